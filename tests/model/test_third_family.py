"""A family whose layers differ and whose contexts are exact, in one module and one entry of the table."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from esm_turbo.files.families import FAMILIES, Family, Vocabulary
from esm_turbo.model.cached_model import CachedModel
from esm_turbo.model.plan import ForwardPlan, LayerKind, Scope
from esm_turbo.ops.torch_ops import rotate
from esm_turbo.proteins.homologs import ContextLimits

WITHIN, GLOBAL = LayerKind(Scope.SEQUENCE, rotary=1, stored=False), LayerKind(Scope.PREFIX)
HEADS, HEAD_DIM = 2, 8
# Tokens of three sequences per row; the last one is a query.
LENGTHS = ((5, 4, 3), (2, 6, 1), (1, 1, 4))


class ToyConfig(PreTrainedConfig):
    model_type = "toy"
    num_hidden_layers = 5
    num_cached_layers = 2
    num_attention_heads = HEADS
    hidden_size = HEADS * HEAD_DIM
    vocab_size = 12
    mask_token_id = 5


FAMILY = Family(
    name="Toy",
    model_type="toy",
    modeling=__name__,
    model="Toy",
    masked_lm="",
    attribute="toy",
    tokenizer="",
    vocabulary_file="",
    vocabulary=Vocabulary(()),
    chain_break=None,
    trained_residues=100,
    layers="layers",
    projections=("q", "k", "v", "o"),
    since="5.6",
)


class Toy(CachedModel, PreTrainedModel):
    """Attention layers with residuals: the second and the fifth are global."""

    config_class = ToyConfig
    family = FAMILY
    exact_contexts = ContextLimits(9, 100, 300)
    layer_kinds = (WITHIN, GLOBAL, WITHIN, WITHIN, GLOBAL)
    special_ids = (1, 2)

    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.tokens, self.sequences = nn.Embedding(config.vocab_size, size), nn.Embedding(9, size)
        self.layers = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(size, size) for name in "qkvo"}) for _ in self.layer_kinds
        )
        self.prepare_turbo()

    def frequencies(self, kind: LayerKind) -> Tensor:
        return torch.tensor([1.0, 0.3, 0.1, 0.03]) if kind.rotary else self.rotary_frequencies

    @property
    def rotary_frequencies(self) -> Tensor:
        return torch.tensor([0.5, 0.2, 0.05, 0.01])

    @property
    def parts(self) -> Sequence[nn.Module]:
        return self.tokens, self.sequences, self.layers

    def embed(self, input_ids: Tensor, mask: Tensor, counts: tuple[Tensor, Tensor] | None) -> Tensor:
        return self.tokens(input_ids)

    def embed_sequences(self, embeddings: Tensor, chains: Tensor | None) -> Tensor:
        return embeddings + self.sequences(
            torch.zeros(1, 1, dtype=torch.int64) if chains is None else chains.clamp_min(0)
        )

    def library_forward(self, plan: ForwardPlan) -> BaseModelOutputWithPast:
        hidden = plan.embeddings
        if hidden is None:
            hidden = self.embed_sequences(self.tokens(plan.input_ids), plan.chains)
        for index, layer in enumerate(self.layers):
            heads = (layer[name](hidden).unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for name in "qkv")
            query, keys, values = heads
            query, keys = rotate(query, keys, *plan.rotary.at(index, hidden.device), HEAD_DIM**-0.5)
            attended = plan.attend(index, query, keys, values).transpose(1, 2).flatten(2)
            hidden = hidden + torch.tanh(layer["o"](attended))
        return self.output(hidden, None)

    def output(self, last: Tensor, states: tuple[Tensor, ...] | None) -> BaseModelOutputWithPast:
        return BaseModelOutputWithPast(last)


def rows(lengths: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, mask and sequences of rows, padded on the right."""
    width = max(map(sum, lengths))
    ids = torch.randint(6, 12, (len(lengths), width), generator=torch.Generator().manual_seed(3))
    chains = torch.full((len(lengths), width), -1)
    for row, parts in enumerate(lengths):
        chains[row, : sum(parts)] = torch.arange(len(parts)).repeat_interleave(torch.tensor(parts))
    return ids, (chains >= 0).long(), chains


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Toy:
    monkeypatch.setitem(FAMILIES, "toy", FAMILY)
    torch.manual_seed(0)
    model = Toy(ToyConfig()).eval()
    model.set_turbo(preset="exact")
    model.model_id = "toy"
    return model


@pytest.mark.parametrize("index", [None, [2, 0, 1, 0]])
@torch.no_grad()
def test_a_query_after_its_context_is_the_end_of_the_whole(toy: Toy, index: list[int] | None) -> None:
    """Exactly, whatever follows the context, and with only the global layers stored."""
    ids, mask, chains = rows(LENGTHS)
    whole = toy(ids, mask, chains=chains).last_hidden_state
    _, context_mask, context_chains = rows([parts[:2] for parts in LENGTHS])
    width = context_mask.shape[1]
    real = context_mask == 1
    context = (torch.where(real, ids[:, :width], 0), context_mask)
    cache = toy(*context, chains=context_chains, use_cache=True).past_key_values
    assert len(cache.layers) == 2
    assert cache.next_chains.tolist() == [2, 2, 2]
    chosen = [0, 1, 2] if index is None else index
    spans = [slice(sum(LENGTHS[row][:2]), sum(LENGTHS[row])) for row in chosen]
    queries = pad_sequence([ids[row, span] for row, span in zip(chosen, spans, strict=True)], batch_first=True)
    _, mask, _ = rows([LENGTHS[row][2:] for row in chosen])
    found = toy(queries, mask, past_key_values=cache, context_index=index).last_hidden_state
    expected = torch.cat([whole[row, span] for row, span in zip(chosen, spans, strict=True)])
    torch.testing.assert_close(found[mask == 1], expected, rtol=0, atol=1e-5)
    # The context itself is what it would be without the query.
    alone = toy(*context, chains=context_chains).last_hidden_state
    torch.testing.assert_close(alone[real], whole[:, :width][real], rtol=0, atol=1e-5)
