"""The report of the environment."""

import importlib.metadata

import pytest
import torch

import esm_turbo
from esm_turbo import env


def test_versions_of_packages_and_devices():
    report = env.environment()
    assert report["torch"] == torch.__version__
    assert report["transformers"] == importlib.metadata.version("transformers")
    assert report["threads"] == str(torch.get_num_threads())
    assert set(report) >= {"python", "platform", "cores", "cuda", "mps"}


def test_packages_that_are_not_installed(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    report = env.environment()
    assert report["h5py"] == "not installed"
    # A checkout that is not installed has a version nevertheless.
    assert report["esm_turbo"] == esm_turbo.__version__


def test_one_line_per_entry(capsys: pytest.CaptureFixture[str]):
    env.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(env.environment())
