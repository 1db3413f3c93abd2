"""Bodies of requests and answers, as the OpenAPI page documents them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from esm_turbo.config import DEFAULT_REFRESH
from esm_turbo.tasks.common.options import CandidateFill, MarginalMethod, UnmaskingOrder

_PROTEIN = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQAPILSRVGDGTQDNLSGAEKAVQVKVKALPDAQFEVVHSLAKWKRQ"
ContextId = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
# More than any request has; each that is unknown is an error of its own.
_MOST_FIELDS = 50
_STREAM = Field(False, description="Answer with lines of JSON: `progress` now and then, at last `result` or `error`.")


_T = TypeVar("_T")
# Of a list, the first wrong item is an error, and no other: there may be very many, and each takes memory.
_List = Annotated[list[_T], Field(fail_fast=True)]
_Homologs = ContextId | _List[ContextId] | None


def _letters_by_position(given: object) -> object:
    if isinstance(given, dict):
        for position, letters in given.items():
            if not isinstance(letters, str):
                raise ValueError(f"residues of position {position[:40]!r} must be letters")
    return given


class _Request(BaseModel):
    """Unknown fields and values of another type are errors."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _few(cls, given: object) -> object:
        if isinstance(given, dict) and len(given) > _MOST_FIELDS:
            raise ValueError(f"a body has at most {_MOST_FIELDS} fields, got {len(given):,}")
        return given


class ContextRequest(_Request):
    """A protein to compute once and keep; for E1, its homologs."""

    sequence: str | _List[str] = Field(
        description="Residues, one letter each; for E1, homologs: separated by commas, or a list.", examples=[_PROTEIN]
    )


class ScoreRequest(_Request):
    """Candidates, usually peptides, to score after a protein."""

    candidates: _List[str] = Field(description="Residues of each candidate.", examples=[["GSGSWKDLAE", "PLLKRR"]])
    place: CandidateFill = Field("masked", description="What stands for the candidate while the context is computed.")
    refresh: int = Field(DEFAULT_REFRESH, ge=0, description="Residues before the candidate that run with it.")
    background: Literal["none", "alone", "decoys"] = Field(
        "none", description="Compare candidates with themselves after no target, or after shipped proteins."
    )
    log_probabilities: bool = Field(False, description="Add the log-probability of each residue.")
    stream: bool = _STREAM


class VariantsRequest(_Request):
    """Substitutions to score."""

    variants: _List[str] | None = Field(
        None, description="Such as `H24C`, or `H24C:E26K`; null for all single ones.", examples=[["K2A", "T3D:A4P"]]
    )
    method: MarginalMethod = Field("masked", description="Whether each position is masked.")
    refresh: int = Field(DEFAULT_REFRESH, ge=0, description="Residues around a position that run with it.")
    first_position: int = Field(1, ge=-(2**53), le=2**53, description="Position of the first residue.")
    stream: bool = _STREAM


class ProteinVariantsRequest(VariantsRequest):
    """Substitutions of a protein to score; by E1, after contexts of homologs."""

    sequence: str = Field(description="Residues of the wild type.", examples=[_PROTEIN])
    context: _Homologs = Field(
        None, description="For E1: homologs that the protein is read after; of several contexts, scores are averaged."
    )


class EmbeddingsRequest(_Request):
    """Proteins to embed, in the shape of OpenAI's API."""

    input: str | _List[str] = Field(description="A sequence, or several.", examples=[[_PROTEIN, "ACDEFGHIK"]])
    model: str = Field(description="The service's model, see `/v1/models`.", examples=["esm2-mini"])
    encoding_format: Literal["float", "base64"] = Field("float", description="base64 is of little-endian float32.")
    dimensions: int | None = Field(None, description="If given, the model's hidden size.")
    user: str | None = Field(None, description="Ignored.")
    context: ContextId | None = Field(None, description="For E1: homologs that each protein is read after.")


class GenerateRequest(_Request):
    """A protein to append residues to, or to replace residues in; see the docs of generation for the options."""

    sequence: str | None = Field(None, description="Residues; `<mask>` may stand for one.", examples=[_PROTEIN])
    context: _Homologs = Field(
        None,
        description="In place of `sequence`: a context to append to. For E1, beside it: homologs that it is read after,"
        " or several contexts to average.",
    )
    max_new_tokens: int | None = Field(None, description="Residues to append.", examples=[8])
    template: str | None = Field(
        None, description="Peptide to append, whose residues are kept or drawn.", examples=["GX[KR]XXP"]
    )
    positions: _List[int] | None = Field(
        None, description="Positions to replace, from 1; repeated ones count once. Null for all masks."
    )
    order: UnmaskingOrder | None = None
    per_step: int = 1
    sweeps: int = 1
    num_return_sequences: int = Field(1, description="Number of samples.")
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    allowed: Annotated[str | dict[str, str] | None, BeforeValidator(_letters_by_position)] = Field(
        None, description="Residues, or residues by position."
    )
    banned: str = ""
    refresh: int | None = None
    refresh_every: int | None = None
    seed: int = Field(0, ge=0, lt=2**63)


class Run(BaseModel):
    """What computed an answer."""

    model: str
    fingerprint: str = Field(description="Hash of the model's weights.")
    arm: str = Field(description="`turbo`, `frozen` or `full`: how contexts are kept.")
    preset: str | None = Field(description="Storage format of contexts; null if none is used.")
    version: str = Field(description="Of esm_turbo.")
    device: str
    dtype: str


class ContextAnswer(BaseModel):
    """A stored context."""

    id: str = Field(description="A hash of the sequence.")
    residues: int
    homologs: int | None = Field(None, description="Their number, for E1.")
    run: Run


class BackgroundAnswer(BaseModel):
    """Log-likelihoods per residue of a candidate in the contexts of a background: `spread` is their s.d., nats."""

    mean: float
    spread: float
    contexts: int


class CandidateAnswer(BaseModel):
    """The score of a candidate; `log_probabilities` where asked for."""

    candidate: str
    rank: int
    pseudo_perplexity: float
    pseudo_log_likelihood: float
    mean_log_probability: float
    specificity: float | None = Field(None, description="With a background, nats per residue.")
    specificity_z: float | None = Field(None, description="The same in standard deviations of five contexts or more.")
    background: BackgroundAnswer | None = Field(None, description="What specificity compares with.")
    log_probabilities: list[float] | None = None


class ScoreAnswer(BaseModel):
    """Scores in the order of the candidates."""

    context: str
    place: str
    refresh: int
    candidates: list[CandidateAnswer]
    run: Run


class VariantAnswer(BaseModel):
    """The score of a variant: log-probability of the mutant minus that of the wild type, nats."""

    variant: str
    score: float


class VariantsAnswer(BaseModel):
    """Scores in the order of the variants."""

    context: str | list[str] | None
    wild_type: str
    first_position: int
    method: str
    refresh: int
    variants: list[VariantAnswer]
    run: Run


class EmbeddingsAnswer(BaseModel):
    """As OpenAI's API answers; `run` besides."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    model: str
    usage: dict[str, int]
    run: Run


class GeneratedAnswer(BaseModel):
    """A generated sequence."""

    sequence: str
    new_residues: str
    positions: list[int]
    log_probs: list[float]
    mean_log_prob: float


class GenerateAnswer(BaseModel):
    """Generated sequences."""

    sequences: list[GeneratedAnswer]
    seed: int
    run: Run


class ErrorItem(BaseModel):
    """What is wrong, and in which field."""

    loc: list[str | int]
    msg: str
    type: str


class ErrorAnswer(BaseModel):
    """Why there is no result."""

    detail: list[ErrorItem]
