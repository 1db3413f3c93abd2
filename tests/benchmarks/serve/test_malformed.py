"""Requests that are none, in the short form of the recorded run: each is refused, and the service stays well."""

from benchmarks.serve.malformed import malformed, status_of
from tests.helpers.service import running


def test_every_one_is_refused(turbo, tmp_path, caplog, capfd):
    with running(turbo, tmp_path / "store", hosts=["localhost", "127.0.0.1"]) as client:
        key = client.add("ACDEFGHIK")
        requests = list(malformed(250, key, seed=4))
        statuses = [status_of(client.port, raw) for raw in requests]
        # One that is right, so that the way of asking is.
        assert status_of(client.port, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n") == 200
        assert client.add("ACDEFGHIK") == key
        assert client.service.engine.jobs == 0
    wrong = [(status, raw[:200]) for status, raw in zip(statuses, requests, strict=True) if not 400 <= status < 500]
    assert wrong == []
    assert {404, 405, 413, 422} <= set(statuses)
    assert "Traceback" not in caplog.text + "".join(capfd.readouterr())
