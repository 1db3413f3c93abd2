"""Options that several commands share, each declared and documented once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter

from esm_turbo.config import DEFAULT_PRESET, Backend
from esm_turbo.files.suffixes import SEQUENCES, TABLES
from esm_turbo.tasks.common.options import Arm, SortBy, UnknownResidues

DType = Literal["float32", "bfloat16", "float16"]

_MODEL, _PARALLEL = Group("Model"), Group("Parallel")

READS = object()
"""Marks an argument that names an input, which no output may replace."""


@dataclass(frozen=True)
class Writes:
    """Marks an argument that names an output."""

    holds: Literal["text", "picture", "calibration", "embeddings", "contexts"]
    suffixes: tuple[str, ...] = ()


InputFile = Annotated[Path, READS]
OptionalInput = Annotated[Path | None, READS]
TableFile = Annotated[Path | None, Writes("text", TABLES)]
SequenceFile = Annotated[Path | None, Writes("text", SEQUENCES)]
TableOrSequenceFile = Annotated[Path | None, Writes("text", (*TABLES, *SEQUENCES))]

PictureFile = Annotated[
    Path | None,
    Parameter(
        help="Picture to draw, by its suffix: .html (opens offline), .pdf, or .png or .svg for one protein (of several"
        " targets, their heat map)."
    ),
    Writes("picture"),
]

# `--include mean per_tok`; without the generated `--empty-include`, which would mean nothing.
MANY = Parameter(consume_multiple=True, negative="", show_default=lambda values: " ".join(map(str, values)))
# After `MANY`, of an option whose default its help tells in words, or that has none.
NO_DEFAULT = Parameter(show_default=False)

Device = Annotated[
    str | None, Parameter(help="Device of the model, such as cpu, cuda or mps. By default, the best one available.")
]
BackendOption = Annotated[Backend, Parameter(help="Implementation of attention over compressed caches.", group=_MODEL)]
Arms = Annotated[tuple[Arm, ...] | None, MANY, NO_DEFAULT]
AutoBatchTokens = Annotated[
    int | None, Parameter(help="Maximum number of tokens per batch. By default, chosen by arm and device.")
]
ProteinBatchTokens = Annotated[
    int | None,
    Parameter(
        help="Maximum number of tokens per batch, padding included. By default, 16384 on CUDA devices, and else 4096."
    ),
]
StoreFolder = Annotated[
    Path | None,
    Parameter(
        help="Folder of contexts, created if needed: those that it holds are used, and missing ones are computed and"
        " added."
    ),
    Writes("contexts"),
]
# `-` alone is standard output.
JsonFile = Annotated[
    str | None,
    Parameter(help="Write the result as JSON to this file; - for standard output.", allow_leading_hyphen=True),
    Writes("text"),
]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SequenceOptions:
    """Treatment of characters that are not residue codes, and of identifiers."""

    unknown: Annotated[
        str | None,
        Parameter(help="X replaces letters that are not residue codes with X. By default, such records are rejected."),
    ] = None
    remove_gaps: Annotated[
        bool,
        Parameter(help="Remove gaps (- . ~) from sequences, such as those of an alignment.", negative=""),
    ] = False
    accessions: Annotated[
        bool,
        Parameter(help="Reduce identifiers of UniProt, such as sp|P69905|HBA_HUMAN, to P69905.", negative=""),
    ] = False


@Parameter(name="*", group=Group("Screen"))
@dataclass(frozen=True, kw_only=True)
class ScreenOptions:
    """The background that candidates are compared with, and the number that ranks them."""

    background: Annotated[
        str,
        Parameter(
            help="Compare each candidate with itself elsewhere, for its specificity: on the other targets, after no"
            " target (alone), on shipped proteins (all-decoys: twelve; decoys: one for every four targets, and all"
            " twelve for fewer than four), or on those of a FASTA file; none compares nothing."
        ),
        READS,
    ] = "targets"
    sort_by: Annotated[
        SortBy,
        Parameter(
            help="Rank by likelihood, or by specificity: log-likelihood per residue minus the background's mean, in"
            " its standard deviations if it has five contexts or more."
        ),
    ] = "likelihood"
    rescore: Annotated[
        int | None,
        Parameter(
            help="Number of candidates per target, the best, that are scored again exactly, by the arm full; where"
            " specificity ranks, in their background, too: with the other targets, as many times the work as there"
            " are targets."
        ),
    ] = None
    unknown_residues: Annotated[
        UnknownResidues,
        Parameter(help="Leave B, X and Z, which stand for several residues, out of a candidate's figures, or not."),
    ] = "omit"
    pairs: Annotated[
        Literal["column", "all"],
        Parameter(help="Score a candidate on the target that its row names, or all candidates on all targets."),
    ] = "column"


@Parameter(name="*", group=_MODEL)
@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model runs, where, and at which precision."""

    model: Annotated[
        str | None,
        Parameter(help="Hub id or folder of an ESM-2, ESM-C or E1 checkpoint. By default, the embedded esm2-mini."),
        READS,
    ] = None
    device: Device = None
    device_map: Annotated[
        Literal["auto", "balanced", "balanced_low_0", "sequential"] | None,
        Parameter(help="Spread the layers of a model that is larger than a device: how they are shared out."),
    ] = None
    dtype: Annotated[
        DType | None,
        Parameter(help="Precision of the model. By default, float32 on CPU and MPS, the checkpoint's dtype on CUDA."),
    ] = None
    precision: Annotated[
        Literal["fp8"] | None,
        Parameter(
            help="Precision of the matrix products of ESM-2 and ESM-C: fp8 needs an H100, H200 or newer, and is faster"
            " for the largest models. By default, that of the model."
        ),
    ] = None
    threads: Annotated[
        int | None,
        Parameter(help="Threads on a CPU. By default, as many as there are free cores, at least 1."),
    ] = None


