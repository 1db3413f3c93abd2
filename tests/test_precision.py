"""Eight-bit products: what they cost in accuracy, what they change, and where they are refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from esm_turbo import TurboEsm, TurboEsmForMaskedLM
from esm_turbo.assets import EMBEDDED_MODEL, evaluation_proteins
from esm_turbo.evaluate.precision import choose_products
from esm_turbo.evaluate.protocols import Protein
from esm_turbo.files.identity import exact_identity
from esm_turbo.files.quality import EightBits
from esm_turbo.model.precision import (
    PRODUCTS,
    Product,
    all_products,
    check_precision,
    quantize_products,
)
from esm_turbo.modeling_esmc_turbo import TurboEsmcForMaskedLM
from esm_turbo.ops.float8 import Float8Linear
from esm_turbo.proteins.fasta import read_fasta_strict
from tests.helpers.e1 import make_e1
from tests.helpers.models import ESMC_MINI, make_esm, make_esmc, random_ids, relative_error
from tests.helpers.packed import run_packed

LENGTHS = [17, 5, 30, 1]
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "ESM-2": lambda: TurboEsmForMaskedLM.from_esm(make_esm(layers=3), preset="exact"),
    "ESM-C": lambda: TurboEsmcForMaskedLM.from_esm(make_esmc(layers=3), preset="exact"),
}


def quantized_products(model: Any) -> list[Product]:
    """The eight-bit products of a model, by layer."""
    return [
        (index, name)
        for index, products in enumerate(model.base_model.products)
        for name, linears in products.items()
        if isinstance(linears[0], Float8Linear)
    ]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("keep", [(), [(1, "qkv"), (0, "attention_out"), (2, "mlp_in"), (1, "mlp_out")]])
@torch.no_grad()
def test_packed_rows_are_those_of_the_library(family: str, keep: list[tuple[int, str]]) -> None:
    model = FAMILIES[family]().bfloat16()
    ids, mask = random_ids(LENGTHS, masks=0)
    before = model.base_model(ids, mask).last_hidden_state[mask.bool()]
    quantize_products(model, keep)
    expected = model.base_model(ids, mask).last_hidden_state[mask.bool()]
    _, found, _ = run_packed(model.base_model, ids, mask)
    assert quantized_products(model) == [(i, name) for i in range(3) for name in PRODUCTS if (i, name) not in keep]
    # Rounded to bfloat16 in between, the two differ, and some numbers then have neighbouring codes.
    assert relative_error(found, expected) < 0.75 * relative_error(expected, before) < 0.15


@pytest.fixture(scope="module")
def minis() -> dict[str, TurboEsm]:
    """Trained models, float32."""
    folders = {"esm2-mini": EMBEDDED_MODEL, "esmc-mini": ESMC_MINI}
    return {name: TurboEsm.from_pretrained(folder, device="cpu") for name, folder in folders.items()}


@pytest.mark.parametrize("name", ["esm2-mini", "esmc-mini"])
@torch.no_grad()
def test_accuracy_of_trained_models(minis: dict[str, TurboEsm], name: str) -> None:
    """All products in eight bits, with the library's forward and on packed rows."""
    turbo = minis[name]
    sequences = [record.sequence[:120] for record in read_fasta_strict(evaluation_proteins())][:4]
    batch = turbo.tokenizer(sequences, padding=True, return_tensors="pt")
    ids, mask = batch.input_ids, batch.attention_mask
    exact = turbo.model(ids, mask, output_hidden_states=True)
    model = copy.deepcopy(turbo.model).bfloat16()
    quantize_products(model)
    _, packed, _ = run_packed(model.base_model, ids, mask)
    by_library = model.base_model(ids, mask).last_hidden_state[mask.bool()]
    expected = turbo.model.base_model(ids, mask).last_hidden_state[mask.bool()]
    log_p = exact.logits[mask.bool()].log_softmax(-1)
    for found in (by_library, packed):
        log_q = model.lm_head(found).float().log_softmax(-1)
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)
        cosine = torch.cosine_similarity(found.float(), expected, dim=-1)
        # Measured: 2.2e-4 and 1.9e-4; 0.9995.
        assert 0 < kl.mean() < 3e-4
        assert cosine.mean() > 0.999


