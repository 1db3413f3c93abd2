"""`ContextModel`: the contract between a model and everything built on it.

Tasks, context stores and evaluations are written against this class alone, so none of them depends on how a model is
loaded. `TurboEsm` adds loading and one method per task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from esm_turbo.codecs.row_index import RowIndex, of_rows
from esm_turbo.codecs.transfers import to_device
from esm_turbo.config import DEFAULT_REFRESH, Geometry
from esm_turbo.files.hub import model_name
from esm_turbo.files.identity import model_identity
from esm_turbo.files.tabular import named
from esm_turbo.model.inputs import check_context_index
from esm_turbo.model.plain import check_tokenwise, check_unhooked
from esm_turbo.proteins.batches import TokenRow, encode_rows
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.proteins.homologs import ContextLimits, encode_homologs
from esm_turbo.proteins.tokens import TokenCodes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from esm_turbo.calibration import Calibration
    from esm_turbo.kv_cache import TurboKVCache
    from esm_turbo.model.masked_lm import CachedMaskedLM
    from esm_turbo.proteins.alignments import HomologContext

__all__ = ["ContextModel", "ExtendOutput"]

Sequences = str | ProteinRecord | Sequence[str | ProteinRecord]
"""Residues of one protein or several, by themselves or as records of a FASTA file."""

Contexts: TypeAlias = "Sequences | HomologContext | Sequence[HomologContext] | TurboKVCache"
"""Homologs that a query reads, separated by commas, or drawn; several such contexts; or a cache of them."""


@dataclass(frozen=True)
class ExtendOutput:
    """Outputs of an extension for the new residues and `<eos>`.

    Attributes:
        hidden_states: last layer, after its layer norm, [batch, n, hidden_size].
        logits: [batch, n, vocab_size].
        attention_mask: 1 for tokens, 0 for padding on the right, [batch, n].
    """

    hidden_states: Tensor
    logits: Tensor
    attention_mask: Tensor

    def __repr__(self) -> str:
        return named(self, **{name: list(value.shape) for name, value in vars(self).items()})


class _NewRows(NamedTuple):
    """The tokens of an extension.

    Attributes:
        input_ids: [batch, n].
        mask: real tokens, int64 [batch, n].
        positions: [batch, n].
        first: columns of the cache that each row reads, those before this one, [batch, 1]; None for all.
        begin: first column of the new tokens, [batch, 1].
        end: column after the last token that an append stores, [batch, 1].
    """

    input_ids: Tensor
    mask: Tensor
    positions: Tensor
    first: Tensor | None
    begin: Tensor
    end: Tensor


class ContextModel:
    """A model that caches contexts and extends them.

    This is the whole contract: tasks, context stores and evaluations use `model`, `tokenizer`, `codes`,
    `calibration`, `name`, `runner`, `prefill`, `prefill_within_call` and `extend`, and nothing else. A class for
    another model family that provides these nine runs every task.

    Of `model`, tasks and stores use the forward (a Hugging Face masked language model with `past_key_values`,
    `use_cache`, `append_mask` and `row_lengths`), `config`, `device`, `dtype`, `named_parameters()`, `lm_head`,
    `new_cache()`, `bind_cache()`, `refresh_fingerprint()`, `watched()` and `growing()`; of the encoder,
    `model.base_model`, the forward, `config`, `device`, `turbo_config`, `codec()`, `decoded()` and
    `predict_contacts()`. Calibration reads the encoder's layers, and evaluations also use `kv_session`, `special_ids`,
    `backend` and `set_turbo()`.

    Args:
        model: the model; it is put into evaluation mode.
        tokenizer: its tokenizer.

    Attributes:
        model: of any family, such as `TurboEsmForMaskedLM`.
        tokenizer: of the same family, such as `EsmTokenizer`.
        codes: token ids of residues and special tokens.
    """

    def __init__(self, model: CachedMaskedLM, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.model = model.eval()

    @property
    def model(self) -> CachedMaskedLM:
        """The model; another one must be of a family that the tokenizer serves.

        Raises:
            TypeError: when it is set, it is not a model that caches contexts, such as one wrapped by PEFT.
            ValueError: it is of another family.
        """
        return self._model

    @model.setter
    def model(self, model: CachedMaskedLM) -> None:
        if not hasattr(type(model), "new_cache"):
            raise TypeError(
                f"`model` must be one such as TurboEsmForMaskedLM, got {type(model).__name__}; of an adapter give"
                " `merge_and_unload()`"
            )
        codes = TokenCodes.of(self.tokenizer, model.family)
        codes.check(model.config)
        self._model, self.codes = model, codes

    def __repr__(self) -> str:
        encoder = self.model.base_model
        geometry, preset = Geometry.of(encoder.config), encoder.turbo_config.name
        dtype = str(self.model.dtype).removeprefix("torch.")
        calibrated = "calibrated" if self.calibration is not None else "not calibrated"
        return named(self, self.name, geometry, f"preset {preset}", calibrated, dtype, self.model.device)

    def runner(self, devices: Any) -> Any:
        """A `Runner` on other devices, see `TurboEsm`, which has them; None for this process.

        Raises:
            ValueError: devices are given.
        """
        if devices is not None:
            raise ValueError(f"`devices` needs a model that is loaded by TurboEsm, got {devices!r}")

    @property
    def calibration(self) -> Calibration | None:
        """The model's calibration, if it has one."""
        calibration: Calibration | None = self.model.base_model.calibration
        return calibration

    @property
    def name(self) -> str:
        """Hub id of the model, or the name of its folder."""
        return model_name(self.model.config._name_or_path) or "a model without a name"

    def prefill(
        self,
        sequences: Sequences,
        total_tokens: int | Sequence[int] | None = None,
        total_masks: int | Sequence[int] | None = None,
    ) -> TurboKVCache:
        """Compute contexts exactly and cache them: `<cls>` and the residues, without `<eos>`.

        Of a family with exact contexts, such as E1, a context is one homolog or several, separated by commas, each a
        whole sequence. X in them is left out, and its position kept.

        Args:
            sequences: residues; `<mask>` may stand for one, though not in homologs.
            total_tokens: number of tokens in the whole input that a context begins, including `<cls>` and `<eos>`;
                one number, or one per sequence. Token dropout depends on it. None counts the context alone.
            total_masks: number of masks in the whole input, likewise.

        Returns:
            A cache with one row per sequence.

        Raises:
            ValueError: a sequence is empty, too long for exact contexts or has a letter that is not a residue, there
                are too many homologs, a total is smaller than the context's own count, or the model cannot be
                identified, see `ModelIdentity.check_lasting`.
        """
        return self._prefill(self.model.new_cache, sequences, total_tokens, total_masks)

    def prefill_within_call(
        self,
        sequences: Sequences,
        total_tokens: int | Sequence[int] | None = None,
        total_masks: int | Sequence[int] | None = None,
    ) -> TurboKVCache:
        """As `prefill`, for contexts that are not returned to users: any model can read what it has just written."""
        encoder = self.model.base_model
        new_cache = partial(encoder.kv.cache_within_call, encoder.turbo_config)
        return self._prefill(new_cache, sequences, total_tokens, total_masks)

    @torch.no_grad()
    def _prefill(
        self,
        new_cache: Callable[[], TurboKVCache],
        sequences: Sequences,
        total_tokens: int | Sequence[int] | None,
        total_masks: int | Sequence[int] | None,
    ) -> TurboKVCache:
        rows, positions = self.codes.present(self.encode_contexts(as_list(sequences)))
        input_ids, attention_mask = self.codes.batch(rows)
        places = None if positions is None else self.codes.batch(positions)[0]
        counts = None
        if total_tokens is not None or total_masks is not None:
            tokens = totals_per_row("total_tokens", total_tokens, attention_mask.sum(1).tolist())
            masks = totals_per_row("total_masks", total_masks, (input_ids == self.codes.mask).sum(1).tolist())
            counts = torch.tensor(tokens), torch.tensor(masks)
            if bool((counts[1] >= counts[0]).any()):
                raise ValueError("`total_masks` must be smaller than `total_tokens`")

        def call() -> TurboKVCache:
            output = self.model.base_model(
                input_ids,
                attention_mask,
                places,
                past_key_values=new_cache(),
                use_cache=True,
                token_counts=counts,
                row_lengths=[len(row) for row in rows],
            )
            cache: TurboKVCache = output.past_key_values
            return cache

        cache = call()
        # Looked for while the device computes: a cache is not returned as one of the weights that were there before.
        return call() if self.model.refresh_fingerprint() else cache

    def encode_contexts(self, sequences: Sequence[str]) -> list[TokenRow]:
        """Token ids of the contexts that `prefill` computes, by which a store knows them.

        Raises:
            ValueError: as of `prefill`.
        """
        limits = self.model.base_model.exact_contexts
        if limits is None:
            return encode_rows(self.codes, sequences, eos=False)
        named = [(context, f"context {number}") for number, context in enumerate(sequences, start=1)]
        return [np.array(encode_homologs(self.codes, *one, limits), dtype=np.uint8) for one in named]

    @torch.no_grad()
    def extend(
        self,
        cache: TurboKVCache,
        sequences: Sequences,
        eos: bool = True,
        refresh: int = DEFAULT_REFRESH,
        append: bool = False,
        context_index: Sequence[int] | Tensor | None = None,
    ) -> ExtendOutput:
        """Run new residues after cached contexts.

        Of a family with exact contexts, such as E1, each sequence is a whole query, and the result is that of context
        and query together: `eos` and `refresh` have no effect, and outputs are those of all of the query's tokens,
        what stands around its residues included. X in it is left out, and its position kept.

        Args:
            cache: one row per sequence, one row that all sequences share, or any rows with a `context_index`. It
                changes only if `append` is set.
            sequences: the new residues of each row; `<mask>` may stand for one.
            eos: end with `<eos>`.
            refresh: number of residues at the end of the context that run again together with the new ones, their
                cached keys and values hidden. This removes most of the freezing error.
            append: add the new residues (not `<eos>`) to the cache; not with a `context_index`.
            context_index: the row of the cache that each sequence follows, integers [batch], in any order and as often
                as you like.

        Returns:
            Outputs for the new residues and `<eos>`, padded on the right.

        Raises:
            ValueError: the batch does not match the cache, the cache is empty or belongs to another model, `refresh`
                would run residues of several chains, a sequence is invalid, or dropout is active.
        """
        call = partial(self._extend, cache, as_list(sequences), eos, refresh, append, context_index)
        if append:
            self.model.refresh_fingerprint()
            return call()
        with self.model.watched() as changed:
            try:
                output = call()
            except Exception:
                if not changed():
                    raise
                return call()
        # Looked for while the device computes: what changed weights made of a context is not returned.
        return call() if changed() else output

    def _extend(
        self,
        cache: TurboKVCache,
        sequences: list[str],
        eos: bool,
        refresh: int,
        append: bool,
        context_index: Sequence[int] | Tensor | None,
    ) -> ExtendOutput:
        """See `extend`; changes of the weights that leave no trace on the host go unnoticed."""
        if refresh < 0:
            raise ValueError(f"`refresh` must be at least 0, got {refresh}")
        check_unhooked(self.model)
        check_tokenwise(self.model)
        # Of the encoder, the cache tells.
        if any(module.training for module in self.model.lm_head.modules()):
            model_identity(self.model).check_determinate()
        index = None
        if context_index is not None:
            index = check_context_index(context_index, len(sequences), cache.batch_size)
        elif cache.batch_size not in (1, len(sequences)):
            raise ValueError(f"the cache has {cache.batch_size} rows, but there are {len(sequences)} sequences")
        if not bool((cache.lengths > 0).all()):
            raise ValueError("the cache has an empty row: prefill a context first")
        limits = self.model.base_model.exact_contexts
        if limits is None:
            rows = self._rows_after(cache, sequences, eos, refresh, index)
        else:
            rows = self._queries_after(cache, sequences, index, limits)
        device, mask = self.model.device, rows.mask
        # Attention without a mask is faster, of whole rows that are equally long.
        seen = None if rows.first is None and bool(mask.all()) else mask
        if rows.first is not None:
            seen = torch.cat([(torch.arange(cache.get_seq_length()) < rows.first).long(), mask], dim=1)
        steps = torch.arange(mask.shape[1])
        states = self.model.base_model(
            rows.input_ids,
            seen,
            rows.positions,
            past_key_values=cache,
            context_index=None if index is None else index.contexts.tolist(),
            use_cache=append,
            append_mask=(steps >= rows.begin) & (steps < rows.end),
        ).last_hidden_state
        # The new tokens of each row follow its refreshed ones.
        counts = mask.sum(1, keepdim=True)
        column = rows.begin + torch.arange(int((counts - rows.begin).max()))
        at = to_device(column.clamp_max(len(steps) - 1)[..., None], device)
        logits = self.model.lm_head(states)
        return ExtendOutput(
            states.gather(1, at.expand(-1, -1, states.shape[2])),
            logits.gather(1, at.expand(-1, -1, logits.shape[2])),
            to_device((column < counts).long(), device),
        )

    def _queries_after(
        self, cache: TurboKVCache, sequences: list[str], index: RowIndex | None, limits: ContextLimits
    ) -> _NewRows:
        """The rows of an extension of exact contexts: whole queries."""
        chains, nexts = (
            of_rows(x.cpu(), index).expand(len(sequences)) for x in (cache.next_chains, cache.next_positions)
        )
        rows = []
        for number, (sequence, before, begin) in enumerate(
            zip(sequences, chains.tolist(), nexts.tolist(), strict=True), start=1
        ):
            name = f"sequence {number}"
            residues = self.codes.encode(sequence, name)
            limits.check_length(name, len(residues))
            rows.append(self.codes.whole(residues))
            limits.check(f"{name} and its context", before + 1, begin + len(rows[-1]))
        present, places = self.codes.present(rows)
        input_ids, mask = self.codes.batch(present)
        positions = torch.arange(input_ids.shape[1])[None] if places is None else self.codes.batch(places)[0]
        return _NewRows(
            input_ids,
            mask,
            positions + nexts[:, None],
            None,
            torch.zeros(len(rows), 1, dtype=torch.int64),
            mask.sum(1, keepdim=True),
        )

    def _rows_after(
        self, cache: TurboKVCache, sequences: list[str], eos: bool, refresh: int, index: RowIndex | None
    ) -> _NewRows:
        """The rows of an extension: the end of each context, which runs again without `<cls>`, and the new tokens."""
        ids, lengths, nexts = (x.cpu() for x in (cache.token_ids, cache.lengths, cache.next_positions))
        first = torch.maximum(lengths - refresh, (ids[:, 0] == self.codes.cls).long())
        if refresh and cache.chains is not None:
            raise ValueError("residues that run again would see all chains of the context: give `refresh=0`")
        bounds = zip(ids.tolist(), first.tolist(), lengths.tolist(), strict=True)
        tails = [row[start:length] for row, start, length in bounds]
        first, lengths, nexts = (of_rows(x, index)[:, None].expand(len(sequences), 1) for x in (first, lengths, nexts))
        rows, ends = [], []
        for number, sequence in enumerate(sequences, start=1):
            row = (number - 1) % len(tails) if index is None else index.contexts[number - 1]
            tail, new = tails[row], self.codes.encode(sequence, f"sequence {number}")
            rows.append([*tail, *new, *([self.codes.eos] if eos else [])])
            ends.append(len(tail) + len(new))
        input_ids, mask = self.codes.batch(rows)
        columns = first + torch.arange(input_ids.shape[1])
        positions = nexts + columns - lengths
        if cache.positions is not None:
            stored = of_rows(cache.positions.cpu().long(), index).expand(len(sequences), -1)
            positions = torch.where(
                columns < lengths, stored.gather(1, columns.clamp_max(cache.columns - 1)), positions
            )
        return _NewRows(input_ids, mask, positions, first, lengths - first, torch.tensor(ends)[:, None])


