"""A command that does one shard of its work, see `parallel.shards`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esm_turbo.cli.console import say
from esm_turbo.files.tabular import counted
from esm_turbo.files.writing import file_errors, replacing
from esm_turbo.parallel.shards import (
    Kind,
    Manifest,
    ShardError,
    as_json,
    finish_shard,
    input_digests,
    is_done,
    results_file,
    shard_output,
)
from esm_turbo.proteins.fasta import BadRecord
from esm_turbo.tasks.common.pieces import Plan, Shard

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel
    from esm_turbo.tasks.common.options import Arm
    from esm_turbo.tasks.common.run_info import RunInfo


def model_settings(turbo: ContextModel, arms: Sequence[Arm]) -> dict[str, Any]:
    """Properties of a model and its contexts that determine results, up to rounding, weights first."""
    from esm_turbo.tasks.common.run_info import run_settings

    own = run_settings(turbo, arms)
    shared = next(iter(own.values()))
    contexts = {arm: [one.get("preset"), one.get("codec")] for arm, one in own.items()}
    return {"weights": shared["weights"], "dtype": shared["dtype"], "arms": contexts}


class Sharding:
    """The shard that a command does, if it does not do all.

    Args:
        command: its name.
        kind: of its output.
        shard: as given, such as `3/16`; None for all.
        out: the output of all shards.
        inputs: files that all shards read, see `input_digests`.

    Attributes:
        plan: which pieces are done; None is all.
        out: where they are written.

    Raises:
        ValueError: it is no shard, there is no output, or an input is not a file.
    """

    def __init__(
        self,
        command: str,
        kind: Kind,
        shard: str | None,
        out: Path | None,
        inputs: Iterable[str | os.PathLike[str] | None],
    ) -> None:
        self.plan = None if shard is None else Plan(Shard.parse(shard))
        self.out = self._whole = out
        if self.plan is None:
            return
        if out is None:
            raise ValueError(f"--shard {shard} writes a part of an output; name the output with --out")
        self.out = shard_output(out, self.plan.shard, kind)
        self._inputs = list(inputs)
        self._manifest = Manifest(self.plan.shard, command, kind, input_digests(self._inputs))

    def is_done(self, settings: Callable[[], Mapping[str, Any]]) -> bool:
        """True if the shard was done earlier; says so. To be called once the inputs have been read.

        Args:
            settings: finds everything that determines its results, JSON values.

        Raises:
            ShardError: (a ValueError) it was done with other settings, or another input; or an input has changed since
                the command began.
        """
        if self.plan is None or self._whole is None:
            return False
        for name, digest in input_digests(self._inputs).items():
            if digest != self._manifest.inputs[name]:
                raise ShardError(f"{name}: has changed while it was read; run the shard again")
        self._manifest = replace(self._manifest, settings=as_json(settings()))
        done = is_done(self._whole, self._manifest)
        if done:
            say(f"shard {self.plan.shard} of {self._whole} is done already")
        return done

    def keep(self, results: Callable[[], Mapping[str, Any]]) -> None:
        """Write the results that the shard's table shows, JSON values, for `merge`. Does nothing without a shard."""
        if self.plan is not None and self._whole is not None:
            path = results_file(self._whole, self.plan.shard)
            with file_errors(path), replacing(path, inside=True) as temporary:
                temporary.write_text(json.dumps(results()), encoding="utf-8")

    def finish(self, run: RunInfo, failed: Iterable[BadRecord], order: Iterable[int] = ()) -> None:
        """Write what the shard did; the arguments are those of a `Manifest`. Does nothing without a shard."""
        if self.plan is None or self._whole is None:
            return
        from esm_turbo.files.artifacts import package_versions

        plan = self.plan
        results = {
            "run": run.to_dict(),
            "plan": plan.digest,
            "order": list(order),
            "failed": [(one.record, one.reason) for one in failed],
            "versions": package_versions(),
        }
        finish_shard(self._whole, replace(self._manifest, **as_json(results)))
        if plan.chosen:
            say(f"shard {plan.shard}: {len(plan.chosen)} of {plan.total} pieces done, in {self.out}")
        else:
            say(f"shard {plan.shard}: nothing to do, all shards share {counted(plan.total, 'piece')}")

    def exit_code(self, failed: Sequence[object]) -> int:
        """Of the command. A shard with failed records has done its part: `status` and `merge` report them."""
        return 1 if failed and self.plan is None else 0
