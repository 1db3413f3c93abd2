"""All masked positions of a protein after homologs, by E1, compared with its reference code.

The reference is measured where its repository lies in `external/E1`, which git ignores: nothing of it is part of this
project. It needs einops. Its first batch of a context computes the context for every row, and later ones read it from
its cache, so that it runs all positions.

On a CPU it keeps the scores of all tokens of a batch with each other, 69 GB for batches of the size that it takes by
default. There it runs one row at a time after a context, which is the fastest: four rows take three times as long each.
It is in bfloat16, as its predictor is everywhere, and ours in float32.
"""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import cuda_timing
from benchmarks.harness.environment import device_name
from benchmarks.harness.measure import Case, Check, Figures, Target, largest_difference, timed, worst
from benchmarks.harness.names import E1_OURS, E1_PREFILL, E1_REFERENCE
from esm_turbo import KVCalibrator, TurboEsm
from esm_turbo.config import DEFAULT_PRESET
from esm_turbo.modeling_e1_turbo import TurboE1Config, TurboE1ForMaskedLM
from esm_turbo.proteins.e1_tokenizer import E1Tokenizer
from esm_turbo.proteins.fasta import STANDARD_RESIDUES
from esm_turbo.tasks.common.forwards import batch_tokens

_ROOT = Path(__file__).resolve().parents[2]
_EXTERNAL = _ROOT / "external"
_REFERENCE = _EXTERNAL / "E1" / "src"
E1_MINI = _ROOT / "models" / "e1-mini"

# Tokens that stand around the residues of a sequence.
_AROUND = 4
# Logits of random weights are of size one, and bfloat16 has eight bits; the check after a trained model is float32.
_TOLERANCE = {torch.bfloat16: 0.25, torch.float32: 1e-4}
# The reference runs under autocast, in bfloat16; those of the trained model are of size ten.
_REFERENCE_TOLERANCE = {torch.bfloat16: 0.25, torch.float32: 1.0}
# Tokens of a batch on a CPU, where rows with their contexts are longer.
_REFERENCE_TOKENS_CPU = 1024


@dataclass(frozen=True)
class Workload:
    """One row of the table.

    Attributes:
        contexts: tokens of each context, in the order of their averaging; none for the protein alone.
        compares: whether the reference is measured.
        targets: of the figures.
    """

    contexts: tuple[int, ...]
    compares: bool
    targets: tuple[Target, ...]

    @property
    def name(self) -> str:
        """As in the table."""
        if not self.contexts:
            return "no context"
        if len(self.contexts) > 1:
            return f"{len(self.contexts)} contexts averaged"
        return f"context of {self.contexts[0]:,} tokens"


def _at_most(seconds: float, arm: str = E1_OURS) -> Target:
    return Target(("seconds", arm, "p50"), at_most=seconds)


GPU_WORKLOADS = (
    Workload((), True, (_at_most(0.40),)),
    Workload((7168,), True, (_at_most(0.55),)),
    Workload(
        (21_504,),
        True,
        (_at_most(1.1), _at_most(0.15, E1_PREFILL), Target(("context_bytes",), at_most=0.21 * 2**30)),
    ),
    Workload((7168, 14_336, 21_504) * 5, False, (_at_most(12.0),)),
)
CPU_WORKLOADS = (Workload((1024,), True, (Target(("ratios", f"{E1_REFERENCE} / {E1_OURS}"), at_least=5.0),)),)


def random_cases(workloads: Sequence[Workload] = GPU_WORKLOADS, residues: int = 300) -> Iterator[Case]:
    """The geometry of 600M with random weights in bfloat16, on a CUDA device."""
    if not cuda_timing.available():
        return
    yield from (
        _case(workload, residues, "E1 600M, random weights", partial(_random_model, torch.bfloat16))
        for workload in workloads
    )


def small_cases(workloads: Sequence[Workload] = CPU_WORKLOADS, residues: int = 100) -> Iterator[Case]:
    """The small trained model in float32, on the CPU."""
    for workload in workloads:
        yield _case(workload, residues, E1_MINI.name, _small_model)


def _case(workload: Workload, residues: int, model: str, load: Callable[[], TurboEsm]) -> Case:
    dtype, device = ("float32", "cpu") if model == E1_MINI.name else ("bfloat16", cuda_timing.DEVICE)
    has_reference = workload.compares and _REFERENCE.is_dir()
    return Case(
        workload.name,
        model,
        {
            "residues": residues,
            "contexts": list(workload.contexts),
            "preset": DEFAULT_PRESET,
            "dtype": dtype,
            "device": device,
            "device_name": device_name(device),
            "reference": has_reference,
        },
        lambda: _check(load(), residues),
        partial(_measure, workload, residues, load, has_reference),
        [target for target in workload.targets if has_reference or target.figure[0] != "ratios"],
    )


