"""The service of a family with exact contexts: homologs are posted once, and proteins are read after them."""

from __future__ import annotations

import numpy as np
import pytest

from esm_turbo import ContextStore, TurboEsm
from esm_turbo.proteins.homologs import encode_homologs
from esm_turbo.serve.limits import Limits
from esm_turbo.tasks.common.forwards import prefill_rows
from tests.helpers.models import E1_MINI
from tests.helpers.service import running

PROTEIN = "MKNKVVVVTGVPGVGGTT"
HOMOLOGS = ["MKNKVVVIVGVPGVGSTT", "MKIGIVXGIPGVGKST", "MRHPFKVVVVTGVPGVGKTT"]
OTHERS = "MKNKVVVVTGVPGVGSTT,MKIGIVTGIPG"
# Largest difference of a log-probability from that of the library's own batches.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("served") / "store"


@pytest.fixture(scope="module")
def client(e1, folder):
    limits = Limits(residues=60, inputs=4, samples=4, tokens=100_000, averaged=3)
    with running(e1, folder, limits) as client:
        yield client


@pytest.fixture(scope="module")
def context(client):
    return client.add(HOMOLOGS)


@pytest.fixture(scope="module")
def other(client):
    return client.add(OTHERS)


def test_homologs_are_a_list_or_separated_by_commas(client, e1, context, other):
    assert client.add(",".join(HOMOLOGS).lower()) == context != other
    found = client.get(f"/v1/contexts/{context}").json
    assert (found["homologs"], found["residues"]) == (3, sum(map(len, HOMOLOGS)))
    assert (found["run"]["arm"], found["run"]["preset"]) == ("frozen", "exact")
    assert client.get("/healthz").json["homologs"] == {"sequences": 512, "residues": 8192, "positions": 65536}


@pytest.mark.parametrize("method", ["masked", "wild_type"])
def test_variants_are_those_of_the_library(client, e1, context, other, method):
    homologs = {context: ",".join(HOMOLOGS), other: OTHERS}
    for given in (None, context, [context, other]):
        body = {"sequence": PROTEIN, "context": given, "method": method, "first_position": 5}
        answer = client.post("/v1/variants", body)
        assert answer.status == 200, answer.body
        keys = [given] if isinstance(given, str) else given
        texts = keys and [homologs[key] for key in keys]
        expected = e1.score_variants(PROTEIN, method=method, first_position=5, context=texts)
        assert [one["variant"] for one in answer.json["variants"]] == [one.variant for one in expected.scores]
        assert [one["score"] for one in answer.json["variants"]] == pytest.approx(expected.values, abs=2 * TOLERANCE)
        assert (answer.json["context"], answer.json["run"]["preset"]) == (given, expected.preset)


def test_each_context_that_is_averaged_may_take_as_many_tokens(e1, tmp_path):
    with running(e1, tmp_path / "store", Limits(tokens=600)) as client:
        keys = [client.add(HOMOLOGS), client.add(OTHERS)]
        for context in (keys[0], keys):
            assert client.post("/v1/variants", {"sequence": PROTEIN, "context": context}).status == 200
        for context, most in (
            (keys[0], "600 are allowed per request"),
            (keys, "1,200 are allowed per request with so"),
        ):
            answer = client.post("/v1/variants", {"sequence": PROTEIN * 2, "context": context})
            assert answer.status == 422 and answer.fields == [["body", "variants"]]
            message = answer.json["detail"][0]["msg"]
            assert f"at most {most}" in message and message.endswith("divide it into several")


def test_compressed_contexts_are_those_of_the_library_and_outlive_the_service(tmp_path):
    turbo3 = TurboEsm.from_pretrained(E1_MINI, preset="turbo3", device="cpu")
    with running(turbo3, tmp_path / "store") as client:
        key = client.add(HOMOLOGS)
    # Read from the file, whose tokens lack X.
    with running(turbo3, tmp_path / "store") as client:
        assert client.get(f"/v1/contexts/{key}").json["residues"] == sum(map(len, HOMOLOGS))
        body = {"sequence": PROTEIN, "context": key, "variants": ["M1A", "V5A:T9S"]}
        answer = client.post("/v1/variants", body).json
        assert client.service.contexts.stored == 1
    expected = turbo3.score_variants(PROTEIN, ["M1A", "V5A:T9S"], context=",".join(HOMOLOGS))
    assert [one["score"] for one in answer["variants"]] == pytest.approx(expected.values, abs=4 * TOLERANCE)
    assert answer["run"]["preset"] == "turbo3"


