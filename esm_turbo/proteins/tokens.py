"""Residues to token ids and back. Sequences are checked first: the tokenizer would accept bad letters silently."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esm_turbo.proteins.fasta import CHAIN_BREAK, RESIDUES, ProteinRecord, check_sequence

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from esm_turbo.files.families import Family

_SYMBOL = re.compile(r"<mask>|\S", re.IGNORECASE)
_MASK = "<mask>"
# Neither an id nor a letter.
_OTHER = 255

TokenIds = Sequence[int] | npt.NDArray[np.integer[Any]]
"""Token ids of one row: a list, or a NumPy array of integers."""


@dataclass(frozen=True)
class TokenCodes:
    """Ids of a vocabulary's tokens.

    Attributes:
        residues: id of each residue letter.
        chain_break: id of the token between chains; None if there is none.
        before: ids of the tokens before the residues of a protein.
        after: ids of those after them.
        mask_symbol: the mask as it is written; `<mask>` is read by all families.
        unknown: id of a residue that contexts leave out, its position kept; None for none.
    """

    residues: dict[str, int]
    cls: int
    eos: int
    mask: int
    pad: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    chain_break: int | None = None
    mask_symbol: str = _MASK
    unknown: int | None = None

    @functools.cached_property
    def _ids(self) -> bytes:
        """Id of each byte that is a residue letter, and `_OTHER` of the others."""
        ids = {ord(case): index for letter, index in self.residues.items() for case in (letter, letter.lower())}
        return bytes(ids.get(byte, _OTHER) for byte in range(256))

    @functools.cached_property
    def _letters(self) -> bytes:
        """Letter of each id that is a residue's, and `_OTHER` of the others."""
        letters = {index: ord(letter) for letter, index in self.residues.items()}
        return bytes(letters.get(index, _OTHER) for index in range(256))

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, family: Family) -> TokenCodes:
        """The ids of a tokenizer.

        Raises:
            ValueError: its vocabulary or special tokens are not the family's.
        """
        known, vocabulary = family.vocabulary, tokenizer.get_vocab()
        tokens = sorted(vocabulary, key=vocabulary.__getitem__)
        for index, (found, expected) in enumerate(itertools.zip_longest(tokens, known.tokens)):
            if found != expected or vocabulary[found] != index:
                raise ValueError(
                    f"{tokenizer.name_or_path}: {family.vocabulary_file} is not {family.name}'s: token {index} is"
                    f" {found!r}, not {expected!r}; copy it again from the checkpoint"
                )
        for name in ("cls", "pad", "eos", "mask"):
            expected = getattr(known, name)
            if (found := getattr(tokenizer, f"{name}_token")) != expected:
                raise ValueError(
                    f"{tokenizer.name_or_path}: tokenizer_config.json is not {family.name}'s: {name}_token is"
                    f" {found!r}, not {expected!r}; copy it again from the checkpoint"
                )
        return cls(
            {residue: vocabulary[residue] for residue in RESIDUES},
            vocabulary[known.cls],
            vocabulary[known.eos],
            vocabulary[known.mask],
            vocabulary[known.pad],
            tuple(vocabulary[token] for token in known.before),
            tuple(vocabulary[token] for token in known.after),
            vocabulary.get(family.chain_break),
            known.mask,
            None if known.unknown is None else vocabulary[known.unknown],
        )

    def whole(self, ids: Iterable[int]) -> list[int]:
        """Ids of a whole protein, given those of its residues."""
        return [*self.before, *ids, *self.after]

    @property
    def around(self) -> int:
        """Number of tokens around the residues of a whole protein."""
        return len(self.before) + len(self.after)

    def check(self, config: PreTrainedConfig) -> None:
        """Check that a model takes the same tokens for special ones.

        Raises:
            ValueError: its configuration names another id.
        """
        for name, known in (("bos", self.cls), ("eos", self.eos), ("mask", self.mask), ("pad", self.pad)):
            if (found := getattr(config, f"{name}_token_id")) not in (None, known):
                raise ValueError(
                    f"{config._name_or_path}: config.json has {name}_token_id {found!r}, which the vocabulary has at"
                    f" {known}; copy it again from the checkpoint"
                )

    def encode(self, sequence: str | ProteinRecord, name: str) -> list[int]:
        """Ids of residues, `<mask>` and, where the vocabulary has it, `|`, without `<cls>` and `<eos>`.

        Raises:
            TypeError: the sequence is not a string.
            ValueError: the sequence is empty or has letters that are not residue codes.
        """
        if isinstance(sequence, ProteinRecord):
            sequence = sequence.sequence
        if not isinstance(sequence, str):
            raise TypeError(f"{name}: a sequence must be a string or a ProteinRecord, got {type(sequence).__name__}")
        # Most sequences are nothing but residues, and screens have millions of them.
        if (ids := sequence.encode("ascii", "replace").translate(self._ids)) and _OTHER not in ids:
            return list(ids)
        symbols = _SYMBOL.findall(sequence)
        others = {_MASK: self.mask, self.mask_symbol: self.mask} | (
            {} if self.chain_break is None else {CHAIN_BREAK: self.chain_break}
        )
        # They count as one residue each, so that messages give the positions that a reader counts.
        letters = "".join("X" if symbol.lower() in others else symbol for symbol in symbols)
        residues = check_sequence(letters, name=name)
        return [
            others.get(symbol.lower(), self.residues[residue])
            for symbol, residue in zip(symbols, residues, strict=False)
        ]

    def decode(self, token_ids: Iterable[int]) -> str:
        """Residues, `<mask>` and `|` of ids: the inverse of `encode`."""
        token_ids = list(token_ids)
        residues = bytes(token_ids).translate(self._letters)
        if _OTHER not in residues:
            return residues.decode("ascii")
        letters = {index: letter for letter, index in self.residues.items()} | {self.mask: self.mask_symbol}
        if self.chain_break is not None:
            letters[self.chain_break] = CHAIN_BREAK
        return "".join(letters[index] for index in token_ids)

    def residues_among(self, tokens: TokenIds) -> slice | list[int]:
        """Index of the residues among tokens between `<cls>` and `<eos>`: all, but for breaks between chains."""
        if self.chain_break is None or self.chain_break not in tokens:
            return slice(None)
        return [index for index, token in enumerate(tokens) if token != self.chain_break]

    def present(self, rows: Sequence[TokenIds]) -> tuple[list[TokenIds], list[list[int]] | None]:
        """Rows without the residues that contexts leave out, and the positions of the others; None for 0, 1, 2, ..."""
        if self.unknown is None or not any(self.unknown in row for row in rows):
            return list(rows), None
        positions = [[place for place, token in enumerate(row) if token != self.unknown] for row in rows]
        return [[int(row[i]) for i in kept] for row, kept in zip(rows, positions, strict=True)], positions

    def batch(self, rows: Sequence[TokenIds]) -> tuple[Tensor, Tensor]:
        """Rows of ids as `input_ids` and `attention_mask`, int64 [batch, longest], padded on the right."""
        width = max(len(row) for row in rows)
        input_ids = np.full((len(rows), width), self.pad, dtype=np.int64)
        attention_mask = np.zeros((len(rows), width), dtype=np.int64)
        for index, row in enumerate(rows):
            input_ids[index, : len(row)] = row
            attention_mask[index, : len(row)] = 1
        return torch.from_numpy(input_ids), torch.from_numpy(attention_mask)
