"""`Service`: the model, its contexts and its engine, and jobs made from requests that were checked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn, TypeVar

from esm_turbo import __version__
from esm_turbo.context_store import ContextStore
from esm_turbo.files.identity import lasting_identity
from esm_turbo.proteins.fasta import STANDARD_RESIDUES
from esm_turbo.proteins.homologs import SEPARATOR, ContextLimits, decode_homologs, encode_homologs
from esm_turbo.serve.contexts import Contexts
from esm_turbo.serve.engine import Engine
from esm_turbo.serve.errors import RequestError, field_errors, invalid
from esm_turbo.serve.jobs import ContextJob, EmbedJob, GenerateJob, ItemJob, Job
from esm_turbo.serve.limits import Limits
from esm_turbo.serve.metrics import Metrics
from esm_turbo.serve.schemas import (
    EmbeddingsRequest,
    GenerateRequest,
    ProteinVariantsRequest,
    ScoreRequest,
    VariantsRequest,
)
from esm_turbo.tasks.common.homologs import check_known, default_query_arm, query_contexts
from esm_turbo.tasks.common.run_info import context_arm
from esm_turbo.tasks.generation.generate import GenerationOptions, allowed_residues
from esm_turbo.tasks.generation.notation import parse_template
from esm_turbo.tasks.scoring.score import ComparedRows, TargetRows, scored_residues, target_ids, warn_of_peptides
from esm_turbo.tasks.scoring.specificity import background_contexts
from esm_turbo.tasks.variants.score import ProteinRows
from esm_turbo.tasks.variants.substitutions import all_substitutions

if TYPE_CHECKING:
    from esm_turbo.context_model import ContextModel

# Characters that a residue may take in a sequence, as `<mask>` does; blanks count, too.
_CHARACTERS_PER_RESIDUE = 8
_Job = TypeVar("_Job", bound=Job)
_FIELD = re.compile(r"`(\w+)")


class Service:
    """Everything behind the endpoints.

    Args:
        turbo: the model, which nothing else may use meanwhile.
        store: its contexts.
        limits: of requests.
        resident_bytes: memory for contexts that requests read, derived from the stored ones.
        toks_per_batch: tokens per batch; None chooses by device.
        wait: seconds that a batch with room left waits for further requests.

    Attributes:
        engine: runs jobs.
        checks: another, which reads and checks requests, from which it makes jobs.
        name: of the model.
        arm: how its contexts are kept, `turbo` or `frozen`.
        homologs: sizes of its contexts if these are homologs, see `FamilyEncoder.exact_contexts`; else None.

    Raises:
        ValueError: the store belongs to another model, or the preset needs a calibration and there is none.
    """

    def __init__(
        self,
        turbo: ContextModel,
        store: ContextStore,
        limits: Limits | None = None,
        *,
        resident_bytes: int = 1 << 30,
        toks_per_batch: int | None = None,
        wait: float = 0.002,
    ) -> None:
        for tensor in (*turbo.model.parameters(), *turbo.model.buffers()):
            if tensor.device.type == "cpu":
                # What is mapped from a file would change with it.
                tensor.data = tensor.data.clone()
        turbo.model.new_cache()
        store.check_model(turbo)
        self.turbo = turbo
        self.limits = limits or Limits()
        self.name = turbo.name
        self.arm = context_arm(turbo)
        self.homologs: ContextLimits | None = turbo.model.base_model.exact_contexts
        self._run = {
            "model": self.name,
            "fingerprint": lasting_identity(turbo.model).digest,
            "arm": str(self.arm),
            "preset": turbo.model.base_model.turbo_config.name,
            "version": __version__,
            "device": str(turbo.model.device),
            "dtype": str(turbo.model.dtype).removeprefix("torch."),
        }
        self.metrics = Metrics({name: self._run[name] for name in ("model", "fingerprint", "arm", "preset")})
        self.contexts = Contexts(turbo, store, resident_bytes, limit=self.limits.contexts)
        self.engine = Engine(turbo, self.contexts, self.limits, self.metrics, toks_per_batch, wait)
        self.checks = Engine(turbo, self.contexts, self.limits, self.metrics)

    def run(self, *, contexts: bool = True) -> dict[str, str | None]:
        """What computes an answer; with `contexts` False, one for which the whole sequence runs."""
        return dict(self._run) if contexts else {**self._run, "arm": "full", "preset": None}

    @property
    def engines(self) -> tuple[Engine, Engine]:
        """Both, in the order in which requests pass them."""
        return self.checks, self.engine

    @property
    def jobs(self) -> int:
        """Number of requests that wait or run."""
        return sum(one.jobs for one in self.engines)

    @property
    def running(self) -> int:
        """Number of requests that run, those that nobody waits for any more among them."""
        return sum(one.running for one in self.engines)

    def metrics_text(self) -> bytes:
        """The answer of `/metrics`."""
        self.metrics.queue.set(self.jobs)
        self.metrics.running.set(self.running)
        self.metrics.stored.set(self.contexts.stored)
        self.metrics.derived.set(self.contexts.resident.nbytes)
        return self.metrics.text()

    def describe_context(self, key: str) -> dict[str, object]:
        """The answer about a stored context.

        Raises:
            RequestError: there is none.
        """
        homologs = self.contexts.sequence(key).split(SEPARATOR)
        about: dict[str, object] = {"id": key, "residues": sum(map(len, homologs)), "run": self.run()}
        return about if self.homologs is None else about | {"homologs": len(homologs)}

    def context_job(self, given: str | Sequence[str]) -> ContextJob:
        """The job of storing the context of a protein, or of homologs."""
        limits, codes = self.homologs, self.turbo.codes
        if limits is None:
            if not isinstance(given, str):
                raise invalid(self._reads_one, "sequence")
            return ContextJob(self._residues(given, "sequence"))
        if not isinstance(given, str):
            _check_count(given, limits.sequences, "sequence")
            given = SEPARATOR.join(given)
        if len(given) > limits.positions * _CHARACTERS_PER_RESIDUE:
            most = f"at most {limits.positions:,} positions are allowed"
            raise invalid(f"has {len(given):,} characters; {most}", "sequence")
        with field_errors("sequence"):
            return ContextJob(decode_homologs(codes, encode_homologs(codes, given, "sequence", limits)))

    def score_job(self, context: str, request: ScoreRequest) -> ItemJob:
        """The job of scoring candidates."""
        warn_of_peptides(self.turbo)
        target = self._protein(context)
        _check_count(request.candidates, self.limits.candidates, "candidates")
        candidates = []
        for index, sequence in enumerate(request.candidates):
            field = ("candidates", index)
            if len(sequence.split()) > 1:
                raise invalid("has a space inside; remove it, or give two candidates", *field)
            candidates.append(self._encode(sequence, self.limits.candidate_residues, *field))
            if self.turbo.codes.mask in candidates[-1]:
                raise invalid("holds a <mask>, which has no likelihood; give residues only", *field)
            if not scored_residues(self.turbo.codes.decode(candidates[-1]), "omit"):
                raise invalid("holds none but unknown residues (B, X, Z)", *field)
        _check_at_most(request.refresh, self.limits.residues, "refresh")

        def rows_on(target: str) -> TargetRows:
            ids = target_ids(self.turbo.codes, target)
            return TargetRows(self.turbo, ids, candidates, self.arm, request.place, request.refresh)

        own = rows_on(target)
        background, others = background_contexts(request.background, 1)
        # A protein is no background of itself.
        contexts = [rows_on(one.sequence) for one in others if one.sequence != target]
        rows = own if background is None else ComparedRows(own, contexts, background)
        return self._small(ItemJob("score", rows, self.arm), "candidates")

    def variants_job(self, context: str, request: VariantsRequest) -> ItemJob:
        """The job of scoring variants of a protein that is a stored context."""
        return self._variants(self._protein(context), request, [])

    def protein_variants_job(self, request: ProteinVariantsRequest) -> ItemJob:
        """The job of scoring variants of a protein, alone or after homologs."""
        wild_type = self._residues(request.sequence, "sequence")
        with field_errors("sequence"):
            check_known(self.turbo, self.turbo.codes.encode(wild_type, "sequence"), "sequence")
        return self._variants(wild_type, request, self._homologs_before(wild_type, request.context))

    def _variants(self, wild_type: str, request: VariantsRequest, homologs: Sequence[str]) -> ItemJob:
        """The job of scoring variants of a protein after contexts of homologs, if there are any."""
        _check_at_most(request.refresh, self.limits.residues, "refresh")
        names, method, most = request.variants, request.method, self.limits.variants
        if names is not None:
            _check_count(names, most, "variants")
        # One variant may have very many.
        substitutions = sum(1 + name.count(":") for name in names or all_substitutions(wild_type))
        if substitutions > most:
            raise invalid(f"have {substitutions:,} substitutions; at most {most:,}", "variants")
        arm = self.arm if homologs else default_query_arm(self.turbo) or self.arm
        options = request.refresh, request.first_position, homologs or None
        try:
            rows = ProteinRows(self.turbo, wild_type, names, method, arm, *options)
        except ValueError as error:
            wrong = next((i for i, name in enumerate(names or ()) if str(error).startswith(repr(name))), 0)
            raise invalid(str(error), "variants", wrong) from None
        if not rows.groups[0].count:
            raise invalid("there is nothing to substitute", "variants")
        return self._small(ItemJob("variants", rows, arm), "variants" if homologs else "refresh", len(homologs))

    def embed_job(self, request: EmbeddingsRequest) -> EmbedJob:
        """The job of embedding sequences."""
        if request.model != self.name:
            raise invalid(f"the model is {self.name!r}, got {request.model[:80]!r}", "model")
        size = self.turbo.model.config.hidden_size
        if request.dimensions not in (None, size):
            raise invalid(f"embeddings of this model have {size} dimensions", "dimensions")
        given = [request.input] if isinstance(request.input, str) else request.input
        _check_count(given, self.limits.inputs, "input")
        fields: list[tuple[str | int, ...]] = [("input",)]
        if not isinstance(request.input, str):
            fields = [("input", index) for index in range(len(given))]
        sequences = [self._residues(one, *field) for one, field in zip(given, fields, strict=True)]
        longest, field = max(zip(sequences, fields, strict=True), key=lambda one: len(one[0]))
        homologs = self._homologs_before(longest, request.context, *field)
        context = query_contexts(self.turbo, homologs, self.arm)[0] if homologs else None
        return self._small(EmbedJob(sequences, self.turbo.codes.around, context), "input")

    def generate_job(self, request: GenerateRequest) -> GenerateJob:
        """The job of generating residues."""
        limits, codes, homologs = self.limits, self.turbo.codes, None
        if request.template is not None:
            if self.homologs is not None:
                raise invalid(f"{self.turbo.model.family.name} designs no peptides for a target", "template")
            request = self._with_template(request, request.template)
        if self.homologs is not None:
            if request.sequence is None:
                raise invalid("give a protein; a context holds homologs that it is read after", "sequence")
            if request.max_new_tokens is not None:
                family = self.turbo.model.family.name
                raise invalid(f"{family} appends nothing: give masks or positions", "max_new_tokens")
        elif (request.sequence is None) == (request.context is None):
            raise invalid("give either a sequence or a context", "sequence")
        elif request.context is not None and request.max_new_tokens is None:
            raise invalid("a context can only be appended to: give max_new_tokens", "max_new_tokens")
        _check_at_most(request.num_return_sequences, limits.samples, "num_return_sequences")
        _check_at_most(request.max_new_tokens, limits.candidate_residues, "max_new_tokens")
        for name in ("refresh", "refresh_every", "per_step", "sweeps", "top_k"):
            _check_at_most(getattr(request, name), limits.residues, name)
        sequence = request.sequence or ""
        if self.homologs is None and request.context is not None:
            if not isinstance(request.context, str):
                raise invalid(self._reads_one, "context")
            sequence = self.contexts.sequence(request.context, ("body", "context"))
        ids = self._encode(sequence, limits.residues, "sequence")
        if self.homologs is not None:
            with field_errors("sequence"):
                check_known(self.turbo, ids, "sequence")
            homologs = self._homologs_before(codes.decode(ids), request.context)
        fields = request.model_dump(exclude={"sequence", "context", "template", "seed", "allowed"})
        try:
            options = GenerationOptions(allowed=_by_position(request.allowed), **fields)
            constraint = allowed_residues(self.turbo, options)
        except ValueError as error:
            _refuse(error, fields | {"allowed": None})
        if options.max_new_tokens is not None:
            chosen = list(range(len(ids) + 1, len(ids) + options.max_new_tokens + 1))
        elif request.positions is not None:
            chosen = request.positions
            for index, position in enumerate(chosen):
                if not 1 <= position <= len(ids):
                    raise invalid(f"positions are 1 to {len(ids)}, got {position}", "positions", index)
            _check_count(chosen, len(ids), "positions")
        else:
            chosen = [position for position, token in enumerate(ids, start=1) if token == codes.mask]
            if not chosen:
                raise invalid("has no <mask>: add some, or give positions or max_new_tokens", "sequence")
            options = replace(options, positions=chosen)
        for position in constraint.by_position:
            if position not in chosen:
                raise invalid(f"names position {position}, where nothing is generated", "allowed", str(position))
        stored = homologs is None and request.context is not None
        job = GenerateJob(codes.decode(ids), len(ids), codes.around, options, request.seed, stored, homologs)
        return self._small(job, "sequence", len(homologs or ()))

    @property
    def _reads_one(self) -> str:
        return f"{self.turbo.model.family.name} reads one protein at a time and no homologs"

    def _protein(self, context: str) -> str:
        """The protein of a stored context."""
        if self.homologs is not None:
            name = self.turbo.model.family.name
            message = f"contexts of {name} are homologs: post a protein and its context to /v1/variants"
            raise RequestError(422, message, ("path", "id"))
        return self.contexts.sequence(context)

    def _homologs_before(self, query: str, context: str | Sequence[str] | None, *field: str | int) -> list[str]:
        """Homologs of each context that a query is read after.

        Args:
            query: residues, which `field` of the body holds; none for `sequence`.
            context: keys.
        """
        if context is None:
            return []
        limits, around = self.homologs, self.turbo.codes.around
        if limits is None:
            raise invalid(self._reads_one, "context")
        keys = [context] if isinstance(context, str) else context
        _check_count(keys, self.limits.averaged, "context")
        found = [self.contexts.sequence(key, ("body", "context")) for key in keys]
        for text in found:
            with field_errors(*(field or ("context",))):
                limits.check_sequences("protein and context", [*text.split(SEPARATOR), query], around)
        return found

    def _with_template(self, request: GenerateRequest, template: str) -> GenerateRequest:
        """The request with masks for what a template leaves open, and its other residues, after the sequence."""
        if request.sequence is None:
            raise invalid("a template needs a sequence to follow", "sequence")
        for name in ("max_new_tokens", "positions"):
            if getattr(request, name) is not None:
                raise invalid("a template says what is drawn; leave this out", name)
        if isinstance(request.allowed, dict):
            raise invalid("with a template, residues by position belong into it", "allowed")
        if len(template) > self.limits.candidate_residues * _CHARACTERS_PER_RESIDUE:
            raise invalid(f"has {len(template):,} characters", "template")
        with field_errors("template"):
            places = parse_template(template, (request.allowed or STANDARD_RESIDUES).upper())
        if len(places) > self.limits.candidate_residues:
            raise invalid(f"has {len(places):,} residues; at most {self.limits.candidate_residues:,}", "template")
        ids = self._encode(request.sequence, self.limits.residues, "sequence")
        drawn = {len(ids) + place: own for place, own in enumerate(places, start=1) if len(own) > 1}
        if not drawn:
            raise invalid("leaves nothing to draw; X stands for any residue", "template")
        peptide = "".join(own if len(own) == 1 else self.turbo.codes.mask_symbol for own in places)
        changed = {
            "sequence": self.turbo.codes.decode(ids) + peptide,
            "positions": list(drawn),
            "allowed": {str(position): own for position, own in drawn.items()},
        }
        return request.model_copy(update=changed)

    def _residues(self, sequence: str, *field: str | int) -> str:
        """The residues of a sequence, upper case, without masks."""
        ids = self._encode(sequence, self.limits.residues, *field)
        if self.turbo.codes.mask in ids:
            raise invalid("holds a <mask>; give residues only", *field)
        return self.turbo.codes.decode(ids)

    def _encode(self, sequence: str, longest: int, *field: str | int) -> list[int]:
        """Token ids of a sequence."""
        if len(sequence) > longest * _CHARACTERS_PER_RESIDUE:
            raise invalid(f"has {len(sequence):,} characters; at most {longest:,} residues are allowed", *field)
        with field_errors(*field):
            ids = self.turbo.codes.encode(sequence, ".".join(map(str, field)))
        if len(ids) > longest:
            raise invalid(f"has {len(ids):,} residues; at most {longest:,} are allowed", *field)
        return ids

    def _small(self, job: _Job, field: str, contexts: int = 0) -> _Job:
        """The job, unless it is too large to be run. Contexts that it averages are read one after the other."""
        most = self.limits.tokens * max(1, contexts)
        if job.tokens > most:
            allowed = f"at most {most:,} are allowed per request{' with so many contexts' * (contexts > 1)}"
            raise invalid(f"needs about {job.tokens:,} tokens; {allowed}: divide it into several", field)
        return job


def _check_count(items: Sequence[object], most: int, field: str) -> None:
    if not 1 <= len(items) <= most:
        raise invalid(f"must hold 1 to {most:,} items, got {len(items):,}", field)


def _check_at_most(value: int | None, most: int, field: str) -> None:
    if value is not None and value > most:
        raise invalid(f"must be at most {most:,}, got {value}", field)


def _by_position(allowed: str | Mapping[str, str] | None) -> str | dict[int, str] | None:
    """Residues by position, whose numbers are strings in JSON."""
    if not isinstance(allowed, Mapping):
        return allowed
    for position in allowed:
        if not (position.isascii() and position.isdecimal() and len(position) < 10 and position[0] != "0"):
            raise invalid(f"positions are integers counted from 1, got {position[:40]!r}", "allowed")
    return {int(position): letters for position, letters in allowed.items()}


def _refuse(error: ValueError, fields: Mapping[str, object]) -> NoReturn:
    """Raise an error of the options as one of the field that it names."""
    named = next((name for name in _FIELD.findall(str(error)) if name in fields), None)
    raise invalid(str(error), *([] if named is None else [named])) from None
