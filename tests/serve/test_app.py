"""The service over HTTP: answers are the library's, wrong requests name the field, pages come from the service."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import re
import socket
import threading
import time
from http.client import HTTPResponse

import numpy as np
import pytest
from safetensors import SafetensorError

from benchmarks.serve.process import Client
from esm_turbo import TurboEsm
from esm_turbo.files.paths import NotWritableError
from esm_turbo.pictures.palettes import DIVERGING, RESIDUE_ORDER
from esm_turbo.serve import routes, service
from esm_turbo.serve.app import STATIC
from esm_turbo.serve.jobs import ItemJob
from esm_turbo.serve.limits import Limits
from esm_turbo.serve.schemas import ErrorAnswer
from esm_turbo.serve.service import Service
from esm_turbo.tasks.scoring.specificity import background_contexts
from tests.helpers.service import running

TARGET = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQAPILSRVGDGTQDNL"
# A protein that is one of the decoys.
DECOY = background_contexts("decoys", 1)[1][0].sequence
CANDIDATES = ["GSGSWKDLAE", "PLLKRR", "AAAAAA", "W"]
# Largest difference of a log-probability from that of the library's own batches.
TOLERANCE = 1e-4
RUN = {"model", "fingerprint", "arm", "preset", "version", "device", "dtype"}


@pytest.fixture(scope="module")
def client(turbo, tmp_path_factory):
    limits = Limits(residues=200, candidates=20, inputs=4, samples=4, body_bytes=50_000, tokens=50_000)
    with running(turbo, tmp_path_factory.mktemp("served") / "store", limits) as client:
        yield client


@pytest.fixture(scope="module")
def context(client):
    return client.add(TARGET)


def test_a_context_is_named_by_a_hash(client, context):
    assert re.fullmatch("[0-9a-f]{64}", context)
    assert client.add(f" {TARGET.lower()}\n") == context
    found = client.get(f"/v1/contexts/{context}")
    assert found.status == 200
    assert found.json["residues"] == len(TARGET)
    assert set(found.json["run"]) == RUN


def test_what_a_family_was_not_trained_on_is_mentioned(client, context, turbo, monkeypatch):
    warned = []
    monkeypatch.setattr(service, "warn_of_peptides", warned.append)
    assert client.post(f"/v1/contexts/{context}/score", {"candidates": CANDIDATES}).status == 200
    assert warned == [turbo]


@pytest.mark.parametrize(("background", "target"), [("alone", TARGET), ("decoys", TARGET), ("decoys", DECOY)])
def test_specificity_is_that_of_the_library(client, turbo, background, target):
    body, context = {"candidates": CANDIDATES, "background": background}, client.add(target)
    answer = client.post(f"/v1/contexts/{context}/score", body).json
    expected = turbo.score(target, CANDIDATES, background=background)
    for own, theirs in zip(answer["candidates"], expected.scores, strict=True):
        assert own["specificity"] == pytest.approx(theirs.specificity, abs=1e-4)
        assert (own["specificity_z"] is None) == (theirs.specificity_z is None) == (background == "alone")
        assert own["background"] == pytest.approx(theirs.background._asdict(), abs=1e-4)
    plain = client.post(f"/v1/contexts/{context}/score", {"candidates": CANDIDATES}).json
    assert "specificity" not in plain["candidates"][0]
    refused = client.post(f"/v1/contexts/{context}/score", {"candidates": ["A", "XB"]})
    assert refused.status == 422 and "none but unknown residues" in refused.json["detail"][0]["msg"]


@pytest.mark.parametrize("place", ["masked", "empty"])
@pytest.mark.parametrize("refresh", [0, 8, 150])
def test_scores_are_those_of_the_library(client, context, turbo, place, refresh):
    body = {"candidates": CANDIDATES, "place": place, "refresh": refresh, "log_probabilities": True}
    answer = client.post(f"/v1/contexts/{context}/score", body).json
    expected = turbo.score(TARGET, CANDIDATES, place=place, refresh=refresh)
    assert [one["candidate"] for one in answer["candidates"]] == CANDIDATES
    for own, theirs in zip(answer["candidates"], expected.scores, strict=True):
        assert own["log_probabilities"] == pytest.approx(theirs.log_probabilities, abs=TOLERANCE)
        assert own["pseudo_perplexity"] == pytest.approx(theirs.pseudo_perplexity, rel=TOLERANCE)
    ranked = sorted(answer["candidates"], key=lambda one: one["rank"])
    assert [one["candidate"] for one in ranked] == [CANDIDATES[index] for index in expected.ranking()]
    assert (answer["place"], answer["refresh"]) == (place, expected.refresh)
    assert (answer["run"]["arm"], answer["run"]["preset"]) == (expected.arm, expected.preset)


@pytest.mark.parametrize("method", ["masked", "wild_type"])
def test_variants_are_those_of_the_library(client, context, turbo, method):
    answer = client.post(f"/v1/contexts/{context}/variants", {"method": method, "first_position": 24}).json
    expected = turbo.score_variants(TARGET, method=method, first_position=24)
    assert [one["variant"] for one in answer["variants"]] == [one.variant for one in expected.scores]
    assert [one["score"] for one in answer["variants"]] == pytest.approx(expected.values, abs=2 * TOLERANCE)
    several = client.post(f"/v1/contexts/{context}/variants", {"variants": ["K2A:T3D", "m1a"], "method": method}).json
    expected = turbo.score_variants(TARGET, ["K2A:T3D", "m1a"], method=method)
    assert [one["score"] for one in several["variants"]] == pytest.approx(expected.values, abs=4 * TOLERANCE)


def test_embeddings_are_in_the_shape_of_openai(client, turbo):
    sequences = [TARGET, "ACDEFGHIK", TARGET]
    answer = client.post("/v1/embeddings", {"input": sequences, "model": "esm2-mini"}).json
    expected = turbo.embed(sequences, include=["mean"])
    assert (answer["object"], answer["model"]) == ("list", "esm2-mini")
    assert [(one["object"], one["index"]) for one in answer["data"]] == [("embedding", i) for i in range(3)]
    for one, theirs in zip(answer["data"], expected, strict=True):
        [mean] = theirs.mean_representations.values()
        assert np.allclose(one["embedding"], mean, atol=1e-4)
    tokens = sum(len(sequence) + 2 for sequence in sequences)
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert (answer["run"]["arm"], answer["run"]["preset"]) == ("full", None)
    # As OpenAI's client asks by default.
    coded = client.post(
        "/v1/embeddings", {"input": "ACDEFGHIK", "model": "esm2-mini", "encoding_format": "base64"}
    ).json
    floats = np.frombuffer(base64.b64decode(coded["data"][0]["embedding"]), dtype="<f4")
    assert np.allclose(floats, answer["data"][1]["embedding"], atol=1e-4)
    assert client.get("/v1/models").json["data"][0]["id"] == "esm2-mini"


def test_generated_residues_are_those_of_the_library(client, context, turbo):
    body = {"max_new_tokens": 6, "num_return_sequences": 3, "seed": 5, "top_k": 5, "banned": "C"}
    answer = client.post("/v1/generate", {"context": context, **body}).json
    expected = turbo.generate(TARGET, **body)
    assert [one["sequence"] for one in answer["sequences"]] == expected.sequences
    for one, theirs in zip(answer["sequences"], expected.log_probs, strict=True):
        assert one["log_probs"] == pytest.approx(theirs, abs=10 * TOLERANCE)
    masked = f"AC<mask>{TARGET}<mask>"
    body = {"order": "confidence", "sweeps": 2, "allowed": {"3": "AG"}}
    answer = client.post("/v1/generate", {"sequence": masked, **body}).json
    assert answer["sequences"][0]["sequence"] == turbo.generate(masked, **body | {"allowed": {3: "AG"}}).sequences[0]
    body = {"positions": [2, 5], "seed": 9}
    answer = client.post("/v1/generate", {"sequence": TARGET, **body}).json
    assert answer["sequences"][0]["sequence"] == turbo.generate(TARGET, **body).sequences[0]


def test_lines_report_progress(client, context):
    answer = client.post(f"/v1/contexts/{context}/variants", {"stream": True})
    assert answer.headers["content-type"] == "application/x-ndjson"
    *lines, last = [json.loads(line) for line in answer.body.splitlines()]
    assert lines and all(0 <= line["progress"]["done"] <= line["progress"]["total"] for line in lines)
    result, plain = last["result"], client.post(f"/v1/contexts/{context}/variants", {}).json
    # Pieces are cut by how fast the machine is, which moves last bits.
    ours, theirs = ([one["score"] for one in each.pop("variants")] for each in (result, plain))
    assert result == plain and ours == pytest.approx(theirs, abs=TOLERANCE)


def test_many_clients_at_once_get_their_own_answers(client, turbo):
    targets = [TARGET[i:] + TARGET[:i] for i in range(6)]
    keys = [client.add(target) for target in targets]
    expected = [turbo.score(target, CANDIDATES).pseudo_perplexities for target in targets]
    answers: dict[int, list[float]] = {}

    def ask(number: int) -> None:
        answer = Client(client.port).post(f"/v1/contexts/{keys[number % 6]}/score", {"candidates": CANDIDATES}).json
        answers[number] = [one["pseudo_perplexity"] for one in answer["candidates"]]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(18)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(answers) == list(range(18))
    for number, answer in answers.items():
        assert answer == pytest.approx(expected[number % 6], rel=TOLERANCE)


SCORE, VARIANTS = "/v1/contexts/{context}/score", "/v1/contexts/{context}/variants"
EMBED = {"model": "esm2-mini"}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/contexts", {}, ["sequence"]),
        ("/v1/contexts", {"sequence": ""}, ["sequence"]),
        ("/v1/contexts", {"sequence": "AC!"}, ["sequence"]),
        ("/v1/contexts", {"sequence": "AC<mask>"}, ["sequence"]),
        ("/v1/contexts", {"sequence": "A" * 201}, ["sequence"]),
        ("/v1/contexts", {"sequence": " " * 2000}, ["sequence"]),
        ("/v1/contexts", {"sequence": 7}, ["sequence"]),
        ("/v1/contexts", {"sequence": "AC", "path": "../x"}, ["path"]),
        (SCORE, {"candidates": []}, ["candidates"]),
        (SCORE, {"candidates": ["A"] * 21}, ["candidates"]),
        (SCORE, {"candidates": ["A", "B1"]}, ["candidates", 1]),
        (SCORE, {"candidates": ["A", ""]}, ["candidates", 1]),
        (SCORE, {"candidates": ["A", "\ud800"]}, ["candidates", 1]),
        (SCORE, {"candidates": ["A<mask>"]}, ["candidates", 0]),
        (SCORE, {"candidates": ["A", "C D"]}, ["candidates", 1]),
        (SCORE, {"candidates": ["A" * 101]}, ["candidates", 0]),
        (SCORE, {"candidates": ["A", None]}, ["candidates", 1]),
        (SCORE, {"candidates": ["A" * 100] * 20}, ["candidates"]),
        (SCORE, {"candidates": ["A"], "refresh": -1}, ["refresh"]),
        (SCORE, {"candidates": ["A"], "refresh": 10**9}, ["refresh"]),
        (SCORE, {"candidates": ["A"], "refresh": True}, ["refresh"]),
        (SCORE, {"candidates": ["A"], "place": "there"}, ["place"]),
        (VARIANTS, {"variants": ["M1A", "M2A"]}, ["variants", 1]),
        (VARIANTS, {"variants": ["M1A", "nonsense"]}, ["variants", 1]),
        (VARIANTS, {"variants": []}, ["variants"]),
        (VARIANTS, {"variants": ["K2A" + ":" * 20_000]}, ["variants"]),
        (VARIANTS, {"variants": ["M1A"], "first_position": 10**30}, ["first_position"]),
        (VARIANTS, {"method": "guess"}, ["method"]),
        ("/v1/embeddings", {"input": "ACD"}, ["model"]),
        ("/v1/embeddings", {"input": "ACD", "model": "gpt"}, ["model"]),
        ("/v1/embeddings", {"input": ["ACD", "A-C"], **EMBED}, ["input", 1]),
        ("/v1/embeddings", {"input": "A-C", **EMBED}, ["input"]),
        ("/v1/embeddings", {"input": ["A"] * 5, **EMBED}, ["input"]),
        ("/v1/embeddings", {"input": "A", "dimensions": 3, **EMBED}, ["dimensions"]),
        ("/v1/generate", {}, ["sequence"]),
        ("/v1/generate", {"sequence": "ACD"}, ["sequence"]),
        ("/v1/generate", {"sequence": "ACD", "max_new_tokens": 0}, ["max_new_tokens"]),
        ("/v1/generate", {"template": "GXP"}, ["sequence"]),
        ("/v1/generate", {"sequence": "ACD", "template": "GXP", "max_new_tokens": 2}, ["max_new_tokens"]),
        ("/v1/generate", {"sequence": "ACD", "template": "GXP", "positions": [1]}, ["positions"]),
        ("/v1/generate", {"sequence": "ACD", "template": "GXP", "allowed": {"1": "A"}}, ["allowed"]),
        ("/v1/generate", {"sequence": "ACD", "template": "G1P"}, ["template"]),
        ("/v1/generate", {"sequence": "ACD", "template": "GSP"}, ["template"]),
        ("/v1/generate", {"sequence": "ACD", "template": "X(999)"}, ["template"]),
        ("/v1/generate", {"sequence": "ACD", "template": "X" * 5000}, ["template"]),
        ("/v1/generate", {"sequence": "ACD", "max_new_tokens": 1000}, ["max_new_tokens"]),
        ("/v1/generate", {"sequence": "ACD", "max_new_tokens": 2, "num_return_sequences": 5}, ["num_return_sequences"]),
        ("/v1/generate", {"sequence": "ACD", "positions": [1, 4]}, ["positions", 1]),
        ("/v1/generate", {"sequence": "ACD", "positions": []}, ["positions"]),
        ("/v1/generate", {"sequence": "A<mask>", "allowed": {"1": "A"}}, ["allowed", "1"]),
        ("/v1/generate", {"sequence": "A<mask>", "allowed": {"x": "A"}}, ["allowed"]),
        ("/v1/generate", {"sequence": "A<mask>", "allowed": {"2": "A", "02": "C"}}, ["allowed"]),
        ("/v1/generate", {"sequence": "A<mask>", "banned": "@"}, ["banned"]),
        ("/v1/generate", {"sequence": "A<mask>", "temperature": -1}, ["temperature"]),
        ("/v1/generate", {"sequence": "A<mask>", "top_p": 2}, ["top_p"]),
        ("/v1/generate", {"sequence": "A<mask>", "seed": 2**63}, ["seed"]),
        ("/v1/generate", {"context": "x", "max_new_tokens": 2}, ["context"]),
    ],
)
def test_what_is_wrong_is_named(client, context, path, body, field):
    answer = client.post(path.format(context=context), body)
    assert answer.status == 422, answer.body
    assert ["body", *field] in [loc[: 1 + len(field)] for loc in answer.fields]
    assert all(item["msg"].isascii() and "\n" not in item["msg"] for item in answer.json["detail"])


@pytest.mark.parametrize(("most", "status"), [(912, 200), (911, 422)])
def test_all_variants_are_no_more_than_others(client, context, monkeypatch, most, status):
    monkeypatch.setattr(client.service, "limits", dataclasses.replace(client.service.limits, variants=most))
    answer = client.post(VARIANTS.format(context=context), {"method": "wild_type"})
    assert answer.status == status
    assert status == 200 or answer.fields == [["body", "variants"]]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 422),
        (b"{", 422),
        (b"[]", 422),
        (b"null", 422),
        (b'"ACD"', 422),
        (b"\xff\xfe", 422),
        (b'{"sequence": "ACD", "sequence": "AAA"}', 422),
        (b'{"sequence": NaN}', 422),
        (b"[" * 20_000, 400),
        (b'{"sequence": ' + b"9" * 10_000 + b"}", 400),
        (b'{"sequence": "' + b"A" * 60_000 + b'"}', 413),
    ],
)
def test_bodies_that_are_none(client, body, status):
    answer = client.post("/v1/contexts", body)
    assert answer.status == status
    assert "Traceback" not in answer.body.decode()


@pytest.mark.parametrize(
    ("path", "body", "fields"),
    [
        (SCORE, {"candidates": list(range(5000))}, [["body", "candidates", 0]]),
        (VARIANTS, {"variants": [None] * 5000}, [["body", "variants", 0]]),
        ("/v1/embeddings", {"input": [1] * 5000, **EMBED}, [["body", "input", "str"], None]),
        ("/v1/generate", {"sequence": "A", "positions": ["x"] * 5000}, [["body", "positions", 0]]),
        ("/v1/generate", {"sequence": "A", "allowed": {str(n): n for n in range(1000)}}, [["body", "allowed"]]),
        ("/v1/generate", {str(n): n for n in range(1000)}, [["body"]]),
    ],
)
def test_of_many_errors_the_first_is_told(client, context, path, body, fields):
    answer = client.post(path.format(context=context), body)
    assert answer.status == 422
    assert [loc for loc, known in zip(answer.fields, fields, strict=True) if known] == [x for x in fields if x]


def test_a_body_of_values_without_end_is_refused_unparsed(client, context):
    raw = b'{"candidates": [' + b"1," * 24_000 + b"1]}"
    assert client.service.limits.items == 41_000
    assert client.post(SCORE.format(context=context), raw).status == 422
    answer = client.post(SCORE.format(context=context), b"[" * 41_001)
    assert (answer.status, answer.json["detail"][0]["type"]) == (413, "http_413")


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 40000", 404),
        (b"PUT /v1/contexts HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked", 405),
        (b"POST /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 40000", 405),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 40000", 200),
        (b"POST /v1/contexts HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50001", 413),
        (b"POST /v1/contexts HTTP/1.1\r\nHost: localhost\r\nContent-Length: x", 400),
        (b"no request", 400),
    ],
)
def test_what_is_not_read_is_answered_at_once_and_the_connection_closed(client, head, status):
    with socket.create_connection(("127.0.0.1", client.port), 5) as one:
        one.sendall(head + b"\r\n\r\n")
        with HTTPResponse(one) as response:
            response.begin()
            answer = json.loads(response.read())
        assert (response.status, response.will_close) == (status, True)
        assert status == 200 or ErrorAnswer.model_validate(answer).model_dump() == answer
        assert one.recv(1) == b""


def test_a_form_of_another_site_is_refused(client):
    answer = client.send("POST", "/v1/contexts", b'{"sequence": "ACD"}', {"content-type": "text/plain"})
    assert answer.status == 422
    assert answer.json["detail"][0]["msg"].endswith("send Content-Type: application/json")


def test_broken_json_is_located(client):
    answer = client.post("/v1/contexts", b'{"sequence": "ACD",\n "x" 1}')
    assert answer.status == 422
    assert "at line 2, column 6" in answer.json["detail"][0]["msg"]


@pytest.mark.parametrize("key", ["0" * 64, "..%2f..%2fetc%2fpasswd", "../../etc/passwd", "0" * 63, "G" * 64])
def test_what_is_no_context_is_not_found(client, key):
    answer = client.post(f"/v1/contexts/{key}/score", {"candidates": ["A"]})
    assert answer.status in (404, 422)
    found = client.get(f"/v1/contexts/{key}")
    assert found.status in (404, 422)
    if found.status == 422:
        assert found.json["detail"][0]["msg"].endswith("post its sequence to /v1/contexts first")


def test_the_pages_come_from_the_service_alone(client):
    pages = [client.get(path) for path in ("/", "/docs")]
    assert {page.status for page in pages} == {200}
    assert {page.headers["content-type"] for page in pages} == {"text/html; charset=utf-8"}
    files = sorted(path.name for path in STATIC.iterdir())
    assert "app.js" in files
    for name in files:
        served = client.get(f"/static/{name}")
        assert served.status == 200
        assert served.body == (STATIC / name).read_bytes()
        assert "default-src 'self'" in served.headers["content-security-policy"]
        # No address but those of the namespaces of SVG and the like, which nothing loads.
        addresses = re.findall(rb"(?:https?:)?//[\w.-]+\.[a-z]{2,}", served.body)
        assert [address for address in addresses if b"www.w3.org" not in address] == []
    linked = set(re.findall(rb'(?:src|href)="/static/([\w.-]+)"', b"".join(page.body for page in pages)))
    assert {name.decode() for name in linked} <= set(files)
    assert client.get("/static/../app.py").status == 404
    assert client.get("/redoc").status == 404


def test_errors_of_the_framework_have_the_documented_shape(client):
    missing, wrong = client.get("/v1/nothing"), client.get("/v1/embeddings")
    assert (missing.status, wrong.status) == (404, 405)
    assert missing.json == {"detail": [{"loc": [], "msg": "Not Found", "type": "http_404"}]}
    assert wrong.json == {"detail": [{"loc": [], "msg": "Method Not Allowed", "type": "http_405"}]}


def test_the_map_of_the_page_is_in_the_order_and_colours_of_pictures():
    script, page = ((STATIC / name).read_text() for name in ("heatmap.js", "index.html"))
    assert f'ORDER = "{RESIDUE_ORDER}"' in script
    # `RdBu` is red below zero.
    assert DIVERGING == "RdBu" and "x < 0 ? [[178, 24, 43], -x] : [[33, 102, 172], x]" in script
    assert "Red: less likely than the wild type, blue: more likely" in page


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "documented"),
    [
        ("POST", "/v1/contexts", b"[" * 20_000, 400, "400"),
        ("GET", "/v1/contexts/{id}", b"", 404, "404"),
        ("PUT", "/v1/contexts", b"", 405, "default"),
        ("POST", "/v1/contexts", b"A" * 60_000, 413, "413"),
        ("POST", "/v1/contexts", b"{", 422, "422"),
    ],
)
def test_errors_are_documented(client, method, path, body, status, documented):
    answer = client.send(method, path.format(id="0" * 64), body, {"content-type": "application/json"})
    assert answer.status == status
    spec = client.get("/openapi.json").json
    # What PUT is answered stands with the methods that there are.
    responses = next(iter(spec["paths"][path].values()))["responses"]
    assert (str(status) if str(status) in responses else "default") == documented
    assert responses[documented]["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/ErrorAnswer"
    }
    assert ErrorAnswer.model_validate(answer.json).model_dump() == answer.json


def test_every_endpoint_documents_its_errors(client):
    methods = [one for path in client.get("/openapi.json").json["paths"].values() for one in path.values()]
    assert len(methods) == 10
    for one in methods:
        errors = [answer["content"] for status, answer in one["responses"].items() if status != "200"]
        assert "default" in one["responses"]
        assert {content["application/json"]["schema"]["$ref"] for content in errors} == {
            "#/components/schemas/ErrorAnswer"
        }


def test_the_documentation_names_every_endpoint(client):
    paths = client.get("/openapi.json").json["paths"]
    assert set(paths) == {
        "/v1/contexts", "/v1/contexts/{id}", "/v1/contexts/{id}/score", "/v1/contexts/{id}/variants",
        "/v1/variants", "/v1/models", "/v1/embeddings", "/v1/generate", "/healthz", "/metrics",
    }  # fmt: skip


def test_health_and_metrics(client, context):
    def value(name: str) -> float:
        found = re.search(rf"^{re.escape(name)} (\S+)$", client.get("/metrics").body.decode(), re.MULTILINE)
        return 0.0 if found is None else float(found[1])

    answers = 'esm_turbo_requests_total{endpoint="/v1/contexts/{id}/score",status="200"}'
    before = value(answers), value("esm_turbo_tokens_total")
    client.post(f"/v1/contexts/{context}/score", {"candidates": ["A"]})
    wait_until(lambda: value(answers) == before[0] + 1)
    # The candidate and its context.
    wait_until(lambda: value("esm_turbo_tokens_total") - before[1] >= 1 + 8 + 1)
    assert client.get("/healthz").json["status"] == "ok"


def test_tokens_are_needed_for_data_alone(turbo, tmp_path):
    with running(turbo, tmp_path / "store", tokens=["a" * 20, "b" * 20]) as client:
        for path in ("/", "/docs", "/healthz", "/openapi.json", "/static/app.js"):
            assert client.get(path).status == 200
        for headers in ({}, {"authorization": "Bearer c"}, {"authorization": "Basic " + "a" * 20}):
            for path in ("/metrics", "/v1/models", "/v1/nothing"):
                answer = client.get(path, headers)
                assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
        client.headers["authorization"] = "Bearer " + "b" * 20
        assert client.get("/metrics").status == 200
        assert client.add("ACDEFG")


def test_only_named_hosts_are_answered(turbo, tmp_path):
    with running(turbo, tmp_path / "store", hosts=["127.0.0.1", "localhost"]) as client:
        assert client.get("/healthz").status == 200
        assert client.get("/healthz", {"host": "localhost:99"}).status == 200
        assert client.get("/healthz", {"host": "evil.example"}).status == 421


class Gate:
    """Holds the engine before its next rows until it is opened, or for a minute."""

    def __init__(self, monkeypatch):
        self.reached, self.open = threading.Event(), threading.Event()
        original = ItemJob.take

        def take(job, *arguments):
            self.reached.set()
            assert self.open.wait(60)
            return original(job, *arguments)

        monkeypatch.setattr(ItemJob, "take", take)


def score_in_thread(client: Client, key: str, results: list) -> threading.Thread:
    def ask():
        results.append(Client(client.port).post(f"/v1/contexts/{key}/score", {"candidates": ["ACDE"]}))

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


def wait_until(condition):
    for _ in range(600):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("did not happen within 30 s")


def test_too_many_requests_are_told_to_come_again(turbo, tmp_path, monkeypatch):
    with running(turbo, tmp_path / "store", Limits(queue=4)) as client:
        key, gate, results = client.add(TARGET), Gate(monkeypatch), []
        threads = [score_in_thread(client, key, results) for _ in range(2)]
        wait_until(lambda: client.service.engine.jobs == 2)
        refused = client.post(f"/v1/contexts/{key}/score", {"candidates": ["A"]})
        assert refused.status == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 600
        gate.open.set()
        for thread in threads:
            thread.join(60)
        assert [answer.status for answer in results] == [200, 200]
        assert client.post(f"/v1/contexts/{key}/score", {"candidates": ["A"]}).status == 200


def test_checks_are_made_in_turn_and_for_nobody_who_left(turbo, tmp_path, monkeypatch):
    order, reached, gate = [], threading.Event(), threading.Event()

    def noting(name):
        original = getattr(Service, name)

        def check(service, request):
            order.append(name)
            reached.set()
            assert gate.wait(60)
            return original(service, request)

        monkeypatch.setattr(Service, name, check)

    def ask(token, path, body):
        answers.append(Client(client.port, {"authorization": f"Bearer {token}"}).post(path, body))

    noting("protein_variants_job")
    noting("embed_job")
    variants = {"sequence": TARGET, "variants": ["M1A"]}
    raw = json.dumps(variants).encode()
    with running(turbo, tmp_path / "store", Limits(queue=8), tokens=["a" * 20, "b" * 20]) as client:
        engine, answers = client.service.checks, []
        head = f"POST /v1/variants HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {'a' * 20}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
        with contextlib.ExitStack() as sent:
            first, *others = [socket.create_connection(("127.0.0.1", client.port)) for _ in range(4)]
            first.sendall(head.encode() + raw)
            assert reached.wait(30)
            for one in others:
                sent.enter_context(one).sendall(head.encode() + raw)
            wait_until(lambda: engine.jobs == 4)
            ask("a" * 20, "/v1/variants", variants)
            assert answers.pop().status == 429
            other = threading.Thread(target=ask, args=("b" * 20, "/v1/embeddings", {"input": "ACD", **EMBED}))
            other.start()
            wait_until(lambda: engine.jobs == 5)
            assert client.get("/healthz").json["queue"]["requests"] == 5
            others[0].close()
            wait_until(lambda: engine.jobs == 4)
            gate.set()
            other.join(60)
            wait_until(lambda: engine.jobs == 0)
        first.close()
    # The first had been taken before there were others.
    assert order == [*["protein_variants_job"] * 2, "embed_job", "protein_variants_job"]
    assert [answer.status for answer in answers] == [200]


def test_a_stream_whose_answer_fails_ends_with_an_error(client, context, monkeypatch):
    monkeypatch.setattr(routes, "_json", lambda render, result: json.dumps(float("nan"), allow_nan=False))
    answer = client.post(f"/v1/contexts/{context}/variants", {"stream": True})
    assert json.loads(answer.body.splitlines()[-1])["error"]["detail"][0]["type"] == "http_500"


def test_a_check_counts_to_the_time_of_its_request(turbo, tmp_path, monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(Service, "embed_job", lambda service, request: gate.wait(60))
    with running(turbo, tmp_path / "store", Limits(seconds=0.5)) as client:
        assert client.post("/v1/embeddings", {"input": "ACD", **EMBED}).status == 504
        wait_until(lambda: client.get("/healthz").status == 503)
        gate.set()
        wait_until(lambda: client.get("/healthz").status == 200)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_place(turbo, tmp_path, monkeypatch, stream):
    with running(turbo, tmp_path / "store", Limits(queue=4)) as client:
        key, gate, results = client.add(TARGET), Gate(monkeypatch), []
        first = score_in_thread(client, key, results)
        assert gate.reached.wait(30)
        body = json.dumps({"candidates": ["ACDE"], "stream": stream}).encode()
        with socket.create_connection(("127.0.0.1", client.port)) as leaving:
            head = f"POST /v1/contexts/{key}/score HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            leaving.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            wait_until(lambda: client.service.engine.jobs == 2)
        wait_until(lambda: client.service.engine.jobs == 1)
        gate.open.set()
        first.join(60)
        assert results[0].status == 200
        wait_until(lambda: client.service.engine.jobs == 0)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/generate"])
def test_nobody_computes_for_a_client_that_left(turbo, tmp_path, path):
    with running(turbo, tmp_path / "store", Limits(seconds=600)) as client:
        # Minutes of work.
        body: dict[str, object] = {"sequence": TARGET * 20, "positions": list(range(1, 900)), "sweeps": 1}
        if path == "/v1/embeddings":
            body = {"input": [TARGET * 20 + "A" * number for number in range(40)], **EMBED}
        raw = json.dumps(body).encode()
        with socket.create_connection(("127.0.0.1", client.port)) as leaving:
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            leaving.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
            wait_until(lambda: client.service.engine.running == 1)
            assert client.get("/healthz").json["queue"]["requests"] == 1
        wait_until(lambda: client.service.engine.jobs == 0)
        # Only the piece that runs.
        wait_until(lambda: client.service.engine.running == 0)
        assert client.get("/healthz").json["queue"] == {"requests": 0, "running": 0, "seconds": 0}


def test_a_batch_that_does_not_end_is_told(turbo, tmp_path, monkeypatch):
    with running(turbo, tmp_path / "store", Limits(seconds=0.5)) as client:
        key, gate, results = client.add(TARGET), Gate(monkeypatch), []
        assert client.get("/healthz").status == 200
        first = score_in_thread(client, key, results)
        wait_until(lambda: client.get("/healthz").status == 503)
        assert "a batch has been running for" in client.get("/healthz").json["detail"][0]["msg"]
        gate.open.set()
        first.join(60)
        wait_until(lambda: client.get("/healthz").status == 200)


def test_a_request_that_waits_too_long_is_given_up(turbo, tmp_path, monkeypatch):
    with running(turbo, tmp_path / "store", Limits(seconds=3)) as client:
        key, gate, results = client.add(TARGET), Gate(monkeypatch), []
        first = score_in_thread(client, key, results)
        assert gate.reached.wait(30)
        waiting = client.post("/v1/generate", {"sequence": "ACD", "max_new_tokens": 1})
        assert (waiting.status, "retry-after" in waiting.headers) == (429, True)
        first.join(60)
        assert results[0].status == 504
        assert client.service.engine.jobs == 0
        gate.open.set()


def test_a_failure_is_one_line_and_reaches_nobody_else(turbo, tmp_path, monkeypatch, caplog):
    with running(turbo, tmp_path / "store") as client:
        key = client.add(TARGET)

        def fail(*_):
            raise RuntimeError("broken\nhere")

        with monkeypatch.context() as patched:
            patched.setattr("esm_turbo.serve.jobs.predict_together", fail)
            answer = client.post(f"/v1/contexts/{key}/score", {"candidates": ["ACDE"]})
        assert answer.status == 500
        assert b"broken" not in answer.body
        assert "RuntimeError: broken here" in caplog.text
        assert client.post(f"/v1/contexts/{key}/score", {"candidates": ["ACDE"]}).status == 200


def test_a_checkpoint_that_is_overwritten_changes_nothing_that_is_served(turbo, tmp_path):
    turbo.save_pretrained(tmp_path / "served")
    loaded = TurboEsm.from_pretrained(tmp_path / "served", dtype="float32")
    with running(loaded, tmp_path / "store") as client:
        body = {"input": "ACDEF", "model": loaded.name}
        before = client.post("/v1/embeddings", body).json
        path = tmp_path / "served" / "model.safetensors"
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 2)
            file.write(bytes(path.stat().st_size // 2))
        assert client.post("/v1/embeddings", body).json == before


def test_a_full_store_and_a_full_disk_are_told(turbo, tmp_path, monkeypatch):
    with running(turbo, tmp_path / "store", Limits(contexts=1)) as client:
        key = client.add("ACDEFG")
        assert client.add("ACDEFG") == key
        assert client.post("/v1/contexts", {"sequence": "ACD"}).status == 507
    with running(turbo, tmp_path / "another") as client:

        def read_only(*_):
            raise NotWritableError("/store: cannot be written (Read-only file system)")

        def full(*_, **__):
            raise SafetensorError("I/O error: No space left on device (os error 28)")

        monkeypatch.setattr("esm_turbo.files.artifacts.save_file", full)
        assert client.post("/v1/contexts", {"sequence": "ACD"}).status == 507
        monkeypatch.setattr(client.service.contexts, "add", read_only)
        answer = client.post("/v1/contexts", {"sequence": "ACD"})
        assert answer.status == 500 and b"/store" not in answer.body
        monkeypatch.undo()
        assert client.add("ACD")
