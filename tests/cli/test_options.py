"""The options of every command: names and help."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from esm_turbo.cli.commands import app

MODEL = "--model --device --device-map --dtype --precision --threads"
CALIBRATED = f"{MODEL} --calibration"
CACHES = f"{CALIBRATED} --preset"
STORED = f"{CACHES} --store"
PARALLEL = "--devices --workers --shard --engine --address"
FILES = "--unknown --remove-gaps --accessions --json"
SAMPLING = (
    "--num-return-sequences --top-k --top-p --temperature --per-step --sweeps --allowed --banned --seed --refresh"
)
FAMILY = "--homologs --max-similarity --context-tokens --seed"
OPTIONS = {
    "calibrate": f"{FILES} {MODEL} {PARALLEL} --plot --out --max-residues --toks-per-batch",
    "embed": f"{FILES} {STORED} {PARALLEL} --repr-layers --include --toks-per-batch --truncation-seq-length"
    " --window --overlap --memory --format --names --nogpu",
    "generate": f"{FILES} {STORED} {SAMPLING} --plot --max-new-tokens --positions --mask-letter --order --refresh-every"
    " --toks-per-batch --out",
    "binders": f"{FILES} {STORED} {SAMPLING} --length --template --arm --top --toks-per-batch --out"
    " --background --sort-by --rescore --plot",
    "store": f"{FILES} {CACHES} {PARALLEL} {FAMILY} --toks-per-batch",
    "evaluate": f"{FILES} {CALIBRATED} --plot --preset --max-proteins --extend-ks --refresh-ws --backend",
    "score": f"{FILES} {STORED} {PARALLEL} --plot --arm --refresh --place --top --top-k --toks-per-batch --out"
    " --backend --background --sort-by --rescore --unknown-residues --pairs --matrix",
    "variants": f"{FILES} {STORED} {PARALLEL} --plot --method --arm --refresh --first-position"
    f" {FAMILY} --freeze-query --mutant-column --protein-column --measured --top --toks-per-batch --out --backend",
    "serve": f"{STORED} --host --port --token-file --allowed-host --max-residues --max-candidates --max-contexts"
    " --queue --timeout --resident-mib --toks-per-batch --backend",
    "status": "--json",
    "merge": "--json",
    "info": "--calibration --length --batch --json",
    "warmup": f"{CACHES} --json",
}


def texts_of(command: str) -> dict[str, str]:
    """Types and texts of options by name, as the help of a command shows them."""
    page = io.StringIO()
    app.help_print([command], console=Console(file=page, width=400))
    rows = [line.strip("│* ").split() for line in page.getvalue().splitlines()]
    return {row[0]: " ".join(row[1:]) for row in rows if row and row[0].startswith("--")}


def test_every_command_is_listed() -> None:
    assert {name for name in app if not name.startswith("-")} == set(OPTIONS)


@pytest.mark.parametrize("command", OPTIONS)
def test_help_shows_every_option_with_a_sentence(command: str) -> None:
    names = {one.name for one in app[command].assemble_argument_collection() if one.name.startswith("--")}
    assert names == set(OPTIONS[command].split())
    texts = texts_of(command)
    # Which calibrate refuses in a sentence of its own.
    for name in names - ({"--shard"} if command == "calibrate" else set()):
        sentence = texts[name].split("[")[0].strip()
        # A type, such as STR, comes first.
        assert len(sentence.split()) > 2 and sentence.endswith("."), name
        assert "[default: ]" not in texts[name], name


def test_shared_options_have_one_text() -> None:
    helps = [texts_of(command) for command in OPTIONS]
    for name in ("--model", "--device", "--dtype", "--unknown", "--json", "--backend"):
        assert len({texts[name] for texts in helps if name in texts}) == 1, name