def _check(turbo: TurboEsm, residues: int) -> Check:
    """Full-precision contexts against the model without a cache, and against the reference where it is."""
    protein, [homologs] = _texts(residues, [5 * (residues + _AROUND) - 7])
    rows = _masked(protein)[:3]
    turbo.model.set_turbo(calibration=turbo.calibration, preset="exact")
    found = turbo.extend(turbo.prefill(homologs), rows).logits
    turbo.model.set_turbo(calibration=turbo.calibration, preset=DEFAULT_PRESET)
    context = [token for one in homologs.split(",") for token in turbo.codes.whole(turbo.codes.encode(one, "it"))]
    ids = torch.tensor([[*context, *turbo.codes.whole(turbo.codes.encode(row, "it"))] for row in rows])
    with torch.no_grad():
        expected = turbo.model(ids.to(turbo.model.device)).logits[:, len(context) :]
    dtype = turbo.model.dtype
    parts = [largest_difference(found, expected) / _TOLERANCE[dtype]]
    what = "logits after a context against those without a cache"
    if _REFERENCE.is_dir():
        what += ", and at masks against the reference"
        masked = found[torch.arange(3), torch.arange(3) + len(turbo.codes.before)]
        parts.append(
            largest_difference(masked.cpu(), reference_logits(turbo, rows, homologs)) / _REFERENCE_TOLERANCE[dtype]
        )
    return Check(what + ", largest difference as a part of what is allowed", worst(parts), 1.0)


@torch.no_grad()
def _measure(
    workload: Workload, residues: int, load: Callable[[], TurboEsm], has_reference: bool, repeats: int
) -> Figures:
    turbo = load()
    protein, contexts = _texts(residues, workload.contexts)
    rows = _masked(protein)
    ours = partial(_after_contexts, turbo, contexts, rows) if contexts else partial(_alone, turbo, rows)
    arms: dict[str, Callable[[], object]] = {E1_OURS: ours}
    figures: Figures = {"positions": residues}
    if contexts:
        arms[E1_PREFILL] = lambda: [turbo.prefill(context) for context in contexts]
    if len(contexts) == 1:
        cache = turbo.prefill(contexts[0])
        figures |= {"context_bytes": cache.nbytes, "context_tokens": int(cache.lengths[0])}
    seconds = timed(arms, repeats)
    figures["seconds"] = seconds
    figures["per_second"] = {E1_OURS: residues * max(1, len(contexts)) / seconds[E1_OURS]["p50"]}
    if has_reference:
        # Its own cache is filled by the first batch of a context, so that a fresh predictor runs each time.
        theirs = timed({E1_REFERENCE: lambda: reference_logits(turbo, rows, *contexts)}, 1)
        figures["seconds"] |= theirs
        figures["ratios"] = {f"{E1_REFERENCE} / {E1_OURS}": theirs[E1_REFERENCE]["p50"] / seconds[E1_OURS]["p50"]}
    return figures


def _after_contexts(turbo: TurboEsm, contexts: Sequence[str], rows: Sequence[str]) -> Tensor:
    """Log-probabilities at the masked positions, averaged over the contexts, [rows, vocabulary]."""
    total: Tensor | float = 0.0
    device = turbo.model.device
    tokens = batch_tokens(None, "turbo", device) if device.type == "cpu" else len(rows) * (len(rows[0]) + _AROUND)
    step = tokens // (len(rows[0]) + _AROUND)
    for context in contexts:
        cache = turbo.prefill(context)
        parts = [
            _at_masks(turbo, turbo.extend(cache, list(rows[first : first + step])).logits, first)
            for first in range(0, len(rows), step)
        ]
        total = total + torch.cat(parts)
    assert isinstance(total, Tensor)
    return (total / len(contexts)).cpu()


def _alone(turbo: TurboEsm, rows: Sequence[str]) -> Tensor:
    """The same without a context."""
    ids, mask = turbo.codes.batch([turbo.codes.whole(turbo.codes.encode(row, "it")) for row in rows])
    lengths = mask.sum(1).tolist()
    logits = turbo.model(ids.to(turbo.model.device), row_lengths=lengths).logits
    return _at_masks(turbo, logits).cpu()


