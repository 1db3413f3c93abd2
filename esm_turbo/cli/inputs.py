"""Steps that commands share: check arguments, read proteins, load the model."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast, get_args, get_type_hints

from esm_turbo.assets import EMBEDDED_MODEL
from esm_turbo.cli.console import progress_bar, quiet_transformers, say, working
from esm_turbo.cli.interrupts import interrupts
from esm_turbo.cli.options import READS, ModelOptions, SequenceOptions, Writes
from esm_turbo.cli.threads import set_threads
from esm_turbo.files.paths import Output, check_outputs
from esm_turbo.files.suffixes import embedding_format
from esm_turbo.files.tabular import counted
from esm_turbo.proteins.fasta import BadRecord, ProteinRecord, normalize_sequence, read_fasta, sha256_residues
from esm_turbo.tasks.common.options import ONE_FILE, Background

if TYPE_CHECKING:
    from esm_turbo.context_store import ContextStore
    from esm_turbo.files.journal import Journal
    from esm_turbo.tasks.common.options import Arm
    from esm_turbo.tasks.common.run_info import RunInfo
    from esm_turbo.turbo_esm import TurboEsm

_P = ParamSpec("_P")
_R = TypeVar("_R")


def with_checked_outputs(command: Callable[_P, _R]) -> Callable[_P, _R]:
    """A command that first checks its outputs, see `check_outputs`; the types of its arguments say which these are."""

    @functools.wraps(command)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        arguments = inspect.signature(command).bind(*args, **kwargs)
        arguments.apply_defaults()
        inputs, outputs = _paths(command, arguments.arguments)
        check_outputs(outputs, inputs)
        return command(*args, **kwargs)

    return checked


def _paths(declared_by: Any, values: Mapping[str, Any]) -> tuple[list[str | Path], list[Output]]:
    """Inputs and outputs among the arguments of a command, or the fields of its options."""
    inputs: list[str | Path] = []
    outputs: list[Output] = []
    for name, hint in get_type_hints(declared_by, include_extras=True).items():
        value: Any = values.get(name)
        if value is None or value == "-":
            continue
        if is_dataclass(value):
            inputs += _paths(type(value), vars(value))[0]
        for mark in getattr(hint, "__metadata__", ()):
            if mark is READS:
                inputs.append(value)
            elif isinstance(mark, Writes):
                if isinstance(value, str) and value.startswith("-"):
                    raise ValueError(f"--{name} needs a file, or - for standard output; got {value}")
                one_file = None
                if mark.holds == "embeddings":
                    one_file = ONE_FILE.get(embedding_format(value, values["format"]))
                outputs.append(Output(value, one_file or mark.holds, mark.suffixes))
    return inputs, outputs


def check_minimum(minimum: int, **options: int | None) -> None:
    """Make sure that no option is below its minimum.

    Raises:
        ValueError: one is.
    """
    for name, value in options.items():
        if value is not None and value < minimum:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {minimum}, got {value}")


def read_proteins(path: Path, letters: SequenceOptions) -> tuple[list[ProteinRecord], list[BadRecord]]:
    """Read the good and the bad records of a FASTA file; those with several chains are for `readable`.

    Raises:
        ValueError: there is no good record, or the file is not FASTA.
    """
    good, bad = read_fasta(path, **asdict(letters), chain_breaks=True)
    check_usable(path, good, bad)
    return good, bad


def read_background(
    name: str, letters: SequenceOptions, targets: int
) -> tuple[str | None, list[ProteinRecord], list[BadRecord]]:
    """A background's name, and the proteins in whose context candidates are scored for it, see `background_contexts`.

    The bad records of a file come last.

    Raises:
        ValueError: it is neither known nor a FASTA file.
    """
    from esm_turbo.tasks.scoring.specificity import background_contexts

    if name in get_args(Background):
        return *background_contexts(cast(Background, name), targets), []
    path = Path(name)
    if not path.exists():
        raise ValueError(f"--background must be {', '.join(get_args(Background))} or a FASTA file, got {name!r}")
    return "decoys", *read_proteins(path, letters)


def background_setting(name: str, decoys: Sequence[ProteinRecord]) -> str | dict[str, str]:
    """What files and shards say of a background: its name; of a file of decoys also the SHA-256 of their residues."""
    if name in get_args(Background):
        return name
    return {"file": Path(name).name, "sha256": sha256_residues(one.sequence for one in decoys)}


def readable(turbo: TurboEsm, path: Path, good: Sequence[ProteinRecord], bad: list[BadRecord]) -> list[ProteinRecord]:
    """The records that a model can read: with several chains, only if its vocabulary has a break between them.

    Args:
        turbo: the model.
        path: the file.
        good: its records.
        bad: those that cannot be used; the others are added.

    Raises:
        ValueError: there is none.
    """
    if turbo.codes.chain_break is not None:
        return list(good)
    kept = []
    for record in good:
        try:
            normalize_sequence(record.sequence, name="")
            kept.append(record)
        except ValueError as error:
            bad.append(BadRecord(record.id, str(error)))
    check_usable(path, kept, bad)
    return kept


def check_usable(source: Path, good: Sequence[object], bad: Sequence[BadRecord], kind: str = "record") -> None:
    """Make sure that a file has at least one good record.

    Raises:
        ValueError: it has none; the bad ones have then been listed.
    """
    if not good:
        list_bad(source, bad)
        raise ValueError(f"{source}: no usable {kind}; correct those above")


def list_bad(source: Path, bad: Sequence[BadRecord]) -> None:
    """Print an error for every bad record."""
    for one in bad:
        say(f"error: {source}, record {one.record!r}: {one.reason}")


def outcome(written: int, noun: str, out: Path | None, failed: Sequence[BadRecord]) -> list[str]:
    """Lines that say at the end of a run what it wrote, and how many records it could not use."""
    lines = [] if out is None or not written else [f"{counted(written, noun)} written to {out}"]
    return [*lines, *([f"{counted(sum(one.count for one in failed), 'record')} failed, see above"] if failed else [])]


def from_pretrained(options: ModelOptions, **more: Any) -> TurboEsm:
    """Load a model by the options of a command, but for its threads; without `calibration`, it is loaded without one.

    Args:
        options: of the command.
        **more: of `TurboEsm.from_pretrained`.
    """
    quiet_transformers()
    from esm_turbo.turbo_esm import TurboEsm

    given = {"calibration": False} | asdict(options) | more
    given = {name: value for name, value in given.items() if value is not None and name != "threads"}
    # Named, since `announce` says what the embedded model is.
    return TurboEsm.from_pretrained(given.pop("model", EMBEDDED_MODEL), **given)


def load_model(options: ModelOptions, **more: Any) -> TurboEsm:
    """Load the model of a command, see `from_pretrained`; any failure counts as unusable input.

    Raises:
        ValueError: the model or its calibration cannot be loaded.
    """
    # In eight bits, a model is calibrated before its products are rounded.
    auto = getattr(options, "calibration", None) == "auto" and options.precision is None
    check_minimum(1, threads=options.threads)
    with unusable_input(f"{options.model or 'the embedded model'} cannot be loaded"):
        with working("loading the model"):
            set_threads(options.threads)
            turbo = from_pretrained(options, **more | ({"calibration": False} if auto else {}))
        if auto:
            from esm_turbo.evaluate.calibrated import measure_calibration
            from esm_turbo.tasks.calibration.auto import auto_calibration

            with progress_bar("residues") as progress:
                calibration = auto_calibration(turbo, progress, measure_calibration)
            esm = turbo.model.base_model
            esm.set_turbo(calibration=calibration, preset=getattr(options, "preset", None), backend=esm.backend)
    return turbo


def named_arms(arm: tuple[Arm, ...] | None, turbo: TurboEsm, default: Arm | None = None) -> tuple[Arm, ...]:
    """The arms of a command, each once; if none is named, `default` or else the model's."""
    from esm_turbo.tasks.common.forwards import default_arm

    if arm is None:
        return (default or default_arm(turbo),)
    return tuple(dict.fromkeys(arm))


