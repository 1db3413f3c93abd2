"""`esm-turbo serve`: options that are refused before anything runs. `tests/serve/test_server.py` starts it."""

import importlib.util

import pytest

from esm_turbo.files.extras import install_hint
from esm_turbo.serve.server import Server


@pytest.fixture(autouse=True)
def _nothing_serves(monkeypatch):
    def run(self):
        raise AssertionError("it serves")

    monkeypatch.setattr(Server, "run", run)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--port", "-1"], "--port must be at least 0, got -1"),
        (["--port", "70000"], "cannot listen on 127.0.0.1 port 70000"),
        (["--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid port 8080"),
        (["--queue", "0"], "--queue must be at least 1, got 0"),
        (["--timeout", "0"], "--timeout must be above 0 seconds"),
        (["--timeout", "nan"], "--timeout must be above 0 seconds"),
        (["--max-residues", "0"], "--max-residues must be at least 1, got 0"),
        (["--token-file", "nowhere"], "nowhere: there is no such file; check the path"),
        (["--store", "/proc/x"], "/proc/x/.lock: cannot be written (No such file or directory); choose another path"),
        (["--port", "0", "--model", "nowhere/at/all"], "nowhere/at/all"),
    ],
)
def test_wrong_options(esm, options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = esm("serve", *options)
    assert result.code == 2
    assert message in result.error
    assert list(tmp_path.iterdir()) == []


def test_contexts_in_memory_are_within_resident_mib(esm, monkeypatch):
    """The service's own, and none of its store besides."""
    found = []

    def run(self):
        contexts = self.service.contexts
        for sequence in ("MKTAYIAKQR", "GSGSPLLKRR"):
            contexts.sequence(*contexts.add([sequence]))
            contexts.get_or_prefill(self.service.turbo, [sequence])
        found.extend(one["bytes"] for one in contexts.store.info()["memory"].values())
        assert contexts.resident.budget == 8 << 20

    monkeypatch.setattr(Server, "run", run)
    assert esm("serve", "--port", "0", "--resident-mib", "8").code == 0
    assert found == [0, 0]


def test_missing_packages_are_named(esm, monkeypatch):
    original = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "uvicorn" else original(name, *a))
    result = esm("serve")
    assert result.code == 2
    assert result.error == f"serve needs uvicorn: {install_hint('serve')}"