def items_of(given: Iterable[Any], noun: str) -> list[Any]:
    """The items of a list, or of what else has items in an order.

    Args:
        given: the items.
        noun: what one of them is; the error names the argument by its plural.

    Raises:
        TypeError: it is a mapping or a table, whose items are keys or names of columns, a set, which has no order, or a
            sequence of another library, as Biopython's `Seq`, whose items are letters.
    """
    if isinstance(given, Mapping | set | frozenset) or hasattr(given, "columns"):
        raise TypeError(f"`{noun}s` must be a list, got {type(given).__name__}; give its values, or one of its columns")
    items = list(given)
    of_letters = bool(items) and all(isinstance(one, str) and len(one) == 1 for one in items)
    if of_letters and not isinstance(given, str) and (hasattr(given, "seq") or str(given) == "".join(items)):
        raise TypeError(f"a {noun} must be a string, got {type(given).__name__}: give its residues as one")
    return items


def as_list(items: Sequences, noun: str = "sequence") -> list[str]:
    """One string or several as a list; of records, their sequences.

    Args:
        items: the strings or records.
        noun: what one of them is; the error names the argument by its plural.

    Raises:
        ValueError: there are none.
        TypeError: one is something else, or they are no list, see `items_of`.
    """
    given = [items] if isinstance(items, str | ProteinRecord) else items_of(items, noun)
    if not given:
        raise ValueError(f"`{noun}s` must hold at least one {noun}")
    for number, item in enumerate(given, 1):
        if not isinstance(item, str | ProteinRecord):
            name = noun.replace("_", " ")
            raise TypeError(f"{name} {number}: a {name} must be a string, got {type(item).__name__}")
    return [item.sequence if isinstance(item, ProteinRecord) else item for item in given]


def totals_per_row(name: str, given: int | Sequence[int] | None, own: list[int]) -> list[int]:
    """Totals of each row for token dropout, see `ContextModel.prefill`.

    Raises:
        ValueError: a total is smaller than the context's own count or no integer, or their number is wrong.
    """
    if given is None:
        return own
    tensor = torch.as_tensor(given)
    if tensor.is_floating_point():
        raise ValueError(f"`{name}` must be integers, got {given}")
    if tensor.shape not in ((), (len(own),)):
        raise ValueError(f"`{name}` must be one number or one per sequence ({len(own)}), got {given}")
    totals: list[int] = tensor.expand(len(own)).tolist()
    if any(total < count for total, count in zip(totals, own, strict=True)):
        raise ValueError(f"`{name}` must be at least the context's own {own}, got {totals}")
    return totals
