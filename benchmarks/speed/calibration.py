"""A whole calibration, phase by phase: statistics gathered, presets fitted, accuracy measured, the file written."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.cuda import fp8
from benchmarks.harness.embedded import plain_model
from benchmarks.harness.measure import Case, Check, Figures, Target, spread
from benchmarks.harness.models import Architecture, described, masked_lm, turbo_of
from esm_turbo import KVCalibrator, TurboEsm
from esm_turbo.assets import calibration_proteins
from esm_turbo.config import PRODUCT_PRESETS
from esm_turbo.evaluate.calibrated import measure_calibration
from esm_turbo.files.families import encoder_of, projections_of
from esm_turbo.proteins.fasta import ProteinRecord, read_fasta_strict
from esm_turbo.tasks.calibration.records import calibrate_records

_CHECKED_PROTEINS = 4
# Of the last layer's values, as a part of their root mean square; bfloat16 rounds every layer by 2^-9.
_TOLERANCES = {"float32": 1e-3, "bfloat16": 5e-2}


def embedded_cases(proteins: int, mib: float) -> Iterator[Case]:
    """The embedded model on the CPU, on some of the shipped proteins.

    Args:
        proteins: number of proteins, taken at equal distances, so that classes and lengths are those of all.
        mib: target of the file.
    """
    records = read_fasta_strict(calibration_proteins())
    records = records[:: len(records) // proteins][:proteins]
    turbo = TurboEsm.from_pretrained(device="cpu")
    yield _case("esm2-mini", turbo, plain_model(), records, [Target(("file MiB",), at_most=mib)])


def random_cases(architecture: Architecture, warm: float, first: float, mib: float | None) -> Iterator[Case]:
    """Random weights in bfloat16 on a CUDA device, all shipped proteins; no case without the device.

    Args:
        architecture: of the model.
        warm: target in seconds, where kernels have been compiled.
        first: target in seconds of the first calibration of a process.
        mib: target of the file; None for none.
    """
    if not torch.cuda.is_available():
        return
    model = masked_lm(architecture, "cuda").to(torch.bfloat16)
    turbo = turbo_of(model)
    turbo.model.to("cuda")
    targets = [*_times(warm, first), *([] if mib is None else [Target(("file MiB",), at_most=mib)])]
    yield _case(architecture.name, turbo, model, read_fasta_strict(calibration_proteins()), targets)


def esmc_cases(warm: float, first: float) -> Iterator[Case]:
    """Random weights of ESM-C 6B, as `random_cases`."""
    if not torch.cuda.is_available():
        return
    turbo = fp8.random_model(fp8.esmc_6b, "esmc-mini")
    records = read_fasta_strict(calibration_proteins())
    yield _case("ESM-C 6B, random weights", turbo, turbo.model, records, _times(warm, first))


def _times(warm: float, first: float) -> list[Target]:
    return [Target(("seconds", "all", "p50"), at_most=warm), Target(("first seconds", "all"), at_most=first)]


def _case(
    name: str, turbo: TurboEsm, library: Any, records: Sequence[ProteinRecord], targets: Sequence[Target]
) -> Case:
    shape = described(turbo.model)

    def measure(repeats: int) -> Figures:
        rounds = [_phases(turbo, records) for _ in range(1 + repeats)]
        times = {phase: [seconds[phase] for seconds, _ in rounds[1:]] for phase in rounds[0][0]}
        return {"seconds": spread(times), "first seconds": rounds[0][0], "file MiB": rounds[0][1] / 2**20}

    return Case(
        name=f"{name}, {len(records)} proteins, {shape['device']}",
        model=name,
        shape={
            "proteins": len(records),
            "residues": sum(len(record.sequence) for record in records),
            "presets": list(PRODUCT_PRESETS),
            **shape,
        },
        check=lambda: _check(turbo, library, records[:_CHECKED_PROTEINS], _TOLERANCES[shape["dtype"]]),
        measure=measure,
        targets=targets,
    )


def _phases(turbo: TurboEsm, records: Sequence[ProteinRecord]) -> tuple[dict[str, float], int]:
    """Seconds of each phase of a calibration, and bytes of its file."""
    seconds: dict[str, float] = {}

    def timed(phase: str, function: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        result = function()
        if turbo.model.device.type == "cuda":
            torch.cuda.synchronize()
        seconds[phase] = time.perf_counter() - begin
        return result

    calibration = timed("gather", lambda: calibrate_records(turbo, records, presets=()))
    timed("fit", lambda: calibration.fit(device=turbo.model.device))
    calibration.quality = timed("measure", lambda: measure_calibration(turbo, calibration, records))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "calibration.safetensors"
        timed("write", lambda: calibration.save(path))
        size = path.stat().st_size
    seconds["all"] = sum(seconds.values())
    return seconds, size


def _check(turbo: TurboEsm, library: Any, records: Sequence[ProteinRecord], tolerance: float) -> Check:
    """Moments of the last layer's values against those of the library's projection, one protein after another."""
    calibrator, values, codes = KVCalibrator(turbo.model), [], turbo.codes
    *_, (_, _, projection, _) = projections_of(encoder_of(library))
    for record in records:
        row = [codes.cls, *codes.encode(record.sequence, record.id), codes.eos]
        ids = torch.tensor([row])
        calibrator.partial_fit(ids)
        handle = projection.register_forward_hook(
            lambda module, inputs, output: values.append(output[0, 1:-1].double())
        )
        with torch.no_grad():
            library(ids.to(turbo.model.device))
        handle.remove()
    moments = calibrator.finalize(presets=()).statistics.residues.values
    heads, head_dim = moments.mean.shape[1:]
    x = torch.cat(values).cpu().unflatten(1, (heads, head_dim)).transpose(0, 1)
    centred = x - x.mean(1, keepdim=True)
    rms = x.square().mean(1).sqrt()
    errors = (
        (torch.from_numpy(moments.mean[-1]) - x.mean(1)).abs() / rms,
        (torch.from_numpy(moments.covariance[-1]) - centred.mT @ centred / x.shape[1]).abs()
        / (rms[:, :, None] * rms[:, None, :]),
    )
    largest = float(torch.stack([error.max() for error in errors]).max())
    what = "mean and covariance of the last layer's values against the library's, in root mean squares, largest"
    return Check(what, largest, tolerance)