def test_contexts_that_are_no_whole_homologs_have_no_name(e1, tmp_path):
    whole = encode_homologs(e1.codes, OTHERS, "context", e1.model.base_model.exact_contexts)
    config = e1.model.base_model.turbo_config
    with ContextStore(tmp_path / "store") as store:
        for ids in (whole[:-1], [*whole[:4], *whole[5:-2], *whole[-1:]]):
            store.get_or_compute(e1, ids, config, lambda ids=ids: prefill_rows(e1, [ids], config))
    keys = [path.stem for path in (tmp_path / "store").rglob("*.safetensors") if len(path.stem) == 64]
    assert len(keys) == 2
    with running(e1, tmp_path / "store") as client:
        for key in keys:
            for answer in (
                client.get(f"/v1/contexts/{key}"),
                client.post("/v1/variants", {"sequence": PROTEIN, "context": key}),
                client.post("/v1/embeddings", {"input": PROTEIN, "model": "e1-mini", "context": key}),
            ):
                assert answer.status == 404 and "post its sequence" in answer.json["detail"][0]["msg"]


def test_embeddings_are_those_of_the_library(client, e1, context, other):
    proteins, found = [PROTEIN, "MKXAY"], {}
    for given, text in ((None, None), (context, ",".join(HOMOLOGS)), (other, OTHERS)):
        answer = client.post("/v1/embeddings", {"input": proteins, "model": "e1-mini", "context": given})
        assert answer.status == 200, answer.body
        expected = e1.embed(proteins, include=["mean"], context=text)
        for one, theirs in zip(answer.json["data"], expected, strict=True):
            [mean] = theirs.mean_representations.values()
            assert np.allclose(one["embedding"], mean, rtol=0, atol=TOLERANCE)
        assert answer.json["usage"]["prompt_tokens"] == sum(len(one) + 4 for one in proteins)
        found[given] = answer.json["data"][0]["embedding"], answer.json["run"]["arm"]
    assert len({values[0] for values, _ in found.values()}) == 3
    assert [arm for _, arm in found.values()] == ["full", "frozen", "frozen"]


def test_residues_are_drawn_after_homologs(client, e1, context, other):
    masked = f"{PROTEIN[:5]}<mask>?{PROTEIN[7:]}"
    options = {"num_return_sequences": 2, "seed": 3}
    for given, text in ((None, None), (context, ",".join(HOMOLOGS)), ([context, other], [",".join(HOMOLOGS), OTHERS])):
        answer = client.post("/v1/generate", {"sequence": masked, "context": given, **options})
        assert answer.status == 200, answer.body
        expected = e1.generate(masked, context=text, **options)
        assert [one["sequence"] for one in answer.json["sequences"]] == expected.sequences
        for one, theirs in zip(answer.json["sequences"], expected.log_probs, strict=True):
            assert one["log_probs"] == pytest.approx(theirs, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "must hold 1 to 512 items"),
        ("", "sequence: holds no residues"),
        (["MKT", ""], "homolog 2: holds no residues"),
        ("MKT,,A", "homolog 2: holds no residues"),
        (["MKT", "M?T"], "homolog 2: position 2 is a mask"),
        (["MKT", "M-T"], "homolog 2: position 2 is '-'"),
        (["M"] * 513, "must hold 1 to 512 items"),
        (",".join(["M"] * 513), "513 sequences are too many"),
        (["MK", "A" * 8193], "homolog 2: 8,193 residues are too many"),
        (["A" * 8192] * 8, "65,568 positions are too many"),
        (" " * 600_000, "has 600,000 characters"),
    ],
    ids=lambda given: str(given)[:20],
)
def test_bad_homologs_are_refused(client, given, message):
    stored = client.service.contexts.stored
    answer = client.post("/v1/contexts", {"sequence": given})
    assert answer.status == 422 and ["body", "sequence"] in [loc[:2] for loc in answer.fields]
    assert message in answer.json["detail"][0]["msg"]
    assert client.service.contexts.stored == stored


