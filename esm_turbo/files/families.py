"""The table of model families: where their classes are, and where a model of the library keeps its attention.

Nothing outside a family's own modules may branch on the family. What differs besides is asked of the model, see
`model/family_encoder.py`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a family.

    Attributes:
        tokens: in the order of their ids.
        cls: the first token of a protein.
        eos: the last.
        pad: padding.
        mask: stands for a residue to be predicted.
        before: tokens before the residues of a protein.
        after: tokens after them.
        unknown: residue that contexts leave out, its position kept; None for none.
    """

    tokens: tuple[str, ...]
    cls: str = "<cls>"
    eos: str = "<eos>"
    pad: str = "<pad>"
    mask: str = "<mask>"
    before: tuple[str, ...] = ("<cls>",)
    after: tuple[str, ...] = ("<eos>",)
    unknown: str | None = None


@dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
        name: for readers.
        model_type: in config.json.
        modeling: module of this package with the family's classes.
        model: class of the encoder in it.
        masked_lm: class with the language-model head in it.
        attribute: in which a model with a head holds its encoder.
        tokenizer: class of the tokenizer.
        vocabulary_file: from which the tokenizer is loaded.
        vocabulary: its tokens.
        chain_break: token that separates chains; None if the vocabulary has none.
        trained_residues: of the longest proteins in training, without `<cls>` and `<eos>`.
        layers: path of the list of layers in the encoder.
        projections: paths of the query, key, value and output projections in a layer.
        since: the first version of transformers that has the family.
        tokenizer_module: module of the tokenizer.
    """

    name: str
    model_type: str
    modeling: str
    model: str
    masked_lm: str
    attribute: str
    tokenizer: str
    vocabulary_file: str
    vocabulary: Vocabulary
    chain_break: str | None
    trained_residues: int
    layers: str
    projections: tuple[str, str, str, str]
    since: str
    tokenizer_module: str = "transformers"

    @property
    def library_modules(self) -> str:
        """Package of the library in which the family's modules are defined."""
        return f"transformers.models.{self.model_type}."

    def load(self, name: str) -> Any:
        """A class of this package, by name: `model` or `masked_lm`.

        Raises:
            ValueError: the installed transformers has no such family.
        """
        try:
            return getattr(importlib.import_module(self.modeling), name)
        except ImportError as error:
            raise self.too_old() from error

    def load_tokenizer(self) -> Any:
        """The tokenizer's class.

        Raises:
            ValueError: the installed transformers has no such family.
        """
        try:
            return getattr(importlib.import_module(self.tokenizer_module), self.tokenizer)
        except (ImportError, AttributeError) as error:
            raise self.too_old() from error

    def too_old(self) -> ValueError:
        """The error where the installed transformers has no such family."""
        from transformers import __version__

        return ValueError(f"{self.name} needs transformers {self.since} or newer, installed is {__version__}")


def _esm_tokens(chain_break: str) -> tuple[str, ...]:
    """ESM-2's tokens in the order of their ids; other families have a chain break where ESM-2's has no use."""
    return ("<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWCXBUZO", ".", "-", chain_break, "<mask>")


_E1_VOCABULARY = Vocabulary(
    ("<pad>", "<bos>", "<eos>", "<bos_glm>", "<eos_span>", "?", "1", "2", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
    cls="<bos>",
    mask="?",
    before=("<bos>", "1"),
    after=("2", "<eos>"),
    unknown="X",
)

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            name="ESM-2",
            model_type="esm",
            modeling="esm_turbo.modeling_esm_turbo",
            model="TurboEsmModel",
            masked_lm="TurboEsmForMaskedLM",
            attribute="esm",
            tokenizer="EsmTokenizer",
            vocabulary_file="vocab.txt",
            vocabulary=Vocabulary(_esm_tokens("<null_1>")),
            chain_break=None,
            # Crops of 1,024 tokens (Lin et al. 2023).
            trained_residues=1022,
            layers="encoder.layer",
            projections=(
                "attention.self.query",
                "attention.self.key",
                "attention.self.value",
                "attention.output.dense",
            ),
            since="5.6",
        ),
        Family(
            name="ESM-C",
            model_type="esmc",
            modeling="esm_turbo.modeling_esmc_turbo",
            model="TurboEsmcModel",
            masked_lm="TurboEsmcForMaskedLM",
            attribute="esmc",
            tokenizer="EsmcTokenizer",
            vocabulary_file="tokenizer.json",
            vocabulary=Vocabulary(_esm_tokens("|")),
            chain_break="|",
            # The second stage of training had 2,048 tokens (ESM Team 2024, "ESM Cambrian").
            trained_residues=2046,
            layers="layers",
            projections=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
            since="5.16",
        ),
        Family(
            name="E1",
            model_type="E1",
            modeling="esm_turbo.modeling_e1_turbo",
            model="TurboE1Model",
            masked_lm="TurboE1ForMaskedLM",
            attribute="model",
            tokenizer="E1Tokenizer",
            vocabulary_file="tokenizer.json",
            vocabulary=_E1_VOCABULARY,
            chain_break=None,
            # `max_num_positions_within_seq` of the published configurations, which counts residues.
            trained_residues=8192,
            layers="layers",
            projections=tuple(f"norm_attn_norm.self_attn.{name}_proj" for name in "qkvo"),  # type: ignore[arg-type]
            since="5.6",
            tokenizer_module="esm_turbo.proteins.e1_tokenizer",
        ),
    )
}
"""By model type."""

_NAMES = [family.name for family in FAMILIES.values()]
FAMILY_NAMES = f"{', '.join(_NAMES[:-1])} or {_NAMES[-1]}"


def family_of(model_type: Any, source: object) -> Family:
    """The family of a model type.

    Args:
        model_type: as in config.json.
        source: what has it, for the error.

    Raises:
        ValueError: it is none of the table's.
    """
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(f"{source}: not {FAMILY_NAMES} but model type {model_type!r}")
    return FAMILIES[model_type]


def encoder_of(model: Any) -> Any:
    """The encoder of a model that may have a head, of the library's classes or of this package's."""
    family = FAMILIES.get(getattr(getattr(model, "config", None), "model_type", ""))
    return model if family is None else getattr(model, family.attribute, model)


def projections_of(encoder: Any) -> list[tuple[Any, ...]]:
    """Query, key, value and output projections of every layer of an encoder that caches store.

    Raises:
        ValueError: layers were removed from the encoder, added, or put into modules of other classes.
    """
    family = family_of(encoder.config.model_type, type(encoder).__name__)
    layers = encoder.get_submodule(family.layers)
    # The library's encoders have layers of one kind.
    kinds = getattr(encoder, "layer_kinds", None) or [None] * len(layers)
    if len(kinds) != len(layers):
        raise ValueError(f"the encoder has {len(layers)} layers, but was built with {len(kinds)}; load the model again")
    stored = [layer for layer, kind in zip(layers, kinds, strict=True) if kind is None or kind.stored]
    try:
        return [tuple(map(layer.get_submodule, family.projections)) for layer in stored]
    except AttributeError as error:
        raise ValueError(
            f"a layer of the encoder is not as {family.name} has it, and its calibration cannot be compared: {error}"
        ) from error