def announce(turbo: TurboEsm, arms: Sequence[Arm] = (), devices: str | None = None) -> RunInfo:
    """Say on standard error what runs, and where; say of the embedded model that it is a demonstration.

    Args:
        turbo: the model.
        arms: those that run.
        devices: what the run is computed on; None is the model's own device.

    Returns:
        The same, for the results.

    Raises:
        ValueError: an arm cannot run, since its contexts need a calibration and there is none.
    """
    from esm_turbo.tasks.common.run_info import RunInfo

    info = RunInfo.of(turbo, arms)
    if devices is not None:
        info = replace(info, device=devices, threads=info.threads if devices == "cpu" else None)
    say(str(info))
    encoder = turbo.model.base_model
    if encoder.preset_chosen and encoder.turbo_config.name not in info.arms.values():
        say(f"warning: --preset {encoder.turbo_config.name} changes nothing: this run stores no contexts under it")
    if info.demonstration:
        say(
            f"{info.model} is a small demonstration model, not one of Meta's; for real work name a checkpoint of ESM-2,"
            " ESM-C or E1, such as --model facebook/esm2_t33_650M_UR50D"
        )
    return info


@contextlib.contextmanager
def opened_store(folder: Path | None, turbo: TurboEsm, *, alone: bool = True) -> Iterator[ContextStore | None]:
    """Open the store of a command, and say at the end how many contexts it held; None without a folder.

    Args:
        folder: of the store.
        turbo: the model.
        alone: no other processes look up contexts for this one, which does not know what they have found.

    Raises:
        ValueError: the folder is no store, or belongs to another model.
    """
    if folder is None:
        yield None
        return
    from esm_turbo.context_store import ContextStore

    # A command uses each context once.
    with ContextStore(folder, host_bytes=0, device_bytes=0) as store:
        store.check_model(turbo)
        before = store.info()
        yield store
        after = store.info()
    if not alone:
        held, added = after["contexts"], after["contexts"] - before["contexts"]
        say(f"{folder}: {counted(held, 'context')}, {added:,} computed and added")
        return
    names = ("looked_up", "missed", "damaged")
    looked_up, missed, damaged = (after["usage"][name] - before["usage"][name] for name in names)
    added = after["contexts"] - before["contexts"] + damaged
    # Where its disk is full, a store takes no more.
    computed = f"{missed:,} computed and added" if added >= missed else f"{missed:,} computed, {added:,} added"
    say(f"{folder}: {counted(looked_up - missed, 'context')} found, {computed}")


@contextlib.contextmanager
def resumable(out: Path | None) -> Iterator[Journal | None]:
    """Keep the results of a command until it has written them to a file; None without a file.

    Raises:
        ValueError: another process writes the same file, or it cannot be written.
    """
    from esm_turbo.files.journal import journal_beside

    with journal_beside(out) as journal:
        if journal is None:
            yield None
            return
        with interrupts.resume_by_command(lambda: journal.found + journal.added > 0):
            yield journal
        journal.remove()


@contextlib.contextmanager
def unusable_input(problem: str) -> Iterator[None]:
    """Turn any error into a ValueError, which stands for unusable input, and a lack of memory into one that names it.

    Args:
        problem: how the message begins.
    """
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        from esm_turbo.model.memory import NotEnoughMemoryError, is_out_of_memory

        if is_out_of_memory(error):
            raise NotEnoughMemoryError(f"{problem}: {str(error) or type(error).__name__}") from error
        if isinstance(error, ImportError):
            raise
        raise ValueError(f"{problem}: {str(error) or type(error).__name__}") from error
