"""Embeddings, against a plain loop over Hugging Face's model: one protein at a time, without padding."""

import copy
import warnings

import pytest
import torch
from transformers import EsmForMaskedLM

from esm_turbo import TurboEsm, TurboEsmForMaskedLM
from esm_turbo.assets import EMBEDDED_MODEL
from esm_turbo.proteins.fasta import ProteinRecord
from esm_turbo.proteins.limits import TRAINED_RESIDUES, LongProteinWarning
from esm_turbo.tasks.embedding.embed import embed, iter_embeddings
from esm_turbo.tasks.embedding.request import EmbeddingRequest, ProteinEmbedding

SEQUENCES = [
    "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQ",
    "M",
    "GSGSWKDLAEX",
    "mktayiakqrqisfvk*",
    "ACDEFGHIKLMNPQRSTVWYBZUO" * 3,
]
LENGTHS = [33, 1, 11, 16, 72]
# Hidden states are of order one; batches and padding change the order of float32 sums.
TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}


def model_with_contacts(**options):
    """Hugging Face's embedded model, with numbers in place of its contact head, which was never trained."""
    model = EsmForMaskedLM.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32, **options).eval()
    head = model.esm.contact_head.regression
    with torch.no_grad():
        head.weight.copy_(torch.linspace(-5, 5, head.weight.numel()))
        head.bias.fill_(-1)
    del model.config.untrained_heads
    return model


@pytest.fixture(scope="module")
def with_contacts(turbo):
    model = TurboEsmForMaskedLM.from_esm(model_with_contacts(), calibration=turbo.calibration)
    return TurboEsm(model, turbo.tokenizer)


@pytest.fixture(scope="module")
def expected(turbo):
    """Per sequence, hidden states of all layers, [13, 2 + L, hidden], and contacts, [L, L]."""
    model = model_with_contacts(attn_implementation="eager")
    results = []
    for sequence in SEQUENCES:
        ids = turbo.tokenizer(sequence.upper().removesuffix("*"), return_tensors="pt").input_ids
        with torch.no_grad():
            states = model.esm(ids, output_hidden_states=True).hidden_states
            contacts = model.predict_contacts(ids, torch.ones_like(ids))
        results.append((torch.stack(states)[:, 0], contacts[0]))
    return results


@pytest.mark.parametrize("toks_per_batch", [1, 60, 4096])
def test_everything_equals_a_plain_loop(with_contacts, expected, toks_per_batch):
    layers = (0, 5, 12)
    embeddings = embed(with_contacts, SEQUENCES, layers, ("mean", "per_tok", "bos", "contacts"), toks_per_batch)
    assert [len(e.representations[12]) for e in embeddings] == LENGTHS
    for embedding, (states, contacts) in zip(embeddings, expected, strict=True):
        for layer in layers:
            residues = states[layer, 1:-1]
            torch.testing.assert_close(embedding.representations[layer], residues, **TOLERANCE)
            torch.testing.assert_close(embedding.mean_representations[layer], residues.mean(0), **TOLERANCE)
            torch.testing.assert_close(embedding.bos_representations[layer], states[layer, 0], **TOLERANCE)
        torch.testing.assert_close(embedding.contacts, contacts, rtol=1e-3, atol=2e-5)


def test_the_last_layer_alone(turbo, expected):
    # A code path of its own, without the states of other layers.
    for embedding, (states, _) in zip(turbo.embed(SEQUENCES), expected, strict=True):
        torch.testing.assert_close(embedding.representations[12], states[-1, 1:-1], **TOLERANCE)


def test_layers_are_numbered_from_zero(turbo):
    [embedding] = embed(turbo, ["MKTAY"], (-1, 0, -13, 12, 3), ("mean",))
    assert list(embedding.mean_representations) == [12, 0, 3]
    assert embedding.mean_representations[0].shape == (256,)


def test_only_requested_results_are_computed(with_contacts):
    [embedding] = embed(with_contacts, ["MKTAY"], include="mean")
    assert embedding.representations is embedding.bos_representations is embedding.contacts is embedding.cache is None
    assert list(embedding.tensors()) == ["mean_representations.12"]
    [embedding] = embed(with_contacts, ["MKTAY"], include=["contacts"])
    assert embedding.mean_representations is None
    assert embedding.contacts.shape == (5, 5)


