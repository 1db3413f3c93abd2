"""The calibrator: independent of order, batches and padding, bounded in memory; bad input."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare, kstest
from torch import nn
from transformers import BertConfig, BertModel, EsmModel

from esm_turbo import KVCalibrator, TurboConfig, TurboEsmForMaskedLM
from esm_turbo.config import PRESETS, PRODUCT_PRESETS, Geometry
from tests.helpers.calibration_cases import (
    assert_same_moments,
    assert_same_sample,
    assert_same_sensitivity,
    batch,
    fitted,
    linear_outputs,
    offset_of,
    positions_given_to,
    statistics_of,
    thirteen_proteins,
)
from tests.helpers.models import CLS, EOS, MASK, PAD, default_dtype


@pytest.fixture(scope="module")
def model(tiny_esm):
    return tiny_esm(head_dim=16, heads=2, layers=2)


@pytest.fixture(scope="module")
def proteins():
    return thirteen_proteins()


def test_without_offsets_positions_are_hugging_faces(model, proteins):
    calibrator = KVCalibrator(model, max_positions=1)
    assert [offset_of(calibrator, row) for row in proteins] == [0] * len(proteins)


def test_order_of_batches_changes_nothing(model, proteins):
    # Two copies of a protein would be sampled in the order they come, and each is rounded as its batch is.
    batches = [proteins[:4], proteins[4:5], proteins[5:9], proteins[9:-1]]
    one = statistics_of(model, batches, sample_size=64)
    other = statistics_of(model, [batches[i] for i in (3, 1, 0, 2)], sample_size=64)
    for name in ("keys", "values", "is_special", "positions", "key_weights", "value_weights"):
        np.testing.assert_array_equal(getattr(one.sample, name), getattr(other.sample, name))
    assert_same_moments(other, one, rtol=1e-6)
    assert_same_sensitivity(other, one, rtol=1e-6)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_order_and_any_batches_give_the_same(model, proteins, data):
    order = data.draw(st.permutations(range(len(proteins))))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(proteins) - 1))))
    size = data.draw(st.sampled_from([1, 33, 200, 1000]))
    pieces = [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)]
    shuffled = statistics_of(model, [[proteins[i] for i in piece] for piece in pieces], sample_size=size)
    straight = statistics_of(model, [proteins], sample_size=size)
    assert_same_moments(shuffled, straight, rtol=1e-5)
    assert_same_sensitivity(shuffled, straight, rtol=1e-4)
    assert_same_sample(shuffled.sample, straight.sample)


def test_padding_is_not_seen(model, proteins):
    ids, mask = batch(proteins[:3])
    wider = torch.cat([ids, torch.full((3, 20), PAD)], dim=1)
    longer_mask = torch.cat([mask, torch.zeros(3, 20, dtype=mask.dtype)], dim=1)
    tight = KVCalibrator(model).partial_fit(ids, mask)
    loose = KVCalibrator(model).partial_fit(wider, longer_mask.float())
    # What stands under the padding must not matter either.
    other = KVCalibrator(model).partial_fit(torch.where(longer_mask == 1, wider, 7), longer_mask.bool())
    assert tight.n_residues_seen_ == loose.n_residues_seen_ == int(mask.sum()) - 6
    expected = tight.finalize(presets=()).statistics
    for calibrator in (loose, other):
        statistics = calibrator.finalize(presets=()).statistics
        assert_same_moments(statistics, expected, rtol=1e-5)
        assert_same_sample(statistics.sample, expected.sample)


def test_ids_of_a_smaller_dtype_are_the_same_protein(model, proteins):
    one = statistics_of(model, [proteins[:3]], sample_size=20)
    other = statistics_of(model, [[row.int() for row in proteins[:3]]], sample_size=20)
    assert_same_sample(one.sample, other.sample)


def test_duplicates_count_as_often_as_they_come(model, proteins):
    row = proteins[3]
    once = statistics_of(model, [[row]])
    thrice = statistics_of(model, [[row, row], [row]])
    assert thrice.residues.keys.count == 3 * once.residues.keys.count
    np.testing.assert_allclose(thrice.residues.keys.covariance, once.residues.keys.covariance, atol=1e-5)
    assert len(thrice.sample.is_special) == 3 * len(row)
    keys = np.repeat(once.sample.keys, 3, axis=2)
    np.testing.assert_allclose(thrice.sample.keys, keys, rtol=2**-7, atol=1e-4)


def test_one_protein_is_enough(model, proteins):
    calibration = fitted(model, [[proteins[3]]]).finalize()
    keys = torch.randn(1, 2, 5, 16)
    for preset in PRESETS:
        codec = calibration.codec(preset)
        decoded, _ = codec.decode(1, codec.encode(1, keys, keys))
        assert decoded.shape == keys.shape
        assert bool(torch.isfinite(decoded).all())


def test_offset_belongs_to_the_sequence(tiny_esm, model, proteins):
    calibrator = KVCalibrator(model)
    alone = [offset_of(calibrator, row) for row in proteins]
    ids, mask = batch(proteins[::-1])
    positions = positions_given_to(calibrator, ids, mask)
    assert positions[:, 0].tolist() == alone[::-1]
    # Nor does it belong to the model.
    other = KVCalibrator(tiny_esm(head_dim=24, heads=2, layers=1, seed=5))
    assert [offset_of(other, row) for row in proteins] == alone
    assert len(set(alone[:-1])) > 1
    assert alone[-1] == alone[2]


def test_offsets_are_uniform_over_all_that_fit(tiny_esm):
    calibrator = KVCalibrator(tiny_esm(head_dim=8, heads=1, layers=1), max_positions=100)
    rng = np.random.default_rng(0)
    n = 20
    ids = torch.from_numpy(rng.integers(4, 24, (2000, n)))
    positions = positions_given_to(calibrator, ids)
    offsets = positions[:, 0]
    assert (offsets.min(), offsets.max()) == (0, 100 - n)
    counts = np.bincount(offsets, minlength=100 - n + 1)
    assert chisquare(counts).pvalue > 1e-3
    assert kstest((offsets + 0.5) / (100 - n + 1), "uniform").pvalue > 1e-3


@pytest.mark.parametrize(("n", "highest"), [(99, 1), (100, 0), (101, 0), (130, 0)])
def test_long_proteins_start_where_they_still_fit(model, n, highest):
    calibrator = KVCalibrator(model, max_positions=100)
    rng = np.random.default_rng(n)
    ids = torch.from_numpy(rng.integers(4, 24, (12, n)))
    positions = positions_given_to(calibrator, ids)
    assert set(positions[:, 0].tolist()) == set(range(highest + 1))


def test_offsets_leave_hidden_states_alone(model, proteins):
    calibrator = KVCalibrator(model)
    ids, mask = batch(proteins)
    outputs = []
    handle = calibrator._encoder.encoder.register_forward_hook(lambda m, args, out: outputs.append(out[0]))
    calibrator.partial_fit(ids, mask)
    handle.remove()
    with torch.no_grad():
        expected = model.esm(ids, mask).last_hidden_state
    keep = mask.bool()
    assert offset_of(calibrator, proteins[1]) > 100
    # Angles near 1,000 rad are known to 6e-5 in float32.
    torch.testing.assert_close(outputs[0][0], expected[keep], rtol=0, atol=1e-3)


def test_sample_is_bounded_and_shared_by_all_tokens(tiny_esm):
    # Twenty proteins of one letter each, of 30 to 315 tokens: the letter of a sampled token tells its protein.
    model = tiny_esm(head_dim=16, heads=2, layers=1)
    lengths = np.arange(30, 330, 15)
    rows = [torch.tensor([CLS, *[4 + i] * (n - 2), EOS]) for i, n in enumerate(lengths)]
    size = 1200
    statistics = statistics_of(model, [[row] for row in rows], sample_size=size)
    assert statistics.sample.keys.shape == (1, 2, size, 16)
    # Values of the first layer depend on the token alone.
    tokens = torch.tensor([[CLS, *range(4, 24), EOS]])
    direct = linear_outputs(model, tokens, torch.ones_like(tokens))[2][0, 0].reshape(22, -1)
    sampled = statistics.sample.values[0].transpose(1, 0, 2).reshape(size, -1)
    nearest = np.square(sampled[:, None] - direct).sum(-1).argmin(1)
    np.testing.assert_array_equal(np.isin(nearest, (0, 21)), statistics.sample.is_special)
    counts = np.bincount(nearest, minlength=22)
    expected = np.array([len(rows), *(lengths - 2), len(rows)]) * size / lengths.sum()
    assert chisquare(counts, expected).pvalue > 1e-3


def test_sample_is_all_there_is_until_it_is_full(model, proteins):
    tokens = sum(len(row) for row in proteins[:3])
    assert len(statistics_of(model, [proteins[:3]], sample_size=tokens + 1).sample.is_special) == tokens
    assert len(statistics_of(model, [proteins[:3]], sample_size=tokens).sample.is_special) == tokens
    assert len(statistics_of(model, [proteins[:3]], sample_size=tokens - 1).sample.is_special) == tokens - 1


def test_special_tokens_are_counted_apart(model, proteins):
    rows = [*proteins[:4], proteins[4][1:-1]]
    # A residue, as any other.
    rows[3] = torch.where(torch.arange(len(rows[3])) == 5, MASK, rows[3])
    calibrator = fitted(model, [rows])
    statistics = calibrator.finalize(presets=()).statistics
    residues = sum(len(row) for row in rows) - 8
    assert calibrator.n_residues_seen_ == statistics.residues.keys.count == residues
    assert statistics.specials.values.count == statistics.sample.is_special.sum() == 8
    assert calibrator.n_sequences_seen_ == 5


def test_proteins_without_special_tokens(model, proteins):
    calibrator = fitted(model, [[row[1:-1] for row in proteins]])
    statistics = calibrator.finalize().statistics
    assert statistics.specials.keys.count == 0
    assert not statistics.sample.is_special.any()
    assert np.isfinite(statistics.select(False)[0].keys.second_moment).all()


def held_bytes(thing, seen):
    """Bytes of all arrays and tensors that an object holds, models aside."""
    if id(thing) in seen or isinstance(thing, nn.Module):
        return 0
    seen.add(id(thing))
    if torch.is_tensor(thing):
        return thing.untyped_storage().nbytes()
    if isinstance(thing, np.ndarray):
        return thing.nbytes
    if isinstance(thing, dict):
        return sum(held_bytes(v, seen) for v in thing.values())
    if isinstance(thing, list | tuple):
        return sum(held_bytes(v, seen) for v in thing)
    return held_bytes(vars(thing), seen) if hasattr(thing, "__dict__") else 0


def test_state_does_not_grow_with_the_number_of_proteins(model):
    rng = np.random.default_rng(2)
    calibrator = KVCalibrator(model, sample_size=100)
    sizes = []
    for _ in range(30):
        calibrator.partial_fit(torch.from_numpy(rng.integers(4, 24, (8, 40))))
        sizes.append(held_bytes(calibrator, set()))
    assert calibrator.n_sequences_seen_ == 240
    assert len(set(sizes)) == 1
    # 2 layers x 2 heads: six sets of moments and two more matrices in float64, and one in float32; of 100 tokens keys
    # and values in bfloat16, and two weights in float32.
    moments = (6 * (16 + 16 * 16) + 2 * 16 * 16 + 100) * 4 * 8 + 16 * 16 * 4 * 4
    assert sizes[0] < moments + 100 * 4 * (16 * 2 * 2 + 2 * 4) + 4000


def test_statistics_of_two_models_are_refused(model, proteins):
    trained = copy.deepcopy(model)
    calibrator = fitted(trained, [proteins[:5]])
    with torch.no_grad():
        next(trained.parameters()).mul_(1.1)
    for call in (calibrator.finalize, lambda: calibrator.partial_fit(*batch(proteins[5:]))):
        with pytest.raises(ValueError, match="the model has changed since the calibrator saw its first protein"):
            call()


def test_finalize_can_be_followed_by_more(model, proteins):
    calibrator = fitted(model, [proteins[:5]], sample_size=64)
    first = calibrator.finalize()
    before = copy.deepcopy(first.statistics)
    again = calibrator.finalize()
    for name, tensor in first.codec("paper").state.items():
        assert torch.equal(again.codec("paper").state[name], tensor)
    calibrator.partial_fit(*batch(proteins[5:]))
    later = calibrator.finalize(presets=()).statistics
    straight = statistics_of(model, [proteins[:5], proteins[5:]], sample_size=64)
    assert_same_moments(later, straight, rtol=1e-7)
    np.testing.assert_array_equal(later.sample.keys, straight.sample.keys)
    # The calibration given out earlier has not moved.
    np.testing.assert_array_equal(first.statistics.sample.keys, before.sample.keys)
    np.testing.assert_array_equal(first.statistics.residues.keys.covariance, before.residues.keys.covariance)
    assert first.provenance["residues"] < calibrator.n_residues_seen_


def test_finalize_fits_the_presets_asked_for(model, proteins):
    calibrator = fitted(model, [proteins])
    every = calibrator.finalize()
    assert every.nbytes == sum(
        t.numel() * t.element_size() for name in PRODUCT_PRESETS for t in every.codec(name).state.values()
    )
    none = calibrator.finalize(presets=())
    assert none.nbytes == 0
    custom = TurboConfig(bits=5)
    one = calibrator.finalize(presets=[custom])
    assert one.nbytes == sum(t.numel() * t.element_size() for t in one.codec(custom).state.values())


def test_provenance(model, proteins):
    calibration = fitted(model, [proteins], sample_size=77).finalize((), {"fasta": "x.fasta", "model": "mine"})
    record = calibration.provenance
    assert record["sequences"] == len(proteins)
    assert record["residues"] == sum(len(row) - 2 for row in proteins)
    assert (record["sample_size"], record["max_positions"]) == (77, 1024)
    assert (record["fasta"], record["model"]) == ("x.fasta", "mine")
    assert {"python", "torch", "transformers", "numpy"} <= set(record["versions"])
    assert calibration.geometry == Geometry(2, 2, 16)


def test_model_is_not_changed(tiny_esm, proteins):
    model = tiny_esm(head_dim=16, heads=2, layers=2)
    model.train()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = model.config.to_dict()
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    classes = [type(module) for module in model.modules()]
    ids, mask = batch(proteins)
    with torch.no_grad():
        before = model(ids, mask).logits
    calibration = fitted(model, [proteins]).finalize()
    assert all(module.training for module in model.modules())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert model.config.to_dict() == config
    assert [type(module) for module in model.modules()] == classes
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert torch.is_grad_enabled()
    with torch.no_grad():
        assert torch.equal(model(ids, mask).logits, before)
    calibration.check_model(model)


def test_training_mode_and_dropout_do_not_matter(tiny_esm, proteins):
    options = {"head_dim": 16, "heads": 2, "layers": 2}
    noisy = tiny_esm(**options, hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5)
    noisy.train()
    expected = statistics_of(tiny_esm(**options), [proteins])
    assert_same_moments(statistics_of(noisy, [proteins]), expected, rtol=1e-6)
    assert noisy.training


def test_both_classes_give_the_same(model, proteins):
    body = EsmModel(model.config, add_pooling_layer=False)
    body.load_state_dict(model.esm.state_dict())
    one, other = (fitted(m, [proteins]).finalize() for m in (model, body))
    assert_same_moments(one.statistics, other.statistics, rtol=1e-7)
    np.testing.assert_array_equal(one.fingerprint, other.fingerprint)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_default_dtype_changes_nothing(model, proteins, dtype):
    expected = statistics_of(model, [proteins], sample_size=64)
    with default_dtype(dtype):
        found = statistics_of(model, [proteins], sample_size=64)
    assert_same_sample(found.sample, expected.sample)
    assert_same_moments(found, expected, rtol=1e-6)
    assert_same_sensitivity(found, expected, rtol=1e-6)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float16, 0.01), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("turbo", [False, True], ids=["transformers", "esm_turbo"])
def test_half_precision_models(tiny_esm, model, proteins, dtype, rtol, turbo):
    half = tiny_esm(head_dim=16, heads=2, layers=2)
    half = (TurboEsmForMaskedLM.from_esm(half) if turbo else half).to(dtype)
    calibration = fitted(half, [proteins]).finalize()
    assert {parameter.dtype for parameter in half.parameters()} == {dtype}
    assert {tensor.dtype for tensor in calibration.codec("paper").state.values()} == {torch.float32}
    # Hugging Face's class rounds the rotary frequencies too.
    rtol = rtol if turbo else 4 * rtol
    assert_same_moments(calibration.statistics, statistics_of(model, [proteins]), rtol=rtol)
    calibration.check_model(model)


def test_weights_changed_after_the_beginning_are_used(tiny_esm, proteins):
    model = tiny_esm(head_dim=16, heads=2, layers=1)
    calibrator = KVCalibrator(model)
    with torch.no_grad():
        model.esm.encoder.layer[0].attention.self.value.weight.mul_(3)
        model.esm.encoder.layer[0].attention.self.value.bias.mul_(3)
    scaled = calibrator.partial_fit(*batch(proteins)).finalize(presets=())
    plain = statistics_of(tiny_esm(head_dim=16, heads=2, layers=1), [proteins])
    np.testing.assert_allclose(
        scaled.statistics.residues.values.covariance, 9 * plain.residues.values.covariance, rtol=1e-3, atol=1e-4
    )
    scaled.check_model(model)


def refuses(message, function, *args, **options):
    with pytest.raises(ValueError, match=message):
        function(*args, **options)


HOLE = torch.tensor([[1, 1, 0, 1, 1, 1]])


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        ([[0, 5, 6, 7, 8, 2]], HOLE, "holes; pad on the right"),
        ([[1, 1, 0, 5, 6, 2]], [[0, 0, 1, 1, 1, 1]], "padded on the left"),
        ([[0, 5, 6, 7, 8, 2]], [[1, 1, 1, 1, 1]], "attention_mask.*shape"),
        ([[0, 5, 6, 7, 8, 2]], [1, 1, 1, 1, 1, 1], "attention_mask.*shape"),
        ([[0, 5, 6], [0, 5, 6]], [[1, 1, 1]], "attention_mask.*shape"),
        ([0, 5, 6, 7, 8, 2], None, r"input_ids.*\[batch, n\].*\[6\]"),
        ([[], []], None, r"input_ids.*\[2, 0\]"),
        ([[0.0, 5.0, 6.0]], None, "input_ids.*integers.*float32"),
        ([[0, 5, 33]], None, "input_ids.*0 to 32"),
        ([[0, 5, -1]], None, "input_ids.*0 to 32"),
        ([[0, 5, 6], [0, 5, 6]], [[1, 1, 1], [0, 0, 0]], "row 1.*nothing but"),
        ([[0, 5, 6], [32, 32, 1]], [[1, 1, 1], [1, 1, 0]], "row 1.*<mask>"),
    ],
)
def test_bad_batches_are_refused_and_leave_no_trace(model, proteins, ids, mask, message):
    calibrator = fitted(model, [proteins[:3]])
    expected = calibrator.finalize(presets=()).statistics
    mask = mask if mask is None or torch.is_tensor(mask) else torch.tensor(mask)
    refuses(message, calibrator.partial_fit, torch.tensor(ids), mask)
    assert calibrator.n_sequences_seen_ == 3
    unchanged = calibrator.finalize(presets=()).statistics
    assert_same_moments(unchanged, expected, rtol=0)
    np.testing.assert_array_equal(unchanged.sample.keys, expected.sample.keys)


def test_samples_of_other_sizes_are_not_merged(model, proteins):
    part = fitted(model, [proteins], sample_size=3).take()
    refuses("`sample_size` is 1024 here, and 3 of what is merged", KVCalibrator(model).merge, part)


@pytest.mark.parametrize("whole_layer", [False, True])
def test_dead_heads_are_calibrated(tiny_esm, proteins, whole_layer):
    """Constant values of one head, and a layer whose values are zero."""
    model = tiny_esm(head_dim=16, heads=2, layers=2)
    value = model.esm.encoder.layer[1].attention.self.value
    with torch.no_grad():
        value.weight[: None if whole_layer else 16] = 0
        if whole_layer:
            value.bias.zero_()
    calibration = fitted(model, [proteins]).finalize()
    assert all(t.isfinite().all() for name in PRODUCT_PRESETS for t in calibration.codec(name).state.values())


@pytest.mark.parametrize("rows", [[], [[CLS, 5, 6, 7, 8, 9, 10, 11, EOS]]])
def test_too_few_residues(model, rows):
    calibrator = fitted(model, [[torch.tensor(row)] for row in rows])
    refuses(rf"{7 * len(rows)} residues.*\(16\).*more proteins", calibrator.finalize)


def test_as_many_residues_as_components_are_enough(model, random_proteins):
    ids, mask = random_proteins([18], eos=True)
    calibration = KVCalibrator(model).partial_fit(ids, mask).finalize()
    assert calibration.provenance["residues"] == 16


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_damaged_weights_are_refused_by_name(tiny_esm, proteins, value):
    model = tiny_esm(head_dim=16, heads=2, layers=2)
    sound = KVCalibrator(model)
    with torch.no_grad():
        model.esm.encoder.layer[1].attention.self.key.weight[3, 4] = value
    refuses(r"damaged: .*layer\.1\.attention\.self\.key\.weight", KVCalibrator, model)
    refuses("layer 1 are not finite", sound.partial_fit, proteins[0][None])
    assert (sound.n_sequences_seen_, sound.n_residues_seen_) == (0, 0)


def test_other_models_are_refused(tiny_esm):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    refuses("EsmModel.*BertModel", KVCalibrator, BertModel(BertConfig(**sizes)))
    refuses("EsmModel.*Linear", KVCalibrator, nn.Linear(2, 2))
    refuses("EsmModel.*NoneType", KVCalibrator, None)
    config = tiny_esm(head_dim=8, heads=2, layers=1).config
    config.position_embedding_type = "absolute"
    refuses("ESM-2.*rotary", KVCalibrator, EsmModel(config))


@pytest.mark.parametrize("options", [{"sample_size": 0}, {"sample_size": -1}, {"max_positions": 0}])
def test_options_must_be_positive(model, options):
    refuses("must be positive", KVCalibrator, model, **options)
