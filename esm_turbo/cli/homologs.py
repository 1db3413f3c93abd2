"""Homologs of a command: the family of its protein, and the contexts that are drawn from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from esm_turbo.cli.console import say
from esm_turbo.cli.options import MANY, OptionalInput
from esm_turbo.config import DEFAULT_CONTEXT_TOKENS, DEFAULT_MAX_SIMILARITY
from esm_turbo.files.paths import is_device
from esm_turbo.files.tabular import counted
from esm_turbo.proteins.fasta import ProteinRecord, sha256_file

if TYPE_CHECKING:
    from esm_turbo.proteins.alignments import HomologContext
    from esm_turbo.turbo_esm import TurboEsm


_GROUP = Group("Homologs")


@Parameter(name="*", group=_GROUP)
@dataclass(frozen=True, kw_only=True)
class FamilyOptions:
    """Homologs that the protein is read after, by families with exact contexts, such as E1."""

    homologs: Annotated[
        OptionalInput,
        Parameter(
            help="Family of the protein: an alignment (.a3m or .a2m) whose first record it is, or any FASTA file; plain"
            " or gzip."
        ),
    ] = None
    context_tokens: Annotated[
        tuple[int, ...], MANY, Parameter(help="Budget of a context, in residues of its homologs; several for several.")
    ] = (DEFAULT_CONTEXT_TOKENS,)
    max_similarity: Annotated[
        tuple[float, ...],
        MANY,
        Parameter(help="Largest share of the protein's residues that a homolog may have; one or several caps."),
    ] = (DEFAULT_MAX_SIMILARITY,)
    seed: Annotated[int, Parameter(help="Seed of the first context that is drawn; the next ones have the next.")] = 0


@Parameter(name="*", group=_GROUP)
@dataclass(frozen=True, kw_only=True)
class HomologOptions(FamilyOptions):
    """The same of a command that scores the protein."""

    freeze_query: Annotated[
        bool,
        Parameter(
            help="Run the protein once after its homologs, and then only --refresh residues around each masked"
            " position: faster, and no longer exact."
        ),
    ] = False


@dataclass(frozen=True)
class DrawnHomologs:
    """Contexts of a command.

    Attributes:
        path: of the family; None without one.
        contexts: one for each budget with each cap of similarity.
        freeze_query: see `score_variants`.
        sha256: digest of the file.
    """

    path: Path | None
    contexts: Sequence[HomologContext] = ()
    freeze_query: bool = False
    sha256: str = ""

    @classmethod
    def of(cls, options: FamilyOptions, records: Sequence[ProteinRecord], unknown: str | None) -> DrawnHomologs:
        """Draw contexts from the family of the only protein.

        Args:
            options: of the command.
            records: the proteins.
            unknown: as for `read_fasta`.

        Raises:
            ValueError: there are several proteins, an option is invalid or has no family, or the family is unusable,
                see `read_homologs` and `HomologFamily.sample`.
        """
        path = options.homologs
        if path is None:
            if options != type(options)():
                *names, last = (f"--{one.name.replace('_', '-')}" for one in fields(options) if one.name != "homologs")
                raise ValueError(f"{', '.join(names)} and {last} are for --homologs; name the family")
            return cls(None)
        if is_device(path):
            raise ValueError("results record the checksum of --homologs; give a file, not standard input")
        if len(records) != 1:
            raise ValueError(f"--homologs {path} is the family of one protein; there are {len(records)}")
        from esm_turbo.proteins.alignments import read_homologs

        read = sha256_file(path) if path.is_file() else ""
        family = read_homologs(path, records[0], unknown=unknown)
        if sha256_file(path) != read:
            raise ValueError(f"{path}: has changed while it was read; run it again")
        budgets, caps = options.context_tokens, options.max_similarity
        contexts = family.sample_several(budgets, max_similarity=caps, seed=options.seed)
        sizes = sorted({len(one.ids) for one in contexts})
        drawn = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
        say(f"{path}: {counted(len(contexts), 'context')} of {drawn} of {counted(len(family), 'homolog')}")
        return cls(path, contexts, isinstance(options, HomologOptions) and options.freeze_query, read)

    @property
    def texts(self) -> tuple[str, ...]:
        """Homologs of each context."""
        return tuple(one.sequence for one in self.contexts)

    @property
    def records(self) -> list[ProteinRecord]:
        """The contexts as records, by number."""
        return [ProteinRecord(f"context {number}", text) for number, text in enumerate(self.texts, start=1)]

    def check_model(self, turbo: TurboEsm) -> None:
        """Check that a model reads the homologs.

        Raises:
            ValueError: it reads none, or one or a context is too long for it.
        """
        if self.path is None:
            return
        from esm_turbo.proteins.homologs import SEPARATOR

        limits = turbo.model.base_model.exact_contexts
        if limits is None:
            raise ValueError(
                f"--homologs {self.path}: {turbo.model.family.name} reads one protein at a time and no homologs; name a"
                " checkpoint of E1 with --model"
            )
        for number, context in enumerate(self.contexts, start=1):
            homologs = context.sequence.split(SEPARATOR)
            for name, homolog in zip(context.ids, homologs, strict=True):
                limits.check_length(f"{self.path}: record {name!r}", len(homolog))
            limits.check_sequences(f"{self.path}: context {number}", homologs, turbo.codes.around)

    def to_dict(self) -> dict[str, Any]:
        """What a run used of it, as plain JSON values, under the key `homologs`; nothing without a family."""
        if self.path is None:
            return {}
        contexts = [one.to_dict() for one in self.contexts]
        drawn = {"file": self.path.name, "sha256": self.sha256, "contexts": contexts}
        return {"homologs": drawn | ({"freeze_query": True} if self.freeze_query else {})}