@torch.no_grad()
def test_it_is_part_of_the_identity(minis: dict[str, TurboEsm]) -> None:
    """Contexts of one precision are refused by the other; a calibration serves both."""
    plain = copy.deepcopy(minis["esm2-mini"].model).bfloat16()
    models = {"plain": plain}
    for name, keep in (("all", []), ("some", [(0, "qkv")])):
        models[name] = copy.deepcopy(plain)
        quantize_products(models[name], keep)
    digests = {exact_identity(model.base_model).digest for model in models.values()}
    assert len(digests) == 3
    ids, _ = random_ids([9], masks=0)
    cache = models["all"](ids, use_cache=True).past_key_values
    for copied in (pickle.loads(pickle.dumps(models["all"])), copy.deepcopy(models["all"])):
        assert torch.equal(copied(ids).logits, models["all"](ids).logits)
        copied(ids[:, 1:], past_key_values=cache)
    with pytest.raises(
        ValueError, match=r"it was made in bfloat16\+float8_e4m3fn, and the model computes in bfloat16$"
    ):
        plain(ids[:, 1:], past_key_values=cache)
    with pytest.raises(ValueError, match=r"the weights differ"):
        models["some"](ids[:, 1:], past_key_values=cache)


@torch.no_grad()
def test_a_change_of_an_eight_bit_weight_is_noticed() -> None:
    model = FAMILIES["ESM-2"]().bfloat16()
    quantize_products(model)
    encoder = model.base_model
    ids, mask = random_ids(LENGTHS, masks=0)
    before, states = exact_identity(encoder).digest, run_packed(encoder, ids, mask)[1]
    encoder.encoder.layer[1].output.dense.scales.mul_(2)
    assert exact_identity(encoder).digest != before
    assert not torch.equal(run_packed(encoder, ids, mask)[1], states)


def test_what_cannot_be_done_with_it(tmp_path: Path) -> None:
    model = FAMILIES["ESM-2"]().bfloat16()
    quantize_products(model)
    ids, _ = random_ids([9], masks=0)
    with pytest.raises(ValueError, match=r"eight-bit products have no gradients: load the model without"):
        model(ids)
    model.requires_grad_(False)
    assert not model(ids).logits.requires_grad
    codes, scales = (
        model.esm.encoder.layer[0].output.dense.weight.clone(),
        model.esm.encoder.layer[0].output.dense.scales,
    )
    model.bfloat16().to("cpu")
    assert torch.equal(model.esm.encoder.layer[0].output.dense.weight.view(torch.uint8), codes.view(torch.uint8))
    assert model.esm.encoder.layer[0].output.dense.scales.equal(scales)
    with pytest.raises(ValueError, match=r"stays in bfloat16: load it again for another dtype"):
        model.float()
    with pytest.raises(ValueError, match=r"is not saved: save the one that it was made of"):
        model.save_pretrained(tmp_path / "model")
    assert not list(tmp_path.glob("*/*.safetensors"))
    with pytest.raises(ValueError, match=r"are not replaced"):
        model.load_state_dict({}, strict=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp4"}, r"`precision` must be None or 'fp8', got 'fp4'"),
        (
            {"precision": "fp8"},
            r"precision 'fp8' needs an NVIDIA GPU of compute capability 9.0 or newer.* is a CPU; leave",
        ),
    ],
)
def test_loading_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TurboEsm.from_pretrained(device="cpu", **options)


@pytest.mark.parametrize(
    ("capability", "options", "message"),
    [
        ((8, 0), {}, r"and this is A100 of compute capability 8\.0; leave out the precision"),
        ((9, 0), {"dtype": "float16"}, r"needs dtype bfloat16 beside eight-bit products, got float16"),
        ((10, 0), {"spread": True}, r"needs a model on one device: leave out `device_map`"),
        ((9, 0), {}, None),
        ((12, 0), {"dtype": torch.bfloat16}, None),
    ],
)
def test_which_devices_can(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], options: dict[str, Any], message: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    refused = nullcontext() if message is None else pytest.raises(ValueError, match=message)
    with refused:
        check_precision("fp8", torch.device("cuda", 0), **options)