@Parameter(name="*", group=_PARALLEL)
@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """Devices and processes of a run. The results do not depend on them."""

    devices: Annotated[
        tuple[str, ...] | None,
        MANY,
        NO_DEFAULT,
        Parameter(help="Devices to use at once, a process each: all, or names such as cuda:0 cuda:1."),
    ] = None
    engine: Annotated[
        Literal["local", "ray"],
        Parameter(
            help="What runs the processes: this machine, or Ray, --workers actors; --device cuda gives each a GPU."
        ),
    ] = "local"
    address: Annotated[
        str | None,
        Parameter(help="Ray cluster to use, such as auto. By default, one on this machine for the time of the run."),
    ] = None
    shard: Annotated[
        str | None,
        Parameter(help="Do the K-th of N parts of the work, as in 3/16, beside the output; see status and merge."),
    ] = None
    workers: Annotated[
        int | None,
        Parameter(help="Processes to use at once on a CPU, of one thread each unless --threads says otherwise."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class UnshardedOptions(ParallelOptions):
    """Of a command whose output is one file, which tells whoever asks for shards."""

    shard: Annotated[str | None, Parameter(show=False)] = None


@Parameter(name="*", group=_MODEL)
@dataclass(frozen=True, kw_only=True)
class CalibratedModelOptions(ModelOptions):
    """A model with a calibration."""

    calibration: Annotated[
        str | None,
        Parameter(
            help="Calibration of the model: a file, or auto to calibrate on the shipped proteins."
            " By default, the one saved with the model."
        ),
        READS,
    ] = None


@Parameter(name="*", group=_MODEL)
@dataclass(frozen=True, kw_only=True)
class CacheOptions(CalibratedModelOptions):
    """A model that writes caches of one preset."""

    preset: Annotated[
        str | None,
        Parameter(
            help=f"Preset of compressed caches, such as turbo4, turbo2, paper or exact. By default, {DEFAULT_PRESET}."
        ),
    ] = None
