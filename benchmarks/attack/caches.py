"""Random sequences of cache operations against an independent model of what the cache should hold."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.attack.commands import References, protein, turbo
from benchmarks.attack.trial import OTHER_NUMBERS, Finding, about, library, library_faults
from esm_turbo import TurboKVCache
from esm_turbo.assets import EMBEDDED_MODEL
from tests.helpers.frozen_esm2 import MASK, FrozenEsm2, FrozenRun

TOLERANCE = 2e-5
"""Of logits relative to the largest: float32 over twelve layers against float64; exact sequences stay within 3e-6."""
_PRESETS = ("exact", "exact", "turbo4", "turbo3", "turbo2", "turbo1", "paper")
_MOST_ROWS, _MOST_TOKENS = 4, 90


@dataclass(frozen=True)
class Token:
    """A token that a cache should hold: its id, its position, and its keys and values [layers, heads, head_dim]."""

    id: int
    position: int
    keys: Tensor
    values: Tensor


Row = list[Token]


@functools.cache
def reference() -> FrozenEsm2:
    """The embedded model in float64, independent of the package."""
    return FrozenEsm2(EMBEDDED_MODEL)


def sequences(rng: random.Random, folder: Path, references: References) -> list[Finding]:
    """A dozen random operations on a cache, its tokens and an extension of it compared after each."""
    folder.mkdir()
    preset = rng.choice(_PRESETS)
    reference(), turbo()

    def run() -> int:
        wrong = Operations(rng, preset).run()
        if wrong:
            print(f"\n{wrong}")
        return OTHER_NUMBERS if wrong else 0

    outcome = library(folder, run)
    findings = library_faults(outcome)
    if outcome.code == 2:
        findings.append(Finding("refused", outcome.err.strip()[-300:]))
    return about(f"{preset}, after {outcome.out.partition(chr(10))[0]}", findings)


class Operations:
    """One random sequence of operations.

    Args:
        rng: decides everything.
        preset: of the cache. Tokens of a quantised cache are held as it decodes them when they are new: from then on,
            nothing may change them.
    """

    def __init__(self, rng: random.Random, preset: str) -> None:
        self.rng = rng
        self.exact = preset == "exact"
        self.turbo = turbo()
        esm = self.turbo.model.esm
        esm.set_turbo(calibration=esm.calibration, preset=preset, backend="torch")
        self.cache, self.rows = self._prefill(rng.randint(1, 3))

    def run(self) -> str:
        """The first thing that is wrong, in words; empty if nothing is."""
        wrong = self._compare()
        for _ in range(self.rng.randint(4, 12)):
            if wrong:
                break
            step = self.rng.choice(
                (self._append, self._append, self._crop, self._select, self._reorder, self._repeat, self._cat,
                 self._copy, self._save, self._crop_rows, self._grow)
            )  # fmt: skip
            step()
            wrong = self._compare()
        return wrong

    def _ids(self, shortest: int, longest: int, *, masks: bool = True) -> list[int]:
        ids = self.turbo.codes.encode(protein(self.rng, shortest, longest), "it")
        # Token dropout has no scale for masks alone, which are refused.
        return ids[:1] + [MASK if masks and self.rng.random() < 0.1 else token for token in ids[1:]]

    def _prefill(self, count: int) -> tuple[TurboKVCache, list[Row]]:
        rows = [[self.turbo.codes.cls, *self._ids(4, 30)] for _ in range(count)]
        ids, mask = self.turbo.codes.batch(rows)
        with torch.no_grad():
            cache = self.turbo.model(ids, mask, use_cache=True).past_key_values
        _say(f"prefill of {[len(row) for row in rows]}")
        if self.exact:
            return cache, [_tokens(row, range(len(row)), *_stacked(reference().context(row))) for row in rows]
        keys, values = _decode(cache)
        return cache, [_tokens(row, range(len(row)), keys[:, i], values[:, i]) for i, row in enumerate(rows)]

    def _append(self) -> None:
        """New tokens, of which some are padding or hidden from the others and not stored."""
        ids, mask = self.turbo.codes.batch([self._ids(1, 6) for _ in self.rows])
        with torch.no_grad():
            self.turbo.model(ids, mask, past_key_values=self.cache, use_cache=True)
        before = [len(row) for row in self.rows]
        new = []
        for row, tokens, shown in zip(self.rows, ids.tolist(), mask.tolist(), strict=True):
            kept = tokens[: sum(shown)]
            start = row[-1].position + 1 if row else 0
            positions = list(range(start, start + len(kept)))
            run = _extended(row, [True] * len(row), kept, positions)
            new.append(_tokens(kept, positions, *_stacked(run)))
        self.rows = [row + more for row, more in zip(self.rows, new, strict=True)]
        if not self.exact:
            self._decode_new(before)
        _say(f"append of {[len(more) for more in new]}")

    def _decode_new(self, before: list[int]) -> None:
        keys, values = _decode(self.cache)
        for index, (row, start) in enumerate(zip(self.rows, before, strict=True)):
            for column in range(start, len(row)):
                token = row[column]
                row[column] = Token(token.id, token.position, keys[:, index, :, column], values[:, index, :, column])

    def _crop(self) -> None:
        longest = max(map(len, self.rows))
        tokens = self.rng.choice((self.rng.randint(0, longest), -self.rng.randint(1, longest + 1)))
        self.cache.crop(tokens)
        # A negative number removes that many tokens of each row.
        self.rows = [row[:tokens] if tokens >= 0 else row[: max(0, len(row) + tokens)] for row in self.rows]
        _say(f"crop({tokens})")

    def _crop_rows(self) -> None:
        tokens = [self.rng.randint(0, len(row)) for row in self.rows]
        self.cache.crop(torch.tensor(tokens))
        self.rows = [row[:count] for row, count in zip(self.rows, tokens, strict=True)]
        _say(f"crop({tokens})")

    def _select(self) -> None:
        chosen = self.rng.choices(range(len(self.rows)), k=self.rng.randint(1, _MOST_ROWS))
        if self.rng.random() < 0.5:
            self.cache = self.cache.select(chosen)
        else:
            self.cache.batch_select_indices(torch.tensor(chosen))
        self.rows = [list(self.rows[index]) for index in chosen]
        _say(f"select({chosen})")

    def _reorder(self) -> None:
        order = self.rng.choices(range(len(self.rows)), k=len(self.rows))
        self.cache.reorder_cache(torch.tensor(order))
        self.rows = [list(self.rows[index]) for index in order]
        _say(f"reorder({order})")

    def _repeat(self) -> None:
        if 2 * len(self.rows) <= _MOST_ROWS:
            self.cache.batch_repeat_interleave(2)
            self.rows = [list(row) for row in self.rows for _ in range(2)]
            _say("repeat(2)")

    def _cat(self) -> None:
        if len(self.rows) < _MOST_ROWS:
            cache, rows = self._prefill(1)
            pairs = [(self.cache, self.rows), (cache, rows)]
            self.rng.shuffle(pairs)
            self.cache = TurboKVCache.cat([cache for cache, _ in pairs])
            self.rows = [row for _, some in pairs for row in some]
            _say("cat")

    def _copy(self) -> None:
        """Goes on with a copy, and changes the original, or the other way round."""
        twin = copy.deepcopy(self.cache) if self.rng.random() < 0.5 else copy.copy(self.cache)
        if self.rng.random() < 0.5:
            self.cache, twin = twin, self.cache
        twin.crop(self.rng.randint(0, 3))
        with torch.no_grad():
            ids, mask = self.turbo.codes.batch([self._ids(1, 4) for _ in self.rows])
            self.turbo.model(ids, mask, past_key_values=twin, use_cache=True)
        _say("copy, crop and append of the other")

    def _save(self) -> None:
        self.cache.save("cache.safetensors")
        self.cache = TurboKVCache.load("cache.safetensors", model=self.turbo.model)
        _say("save, load")

    def _grow(self) -> None:
        """Many appends, so that buffers grow and blocks are crossed."""
        while max(map(len, self.rows)) < _MOST_TOKENS and self.rng.random() < 0.7:
            self._append()

    def _compare(self) -> str:
        lengths = [len(row) for row in self.rows]
        if self.cache.lengths.tolist() != lengths:
            return f"lengths are {self.cache.lengths.tolist()}, should be {lengths}"
        for index, row in enumerate(self.rows):
            found = self.cache.token_ids[index, : len(row)].tolist()
            if found != [token.id for token in row]:
                return f"tokens of row {index} are {found}, should be {[token.id for token in row]}"
        if not all(lengths):
            return ""
        return self._compare_extension()

    def _compare_extension(self) -> str:
        """An extension with random masks of the past and of the new tokens, at random positions."""
        ids = [self._ids(2, 5) for _ in self.rows]
        input_ids, new_mask = self.turbo.codes.batch(ids)
        width = input_ids.shape[1]
        hide = self.rng.choice((0.0, 0.2, 0.9))
        past = [[self.rng.random() >= hide for _ in row] for row in self.rows]
        longest = max(map(len, self.rows))
        mask = torch.cat([torch.tensor([row + [False] * (longest - len(row)) for row in past]).long(), new_mask], dim=1)
        steps = [self.rng.choice((1, 1, 2)) for _ in range(width)]
        starts = [row[-1].position + self.rng.choice((1, 1, 5)) for row in self.rows]
        positions = [[start + sum(steps[:column]) for column in range(width)] for start in starts]
        with torch.no_grad():
            logits = self.turbo.model(input_ids, mask, torch.tensor(positions), past_key_values=self.cache).logits
        for index, row in enumerate(self.rows):
            count = len(ids[index])
            run = _extended(row, past[index], ids[index], positions[index][:count])
            found = logits[index, :count].double()
            error = float((found - run.logits).abs().max() / run.logits.abs().max())
            # Not `error > TOLERANCE`: NaN is wrong, too.
            if not error <= TOLERANCE:
                return f"logits of row {index} of {len(self.rows)} are wrong by {error:.1e}"
        return ""


def _say(operation: str) -> None:
    """Print an operation, for the report."""
    print(operation, end="; ", flush=True)


def _extended(row: Row, visible: list[bool], ids: list[int], positions: list[int]) -> FrozenRun:
    """Tokens after those of a row that are visible."""
    shown = [token for token, seen in zip(row, visible, strict=True) if seen]
    past = None
    if shown:
        keys = torch.stack([token.keys for token in shown], dim=2)
        values = torch.stack([token.values for token in shown], dim=2)
        past = list(zip(keys, values, strict=True))
    masks = [token.id for token in shown].count(MASK) + ids.count(MASK)
    return reference().run(ids, positions, total_tokens=len(shown) + len(ids), total_masks=masks, past=past)


def _stacked(run: FrozenRun) -> tuple[Tensor, Tensor]:
    """Keys and values of all layers, [layers, heads, n, head_dim] each."""
    keys, values = zip(*run.kv, strict=True)
    return torch.stack(keys), torch.stack(values)


def _tokens(ids: Sequence[int], positions: Iterable[int], keys: Tensor, values: Tensor) -> Row:
    """Tokens with their keys and values, [layers, heads, n, head_dim] each."""
    return [
        Token(token, position, keys[:, :, i], values[:, :, i])
        for i, (token, position) in enumerate(zip(ids, positions, strict=True))
    ]


def _decode(cache: TurboKVCache) -> tuple[Tensor, Tensor]:
    """Keys and values that a cache stands for, [layers, rows, heads, columns, head_dim] each."""
    keys, values = [], []
    for index, layer in enumerate(cache.layers):
        decoded = list(cache.codec.decode(index, layer.packed | layer.rows))
        if layer.protected:
            zero = torch.zeros(layer.protected["keys"].shape[::2], dtype=torch.int64)
            kept = cache.codec.inverse_transform(index, layer.protected["keys"], layer.protected["values"], zero)
            for row, columns in enumerate(cache.protected_columns.tolist()):
                for slot, column in enumerate(columns):
                    if column >= 0:
                        for x, one in zip(decoded, kept, strict=True):
                            x[row, :, column] = one[row, :, slot]
        keys.append(decoded[0].double())
        values.append(decoded[1].double())
    return torch.stack(keys), torch.stack(values)
