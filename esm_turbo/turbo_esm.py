"""`TurboEsm`, the entry point: a model, its tokenizer and its calibration, and what people do with them.

The modelling code is imported when a model is loaded, so that importing this module is quick.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor

from .assets import EMBEDDED_MODEL
from .config import DEFAULT_PRESET, Backend, TurboConfig
from .hub import ModelNotFoundError, local_files_only, not_found
from .tokens import TokenCodes

if TYPE_CHECKING:
    from transformers import EsmTokenizer

    from .calibration import Calibration
    from .embedding import ProteinEmbedding
    from .evaluate import Evaluation
    from .generation import GenerationOutput
    from .kv_cache import TurboKVCache
    from .modeling_esm_turbo import TurboEsmForMaskedLM
    from .scoring import Scores
    from .variants import VariantScores

__all__ = ["ExtendOutput", "ModelNotFoundError", "TurboEsm"]


@dataclass(frozen=True)
class ExtendOutput:
    """What an extension computes for the new residues and `<eos>`.

    Attributes:
        hidden_states: of the last layer, after its layer norm, [batch, n, hidden_size].
        logits: [batch, n, vocab_size].
        attention_mask: 1 for tokens, 0 for padding on the right, [batch, n].
    """

    hidden_states: Tensor
    logits: Tensor
    attention_mask: Tensor


class TurboEsm:
    """ESM-2 with a compressed key/value cache.

    Attributes:
        model: `TurboEsmForMaskedLM`.
        tokenizer: `EsmTokenizer`.
    """

    def __init__(self, model: TurboEsmForMaskedLM, tokenizer: EsmTokenizer) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.codes = TokenCodes.of(tokenizer)

    @classmethod
    def from_pretrained(
        cls,
        model: str | os.PathLike[str] | None = None,
        *,
        calibration: str | os.PathLike[str] | Calibration | Literal[False] | None = None,
        preset: str | TurboConfig = DEFAULT_PRESET,
        device: str | torch.device | None = None,
        dtype: torch.dtype | str | None = None,
        backend: str | Backend = Backend.AUTO,
        device_map: Any = None,
    ) -> Self:
        """Loads a model with its tokenizer and calibration.

        Args:
            model: a hub id or a folder of any ESM-2 checkpoint; None is the embedded esm2-mini, which needs no network
                and brings its own calibration.
            calibration: a `Calibration`, its path, or "auto": calibrate on the shipped proteins once and keep the
                result in the user's cache folder. None takes the one in the model's folder, if there is one, False
                none at all; then only the preset `exact` can write caches.
            preset: what caches are stored as.
            device: None is CUDA where there is one, else MPS, else the CPU.
            dtype: None is float32 on CPU and MPS and the checkpoint's dtype on CUDA.
            backend: what runs the packed attention, see `Backend`.
            device_map: spreads the model over devices, as of Hugging Face's `from_pretrained`; needs accelerate.

        Raises:
            ValueError: the checkpoint is not ESM-2, its weights are not finite, the calibration is unreadable or
                another model's, an option is wrong, or the device cannot be used.
            ModelNotFoundError: (an OSError) there is no such model, or the hub cannot be reached.
        """
        from transformers import EsmTokenizer

        from .modeling_esm_turbo import TurboEsmForMaskedLM

        source = os.fspath(EMBEDDED_MODEL if model is None else model)
        TurboConfig.from_preset(preset)
        device = _usable(device or _best_device())
        options: dict[str, Any] = {"dtype": dtype or ("auto" if device.type == "cuda" else torch.float32)}
        if device_map is not None:
            options["device_map"] = device_map
        offline = local_files_only(source)
        try:
            loaded = TurboEsmForMaskedLM.from_pretrained(
                source,
                preset=preset,
                calibration=False if calibration == "auto" else calibration,
                local_files_only=offline,
                **options,
            )
        except OSError as error:
            raise not_found(source) from error
        try:
            tokenizer = EsmTokenizer.from_pretrained(source, local_files_only=offline)
        # Without its vocabulary's file the tokenizer raises a TypeError.
        except (OSError, TypeError) as error:
            raise not_found(source) from error
        if device_map is None:
            loaded = loaded.to(device)
        turbo = cls(loaded, tokenizer)
        if calibration == "auto":
            calibration = turbo._auto_calibration()
        loaded.set_turbo(calibration=calibration or loaded.esm.calibration, preset=preset, backend=backend)
        return turbo

    @property
    def calibration(self) -> Calibration | None:
        """The model's calibration, if it has one."""
        calibration: Calibration | None = self.model.esm.calibration
        return calibration

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Writes model, tokenizer and calibration to a folder that `from_pretrained` restores all from."""
        from .calibration import CALIBRATION_FILE

        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        if self.calibration is not None:
            self.calibration.save(Path(folder) / CALIBRATION_FILE)

    @torch.no_grad()
    def prefill(
        self,
        sequences: str | Sequence[str],
        total_tokens: int | Sequence[int] | None = None,
        total_masks: int | Sequence[int] | None = None,
    ) -> TurboKVCache:
        """Computes contexts exactly and stores them: `<cls>` and the residues, without `<eos>`.

        Args:
            sequences: residues; `<mask>` may stand for one.
            total_tokens: tokens of the whole input that a context is the beginning of, `<cls>` and `<eos>` included,
                for token dropout; one number or one per sequence. None counts the context alone.
            total_masks: masks of that whole input, likewise.

        Returns:
            A cache of one row per sequence.

        Raises:
            ValueError: a sequence is empty or has letters that are no residues, or a total is smaller than the
                context's own count.
        """
        sequences = _as_list(sequences)
        rows = [[self.codes.cls, *self.codes.encode(s, f"sequence {i + 1}")] for i, s in enumerate(sequences)]
        input_ids, attention_mask = self.codes.batch(rows)
        counts = None
        if total_tokens is not None or total_masks is not None:
            counts = (
                _totals("total_tokens", total_tokens, attention_mask.sum(1)),
                _totals("total_masks", total_masks, (input_ids == self.codes.mask).sum(1)),
            )
            if bool((counts[1] >= counts[0]).any()):
                raise ValueError("`total_masks` must be smaller than `total_tokens`")
        device = self.model.device
        output = self.model.esm(
            input_ids.to(device), attention_mask.to(device), use_cache=True, token_counts=counts
        )
        cache: TurboKVCache = output.past_key_values
        return cache

    @torch.no_grad()
    def extend(
        self,
        cache: TurboKVCache,
        sequences: str | Sequence[str],
        eos: bool = True,
        refresh: int = 8,
        append: bool = False,
    ) -> ExtendOutput:
        """Runs new residues after cached contexts.

        Args:
            cache: as many rows as sequences, or one row that all share. It is changed only where `append` says so.
            sequences: the new residues of each row; `<mask>` may stand for one.
            eos: end with `<eos>`.
            refresh: the last residues of the context that run again together with the new ones, their stored keys and
                values set aside. It removes most of the freezing error.
            append: add the new residues (not `<eos>`) to the cache.

        Returns:
            Of the new residues and `<eos>`, padded on the right.

        Raises:
            ValueError: the batch does not match the cache, the cache is empty or another model's, or a sequence is bad.
        """
        sequences = _as_list(sequences)
        if refresh < 0:
            raise ValueError(f"`refresh` must be at least 0, got {refresh}")
        if cache.batch_size not in (1, len(sequences)):
            raise ValueError(f"the cache has {cache.batch_size} rows, but there are {len(sequences)} sequences")
        if not bool((cache.lengths > 0).all()):
            raise ValueError("the cache has an empty row: prefill a context first")
        tails = _tails(cache, refresh, len(sequences), self.codes.cls)
        rows, kept = [], []
        for number, (sequence, tail) in enumerate(zip(sequences, tails, strict=True), start=1):
            new = self.codes.encode(sequence, f"sequence {number}")
            rows.append([*tail.token_ids, *new, *([self.codes.eos] if eos else [])])
            kept.append((len(tail.token_ids), len(tail.token_ids) + len(new)))
        input_ids, mask = self.codes.batch(rows)
        steps = torch.arange(input_ids.shape[1])
        begin, end = (torch.tensor(bound)[:, None] for bound in zip(*kept, strict=True))
        past = torch.arange(cache.get_seq_length()) < torch.tensor([tail.column for tail in tails])[:, None]
        positions = torch.stack([_positions(tail, len(steps)) for tail in tails])
        device = self.model.device
        output = self.model(
            input_ids.to(device),
            torch.cat([past.long(), mask], dim=1).to(device),
            positions.to(device),
            past_key_values=cache,
            use_cache=append,
            append_mask=((steps >= begin) & (steps < end)).to(device),
            output_hidden_states=True,
        )
        # Row b's new tokens start after its refreshed ones.
        width = int((mask.sum(1, keepdim=True) - begin).max())
        column = begin + torch.arange(width)
        new_mask = (column < mask.sum(1, keepdim=True)).long()
        index = column.clamp_max(len(steps) - 1)[..., None].to(device)
        hidden = output.hidden_states[-1]
        return ExtendOutput(
            hidden.gather(1, index.expand(-1, -1, hidden.shape[2])),
            output.logits.gather(1, index.expand(-1, -1, output.logits.shape[2])),
            new_mask.to(device),
        )

    def embed(
        self,
        sequences: str | Sequence[str],
        repr_layers: Sequence[int] = (-1,),
        include: Sequence[str] = ("mean", "per_tok"),
        toks_per_batch: int = 4096,
        return_cache: bool = False,
        *,
        window: int | None = None,
        overlap: int | None = None,
        memory: int | None = None,
    ) -> list[ProteinEmbedding]:
        """Embeddings as `esm-extract` makes them; see `embedding.embed`.

        With any of `window`, `overlap` and `memory`, proteins of more than `window` residues are computed window by
        window, see `windows.Windows.of`: any length in memory that does not grow with it.
        """
        from .embedding import embed
        from .windows import Windows

        windows = Windows.of(window, overlap, memory)
        return embed(self, _as_list(sequences), repr_layers, include, toks_per_batch, return_cache, windows)

    def generate(
        self,
        sequences: str | Sequence[str] | TurboKVCache,
        *,
        seed: int | Sequence[int] = 0,
        **options: Any,
    ) -> GenerationOutput:
        """New residues to the right of sequences (`max_new_tokens=`), or in place of their masks.

        See `generation.generate`, and `generation.GenerationOptions` for all options.
        """
        from .generation import GenerationOptions, generate
        from .kv_cache import TurboKVCache

        given = sequences if isinstance(sequences, TurboKVCache) else _as_list(sequences)
        return generate(self, given, GenerationOptions(**options), seed)

    def score(self, context: str | TurboKVCache, candidates: str | Sequence[str], **options: Any) -> Scores:
        """How well candidates continue a target: pseudo-log-likelihoods on one cached context; see `scoring.score`."""
        from .scoring import score

        return score(self, context, candidates, **options)

    def score_variants(
        self, wild_type: str | TurboKVCache, variants: str | Sequence[str] | None = None, **options: Any
    ) -> VariantScores:
        """Effects of substitutions by masked or wild-type marginals; see `variants.score_variants`."""
        from .variants import score_variants

        return score_variants(self, wild_type, variants, **options)

    def evaluate(
        self,
        sequences: str | Sequence[str],
        presets: Sequence[str | TurboConfig] | None = None,
        max_proteins: int | None = None,
        **options: Any,
    ) -> Evaluation:
        """Accuracy and memory of presets on proteins; see `evaluate.evaluate`."""
        from .evaluate import evaluate

        return evaluate(self, _as_list(sequences), presets, max_proteins, **options)

    def _auto_calibration(self) -> Calibration:
        from .auto_calibration import auto_calibration

        return auto_calibration(self)


@dataclass(frozen=True)
class _Tail:
    """The end of a context that runs again: its tokens, their positions, and the column where it begins."""

    column: int
    token_ids: list[int]
    positions: list[int]
    next_position: int


def _tails(cache: TurboKVCache, refresh: int, batch_size: int, cls_id: int) -> list[_Tail]:
    lengths, ids, nexts = cache.lengths.tolist(), cache.token_ids.cpu(), cache.next_positions.tolist()
    positions = None if cache.positions is None else cache.positions.cpu()
    tails = []
    for row, length in enumerate(lengths):
        first_residue = 1 if int(ids[row, 0]) == cls_id else 0
        column = max(first_residue, length - refresh)
        where = list(range(column, length)) if positions is None else positions[row, column:length].tolist()
        tails.append(_Tail(column, ids[row, column:length].tolist(), where, nexts[row]))
    return tails * batch_size if len(tails) == 1 else tails


def _positions(tail: _Tail, n: int) -> Tensor:
    after = range(tail.next_position, tail.next_position + n - len(tail.positions))
    return torch.tensor([*tail.positions, *after])


def _as_list(sequences: str | Sequence[str]) -> list[str]:
    sequences = [sequences] if isinstance(sequences, str) else list(sequences)
    if not sequences:
        raise ValueError("`sequences` must hold at least one sequence")
    return sequences


def _totals(name: str, given: int | Sequence[int] | None, own: Tensor) -> Tensor:
    if given is None:
        return own
    totals = torch.as_tensor(given, dtype=torch.int64)
    if totals.shape not in ((), own.shape):
        raise ValueError(f"`{name}` must be one number or one per sequence ({len(own)}), got {given}")
    totals = totals.expand(len(own))
    if bool((totals < own).any()):
        raise ValueError(f"`{name}` must be at least the context's own {own.tolist()}, got {totals.tolist()}")
    return totals


def _usable(name: str | torch.device) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    # A build of torch without a kind of device says so by an AssertionError.
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        # Some of torch's messages go on for pages.
        reason = str(error).partition("\n")[0].partition(". ")[0].rstrip(".")
        raise ValueError(
            f"device {str(name)!r} cannot be used here: {reason}; use 'cpu', or a machine and a torch that have it"
        ) from None
    return device


def _best_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"
