"""The process: signals, a kill and a restart, and the command line that starts it."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import threading
import time
from http.client import HTTPResponse
from types import SimpleNamespace

import pytest

from benchmarks.serve.process import Client, Process
from esm_turbo import ContextStore
from esm_turbo.serve.limits import Limits
from esm_turbo.serve.server import Server, loopback_names, open_socket, url_of
from esm_turbo.serve.service import Service

SEQUENCES = ["MKTAYIAKQRQISFVKSHFSRQ", "GSGSPLLKRRACDEFGHIKLMNPQ", "ACDEFGHIKLMNPQRSTVWY"]


def test_a_kill_loses_no_stored_context_and_a_signal_lets_requests_finish(tmp_path):
    with Process("--store", tmp_path / "store") as one:
        client = one.client()
        keys = {client.add(sequence): sequence for sequence in SEQUENCES}
        [key, *_] = keys
        body = {"candidates": ["ACDEF"]}
        before = client.post(f"/v1/contexts/{key}/score", body).json
        # While it computes and stores others.
        unanswered = socket.create_connection(("127.0.0.1", one.port))
        raw = json.dumps({"sequence": "".join(SEQUENCES)}).encode()
        head = f"POST /v1/contexts HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n"
        unanswered.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + raw)
        assert one.end(signal.SIGKILL) == -signal.SIGKILL
        unanswered.close()
    with Process("--store", tmp_path / "store") as two:
        client = two.client()
        assert re.fullmatch(r"[34] contexts in .*store", two.held)
        for own, sequence in keys.items():
            assert client.get(f"/v1/contexts/{own}").json["residues"] == len(sequence)
        assert client.post(f"/v1/contexts/{key}/score", body).json == before
        answers = []

        def ask() -> None:
            answers.append(two.client().post(f"/v1/contexts/{key}/score", {"candidates": [SEQUENCES[2]] * 40}))

        thread = threading.Thread(target=ask)
        thread.start()
        while "esm_turbo_queue 1.0" not in client.get("/metrics").body.decode():
            assert thread.is_alive()
            time.sleep(0.01)
        assert (two.end(signal.SIGTERM), two.said) == (0, "esm-turbo: stopped\n")
        thread.join(60)
        [answer] = answers
        assert answer.status == 200
        assert len(answer.json["candidates"]) == 40
        with pytest.raises(OSError):
            client.get("/healthz")


def test_a_signal_ends_it_within_the_time_of_a_request(tmp_path):
    with Process("--timeout", "6", "--threads", "1") as service:
        answers = []
        body = {"input": ["ACDEFGHIKLMNPQRSTVWY" * 50] * 100, "model": "esm2-mini"}
        # Not equal, or they would be embedded once.
        body["input"] = [one[number:] for number, one in enumerate(body["input"])]
        thread = threading.Thread(target=lambda: answers.append(service.client().post("/v1/embeddings", body)))
        thread.start()
        while service.client().get("/healthz").json["queue"]["running"] == 0:
            assert thread.is_alive()
            time.sleep(0.01)
        # Of bodies that have not come, nobody waits for the rest.
        stalled = [socket.create_connection(("127.0.0.1", service.port), 60) for _ in range(3)]
        for one in stalled:
            one.sendall(b"POST /v1/contexts HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{")
        begin = time.monotonic()
        assert service.end(signal.SIGTERM) == 0
        # Without an end to it, it takes a minute.
        assert time.monotonic() - begin < 15
        thread.join(60)
        [answer] = answers
        assert answer.status in (503, 504)
        for one in stalled:
            with one, HTTPResponse(one) as response:
                response.begin()
                assert response.status == 503
                assert json.loads(response.read())["detail"][0]["msg"] == "the service is stopping"
        assert service.said.startswith("esm-turbo: stopped")


def test_no_check_keeps_it_from_ending(turbo, tmp_path, monkeypatch):
    reached, gate, answers = threading.Event(), threading.Event(), []
    monkeypatch.setattr(Service, "embed_job", lambda *_: (reached.set(), gate.wait(60)))
    with ContextStore(tmp_path / "store") as store:
        listener = open_socket("127.0.0.1", 0)
        client, body = Client(listener.getsockname()[1]), {"input": "ACD", "model": "esm2-mini"}
        server = Server(Service(turbo, store, Limits(seconds=6)), listener)
        asking = threading.Thread(target=lambda: answers.append(client.post("/v1/embeddings", body)))
        serving = threading.Thread(target=server.run)
        for thread in (serving, asking):
            thread.start()
        assert reached.wait(30)
        server.stop()
        serving.join(30)
        assert not serving.is_alive()
        asking.join(30)
        gate.set()
    assert [answer.status for answer in answers] == [503]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_it_and_handlers_are_restored(turbo, tmp_path, number):
    before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    with ContextStore(tmp_path / "store") as store:
        service = Service(turbo, store)
        server = Server(service, open_socket("127.0.0.1", 0), ready=lambda: signal.raise_signal(number))
        server.run()
    assert not service.engine.alive
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == before


def test_addresses():
    with open_socket("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert url_of(taken) == f"http://127.0.0.1:{port}"
        with pytest.raises(ValueError, match=rf"cannot listen on 127.0.0.1 port {port}: .*; choose another"):
            open_socket("127.0.0.1", port)
    for host, port in (("no.such.host.invalid", 0), ("192.0.2.1", 0), ("127.0.0.1", 70_000)):
        with pytest.raises(ValueError, match="cannot listen on"):
            open_socket(host, port)
    for host in ("127.0.0.1", "localhost", "127.0.0.2", "127.1.2.3"):
        with open_socket(host, 0) as local:
            assert {"localhost", local.getsockname()[0]} <= set(loopback_names(local))
    with open_socket("0.0.0.0", 0) as everywhere:
        assert loopback_names(everywhere) == []
    if socket.has_ipv6:
        with contextlib.suppress(ValueError), open_socket("::1", 0) as six:
            assert url_of(six) == f"http://[::1]:{six.getsockname()[1]}"
            assert "::1" in loopback_names(six)


@pytest.mark.parametrize(
    ("address", "local"),
    [("::ffff:127.0.0.1", True), ("::1%lo", True), ("fe80::1%eth0", False), ("10.0.0.1", False), ("::", False)],
)
def test_addresses_that_only_this_machine_reaches(address, local):
    assert bool(loopback_names(SimpleNamespace(getsockname=lambda: (address, 80)))) == local
