"""What an encoder answers about its family: how tokens are embedded, what the library's forward takes, and the like."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from esm_turbo.model.checkpoints import CheckpointMixin
from esm_turbo.model.packed_encoder import Attend

if TYPE_CHECKING:
    from transformers import PreTrainedModel as _LibraryModel
    from transformers.modeling_outputs import ModelOutput
else:
    _LibraryModel = object


class FamilyEncoder(CheckpointMixin, _LibraryModel):
    """The part of an encoder that differs from family to family.

    Attributes:
        peptide_notice: what to warn of, once per model, where a peptide is put after a target.
        gated: see `ops.warmup.Sizes`.
        plain_modules: classes of modules whose forward the packed encoder and captured graphs replace.
    """

    gated: ClassVar[bool] = False
    peptide_notice: str | None = None
    plain_modules: ClassVar[Collection[type[nn.Module]]] = ()

    @property
    def packs(self) -> bool:
        """Whether there is a packed encoder, `run_packed`, for this model."""
        return False

    @property
    def token_dropout(self) -> bool:
        """Whether embeddings depend on how many tokens and masks the whole input has."""
        return False

    @property
    @abstractmethod
    def special_ids(self) -> tuple[int, int]:
        """Ids of `<cls>` and `<eos>`, whose keys and values presets may protect."""

    @property
    @abstractmethod
    def rotary_frequencies(self) -> Tensor:
        """Inverse frequencies of the rotary positions, float32 [head_dim / 2]."""

    @property
    @abstractmethod
    def parts(self) -> Sequence[nn.Module]:
        """The modules that compute hidden states."""

    @abstractmethod
    def channel_parameters(self, layer_idx: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Parameters of a layer whose rows are the channels of its queries, of its keys and of its values.

        A row that is multiplied in all of them multiplies that channel, and no other.
        """

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

    @abstractmethod
    def library_forward(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        embeddings: Tensor | None,
        **kwargs: Any,
    ) -> ModelOutput:
        """The library's own forward, which passes a `kv_session` on to the attention.

        Args:
            input_ids: [batch, n].
            attention_mask: [batch, n].
            position_ids: [batch, n] or [1, n].
            embeddings: of the tokens, as by `embed`; where given, they stand for `input_ids`.
            **kwargs: of the library's forward.
        """

    @abstractmethod
    def output(self, last: Tensor, states: tuple[Tensor, ...] | None) -> ModelOutput:
        """The output of `library_forward`, of the last hidden states and, if asked for, of all."""

    def run_packed(
        self, embeddings: Tensor, positions: Tensor, ops: ModuleType, attend: Attend, layers: Collection[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """The layers on packed tokens; only where `packs` says so. See `packed_encoder`."""
        raise NotImplementedError

    def predict_contacts(self, tokens: Tensor, attention_mask: Tensor) -> Tensor:
        """Predict contacts, where the family has a head for it.

        Raises:
            ValueError: it has none.
        """
        raise ValueError(f"{self.family.name} has no contact head: contacts cannot be predicted")
