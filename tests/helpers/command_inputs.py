"""Inputs of the command line's tests: FASTA files, good and bad, and damaged artifacts."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

SEQUENCES = {
    "sp|P1/../x": "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQMKTAYIAKQRQISFVKSHFSRQLEERLG",
    "b": "GSGSWKDLAEXPLLKRRVWTCACDEFGHIKLMNPQRSTVWY",
    "c": "MKVLLRALWQDEGHST",
}
GOOD = "".join(f">{name} class=alpha_beta\n{sequence}\n" for name, sequence in SEQUENCES.items())

# Files that are unusable as a whole, or in one record: the text and part of the message.
WHOLE_FILE = {
    "empty": ("", "is empty"),
    "blank": ("\n\n", "is empty"),
    "not FASTA": ("name,sequence\nx,MKT\n", "is not FASTA: line 1 is 'name,sequence'"),
    "not text": ("\x00\x01>a\nMKT\n", "is not text"),
}
ONE_RECORD = {
    "duplicate id": (GOOD + ">b\nMKT\n", "record 'b': record 4 repeats the identifier of record 2"),
    "empty record": (GOOD + ">d\n\n", "record 'd': holds no residues"),
    "bad letter": (GOOD + ">d\nMKT\nAJ\n", "record 'd': position 5 is 'J', not one of the 25 residue codes"),
    "gap": (GOOD + ">d\nMK-T\n", "record 'd': position 3 is '-'"),
    "stop inside": (GOOD + ">d\nMK*T\n", "record 'd': position 3 is a stop '*' inside"),
    "no id": (GOOD + ">\nMKT\n", "record '#4': the header names no identifier"),
}


def files(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(Path(folder).rglob("*")) if p.is_file()}


def index_of(folder):
    lines = [line.split("\t") for line in (folder / "index.tsv").read_text().splitlines()]
    assert lines[0] == ["id", "residues", "embedding", "cache", "checksum"]
    return {line[0]: line[1:-1] for line in lines[1:]}


def truncated(path):
    path.write_bytes(path.read_bytes()[:-500])


def altered(path):
    data = bytearray(path.read_bytes())
    data[-500] ^= 4
    path.write_bytes(data)


def other_version(path):
    with safe_open(path, framework="pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors, path, metadata=metadata | {"format_version": "99"})


def other_kind(path):
    save_file({"x": torch.zeros(3)}, path)


def not_safetensors(path):
    path.write_text("PK and so on")
