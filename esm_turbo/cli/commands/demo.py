"""`esm-turbo demo`."""

from __future__ import annotations

from esm_turbo.cli.console import progress_bar, quiet_transformers, show, working
from esm_turbo.cli.options import Device, JsonFile


def demo(*, device: Device = None, json: JsonFile = None) -> None:
    """Run the whole workflow on shipped proteins with the embedded model, offline, in less than a minute.

    Calibrates on 60 proteins, prefills contexts, extends them, and compares the results with the exact run.
    """
    with working("loading libraries"):
        quiet_transformers()
        from esm_turbo.cli.demo import run_demo
        from esm_turbo.cli.report import demo_report

    import torch

    # Two threads gain little on so small a model, and on a busy machine they mostly wait for each other.
    torch.set_num_threads(1)
    with progress_bar("done") as progress:
        result, evaluation = run_demo(device, progress)
    show(*demo_report(result, evaluation), to_json=json, result=result)
