"""E1 against the logits of its reference code, against a plain implementation, and its checkpoints."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from esm_turbo import TurboEsm
from esm_turbo.modeling_e1_turbo import TurboE1Config, TurboE1ForMaskedLM, TurboE1Model
from tests.helpers.e1 import make_e1, plain_forward, random_row
from tests.helpers.models import E1_MINI

# Logits of the reference code on a CPU, hidden states rounded to float16; metadata maps each index to its text.
REFERENCE = Path(__file__).parent / "data" / "e1_reference.safetensors"
# Hidden size, heads, MLP, layers and parameters in millions of the published models.
GEOMETRIES = {"150M": (768, 12, 2304, 20, 154), "300M": (1024, 16, 3072, 20, 274), "600M": (1280, 20, 3840, 30, 641)}


@pytest.fixture(scope="module")
def reference() -> dict[str, Tensor]:
    return load_file(REFERENCE)


def texts() -> dict[str, str]:
    with safe_open(REFERENCE, "pt") as file:
        found: dict[str, str] = file.metadata()
    return found


@torch.no_grad()
def test_adapters_of_numbers_of_sequences_run_for_a_single_one() -> None:
    """As the same weights merged, and as before homologs of which there are several."""
    ids = random_row([20])
    hooked, merged = make_e1(), make_e1()
    hooked.model.embed_seq_id.register_forward_hook(lambda module, args, output: 3 * output)
    merged.model.embed_seq_id.weight.mul_(3)
    assert torch.equal(hooked(ids).logits, merged(ids).logits)
    assert not torch.equal(hooked(ids).logits, make_e1()(ids).logits)


@pytest.mark.parametrize("index", sorted(texts()))
@torch.no_grad()
def test_logits_are_those_of_the_reference_code(e1: TurboEsm, reference: dict[str, Tensor], index: str) -> None:
    """One sequence and several, masks, and a letter that stands for any residue."""
    rows = [e1.codes.whole(e1.codes.encode(text, "it")) for text in texts()[index].split(",")]
    ids = torch.tensor([[*chain(*rows)]])
    assert ids[0].tolist() == reference[f"{index}.input_ids"].tolist()
    output = e1.model(ids, output_hidden_states=True)
    # Those of float32 in another order of sums.
    torch.testing.assert_close(output.logits[0], reference[f"{index}.logits"], rtol=0, atol=1e-4)
    assert len(output.hidden_states) == 13
    if (states := reference.get(f"{index}.last_hidden_state")) is not None:
        # Rounded to float16, of at most 4.
        torch.testing.assert_close(output.hidden_states[-1][0], states.float(), rtol=0, atol=2.0**-9 + 1e-4)
    given = {
        "position_ids": reference[f"{index}.global_position_ids"],
        "sequence_id": reference[f"{index}.sequence_ids"],
    }
    again = e1.model(ids, **{name: x[None] for name, x in given.items()})
    assert torch.equal(again.logits, output.logits)


@torch.no_grad()
def test_a_padded_batch_is_each_row_alone(e1: TurboEsm) -> None:
    rows = [random_row(lengths, seed)[0] for seed, lengths in enumerate([[20, 31, 7], [44], [1, 9]])]
    ids, mask = e1.codes.batch([row.tolist() for row in rows])
    output = e1.model(ids, mask)
    for row, logits in zip(rows, output.logits, strict=True):
        torch.testing.assert_close(logits[: len(row)], e1.model(row[None]).logits[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("hidden", [[0, 1], [12], [25]], ids=["before", "within", "between"])
def test_rows_of_several_sequences_are_padded_on_the_right_only(e1: TurboEsm, hidden: list[int]) -> None:
    ids = random_row([20, 31], 0)[0][None]
    mask = torch.ones_like(ids)
    mask[:, hidden] = 0
    for given in ({"attention_mask": mask}, {"sequence_id": torch.where(mask == 1, (ids == 1).cumsum(1) - 1, -1)}):
        with pytest.raises(ValueError, match="be padded on the right and nowhere else"):
            e1.model(ids, **given)


@pytest.mark.parametrize("lengths", [[20], [20, 31]])
@torch.no_grad()
def test_padding_is_named_by_the_mask_or_by_numbers(e1: TurboEsm, lengths: list[int]) -> None:
    row, query = random_row(lengths, 0)[0], random_row([12], 1)
    alone, after = e1.model(row[None]), e1.model(torch.cat([row, query[0]])[None]).logits[:, len(row) :]
    ids = torch.cat([row, torch.zeros(6, dtype=torch.int64)])[None]
    numbers, mask = (ids == 1).cumsum(1) - 1, (torch.arange(ids.shape[1]) < len(row)).long()[None]
    padded = numbers.masked_fill(mask == 0, -1)
    for given in ({"sequence_id": padded}, {"sequence_id": numbers, "attention_mask": mask}, {"attention_mask": mask}):
        output = e1.model(ids, **given, use_cache=True)
        torch.testing.assert_close(output.logits[:, : len(row)], alone.logits, rtol=0, atol=1e-4)
        assert output.past_key_values.lengths.tolist() == [len(row)]
        found = e1.model(query, past_key_values=output.past_key_values).logits
        torch.testing.assert_close(found, after, rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match="the sequence after its last: give no `sequence_id`"):
        e1.model(query, sequence_id=torch.zeros_like(query), past_key_values=output.past_key_values)
    with pytest.raises(ValueError, match="`sequence_id` must be"):
        e1.model(ids, sequence_id=numbers[:, :3])


TWO = random_row([5, 8])
NUMBERS = (TWO == 1).cumsum(1) - 1
SEVERAL = "be numbered upwards from 0 to 511, and be padded"
REFUSED = {
    "embeddings": ({"input_ids": None, "inputs_embeds": torch.zeros(1, 4, 64)}, "not `inputs_embeds`"),
    "no input": ({"input_ids": None}, "give `input_ids`"),
    "one dimension": ({"input_ids": TWO[0]}, r"`input_ids` must be \[batch, n\]"),
    "ids that are no integers": ({"input_ids": TWO.float()}, "`input_ids` must be int64 or int32"),
    "an id too large": ({"input_ids": TWO + 33}, "`input_ids` must lie in 0 to 33"),
    "mask of two columns": ({"attention_mask": torch.zeros(1, 2)}, r"must be \[batch, n\] = \[1, 21\], got \[1, 2\]"),
    "mask of two rows": ({"attention_mask": torch.zeros(2, 21)}, r"`attention_mask` must be \[batch, n\]"),
    "mask of four dimensions": ({"attention_mask": torch.eye(21)[None, None]}, "`attention_mask` must be"),
    "positions for a mask": ({"attention_mask": torch.arange(21)[None]}, "`attention_mask` must hold zeros and ones"),
    "positions of another length": ({"position_ids": torch.arange(3)[None]}, r"`position_ids` must be \[batch, 21\]"),
    "negative positions": ({"position_ids": torch.arange(21)[None] - 3}, "must lie in 0 to 2147483647, got -3"),
    "positions that are no integers": ({"position_ids": torch.zeros(1, 21)}, "`position_ids` must be integers"),
    "numbers that fall": ({"sequence_id": 1 - NUMBERS}, SEVERAL),
    "numbers that return": ({"input_ids": TWO.repeat(1, 2), "sequence_id": NUMBERS.repeat(1, 2)}, SEVERAL),
    "numbers too large": ({"sequence_id": NUMBERS * 512}, SEVERAL),
    "too many sequences": ({"input_ids": torch.tensor([[1, 2] * 513])}, SEVERAL),
}  # fmt: skip


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("case", REFUSED)
def test_inputs_that_are_refused(e1: TurboEsm, case: str, use_cache: bool) -> None:
    given, message = REFUSED[case]
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        e1.model(**({"input_ids": TWO} | given), use_cache=use_cache)


@pytest.mark.parametrize(
    ("name", "value", "nothing"), [("sequence_ids", NUMBERS, None), ("output_attentions", True, False)]
)
def test_arguments_that_it_does_not_have_are_refused(name: str, value: object, nothing: object) -> None:
    model = make_e1()
    with pytest.raises(TypeError, match=f"the forward of E1 takes no '{name}'"):
        model(TWO, **{name: value})
    assert torch.equal(model(TWO, **{name: nothing}).logits, model(TWO).logits)


def test_numbers_of_chains_are_given_as_those_of_sequences() -> None:
    with pytest.raises(TypeError, match="takes no 'chains': give `sequence_id`"):
        make_e1()(TWO, chains=NUMBERS)


def test_an_argument_wins_over_the_configuration() -> None:
    model = make_e1()
    model.config.output_hidden_states = True
    found = [model(TWO, output_hidden_states=asked).hidden_states for asked in (None, True, False)]
    assert [states is None for states in found] == [False, False, True]


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16])
def test_numbers_of_sequences_are_of_any_integers(dtype: torch.dtype) -> None:
    assert torch.equal(make_e1()(TWO, sequence_id=NUMBERS.to(dtype)).logits, make_e1()(TWO).logits)


@torch.no_grad()
def test_a_sequence_too_many_after_a_context() -> None:
    model = make_e1(max_num_sequences=2)
    model.set_turbo(preset="exact")
    cache = model(TWO, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="3 sequences are too many; the model reads at most 2"):
        model(random_row([4]), past_key_values=cache)
    assert cache.lengths.tolist() == [21]


def test_the_tokenizer_is_that_of_the_family(e1: TurboEsm) -> None:
    turbo = TurboEsm.from_pretrained(device="cpu")
    with pytest.raises(ValueError, match="is not E1's: token 0 is '<cls>', not '<pad>'"):
        turbo.model = e1.model
    assert turbo.model is not e1.model


@pytest.mark.parametrize("size", GEOMETRIES)
@torch.no_grad()
def test_published_geometries_equal_the_plain_implementation(size: str) -> None:
    hidden, heads, mlp, layers, millions = GEOMETRIES[size]
    with torch.device("meta"):
        whole = TurboE1ForMaskedLM(
            TurboE1Config(
                hidden_size=hidden, num_attention_heads=heads, intermediate_size=mlp, num_hidden_layers=layers
            )
        )
    assert round(sum(p.numel() for p in whole.parameters()) / 1e6) == millions
    assert whole.config.num_cached_layers == layers // 3
    model = make_e1(head_dim=64, heads=heads, layers=3, intermediate_size=mlp)
    ids = random_row([9, 14, 6])
    states, logits = plain_forward(model.config, dict(model.named_parameters()), ids[0])
    output = model(ids, output_hidden_states=True)
    torch.testing.assert_close(output.hidden_states[-1][0], states, rtol=0, atol=1e-4)
    torch.testing.assert_close(output.logits[0], logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("every", [1, 2, 4])
@torch.no_grad()
def test_other_distances_of_global_layers(every: int) -> None:
    model = make_e1(layers=4, global_attention_every_n_layers=every, clip_qkv=1)
    ids = random_row([5, 8])
    assert model.config.num_cached_layers == 4 // every
    _, logits = plain_forward(model.config, dict(model.named_parameters()), ids[0])
    torch.testing.assert_close(model(ids).logits[0], logits, rtol=0, atol=1e-4)


@torch.no_grad()
def test_saved_and_loaded(tmp_path: Path) -> None:
    """Under the names of published weights, and without a tokenizer, as hub repositories are."""
    model, ids = make_e1(), random_row([12, 5])
    model.save_pretrained(tmp_path)
    assert {"model.layers.0.ffn.mlp.w1.weight", "mlm_head.3.bias"} <= load_file(tmp_path / "model.safetensors").keys()
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "E1"
    loaded = TurboEsm.from_pretrained(tmp_path, device="cpu", preset="exact")
    assert torch.equal(loaded.model(ids).logits, model(ids).logits)
    assert loaded.tokenizer("MK?")["input_ids"] == [1, 6, 20, 18, 5, 7, 2]
    encoder = TurboE1Model.from_pretrained(tmp_path, preset="exact")
    assert torch.equal(encoder(ids).last_hidden_state, model(ids, output_hidden_states=True).hidden_states[-1])


def test_labels_give_a_loss() -> None:
    model, ids = make_e1(), random_row([6])
    labels = torch.where(torch.arange(ids.shape[1]) == 3, ids, -100)
    with torch.no_grad():
        output = model(ids, labels=labels)
    torch.testing.assert_close(output.loss, -output.logits[0, 3].log_softmax(-1)[ids[0, 3]])


def test_half_precision_keeps_frequencies_in_float32() -> None:
    model = make_e1().to(torch.bfloat16)
    assert model.model.rotary_global.inv_freq.dtype == torch.float32
    torch.testing.assert_close(model.model.rotary_within.inv_freq[-1], torch.tensor(1e4 ** -(14 / 16)))


@pytest.mark.parametrize("symbol", ["?", "<mask>"])
def test_a_mask_is_read_and_written(e1: TurboEsm, symbol: str) -> None:
    ids = e1.codes.encode(f"mk{symbol}T", "it")
    assert ids == [20, 18, 5, 27] and e1.codes.decode(ids) == "MK?T"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_key_value_heads": 2}, "4 heads share 2 of keys and values"),
        ({"global_attention_every_n_layers": 0}, "`global_attention_every_n_layers` must be 1 to 12, got 0"),
        ({"gated_mlp": False}, "must be gated by silu"),
        ({"hidden_size": 250}, "hidden_size 250 is not a multiple of 4 heads"),
        ({"clip_qkv": "gone"}, "config.json lacks clip_qkv, on which results depend"),
        ({"rope_theta_global": "5e5"}, "config.json has rope_theta_global '5e5', on which results depend"),
        ({"mask_token_id": 31}, "config.json has mask_token_id 31, which the vocabulary has at 5"),
    ],
    ids=str,
)
def test_other_checkpoints_are_refused(tmp_path: Path, fields: dict[str, object], message: str) -> None:
    config = json.loads((E1_MINI / "config.json").read_text()) | fields
    (tmp_path / "config.json").write_text(json.dumps({name: x for name, x in config.items() if x != "gone"}))
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).symlink_to(E1_MINI / name)
    with pytest.raises(ValueError, match=message):
        TurboEsm.from_pretrained(tmp_path, device="cpu")


def test_a_checkpoint_without_its_head_is_told(tmp_path: Path) -> None:
    weights = {name: x for name, x in load_file(E1_MINI / "model.safetensors").items() if "mlm_head" not in name}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").symlink_to(E1_MINI / "config.json")
    e1 = TurboEsm.from_pretrained(tmp_path, device="cpu", preset="exact")
    with pytest.raises(ValueError, match="the lm head of this model was never trained"):
        e1.score_variants("MKTAY", arm="full")


def test_a_damaged_vocabulary_is_refused(tmp_path: Path) -> None:
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).symlink_to(E1_MINI / name)
    text = (E1_MINI / "tokenizer.json").read_text().replace('"A": 8', '"A": 9').replace('"B": 9', '"B": 8')
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=r"tokenizer.json is not E1's: token 8 is 'B', not 'A'; copy it again"):
        TurboEsm.from_pretrained(tmp_path, device="cpu")


def test_there_are_no_contacts(e1: TurboEsm) -> None:
    with pytest.raises(ValueError, match="no contact head"):
        e1.model.base_model.predict_contacts(random_row([5]), torch.ones(1, 9))
