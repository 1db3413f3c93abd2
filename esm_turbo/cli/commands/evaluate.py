"""`esm-turbo evaluate`."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated

from esm_turbo.assets import evaluation_families, evaluation_proteins, named_proteins
from esm_turbo.cli.console import progress_bar, show, width
from esm_turbo.cli.inputs import announce, check_minimum, load_model
from esm_turbo.cli.options import (
    MANY,
    BackendOption,
    CalibratedModelOptions,
    InputFile,
    JsonFile,
    PictureFile,
    SequenceOptions,
)
from esm_turbo.cli.pictures import check_plot, save_plot
from esm_turbo.config import DEFAULT_PRESET, Backend, TurboConfig
from esm_turbo.proteins.fasta import read_fasta_strict


def evaluate(
    proteins: InputFile,
    /,
    *,
    preset: Annotated[tuple[str, ...], MANY] = ("exact", DEFAULT_PRESET),
    max_proteins: int = 10,
    extend_ks: Annotated[tuple[int, ...], MANY] = (1, 8, 32),
    refresh_ws: Annotated[tuple[int, ...], MANY] = (0, 8, 32),
    json: JsonFile = None,
    plot: PictureFile = None,
    letters: SequenceOptions = SequenceOptions(),
    model: CalibratedModelOptions = CalibratedModelOptions(),
    backend: BackendOption = Backend.AUTO,
) -> None:
    """Measure accuracy and memory of presets on proteins that the calibration has not seen.

    Compares the whole sequence recomputed, a context at full precision, and a compressed one; with `--precision`, also
    the whole sequence in bfloat16. A file with any bad record is refused. A list without values, as in `--extend-ks`
    alone, leaves that part out.

    Args:
        proteins: FASTA file, plain or gzip, for E1 with `family=NAME` in its headers; shipped for the 200 CATH domains,
            or families of homologs, that are shipped with the program.
        preset: Presets to evaluate; all for every preset, including the codecs for comparison.
        max_proteins: Evaluate only the first N proteins, or families, of the file.
        extend_ks: Numbers of new residues at the end of a context.
        refresh_ws: Numbers of residues at the end of the context that are recomputed with the new ones.
    """
    if not preset:
        raise ValueError("--preset must name at least one preset")
    for name in preset:
        if name != "all":
            TurboConfig.from_preset(name)
    check_minimum(1, max_proteins=max_proteins)
    path = named_proteins(proteins, evaluation_proteins)
    records = read_fasta_strict(path, **asdict(letters))
    check_plot(plot)
    turbo = load_model(model, backend=backend)
    from esm_turbo.proteins.homologs import join_families

    if turbo.model.base_model.exact_contexts is not None:
        records = join_families(records if path == proteins else read_fasta_strict(evaluation_families()))
    records = records[:max_proteins]
    reference = None
    if model.precision is not None:
        reference = load_model(replace(model, precision=None, dtype="bfloat16"), backend=backend)
    announce(turbo)
    with progress_bar("proteins") as progress:
        result = turbo.evaluate(
            [record.sequence for record in records],
            list(preset),
            names=[record.id for record in records],
            classes=[record.structural_class for record in records],
            extend_ks=extend_ks,
            refresh_ws=refresh_ws,
            reference=reference,
            progress=progress,
        )
    show(result.table(width()), to_json=json, result=result.to_dict())
    save_plot(plot, result)