def adapted(model: PreTrainedModel) -> None:
    model.base_model.encoder.layer[0].output.dense.register_forward_hook(lambda module, args, output: output + 1)


@pytest.mark.parametrize(
    ("change", "keep", "message"),
    [
        (lambda model: model.float(), [], r"needs a model in bfloat16, got torch\.float32"),
        (adapted, [], r"needs plain linear layers, and a Linear has hooks or adapters: merge them first"),
        (lambda model: None, [(3, "qkv")], r"\(3, 'qkv'\) is none of .* in 3 layers"),
        (
            lambda model: None,
            [(0, "query")],
            r"\(0, 'query'\) is none of \('qkv', 'attention_out', 'mlp_in', 'mlp_out'\)",
        ),
    ],
)
def test_models_that_cannot(change: Callable[[PreTrainedModel], object], keep: list[Product], message: str) -> None:
    """Nothing is changed then."""
    model = FAMILIES["ESM-2"]().bfloat16()
    change(model)
    with pytest.raises(ValueError, match=message):
        quantize_products(model, keep)
    assert not quantized_products(model)


def test_families_without_such_products() -> None:
    with pytest.raises(ValueError, match=r"precision 'fp8' is for ESM-2 and ESM-C, not for E1"):
        quantize_products(make_e1())


@pytest.fixture(scope="module")
def half() -> TurboEsm:
    return TurboEsm.from_pretrained(device="cpu", dtype="bfloat16")


@pytest.fixture(scope="module")
def proteins() -> list[Protein]:
    return [Protein.of(record.id, record.sequence[:80]) for record in read_fasta_strict(evaluation_proteins())][:2]


def test_eight_bits_for_all_where_they_cost_little(half: TurboEsm, proteins: list[Protein]) -> None:
    digest = exact_identity(half.model.base_model).digest
    measured = choose_products(half, proteins, most_kl=0.01)
    assert measured.keep == ()
    assert 0 < measured.chosen.kl_mean < 0.001
    assert exact_identity(half.model.base_model).digest == digest


def test_eight_bits_for_some_where_all_cost_too_much(half: TurboEsm, proteins: list[Protein]) -> None:
    whole = choose_products(half, proteins, most_kl=1.0).every.kl_mean
    measured = choose_products(half, proteins, most_kl=whole / 2)
    layers = half.model.config.num_hidden_layers
    assert 0 < len(measured.keep) < layers * len(PRODUCTS)
    assert 0 < measured.chosen.kl_mean <= whole / 2


def test_eight_bits_for_none_where_any_costs_too_much(half: TurboEsm, proteins: list[Protein]) -> None:
    measured = choose_products(half, proteins, most_kl=0.0)
    assert len(measured.keep) == half.model.config.num_hidden_layers * len(PRODUCTS)
    assert measured.chosen.kl_mean == 0


def test_a_model_keeps_what_its_calibration_found(half: TurboEsm, tmp_path: Path) -> None:
    calibration = half.calibration
    assert calibration is not None and calibration.quality is not None
    kept = EightBits(*[calibration.quality.presets["turbo3"]] * 2, ((0, "qkv"), (2, "mlp_out")))
    calibration.quality = replace(calibration.quality, eight_bits=kept)
    calibration.save(tmp_path / "calibration.safetensors")
    other = TurboEsm.from_pretrained(device="cpu", dtype="bfloat16", calibration=tmp_path / "calibration.safetensors")
    quantize_products(other.model)
    products = set(all_products(other.model))
    assert products - set(quantized_products(other.model)) == set(kept.keep)


def test_an_evaluation_shows_the_third_error(half: TurboEsm, proteins: list[Protein]) -> None:
    reduced = TurboEsm.from_pretrained(device="cpu", dtype="bfloat16")
    quantize_products(reduced.model, ())
    sequences = [protein.sequence for protein in proteins]
    evaluation = reduced.evaluate(sequences, "turbo3", extend_ks=(), reference=half)
    measured = choose_products(half, proteins, most_kl=1.0).every
    assert evaluation.precision is not None
    assert evaluation.precision.residues.kl_mean == measured.kl_mean
    assert "full - reference" in evaluation.table()
    assert "full - reference" not in reduced.evaluate(sequences, "turbo3", extend_ks=()).table()