def test_contacts_of_a_head_that_was_never_trained_are_refused(turbo):
    with pytest.raises(ValueError, match="contacts would be noise: the contact head of this model was never trained"):
        turbo.embed(["MKTAY"], include=["mean", "contacts"])


def test_results_own_their_memory(with_contacts):
    # A view would keep the whole batch alive, and torch.save would write all of it.
    for embedding in embed(with_contacts, SEQUENCES, (0, 12), ("mean", "per_tok", "bos", "contacts")):
        for tensor in embedding.tensors().values():
            assert tensor.dtype == torch.float32
            assert tensor.untyped_storage().nbytes() == 4 * tensor.numel()


def test_results_of_half_precision_are_float32(turbo, tiny_model):
    half = TurboEsm(tiny_model().bfloat16(), turbo.tokenizer)
    whole = TurboEsm(tiny_model(), turbo.tokenizer)
    for a, b in zip(half.embed(SEQUENCES), whole.embed(SEQUENCES), strict=True):
        assert a.representations[2].dtype == torch.float32
        # Eight bits of mantissa through two layers; states are of order one.
        torch.testing.assert_close(a.representations[2], b.representations[2], rtol=0, atol=0.2)


def test_the_cache_is_that_of_prefill(turbo):
    # Batches of one compute exactly what a prefill of one does, so every code must agree.
    embeddings = embed(turbo, SEQUENCES, toks_per_batch=1, return_cache=True)
    for sequence, embedding in zip(SEQUENCES, embeddings, strict=True):
        expected = turbo.prefill(sequence)
        assert embedding.cache.lengths.tolist() == expected.lengths.tolist()
        assert torch.equal(embedding.cache.token_ids, expected.token_ids)
        assert embedding.cache.nbytes == expected.nbytes
        for mine, theirs in zip(embedding.cache.layers, expected.layers, strict=True):
            assert mine.packed.keys() == theirs.packed.keys()
            for name, tensor in mine.packed.items():
                assert torch.equal(tensor, theirs.packed[name])


def test_caches_of_one_batch_are_separate(tiny):
    embeddings = tiny.embed(SEQUENCES, include=["cache"])
    for sequence, embedding, length in zip(SEQUENCES, embeddings, LENGTHS, strict=True):
        cache = embedding.cache
        assert cache.lengths.tolist() == [length + 1]
        # Trimmed to the protein's own columns.
        assert cache.columns == length + 1
        expected = tiny.prefill(sequence)
        for mine, theirs in zip(cache.layers, expected.layers, strict=True):
            for name, tensor in mine.packed.items():
                torch.testing.assert_close(tensor, theirs.packed[name], **TOLERANCE)
        cache.crop(1)
        assert embeddings[-1].cache.get_seq_length() == (1 if cache is embeddings[-1].cache else LENGTHS[-1] + 1)


def test_batches_are_computed_on_demand_longest_first(tiny):
    calls = []
    hook = tiny.model.esm.register_forward_pre_hook(lambda module, args: calls.append(args[0].shape))
    request = EmbeddingRequest.of(tiny, [-1], ["mean"])
    try:
        batches = iter_embeddings(tiny, SEQUENCES, request, toks_per_batch=80)
        assert not calls
        first = next(batches)
        assert len(calls) == 1
        rest = list(batches)
    finally:
        hook.remove()
    assert [index for index, _ in first] == [4]
    assert sorted(index for batch in [first, *rest] for index, _ in batch) == list(range(5))
    assert all(rows * columns <= 80 for rows, columns in calls)
    assert all(isinstance(embedding, ProteinEmbedding) for _, embedding in first)


def test_one_protein_is_no_list_of_letters(tiny):
    request = EmbeddingRequest.of(tiny, [-1], ["mean"])
    [right] = tiny.embed(SEQUENCES[0], include=["mean"])
    for given in (SEQUENCES[0], [ProteinRecord("a", SEQUENCES[0])]):
        [[(index, found)]] = iter_embeddings(tiny, given, request)
        assert index == 0
        for layer, mean in found.mean_representations.items():
            assert torch.equal(mean, right.mean_representations[layer])


def test_one_warning_for_all_long_proteins(turbo, tiny):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tiny.embed(["A" * TRAINED_RESIDUES])
    with pytest.warns(LongProteinWarning, match="2 proteins of up to 1024 residues") as caught:
        found = tiny.embed(["A" * 1023, "M", "A" * 1024])
    assert len(caught) == 1
    assert [len(e.representations[2]) for e in found] == [1023, 1, 1024]


