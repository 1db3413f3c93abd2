"""`evaluate`: all figures of several presets."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from esm_turbo import __version__
from esm_turbo.config import Geometry
from esm_turbo.context_model import Sequences, as_list
from esm_turbo.evaluate.evaluation import Evaluation
from esm_turbo.evaluate.families import after_homologs
from esm_turbo.evaluate.memory import measure_memory
from esm_turbo.evaluate.precision import compare_forwards, whole_forwards
from esm_turbo.evaluate.presets import Presets, resolve_presets
from esm_turbo.evaluate.protocols import Arms, Protein, extend_at_end, leave_one_out
from esm_turbo.evaluate.results import (
    Frozen,
    LeaveOneOut,
    PresetEvaluation,
    Provenance,
    TokenAccuracy,
    extensions,
)
from esm_turbo.files.artifacts import package_versions
from esm_turbo.files.fingerprint import model_fingerprint, same_model
from esm_turbo.files.identity import exact_identity
from esm_turbo.proteins.fasta import check_sequence, sha256_residues
from esm_turbo.proteins.limits import warn_if_long
from esm_turbo.tasks.common.progress import Progress, StageProgress
from esm_turbo.tasks.common.same_model import refuse_changed

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel


def evaluate(
    turbo: ContextModel,
    sequences: Sequences,
    presets: Presets = None,
    max_proteins: int | None = None,
    *,
    names: Sequence[str] | None = None,
    classes: Sequence[str | None] | None = None,
    extend_ks: Sequence[int] = (1, 8, 32),
    refresh_ws: Sequence[int] = (0, 8, 32),
    reference: ContextModel | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Measure the freezing error, the quantisation error, and the memory of caches (docs/concepts.md).

    The proteins should not be part of the calibration set.

    Args:
        turbo: the model with its calibration; its own preset does not matter.
        sequences: residues, or records, without masks; for a family with exact contexts, such as E1, homologs and then
            the protein, separated by commas.
        presets: presets to evaluate; a mapping gives them names of the caller's choice. "all" stands for all presets,
            of which those that cannot run here are reported; None for full precision and the model's own preset.
        max_proteins: evaluate only the first N proteins.
        names: of the sequences, for messages.
        classes: structural class of each sequence, None if unknown; figures are then also given by class.
        extend_ks: numbers of new residues of figure 2; empty disables it.
        refresh_ws: numbers of refreshed residues of figure 2.
        reference: the same weights in a precision to compare whole forwards with, such as the bfloat16 that
            `precision="fp8"` was made of.
        progress: called as proteins are done, see `Progress`.

    Raises:
        ValueError: a preset needs a calibration and the model has none, a sequence is not a protein, an option is
            invalid, `reference` has other weights, outputs contain NaN or infinity, or the model changes meanwhile.
    """
    if max_proteins is not None and max_proteins < 1:
        raise ValueError(f"`max_proteins` must be at least 1, got {max_proteins}")
    extend_ks, refresh_ws = list(extend_ks), list(refresh_ws)
    for name, numbers, least in (("extend_ks", extend_ks, 1), ("refresh_ws", refresh_ws, 0)):
        if any(number < least for number in numbers):
            raise ValueError(f"`{name}` must be at least {least} each, got {list(numbers)}")
    has_families = turbo.model.base_model.exact_contexts is not None
    proteins = _proteins(sequences, names, classes, has_families)[:max_proteins]
    configs, unavailable = resolve_presets(turbo, presets)
    warn_if_long(map(len, proteins), turbo.model.family)

    def advance(stage: str, total: int) -> Callable[[int], None]:
        counter = StageProgress(progress, stage, total)
        counter.advance(0)
        return counter.advance

    begun, precision = exact_identity(turbo.model), None
    begun.check_determinate()
    if reference is not None:
        own, other = (model_fingerprint(one.model.base_model) for one in (turbo, reference))
        if not same_model(own, other, rounded=True):
            raise ValueError("`reference` has other weights than the model: give the same ones in another precision")
        expected, found = (whole_forwards(model, proteins) for model in (reference, turbo))
        precision = TokenAccuracy.of(compare_forwards(turbo, proteins, expected, found))
    memory = measure_memory(turbo, proteins, list(configs.values()))
    extend: dict[tuple[int, int], Arms] = {}
    with turbo.model.base_model.kv.in_call():
        if has_families:
            loo = after_homologs(turbo, proteins, configs, advance("after homologs", len(proteins)))
        else:
            loo = leave_one_out(turbo, proteins, configs, advance("leave-one-out", len(proteins)))
        if extend_ks and refresh_ws and not has_families:
            ks, ws = list(dict.fromkeys(extend_ks)), list(dict.fromkeys(refresh_ws))
            extend = extend_at_end(turbo, proteins, configs, ks, ws, advance("extend", len(proteins)))
    lengths = list(map(len, proteins))
    evaluated = tuple(
        PresetEvaluation(
            name,
            config.to_dict(),
            size,
            LeaveOneOut.of(loo.turbo_frozen[name], loo.turbo_full[name]),
            extensions(extend, lengths, name),
        )
        for (name, config), size in zip(configs.items(), memory, strict=True)
    )
    refuse_changed(turbo, begun)
    frozen = Frozen(TokenAccuracy.of(loo.frozen_full), extensions(extend, lengths, None))
    return Evaluation(_provenance(turbo, proteins), frozen, evaluated, unavailable, precision)


def _proteins(
    sequences: Sequences, names: Sequence[str] | None, classes: Sequence[str | None] | None, has_families: bool
) -> list[Protein]:
    sequences = as_list(sequences)
    for option, given in (("names", names), ("classes", classes)):
        if given is not None and len(given) != len(sequences):
            raise ValueError(f"`{option}` must be one per sequence, got {len(given)} for {len(sequences)} sequences")
    names = [f"sequence {number}" for number in range(1, len(sequences) + 1)] if names is None else names
    classes = [None] * len(sequences) if classes is None else classes
    proteins = [
        Protein.of(*one) if has_families else Protein(*one) for one in zip(names, sequences, classes, strict=True)
    ]
    for protein in proteins:
        if has_families and not protein.homologs:
            raise ValueError(
                f"{protein.name}: exact contexts are evaluated on `HOMOLOG,HOMOLOG,QUERY`; no homolog is given"
            )
    return [replace(protein, sequence=check_sequence(protein.sequence, name=protein.name)) for protein in proteins]


def _provenance(turbo: ContextModel, proteins: Sequence[Protein]) -> Provenance:
    model = turbo.model
    calibration = turbo.calibration
    return Provenance(
        model=turbo.name,
        geometry=Geometry.of(model.config).to_dict(),
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        device_name=_device_name(model.device),
        backend=model.kv_backend.module,
        versions={**package_versions(), "esm_turbo": __version__},
        calibration=None if calibration is None else calibration.provenance,
        proteins=len(proteins),
        residues=sum(map(len, proteins)),
        sequences_sha256=sha256_residues(p.text for p in proteins),
    )


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()