@pytest.mark.parametrize(
    ("path", "body", "status", "field"),
    [
        ("/v1/variants", {"sequence": "MKT", "context": "0" * 64}, 404, ["body", "context"]),
        ("/v1/variants", {"sequence": "MKT", "context": "x"}, 422, ["body", "context"]),
        ("/v1/variants", {"sequence": "MKT", "context": []}, 422, ["body", "context"]),
        ("/v1/variants", {"sequence": "MKT", "context": ["{context}"] * 4}, 422, ["body", "context"]),
        ("/v1/variants", {"sequence": "MKT", "context": "{full}"}, 422, ["body", "context"]),
        ("/v1/variants", {"sequence": "M" * 61, "context": "{context}"}, 422, ["body", "sequence"]),
        ("/v1/variants", {"sequence": "MXT", "context": "{context}"}, 422, ["body", "sequence"]),
        ("/v1/variants", {"sequence": "M?T", "context": "{context}"}, 422, ["body", "sequence"]),
        ("/v1/variants", {"sequence": "MKT,MK", "context": "{context}"}, 422, ["body", "sequence"]),
        ("/v1/variants", {"sequence": "MKT", "variants": ["K1A"]}, 422, ["body", "variants", 0]),
        ("/v1/contexts/{context}/variants", {}, 422, ["path", "id"]),
        ("/v1/contexts/{context}/score", {"candidates": ["MKT"]}, 422, ["path", "id"]),
        ("/v1/embeddings", {"input": ["MKT"], "model": "e1-mini", "context": "{full}"}, 422, ["body", "input", 0]),
        ("/v1/embeddings", {"input": ["M", "MK"], "model": "e1-mini", "context": "{full}"}, 422, ["body", "input", 1]),
        ("/v1/embeddings", {"input": "MK", "model": "e1-mini", "context": ["{context}"]}, 422, ["body", "context"]),
        ("/v1/generate", {"context": "{context}", "max_new_tokens": 2}, 422, ["body", "sequence"]),
        ("/v1/generate", {"sequence": "MKT", "max_new_tokens": 2}, 422, ["body", "max_new_tokens"]),
        ("/v1/generate", {"sequence": "M?X", "context": "{context}"}, 422, ["body", "sequence"]),
        ("/v1/generate", {"sequence": "M?T", "context": "{full}"}, 422, ["body", "context"]),
    ],
)
def test_what_is_wrong_is_named(client, context, path, body, status, field):
    # As many homologs as the model reads, which leave no room for a protein.
    full = client.add(["A"] * 512) if "{full}" in str(body) else ""

    def filled(value):
        if isinstance(value, list):
            return [filled(one) for one in value]
        return value.replace("{context}", context).replace("{full}", full) if isinstance(value, str) else value

    answer = client.post(filled(path), {name: filled(value) for name, value in body.items()})
    assert answer.status == status, answer.body
    assert field in [loc[: len(field)] for loc in answer.fields]


def test_other_families_read_no_homologs(turbo, tmp_path):
    with running(turbo, tmp_path / "store") as client:
        key = client.add(PROTEIN)
        assert client.get("/healthz").json["homologs"] is None
        bodies = {
            "/v1/contexts": {"sequence": [PROTEIN]},
            "/v1/variants": {"sequence": PROTEIN, "context": key},
            "/v1/embeddings": {"input": PROTEIN, "model": "esm2-mini", "context": key},
            "/v1/generate": {"context": [key], "max_new_tokens": 2},
        }
        for path, body in bodies.items():
            answer = client.post(path, body)
            assert answer.status == 422
            assert answer.json["detail"][0]["msg"] == "ESM-2 reads one protein at a time and no homologs"
        # A protein whose context is not stored.
        found = client.post("/v1/variants", {"sequence": PROTEIN, "variants": ["K2A"]}).json
        [expected] = turbo.score_variants(PROTEIN, ["K2A"]).values
        assert [one["score"] for one in found["variants"]] == [pytest.approx(expected, abs=2 * TOLERANCE)]
