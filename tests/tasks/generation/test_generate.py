"""`generate`: inputs, seeds, rows, devices and errors."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch

from esm_turbo import TurboEsm, TurboEsmForMaskedLM
from esm_turbo.proteins.limits import LongProteinWarning
from esm_turbo.tasks.generation.generate import GenerationOptions, generation_steps
from tests.helpers.models import default_dtype, random_ids
from tests.helpers.plain_generation import ATOL, PREFIX

MakeModel = Callable[..., TurboEsmForMaskedLM]


def test_a_given_cache_is_read_and_not_changed(exact: TurboEsm) -> None:
    cache = exact.prefill([PREFIX, "MKT"])
    before = [{name: x.clone() for name, x in layer.packed.items()} for layer in cache.layers]
    options = {"max_new_tokens": 6, "num_return_sequences": 2, "seed": 4, "refresh": 8, "refresh_every": 2}
    output, expected = exact.generate(cache, **options), exact.generate([PREFIX, "MKT"], **options)
    assert output.sequences == expected.sequences
    assert cache.lengths.tolist() == [23, 4]
    for layer, old in zip(cache.layers, before, strict=True):
        assert all(torch.equal(layer.packed[name], x) for name, x in old.items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("options", [{"max_new_tokens": 10}, {"sweeps": 2}])
def test_the_default_dtype_changes_nothing(exact: TurboEsm, options: dict[str, object], dtype: torch.dtype) -> None:
    sequence = PREFIX + "<mask>A<mask>"
    expected = exact.generate(sequence, seed=1, top_p=0.9, **options)
    with default_dtype(dtype):
        found = exact.generate(sequence, seed=1, top_p=0.9, **options)
    assert found.sequences == expected.sequences and found.log_probs == expected.log_probs


@pytest.mark.parametrize("options", [{"max_new_tokens": 10}, {"sweeps": 2}, {"order": "confidence", "per_step": 2}])
def test_rows_do_not_depend_on_each_other(exact: TurboEsm, options: dict[str, object]) -> None:
    sequences = [PREFIX + "<mask>A<mask>", "M<mask>", "<mask>GSGSWKDLAEGS<mask><mask>A"]
    options = options | {"refresh": 4, "refresh_every": 3}
    together = exact.generate(sequences, seed=[1, 2, 3], **options)
    for row, sequence in enumerate(sequences):
        alone = exact.generate(sequence, seed=[row + 1], **options)
        assert alone.sequences == [together.sequences[row]]
        assert alone.positions == [together.positions[row]]
        torch.testing.assert_close(
            torch.tensor(alone.log_probs[0]), torch.tensor(together.log_probs[row]), rtol=0, atol=ATOL
        )


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 11, "refresh": 4, "refresh_every": 3},
        {"max_new_tokens": 7, "return_cache": True},
        {"positions": list(range(2, 14)), "sweeps": 2},
        {"positions": list(range(2, 14)), "order": "confidence", "per_step": 5},
    ],
)
def test_generation_in_steps_is_that_in_one_call(exact: TurboEsm, options: dict[str, object]) -> None:
    expected = exact.generate([PREFIX, "MKT" * 6], num_return_sequences=2, seed=3, **options)
    checked = GenerationOptions(num_return_sequences=2, **options)
    steps = generation_steps(exact, [PREFIX, "MKT" * 6], checked, 3, tokens=30)
    ran, before = [], exact.model.base_model.turbo_config
    while True:
        try:
            ran.append(next(steps))
        except StopIteration as end:
            made = end.value
            break
        # Others may use the model meanwhile.
        assert exact.model.base_model.turbo_config is before
        exact.prefill("ACD")
    assert len(ran) > 2 and min(ran) > 0
    assert (made.sequences, made.positions) == (expected.sequences, expected.positions)
    torch.testing.assert_close(torch.tensor(made.log_probs), torch.tensor(expected.log_probs), rtol=0, atol=ATOL)
    assert (made.cache is None) == (expected.cache is None)
    if expected.cache is not None:
        assert torch.equal(made.cache.token_ids, expected.cache.token_ids)


@pytest.mark.parametrize("options", [{"max_new_tokens": 12}, {"positions": list(range(2, 14))}])
def test_a_seed_reproduces_its_samples(exact: TurboEsm, options: dict[str, object]) -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = exact.generate(PREFIX, num_return_sequences=3, seed=7, **options)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    again = exact.generate(PREFIX, num_return_sequences=3, seed=7, **options)
    assert first == again
    assert len(set(first.sequences)) == 3
    other = exact.generate(PREFIX, num_return_sequences=3, seed=8, **options)
    assert not set(first.sequences) & set(other.sequences)
    # Another seed gives other samples; asking for more samples keeps the first ones.
    more = exact.generate(PREFIX, num_return_sequences=5, seed=7, **options)
    assert more.sequences[:3] == first.sequences


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "sequence 1: has no <mask>, so there is nothing to generate"),
        ({"positions": [0]}, "sequence 1: its positions are 1 to 5, got 0"),
        ({"positions": [1, 6]}, "sequence 1: its positions are 1 to 5, got 6"),
        ({"positions": [True]}, "got True"),
        ({"positions": [2.0]}, "sequence 1: its positions are 1 to 5, got 2.0"),
        ({"positions": [1, [2]]}, r"sequence 1: its positions are 1 to 5, got \[2\]"),
        ({"positions": []}, "sequence 1: `positions` is empty"),
        ({"positions": [[1], [2]]}, "`positions` must be one list, or one for each of the 1 sequences, got 2"),
        ({"max_new_tokens": 1, "seed": [1, 2]}, "one for each of the 1 rows"),
        ({"max_new_tokens": 1, "store": "folder"}, "`store` must be a ContextStore, got a str"),
        ({"max_new_tokens": 1, "allowed": {7: "A"}}, "`allowed` names position 7, where nothing is generated"),
        ({"positions": [2], "allowed": {3: "A"}}, "`allowed` names position 3, where nothing is generated"),
        ({"sequences": [], "max_new_tokens": 2}, "at least one sequence"),
        ({"sequences": ["MKT", ""], "max_new_tokens": 2}, "sequence 2: holds no residues"),
        ({"sequences": ["MKT", "MK-T"], "max_new_tokens": 2}, "sequence 2: position 3 is '-'"),
    ],
)
def test_invalid_arguments(exact: TurboEsm, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        exact.generate(**({"sequences": "MKTAY"} | options))


@torch.no_grad()
def test_invalid_caches(turbo: TurboEsm, tiny_model: MakeModel, exact: TurboEsm) -> None:
    whole = exact.model(*random_ids([9], eos=True), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="row 1 of the cache is not a context of <cls> and residues without <eos>"):
        exact.generate(whole, max_new_tokens=2)
    with pytest.raises(ValueError, match="the cache is empty"):
        exact.generate(exact.model.new_cache(), max_new_tokens=2)
    with pytest.raises(ValueError, match="a cache can only be appended to"):
        exact.generate(exact.prefill("MK<mask>"))
    with pytest.raises(ValueError, match="belongs to another model"):
        exact.generate(TurboEsm(tiny_model(seed=1), turbo.tokenizer).prefill("MKT"), max_new_tokens=2)
    model = tiny_model()
    model.set_turbo(preset="turbo3")
    with pytest.raises(ValueError, match="esm-turbo calibrate"):
        TurboEsm(model, turbo.tokenizer).generate("MKT", max_new_tokens=2)


def test_growing_beyond_the_trained_length_warns(exact: TurboEsm) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exact.generate("A" * 1020, max_new_tokens=2)
    with pytest.warns(LongProteinWarning, match="of up to 1023 residues"):
        exact.generate("A" * 1020, max_new_tokens=3)


def test_half_precision(turbo: TurboEsm, tiny_model: MakeModel) -> None:
    half = TurboEsm(tiny_model().bfloat16(), turbo.tokenizer)
    output = half.generate([PREFIX, "MK"], max_new_tokens=4)
    assert [len(sequence) for sequence in output.sequences] == [26, 6]


def test_generation_runs_within_the_limits_of_mps(turbo: TurboEsm, tiny_model: MakeModel) -> None:
    from tests.test_mps_rules import MpsRules

    model = tiny_model(preset="turbo3", attn_implementation="eager")
    model.esm.calibration.fit(["turbo3"])
    tiny = TurboEsm(model, turbo.tokenizer)
    with MpsRules() as rules:
        tiny.generate(["MKTAYIAKQRQ", "GAV"], max_new_tokens=3, refresh=4, refresh_every=2, top_p=0.9)
        tiny.generate(["MKTAYIAKQRQ", "GAV<mask>L"], positions=[2], sweeps=2)
        tiny.embed("MKTAYIAKQRQISFVKSHFSRQ" * 4, window=20, memory=30)
    assert "exponential" in rules.operations


@pytest.mark.gpu
@pytest.mark.parametrize("preset", ["exact", "turbo3"])
def test_on_a_device(turbo: TurboEsm, tiny_model: MakeModel, preset: str) -> None:
    host = TurboEsm(tiny_model(preset=preset), turbo.tokenizer)
    device = TurboEsm(tiny_model(preset=preset).to("cuda"), turbo.tokenizer)
    # Greedy residues depend on no random draw; rows of several lengths exercise the counting of columns.
    for sequences, options in (
        ([PREFIX, "MK"], {"max_new_tokens": 20, "refresh": 5, "refresh_every": 2, "return_cache": True}),
        ([PREFIX, "MKTAY"], {"positions": [2, 3, 5], "order": "confidence", "sweeps": 2, "refresh_every": 2}),
    ):
        expected = host.generate(sequences, temperature=0, **options)
        output = device.generate(sequences, temperature=0, **options)
        torch.testing.assert_close(torch.tensor(output.log_probs), torch.tensor(expected.log_probs), rtol=0, atol=0.05)
        if output.cache is not None:
            assert output.cache.device.type == "cuda"
            assert output.cache.lengths.tolist() == expected.cache.lengths.tolist()
            assert output.cache.columns == expected.cache.columns
        # Draws do not depend on the device's own generator.
        torch.cuda.manual_seed(1)
        first = device.generate(sequences, seed=3, **options).sequences
        torch.cuda.manual_seed(2)
        assert device.generate(sequences, seed=3, **options).sequences == first
