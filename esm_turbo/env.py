"""The environment, for bug reports: `python -m esm_turbo.env`."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys

_PACKAGES = (
    "esm_turbo",
    "torch",
    "transformers",
    "huggingface_hub",
    "safetensors",
    "numpy",
    "scipy",
    "triton",
    "h5py",
)


def environment() -> dict[str, str]:
    """Versions and devices by name, most important first."""
    import torch

    report = {"python": sys.version.split()[0], "platform": platform.platform(), "cores": str(os.cpu_count())}
    for package in _PACKAGES:
        try:
            report[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            # A checkout that is not installed has no metadata.
            report[package] = _own_version() if package == "esm_turbo" else "not installed"
    report["threads"] = str(torch.get_num_threads())
    report["cuda"] = torch.version.cuda or "not in this build of torch"
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        report[f"cuda:{index}"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    report["mps"] = "available" if torch.backends.mps.is_available() else "not available"
    return report


def _own_version() -> str:
    from esm_turbo import __version__

    return __version__


def main() -> None:
    """Print the report."""
    for name, value in environment().items():
        print(f"{name:16} {value}")


if __name__ == "__main__":
    main()
