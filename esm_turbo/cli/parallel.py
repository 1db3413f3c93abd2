"""Options that spread a command over devices, as what its task is given."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from esm_turbo.cli.console import say
from esm_turbo.cli.inputs import check_minimum, from_pretrained, load_model
from esm_turbo.cli.options import ModelOptions, ParallelOptions

if TYPE_CHECKING:
    from esm_turbo.tasks.common.pieces import Runner
    from esm_turbo.turbo_esm import TurboEsm

_Options = TypeVar("_Options", bound=ModelOptions)

ALL = "all"


@dataclass(frozen=True)
class Spread(Generic[_Options]):
    """The devices of a command.

    Attributes:
        options: of its model.
        names: of the devices; None for this process alone.
        threads: of each process on a CPU.
        more: further arguments of `load_model`.
        engine: `local` or `ray`.
        address: of a Ray cluster; None starts one.
    """

    options: _Options
    names: tuple[str, ...] | None = None
    threads: int = 1
    more: dict[str, Any] = field(default_factory=dict)
    engine: str = "local"
    address: str | None = None

    @classmethod
    def of(cls, parallel: ParallelOptions, options: _Options, **more: Any) -> Spread[_Options]:
        """Find the devices of a command.

        Raises:
            ValueError: options contradict each other, or there are no such devices.
        """
        check_minimum(1, workers=parallel.workers, threads=options.threads)
        if options.device_map is not None and (parallel.devices is not None or parallel.workers is not None):
            raise ValueError("--device-map spreads one model over devices; leave it out beside --devices and --workers")
        threads = 1 if options.threads is None else options.threads
        if parallel.engine == "ray":
            if parallel.workers is None or parallel.devices is not None:
                raise ValueError("--engine ray needs --workers N, the number of actors; --device cuda gives each a GPU")
            from esm_turbo.parallel.ray_actors import import_ray

            import_ray()
            return cls(options, (options.device or "cpu",) * parallel.workers, threads, more, "ray", parallel.address)
        if parallel.address is not None:
            raise ValueError(f"--address {parallel.address} is that of a Ray cluster; give --engine ray as well")
        if parallel.workers is not None and parallel.devices is not None:
            raise ValueError("--workers are processes on a CPU, --devices one on each device; give one of them")
        names = parallel.devices if parallel.workers is None else ("cpu",) * parallel.workers
        if names == (ALL,):
            from esm_turbo.parallel.workers import cuda_devices

            names = cuda_devices()
        if names == ():
            raise ValueError("--devices all finds no CUDA device here; --workers N uses processes on the CPU")
        if names is not None and options.dtype is None and len({name.partition(":")[0] for name in names}) > 1:
            raise ValueError(f"--devices {' '.join(names)} load the model in dtypes of their own: give --dtype as well")
        if names is not None and options.device not in (None, *names[:1]):
            raise ValueError(f"--device {options.device} is one device; leave it out beside --devices and --workers")
        return cls(options, names, threads, more)

    @property
    def devices(self) -> str | None:
        """Devices of the run; None for the device of this process's model."""
        return None if self.names is None else " ".join(dict.fromkeys(self.names))

    def load(self) -> TurboEsm:
        """Load the model of this process: on the CPU if others compute, since it then only checks and describes."""
        if self.names is None:
            return load_model(self.options, **self.more)
        on_cuda = self.names[0].startswith("cuda")
        options = replace(self.options, device="cpu", threads=self.threads)
        if options.precision is None or not on_cuda:
            # As the others load it, whose devices may have another default; a CPU says that it lacks the precision.
            dtype = {"dtype": "auto"} if options.dtype is None and on_cuda else {}
            return load_model(options, **dtype, **self.more)
        from esm_turbo.model.precision import quantize_products

        turbo = load_model(replace(options, precision=None, dtype=options.dtype or "bfloat16"), **self.more)
        quantize_products(turbo.model)
        return turbo

    def move(self, turbo: TurboEsm) -> None:
        """Move the model of this process to the first device, which the processes of `runner` have left."""
        if self.names is not None and self.engine == "local":
            turbo.model.to(self.names[0])

    @contextlib.contextmanager
    def runner(self) -> Iterator[Runner | None]:
        """Processes that share the work; None for this process alone."""
        if self.names is None:
            yield None
            return
        count = f"{len(self.names)} {'actor' if self.engine == 'ray' else 'worker'}{'s' if len(self.names) > 1 else ''}"
        say(f"{count} on {self.devices}")
        load = partial(_load_on, _anywhere(self.options), self.more)
        if self.engine == "ray":
            from esm_turbo.parallel.ray_actors import RayActors

            actors = RayActors(load, len(self.names), device=self.names[0], threads=self.threads, address=self.address)
            with actors:
                yield actors
            return
        from esm_turbo.parallel.workers import Workers

        with Workers(load, self.names, threads=self.threads) as workers:
            yield workers


def _load_on(options: ModelOptions, more: dict[str, Any], device: str) -> TurboEsm:
    """Load the model of a command in another process."""
    return from_pretrained(options, **more | {"device": device})


def _anywhere(options: _Options) -> _Options:
    """Options that name the same files in a process that is in another folder, as Ray's are."""
    named = {name: value for name, value in asdict(options).items() if name in ("model", "calibration") and value}
    return replace(options, **{name: os.path.abspath(value) for name, value in named.items() if os.path.exists(value)})
