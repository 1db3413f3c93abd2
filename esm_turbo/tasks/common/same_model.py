"""Pieces that only the model of their run may compute, wherever they are run.

A process that computes pieces has its model from a folder, which may have been replaced meanwhile, or from a pickle,
which holds no code: functions that a program has replaced are the library's again in another process.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from esm_turbo.config import TurboConfig
from esm_turbo.files.fingerprint import Fingerprint, same_codec
from esm_turbo.files.identity import ModelIdentity, exact_identity, model_identity, seen_foreign
from esm_turbo.files.model_contents import versions_of
from esm_turbo.model.plain import tree_of
from esm_turbo.tasks.common.forwards import default_config
from esm_turbo.tasks.common.pieces import InProcessRunner, Runner, Task
from esm_turbo.tasks.common.progress import Progress

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel

__all__ = ["call_on", "refuse_changed", "refuse_seen_change", "run_on_model"]

PieceT = TypeVar("PieceT")
ResultT = TypeVar("ResultT")
_CHANGED = "the model has changed during the call, and its results are not of one model: call again"
_DTYPE = operator.attrgetter("dtype")


def run_on_model(
    turbo: ContextModel,
    runner: Runner,
    task: Task[PieceT, ResultT],
    pieces: Sequence[PieceT],
    *,
    stage: str,
    units: Sequence[int],
    progress: Progress | None = None,
    begun: ModelIdentity | None = None,
) -> Iterator[tuple[int, ResultT]]:
    """As `Runner.run`; other processes refuse to run pieces with another model or another calibration.

    Args:
        begun: what the model was when the run began: results of this process are refused once it is another one. None
            where no result is kept or joined with others.

    Raises:
        ValueError: as of `refuse_changed`.
    """
    with call_on(turbo, progress):
        alone = isinstance(runner, InProcessRunner)
        if not alone:
            task = _OnSameModel(task, _RunModel.of(turbo, begun))
        for result in runner.run(task, pieces, stage=stage, units=units, progress=progress):
            if alone and begun is not None:
                refuse_changed(turbo, begun)
            yield result


@contextmanager
def call_on(turbo: ContextModel, progress: Progress | None = None) -> Iterator[None]:
    """A call whose results are of one preset, one calibration and one model.

    Weights and their dtypes are compared, as far as counters of writes tell; where code of the caller runs in between,
    all that `model_identity` compares.

    Args:
        turbo: the model.
        progress: of the call, which may change the model.

    Raises:
        ValueError: dropout is active, or the model changed meanwhile.
    """
    model, tree = turbo.model, tree_of(turbo.model)
    # A look at all takes longer than a token's forward.
    looks = progress is not None or any(tree.modes())
    begun = model_identity(model) if looks else None
    if begun is not None:
        begun.check_determinate()
    # Kept here: others might get the addresses of freed ones.
    weights = tree.held()
    before = versions_of(weights), [*map(_DTYPE, weights)]
    with model.base_model.kv.in_call():
        yield
    after = tree_of(turbo.model).held()
    changed = [*map(id, after)] != [*map(id, weights)] or (versions_of(after), [*map(_DTYPE, after)]) != before
    if changed:
        raise ValueError(_CHANGED)
    if begun is not None:
        refuse_seen_change(model, begun)


def refuse_seen_change(model: Any, begun: ModelIdentity) -> None:
    """As `refuse_changed`, as far as `model_identity` sees changes without reading all weights.

    Raises:
        ValueError: the model is not what it was.
    """
    # By value: threads that look at a model at once see it as objects of their own.
    if begun != model_identity(model):
        raise ValueError(_CHANGED)


def refuse_changed(turbo: ContextModel, begun: ModelIdentity) -> None:
    """Make sure that a model is to the bit what it was when a run began.

    Raises:
        ValueError: it is not.
    """
    if difference := begun.difference(exact_identity(turbo.model)):
        raise ValueError(
            f"the model has changed since the run began, and what it then computed is not kept: {difference}"
        )


@dataclass(frozen=True)
class _RunModel:
    """What decides the results of a run besides its task.

    Attributes:
        identity: of the model, its head included.
        device: kind of device on which it lies.
        runs_foreign: whether unknown code runs in it, of which a name says nothing in another process.
        preset: options under which it stores contexts.
        codecs: fingerprints of what its calibration has fitted, that preset included; None without a calibration.
    """

    identity: ModelIdentity
    device: str
    runs_foreign: bool
    preset: TurboConfig
    codecs: dict[TurboConfig, Fingerprint] | None

    @classmethod
    def of(cls, turbo: ContextModel, identity: ModelIdentity | None = None) -> _RunModel:
        """That of a model, as it is unless its identity is given."""
        codecs, preset = None, default_config(turbo)
        if (calibration := turbo.calibration) is not None:
            codecs = {config: calibration.codec(config).fingerprint for config in {preset, *calibration.fitted}}
        identity = identity or exact_identity(turbo.model)
        return cls(identity, turbo.model.device.type, bool(seen_foreign(turbo.model)), preset, codecs)

    def check(self, turbo: ContextModel) -> None:
        """Make sure that a model computes what this one does.

        Raises:
            ValueError: it does not.
        """
        other = self.of(turbo)
        mine, theirs = self.identity, other.identity
        if self.device != other.device:
            # What rounds products is called otherwise there.
            mine, theirs = _by_dtype(mine), _by_dtype(theirs)
        difference = mine.difference(theirs)
        if not difference and self.runs_foreign != other.runs_foreign:
            difference = "other code runs in its forward"
        if not difference and self.preset != other.preset:
            difference = f"it stores contexts as {other.preset.name!r}, not as {self.preset.name!r}"
        if not difference and not _same_codecs(self.codecs, other.codecs):
            difference = "its calibration is another one"
        if difference:
            raise ValueError(
                f"the model in another process is not that of the run: {difference}. Its files were replaced after the"
                " run began, or the program has changed the model or its code since the process took it over: begin"
                " again with new workers, or run without `devices` and workers"
            )


def _by_dtype(identity: ModelIdentity) -> ModelIdentity:
    return replace(identity, precision=identity.precision.partition("-")[0], probe="")


def _same_codecs(a: dict[TurboConfig, Fingerprint] | None, b: dict[TurboConfig, Fingerprint] | None) -> bool:
    if a is None or b is None:
        return a is b
    return all(same_codec(a[config], b[config]) for config in a.keys() & b.keys())


@dataclass
class _OnSameModel(Generic[PieceT, ResultT]):
    """A task that checks the model before its first piece in a process, and on a CPU after each.

    Attributes:
        task: what is done with a piece.
        model: of the run.
        checked: whether the model of this process was compared with it.
    """

    task: Task[PieceT, ResultT]
    model: _RunModel
    checked: bool = field(default=False, init=False)

    def run(self, turbo: ContextModel, pieces: Iterable[PieceT], progress: Progress) -> Iterator[ResultT]:
        """As of the task.

        Raises:
            ValueError: the model is another one.
        """
        if not self.checked:
            self.model.check(turbo)
            self.checked = True
        for result in self.task.run(turbo, pieces, progress):
            # Weights may lie in the file that they were read from, which others can overwrite.
            if turbo.model.device.type == "cpu":
                self.model.check(turbo)
            yield result

    def failed(self, piece: PieceT, reason: str) -> ResultT:
        """As of the task."""
        return self.task.failed(piece, reason)

    def has_failed(self, result: Any) -> bool:
        """As of the task."""
        return self.task.has_failed(result)