def _at_masks(turbo: TurboEsm, logits: Tensor, first: int = 0) -> Tensor:
    """Log-probabilities at the masks of rows, of which the first has its mask at this position."""
    row = torch.arange(len(logits), device=logits.device)
    return logits[row, row + first + len(turbo.codes.before)].float().log_softmax(-1)


def _texts(residues: int, contexts: Sequence[int]) -> tuple[str, list[str]]:
    """A random protein, and contexts of so many tokens, of homologs of about its length."""
    generator = random.Random(0)

    def drawn(count: int) -> str:
        return "".join(generator.choices(STANDARD_RESIDUES, k=count))

    protein, made = drawn(residues), []
    for tokens in contexts:
        count = max(1, tokens // (residues + _AROUND))
        sizes = [tokens // count + (i < tokens % count) - _AROUND for i in range(count)]
        made.append(",".join(drawn(size) for size in sizes))
    return protein, made


def _masked(protein: str) -> list[str]:
    return [f"{protein[:i]}?{protein[i + 1 :]}" for i in range(len(protein))]


@cache
def _small_model() -> TurboEsm:
    turbo = TurboEsm.from_pretrained(E1_MINI, device="cpu", preset="exact")
    return _calibrated(turbo, torch.float32)


@cache
def _random_model(dtype: torch.dtype) -> TurboEsm:
    """The published geometry of 600M, as initialised."""
    torch.manual_seed(0)
    with torch.device(cuda_timing.DEVICE):
        model = TurboE1ForMaskedLM(TurboE1Config()).eval().to(cuda_timing.DEVICE)
    return _calibrated(TurboEsm(model, E1Tokenizer.from_pretrained(E1_MINI)), dtype)


def _calibrated(turbo: TurboEsm, dtype: torch.dtype) -> TurboEsm:
    """With a calibration on a random family, whose caches take as long to read as those of a real one."""
    _, [family] = _texts(150, [1024])
    tokens = [token for one in family.split(",") for token in turbo.codes.whole(turbo.codes.encode(one, "it"))]
    calibrator = KVCalibrator(turbo.model, sample_size=256).partial_fit(torch.tensor([tokens]))
    calibration = calibrator.finalize([DEFAULT_PRESET])
    turbo.model.to(dtype)
    turbo.model.set_turbo(calibration=calibration, preset=DEFAULT_PRESET)
    return turbo


@cache
def _reference_model(turbo: TurboEsm) -> Any:
    """The reference's model with the same weights; its kernels from a hub are left out, as it does without them."""
    # `pip install --no-deps --target external/site einops` where it is not installed.
    sys.path += [str(_REFERENCE), str(_EXTERNAL / "site")]
    if "kernels" not in sys.modules:
        without = types.ModuleType("kernels")

        def get_kernel(name: str) -> None:
            raise ImportError(name)

        without.get_kernel = get_kernel  # type: ignore[attr-defined]
        sys.modules["kernels"] = without
    from E1.config import E1Config
    from E1.modeling import E1ForMaskedLM

    known: Mapping[str, Any] = turbo.model.config.to_dict()
    fields = ("vocab_size", "hidden_size", "intermediate_size", "gated_mlp", "num_hidden_layers", "num_attention_heads")
    more = ("hidden_act", "rms_norm_eps", "global_attention_every_n_layers", "max_num_sequences", "clip_qkv")
    last = ("max_num_positions_within_seq", "max_num_positions_global", "rope_theta_within_seq", "rope_theta_global")
    options = {name: known[name] for name in (*fields, *more, *last)}
    model = E1ForMaskedLM(E1Config(**options, num_key_value_heads=known["num_attention_heads"]))
    model.load_state_dict(turbo.model.state_dict())
    # Rotary tables, which are not weights, stay in float32.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(turbo.model.dtype)
    return model.to(turbo.model.device).eval()


@torch.no_grad()
def reference_logits(turbo: TurboEsm, rows: Sequence[str], *contexts: str) -> Tensor:
    """Logits of the reference at the masked position of each row, [rows, vocabulary], on the CPU."""
    model = _reference_model(turbo)
    from E1.predictor import E1Predictor

    options = {} if turbo.model.device.type == "cuda" else {"max_batch_tokens": _REFERENCE_TOKENS_CPU}
    predictor = E1Predictor(
        model, use_cache=True, save_masked_positions_only=True, fields_to_save=["logits"], **options
    )
    given = {str(number): context for number, context in enumerate(contexts)} or None
    found = sorted(predictor.predict(list(rows), context_seqs=given), key=lambda one: one["id"])
    return torch.cat([one["logits"] for one in found])
