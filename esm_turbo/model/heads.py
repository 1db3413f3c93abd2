"""Heads of a checkpoint that were never trained: their outputs are noise.

A masked language model can be trained without its contact head, which Hugging Face then saves as initialised, and
fills with random numbers where a checkpoint lacks it. `untrained_heads` in config.json names such heads.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from esm_turbo.files.families import encoder_of
from esm_turbo.model.plain import check_tokenwise

Head = Literal["contact_head", "lm_head"]

_USES: dict[Head, tuple[str, str]] = {
    "contact_head": ("contacts", "use a checkpoint of Meta's, which has one"),
    "lm_head": ("residue probabilities", "use a checkpoint with a trained one; embeddings need none"),
}
_FIELD = "untrained_heads"


class UntrainedHeadWarning(UserWarning):
    """The outputs of a head are noise."""


def check_untrained(config: Any) -> None:
    """Check what a configuration names as heads that were never trained.

    Raises:
        ValueError: it has no list of them, or names others than there are.
    """
    named = getattr(config, _FIELD, None)
    if named is not None and not (isinstance(named, list) and all(one in list(_USES) for one in named)):
        raise ValueError(f"`{_FIELD}` must be a list of some of {', '.join(_USES)}, got {named!r}")


def mark_missing_heads(config: Any, missing: Iterable[str]) -> None:
    """Record in a model's configuration which heads its checkpoint lacks.

    Args:
        config: the model's.
        missing: names of the weights that the checkpoint lacks.
    """
    # Of a head, any part is filled with noise. Output embeddings that are tied to the input's are not missing.
    heads = {"contact_head": "contact_head", "lm_head": "lm_head", "mlm_head": "lm_head"}
    lacking = {heads.get(key.removeprefix("esm.").partition(".")[0]) for key in missing} - {None}
    if lacking:
        setattr(config, _FIELD, sorted(lacking.union(_named(config))))


def untrained(model: Any, head: Head) -> str | None:
    """The reason why a model's head gives noise or is missing, and what to do; None for a trained head.

    Args:
        model: such as `TurboEsmForMaskedLM`, or `TurboEsmModel` for its contact head.
        head: the head.
    """
    encoder = encoder_of(model)
    if head == "contact_head" and not hasattr(encoder, head):
        return f"{type(encoder).__name__} has no contact head: contacts cannot be predicted"
    if head in _named(model.config):
        reason = "was never trained"
    # Contacts are rare, so that a trained regression has a negative intercept; zero is how it was initialised.
    elif head == "contact_head" and not bool(encoder.contact_head.regression.bias.any()):
        reason = "was never trained: its intercept is exactly 0, as initialised"
    else:
        return None
    what, remedy = _USES[head]
    return f"{what} would be noise: the {head.replace('_', ' ')} of this model {reason}; {remedy}"


def check_head(model: Any, head: Head) -> None:
    """Check that a model's head was trained, see `untrained`, and that of a language model, as of `check_tokenwise`.

    Raises:
        ValueError: it was not, or as of `check_tokenwise`.
    """
    if problem := untrained(model, head):
        raise ValueError(problem)
    if head == "lm_head":
        check_tokenwise(model)


def _named(config: Any) -> set[str]:
    return set(getattr(config, _FIELD, None) or ())


def check_reads_on(encoder: Any, what: str) -> None:
    """Check that contexts of an encoder are begins of proteins, which tasks continue, and not whole homologs.

    Args:
        encoder: such as `TurboEsmModel`.
        what: would be done, for the error.

    Raises:
        ValueError: they are whole homologs, see `FamilyEncoder.exact_contexts`.
    """
    if encoder.exact_contexts is not None:
        raise ValueError(
            f"{encoder.family.name} does not support {what}: its contexts are whole homologs; call the model, or"
            " `prefill` and `extend`"
        )