def test_layers_that_the_configuration_does_not_know_have_no_numbers(turbo):
    one = copy.deepcopy(turbo)
    del one.model.esm.encoder.layer[11]
    for options in ({"repr_layers": [-2]}, {"repr_layers": [3], "window": 20, "memory": 0}):
        with pytest.raises(ValueError, match=r"the model has 11 layers, and num_hidden_layers .* is 12"):
            one.embed("MKTAYIAKQRQISFVKSHFSRQLEERLG", **options)
    one.model.config.num_hidden_layers = 11
    assert [*one.embed("MKTAY", repr_layers=[-2])[0].mean_representations] == [10]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repr_layers": [13]}, "`repr_layers` must lie in -13 to 12 for this model, got 13"),
        ({"repr_layers": [0.5]}, "`repr_layers` must lie in -13 to 12 for this model, got 0.5"),
        ({"repr_layers": [-14]}, "got -14"),
        ({"repr_layers": []}, "at least one layer"),
        ({"include": []}, "`include` must be some of"),
        ({"include": ["mean", "logits"]}, "'logits'"),
        ({"toks_per_batch": 0}, "`toks_per_batch` must be an integer of at least 1"),
        ({"include": ["cache"], "store": "folder"}, "`store` must be a ContextStore, got a str"),
    ],
)
def test_invalid_options(turbo, options, message):
    with pytest.raises(ValueError, match=message):
        turbo.embed("MKTAY", **options)


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ([], "at least one sequence"),
        (["MKT", ""], "sequence 2: holds no residues"),
        (["MKT", "MK-T"], "sequence 2: position 3 is '-'"),
        (["MKJ"], "sequence 1: position 3 is 'J'"),
        (["MK*T"], "sequence 1: position 3 is a stop"),
    ],
)
def test_invalid_sequences_fail_before_any_forward(tiny, sequences, message):
    calls = []
    hook = tiny.model.esm.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        with pytest.raises(ValueError, match=message):
            tiny.embed(sequences, toks_per_batch=1)
    finally:
        hook.remove()
    assert not calls


def test_caches_need_a_calibration(turbo, tiny_model):
    model = tiny_model()
    model.set_turbo(preset="paper")
    uncalibrated = TurboEsm(model, turbo.tokenizer)
    with pytest.raises(ValueError, match="esm-turbo calibrate"):
        uncalibrated.embed("MKTAY", return_cache=True)
    assert uncalibrated.embed("MKTAY")[0].is_finite()


def test_values_that_are_not_finite_are_noticed():
    good = ProteinEmbedding(mean_representations={3: torch.zeros(4)}, contacts=torch.zeros(2, 2))
    assert good.is_finite()
    assert not ProteinEmbedding(mean_representations={3: torch.tensor([1.0, float("nan")])}).is_finite()
    assert not ProteinEmbedding(contacts=torch.tensor([[float("inf")]])).is_finite()


@pytest.mark.gpu
@pytest.mark.parametrize("toks_per_batch", [40, 4096])
def test_a_device_computes_ahead(turbo, with_contacts, toks_per_batch):
    # The next batch runs while one is collected; their results must not mix.
    model = TurboEsmForMaskedLM.from_esm(model_with_contacts().cuda(), calibration=turbo.calibration)
    on_device = TurboEsm(model, turbo.tokenizer)
    sequences = [*SEQUENCES, *("ACDEFGHIKLMNPQRSTVWY"[i:] + "MKT" * i for i in range(12))]
    include = ("mean", "per_tok", "bos", "contacts", "cache")
    found = on_device.embed(sequences, (0, 5, 12), include, toks_per_batch)
    expected = with_contacts.embed(sequences, (0, 5, 12), include, toks_per_batch)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.tensors().keys() == theirs.tensors().keys()
        for name, tensor in mine.tensors().items():
            assert tensor.device.type == "cpu" and not tensor.is_pinned()
            torch.testing.assert_close(tensor, theirs.tensors()[name], rtol=1e-3, atol=1e-3)
        assert mine.cache.lengths.tolist() == theirs.cache.lengths.tolist()
        assert mine.cache.device.type == "cuda"
