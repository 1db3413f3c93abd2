"""The hooks of a model family: how tokens are embedded, how layers attend, what the library's forward takes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from esm_turbo.model.checkpoints import CheckpointMixin
from esm_turbo.model.plan import ForwardPlan, LayerKind, PackedTokens
from esm_turbo.proteins.homologs import ContextLimits

if TYPE_CHECKING:
    from transformers import PreTrainedModel as _LibraryModel
    from transformers.modeling_outputs import ModelOutput
else:
    _LibraryModel = object


class FamilyEncoder(CheckpointMixin, _LibraryModel):
    """The part of an encoder that differs from family to family.

    Attributes:
        peptide_notice: what to warn of, once per model, where a peptide is put after a target.
        packed_operations: names of the operations of `triton_encoder` that `run_packed` calls, to be compiled ahead.
        plain_modules: classes of modules whose forward the packed encoder and captured graphs replace.
        exact_contexts: sizes of contexts that never see what follows them, so that reusing them changes nothing: whole
            homologs, and then a whole query; None where a context is the begin of a protein, which sees what follows.
        activates_by_session: whether layers have the activation computed by a session, which is faster on a CPU.
        options: names of the further arguments that its forward takes; None where the library's forward takes them.
        is_spread: whether layers lie on several devices, see `model.spread`; then nothing is captured.
    """

    packed_operations: ClassVar[frozenset[str]] = frozenset()
    peptide_notice: str | None = None
    plain_modules: ClassVar[Collection[type[nn.Module]]] = ()
    exact_contexts: ContextLimits | None = None
    activates_by_session: ClassVar[bool] = False
    options: ClassVar[frozenset[str] | None] = None
    is_spread: bool = False

    @property
    def layer_kinds(self) -> Sequence[LayerKind]:
        """The attention of each layer; by default tokens see their row and the context, and every layer is stored."""
        count: int = self.config.num_hidden_layers
        return (LayerKind(),) * count

    def frequencies(self, kind: LayerKind) -> Tensor:
        """Inverse frequencies of the rotary positions in layers of a kind, float32 [head_dim / 2]."""
        return self.rotary_frequencies

    @property
    def packs(self) -> bool:
        """True if there is a packed encoder, `run_packed`, for this model."""
        return False

    @property
    def capturable(self) -> bool:
        """True if extensions and prefills of this model may be captured as CUDA graphs."""
        return True

    @property
    def token_dropout(self) -> bool:
        """True if embeddings depend on how many tokens and masks the whole input has."""
        return False

    @property
    def mask_token_id(self) -> int:
        """Id of `<mask>` as the embeddings count it."""
        token: int = self.config.mask_token_id
        return token

    @property
    @abstractmethod
    def special_ids(self) -> tuple[int, int]:
        """Ids of `<cls>` and `<eos>`."""

    @property
    def protected_ids(self) -> tuple[int, ...]:
        """Ids of the tokens whose keys and values presets may protect, at most one of each in a protein."""
        return self.special_ids

    @property
    @abstractmethod
    def rotary_frequencies(self) -> Tensor:
        """Inverse frequencies of the rotary positions, float32 [head_dim / 2]."""

    @property
    @abstractmethod
    def parts(self) -> Sequence[nn.Module]:
        """The modules that compute hidden states."""

    @abstractmethod
    def embed(self, input_ids: Tensor, mask: Tensor, counts: tuple[Tensor, Tensor] | None) -> Tensor:
        """Embeddings of tokens.

        Args:
            input_ids: [batch, n].
            mask: which of them are real, bool [batch, n].
            counts: number of tokens and of masks in the whole input, int64 [batch] each; None for those of this one.

        Returns:
            [batch, n, hidden_size].
        """

    @property
    def products(self) -> Sequence[Mapping[str, Sequence[nn.Module]]]:
        """The products of each layer that may be eight-bit products, by name, see `precision.PRODUCTS`.

        Linear layers of one input are one product. Empty where a family has none.
        """
        return ()

    def embed_sequences(self, embeddings: Tensor, chains: Tensor | None) -> Tensor:
        """Embeddings of tokens [batch, n, hidden_size], with what a family adds for the sequences they are in.

        Args:
            embeddings: of `embed`.
            chains: number of each token's sequence in its row, integers [batch, n]; None for the first.
        """
        return embeddings

    @abstractmethod
    def library_forward(self, plan: ForwardPlan) -> ModelOutput:
        """The library's own forward of a plan, which passes its session on to the attention."""

    def output(self, last: Tensor, states: tuple[Tensor, ...] | None) -> ModelOutput:
        """The output of `library_forward`, of the last hidden states and, if asked for, of all."""
        return BaseModelOutputWithPast(last, hidden_states=states)

    def run_packed(self, tokens: PackedTokens, ops: ModuleType) -> tuple[Tensor, dict[int, Tensor]]:
        """The layers on packed tokens; only where `packs` says so.

        Args:
            tokens: of all rows.
            ops: `triton_encoder`, or another module with its operations.

        Returns:
            The last hidden states after the final norm, [T, hidden_size], and the inputs of the layers asked for.
        """
        raise NotImplementedError

    def predict_contacts(self, tokens: Tensor, attention_mask: Tensor) -> Tensor:
        """Predict contacts, where the family has a head for it.

        Raises:
            ValueError: it has none.
        """
        raise ValueError(f"{self.family.name} has no contact head: contacts cannot be predicted")
