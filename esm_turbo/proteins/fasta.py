"""Protein sequences: reading FASTA files, checking residues, batching by token budget.

Everything is checked here, before tokenisation: the ESM-2 tokenizer turns a run of unknown letters into one `<unk>` and
has tokens for `-` and `.`, so that it would accept a bad sequence silently.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from esm_turbo.files.csv_files import is_table
from esm_turbo.files.text_files import NO_SUCH_FILE, DamagedGzipError, text_lines

RESIDUES = "LAGVSERTIDPKQNFYMHWCXBUZO"
"""The residue codes of ESM-2's vocabulary, in its order: the 20 standard residues and X, B, U, Z, O."""

CHAIN_BREAK = "|"
"""Stands between chains, in vocabularies that have it."""

STANDARD_RESIDUES = "ACDEFGHIKLMNPQRSTVWY"
"""The 20 standard residues, in alphabetical order."""

PARTICULAR_RESIDUES = STANDARD_RESIDUES + "OU"
"""The codes of one residue each; B, X and Z stand for any of several."""

UNKNOWN = "BXZ"
"""Letters that stand for several residues. The model has seen few of them, and predicts none."""

GAPS = "-.~"
"""Characters that stand for no residue in rows of alignments."""

_NOT_A_RESIDUE = re.compile(f"[^{RESIDUES}]")
_NEITHER_RESIDUE_NOR_GAP = re.compile(f"[^{RESIDUES}{re.escape(GAPS)}]")
# str.upper would also change non-ASCII letters, some of them into two.
_TO_UPPER = str.maketrans("abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJKLMNOPQRSTUVWXYZ")
_WITHOUT_GAPS = str.maketrans("", "", GAPS)
_CLASS_IN_HEADER = re.compile(r"(?:^|\s)class=(\S+)")
_FIRST_IN_HEADER = re.compile(r"(?:^|\s)first_position=(-?\d{1,9})(?=\s|$)", re.ASCII)
_NAMES_FIRST = re.compile(r"(?:^|\s)first_position\s*=", re.ASCII | re.IGNORECASE)
_RANGE_OF_ID = re.compile(r"/(\d{1,9})-(\d{1,9})$", re.ASCII)
# A line of a list of sequences, and the names of columns, which may consist of residues, too.
_LISTED = re.compile(rf"[A-Za-z?*{re.escape(GAPS)}]+", re.ASCII)
_COLUMN_NAMES = ("sequence", "binder")
_HEADLINES = {"seq", "sequences", "binders", "peptide", "peptides", "candidate", "candidates", "protein", "proteins"}
# Records of HH-suite's alignments that are no proteins of the family, such as a predicted secondary structure.
_ANNOTATION = re.compile(r">(?:ss|sa|aa)_(?:pred|conf|dssp)(?!\S)")
# `sp|P69905|HBA_HUMAN`: database, accession and entry name.
_UNIPROT = re.compile(r"(?:sp|tr)\|([A-Z0-9]+(?:-\d+)?)\|(\w+)", re.ASCII)
# An EC number looks the same.
_CATH_CODE = re.compile(r"(?<!EC)(?<!EC:)(?:^|\s)([1-4])\.\d+\.\d+\.\d+(?=\s|$)")
_CLASS_OF_CATH = {"1": "mainly_alpha", "2": "mainly_beta", "3": "alpha_beta", "4": "little_structure"}
_NOT_TEXT = "is not text; give protein sequences in FASTA format, encoded as UTF-8, plain or gzip"
_SHOWN_CHARACTERS = 60
# How the reason ends why sequences without headers are refused.
ADD_HEADERS = "put one before each sequence"


@dataclass(frozen=True, slots=True)
class ProteinRecord:
    """One protein of a FASTA file.

    Attributes:
        id: First word of the header; unique within its file.
        sequence: Upper-case residue codes, all of them in `RESIDUES`, at least one; `|` between chains if asked for.
        description: The rest of the header, may be empty.
    """

    id: str
    sequence: str
    description: str = ""

    @property
    def structural_class(self) -> str | None:
        """The structural class stated in the header, or None.

        Read from `class=NAME`, as in the shipped calibration set, or else from a CATH code such as `3.40.50.720`, whose
        first number is the class (1 mainly alpha, 2 mainly beta, 3 alpha-beta, 4 little structure).
        """
        if named := _CLASS_IN_HEADER.search(self.description):
            return named[1]
        if cath := _CATH_CODE.search(self.description):
            return _CLASS_OF_CATH[cath[1]]
        return None

    @property
    def first_position(self) -> int | None:
        """Position of the first residue, if the header states it, or None.

        Read from `first_position=24`, or else from an identifier that ends in a range of as many residues, as
        `BLAT_ECOLX/24-286` does.
        """
        if stated := _FIRST_IN_HEADER.search(self.description):
            return int(stated[1])
        if (spanned := _RANGE_OF_ID.search(self.id)) and int(spanned[2]) - int(spanned[1]) == len(self.sequence) - 1:
            return int(spanned[1])
        return None


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that cannot be used.

    Attributes:
        record: Identifier; `#N` for the N-th record if it has none; empty if the problem is the whole file.
        reason: The problem, the residue (counted from 1 without whitespace), and the remedy.
        count: How many records share it.
    """

    record: str
    reason: str
    count: int = 1


class FastaError(ValueError):
    """A FASTA file that cannot be used, as a whole or because of some of its records.

    The message is one line: file, first problem, and how many more there are.

    Attributes:
        path: The file, as given.
        problems: In the order of the file; never empty.
    """

    def __init__(self, path: str, problems: Sequence[BadRecord]) -> None:
        super().__init__(path, problems)
        self.path = path
        self.problems = list(problems)

    def __str__(self) -> str:
        first, more = self.problems[0], len(self.problems) - 1
        where = f"{self.path}, record {_shown(first.record)}" if first.record else self.path
        rest = f" (and {more} more bad record{'s' if more > 1 else ''})" if more else ""
        return f"{where}: {first.reason}{rest}"


class _Rejected(ValueError):
    """The reason for rejecting a sequence or a file, without its name."""


def normalize_sequence(sequence: str, *, name: str, unknown: str | None = None, remove_gaps: bool = False) -> str:
    """Convert a protein sequence to upper-case residue codes.

    Whitespace and one trailing `*` (the translated stop codon) are removed.

    Args:
        sequence: One-letter residue codes in either case.
        name: Name of the sequence in error messages; empty for none.
        unknown: None, or `"X"` to replace `?` and letters outside `RESIDUES` with X. Digits, gaps, internal stops and
            other characters stand for no residue.
        remove_gaps: Remove the characters of `GAPS`.

    Raises:
        TypeError: `sequence` is not a string.
        ValueError: Nothing is left, there is a `*` before the end, or a character is outside `RESIDUES` (unless
            `unknown` or `remove_gaps` is for it). The message gives the name, the position, counted from 1, and what
            to do.
    """
    return _named(name, sequence, unknown=unknown, remove_gaps=remove_gaps)


def check_sequence(sequence: str, *, name: str) -> str:
    """As `normalize_sequence`, for a sequence of a Python call, which has no options for what it holds.

    Raises:
        TypeError: `sequence` is not a string.
        ValueError: as by `normalize_sequence`; the message names no options.
    """
    return _named(name, sequence, has_options=False)


def _named(name: str, sequence: str, **options: Any) -> str:
    """As `_normalized`, with the name in errors, if there is one."""
    if not isinstance(sequence, str):
        raise TypeError(f"{name}: a sequence must be a string, got {type(sequence).__name__}")
    try:
        return _normalized(sequence, **options)
    except _Rejected as error:
        raise ValueError(f"{name}: {error}" if name else str(error)) from None


def read_fasta(
    path: str | os.PathLike[str],
    *,
    unknown: str | None = None,
    remove_gaps: bool = False,
    accessions: bool = False,
    chain_breaks: bool = False,
    lists: bool = False,
) -> tuple[list[ProteinRecord], list[BadRecord]]:
    """Read the proteins of a FASTA file, plain or gzip, and separate the unusable records.

    A record is bad if it has no identifier, repeats that of an earlier record, states two first positions, or has a
    sequence that `normalize_sequence` rejects. Windows line ends, lower case and a byte order mark are accepted.

    Args:
        path: The file; gzip is recognised by its first bytes, not by the name. Of an
            alignment, a file named `.a3m` or `.a2m`, the sequences are read without gaps and with their insertions, and
            without HH-suite's annotations, such as `ss_pred`.
        unknown: As for `normalize_sequence`.
        remove_gaps: As for `normalize_sequence`.
        accessions: Reduce identifiers of UniProt, such as `sp|P69905|HBA_HUMAN`, to their accession.
        chain_breaks: Keep `|`, which stands between chains; for models whose vocabulary has it.
        lists: Accept a file named `.txt` that has no headers but one sequence per line, named `#1` and so on.

    Returns:
        The good and the bad records, each in the order of the file.

    Raises:
        FastaError: The whole file cannot be used: missing, a folder, unreadable, empty, not text, a damaged gzip file,
            or not FASTA.
    """
    remove_gaps = remove_gaps or is_alignment(path)
    good: list[ProteinRecord] = []
    bad: list[BadRecord] = []
    first_use: dict[str, int] = {}
    for number, (title, raw) in enumerate(raw_records(path, lists=lists), start=1):
        identifier, *rest = title.split(maxsplit=1) or [""]
        if accessions:
            identifier = next(iter(uniprot_parts(identifier)), identifier)
        try:
            if not identifier or _NAMES_FIRST.match(identifier):
                raise _Rejected("the header names no identifier; write one directly after '>'")
            earlier = first_use.setdefault(identifier, number)
            if earlier != number:
                raise _Rejected(f"record {number} repeats the identifier of record {earlier}; rename one of them")
            stated = len(_NAMES_FIRST.findall(title))
            if stated > 1:
                raise _Rejected("the header states `first_position` more than once; leave one")
            if stated and not _FIRST_IN_HEADER.search(title):
                raise _Rejected("the header states a `first_position` that is no number; write it as first_position=24")
            sequence = _normalized(raw, unknown=unknown, remove_gaps=remove_gaps, chain_breaks=chain_breaks)
            good.append(ProteinRecord(identifier, sequence, "".join(rest)))
        except _Rejected as error:
            bad.append(BadRecord(identifier or f"#{number}", str(error)))
    return good, bad


def read_fasta_strict(
    path: str | os.PathLike[str], *, unknown: str | None = None, remove_gaps: bool = False, accessions: bool = False
) -> list[ProteinRecord]:
    """Read the proteins of a FASTA file, all of whose records must be good.

    Args:
        path: As for `read_fasta`.
        unknown: As for `normalize_sequence`.
        remove_gaps: As for `normalize_sequence`.
        accessions: As for `read_fasta`.

    Raises:
        FastaError: As for `read_fasta`, or any record is bad; `problems` has all bad records.
    """
    good, bad = read_fasta(path, unknown=unknown, remove_gaps=remove_gaps, accessions=accessions)
    if bad:
        raise FastaError(os.fspath(path), bad)
    return good


def uniprot_parts(identifier: str) -> tuple[str, ...]:
    """Accession and entry name in an identifier of UniProt, such as `sp|P69905|HBA_HUMAN`; of others, nothing."""
    match = _UNIPROT.fullmatch(identifier)
    return match.groups() if match else ()


def sha256_file(path: str | os.PathLike[str]) -> str:
    """SHA-256 digest of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_identifiers(records: Iterable[ProteinRecord]) -> None:
    """Check that results of records can be told apart by their identifiers.

    Raises:
        ValueError: one names two sequences.
    """
    known: dict[str, str] = {}
    for record in records:
        if known.setdefault(record.id, record.sequence) != record.sequence:
            raise ValueError(f"identifier {record.id!r} names two sequences; rename one of them")


def sha256_residues(sequences: Iterable[str]) -> str:
    """SHA-256 digest of sequences in their order, in hexadecimal."""
    return hashlib.sha256("\n".join(sequences).encode()).hexdigest()


def _shown(text: str) -> str:
    """Quote input for a one-line message: control characters escaped, length bounded."""
    return repr(text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "...")


def _normalized(
    sequence: str,
    *,
    unknown: str | None = None,
    remove_gaps: bool = False,
    has_options: bool = True,
    chain_breaks: bool = False,
) -> str:
    if unknown is not None and unknown not in ("X", "x"):
        raise ValueError(f"`unknown` must be None or 'X', got {unknown!r}")
    residues = "".join(sequence.split()).translate(_TO_UPPER)
    # Positions in messages count what is given, gaps included.
    residues = residues.rstrip(GAPS if remove_gaps else "").removesuffix("*")
    if (stop := residues.find("*")) >= 0:
        raise _Rejected(f"position {stop + 1} is a stop '*' inside the sequence; cut it there or remove the record")
    if unknown is not None:
        residues = _NEITHER_RESIDUE_NOR_GAP.sub(lambda o: "X" if o[0] == "?" or o[0].isalpha() else o[0], residues)
    checked = residues.replace(CHAIN_BREAK, "X") if chain_breaks else residues
    if outside := (_NEITHER_RESIDUE_NOR_GAP if remove_gaps else _NOT_A_RESIDUE).search(checked):
        raise _Rejected(
            f"position {outside.start() + 1} is {outside[0]!a}, not one of the 25 residue codes "
            f"(A to Z without J); {_remedy(outside[0], has_options)}"
        )
    residues = residues.translate(_WITHOUT_GAPS) if remove_gaps else residues
    if not residues.strip(CHAIN_BREAK):
        raise _Rejected("holds no residues; give a sequence or remove the record")
    return residues


def _remedy(character: str, has_options: bool) -> str:
    """The advice for a character that is not a residue code, with or without the options for it."""
    if character in GAPS:
        if not has_options:
            return f"remove gaps, as by sequence.replace({character!r}, '')"
        return "remove gaps (--remove-gaps, in Python remove_gaps=True)"
    if character.isdecimal():
        return "remove numbers from the sequence"
    if character == "?" or (character.isascii() and character.isalpha()):
        return "correct it, or replace it with X" + (" (--unknown X, in Python unknown='X')" if has_options else "")
    return "correct or remove it"


def raw_records(path: str | os.PathLike[str], *, lists: bool = False) -> Iterator[tuple[str, str]]:
    """Yield headers (without `>`) and raw sequences of a FASTA file or an alignment, plain or gzip.

    Args:
        path: the file.
        lists: see `read_fasta`.

    Raises:
        FastaError: the whole file cannot be used, see `read_fasta`.
    """
    # Imported here: Biopython takes longer to load than the rest of this module, and only files need it.
    from Bio.SeqIO.FastaIO import SimpleFastaParser

    parse: Callable[[Iterator[str]], Iterator[tuple[str, str]]] = SimpleFastaParser
    try:
        # Windows would report a folder as a missing permission.
        if Path(path).is_dir():
            raise IsADirectoryError(path)
        lines = text_lines(path)
        if lists and os.fspath(path).lower().removesuffix(".gz").endswith(".txt"):
            lines = _with_headers(lines)
        yield from parse(_checked_lines(lines, alignment=is_alignment(path), table=is_table(path)))
    except UnicodeDecodeError:
        reason = _NOT_TEXT
    except (DamagedGzipError, _Rejected) as error:
        reason = str(error)
    except FileNotFoundError:
        reason = NO_SUCH_FILE
        if _is_sequence(os.fspath(path)):
            reason += "; if this is a sequence, write it to a FASTA file"
    except IsADirectoryError:
        reason = "is a folder; give a FASTA file"
    except OSError as error:
        reason = f"cannot be read ({error.strerror or error}); check the path and its permissions"
    else:
        return
    raise FastaError(os.fspath(path), [BadRecord("", reason)]) from None


def _is_sequence(text: str) -> bool:
    return not _NOT_A_RESIDUE.search(text.translate(_TO_UPPER))


def is_alignment(path: str | os.PathLike[str]) -> bool:
    """True if a file is an alignment by its name: `.a3m` or `.a2m`."""
    return os.fspath(path).lower().removesuffix(".gz").endswith((".a3m", ".a2m"))


def _with_headers(lines: Iterable[str]) -> Iterator[str]:
    """Pass the lines of FASTA on, and give each line of a list of sequences a header; reject other text."""
    count = 0
    remaining = iter(lines)
    for number, line in enumerate(remaining, start=1):
        text = line.strip()
        if not count and text.startswith(">"):
            yield line
            yield from remaining
        elif text:
            count += 1
            is_name = text.lower() in _COLUMN_NAMES or (text.lower() in _HEADLINES and not text.isupper())
            if is_name or not _LISTED.fullmatch(text):
                raise _Rejected(
                    f"line {number} is {_shown(text)}, not a sequence of residues; write one sequence per line and"
                    " nothing else, or FASTA, or name a table .csv or .tsv"
                )
            yield f">#{count}\n"
            yield f"{text}\n"


def _alignment_lines(numbered: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Pass the lines of an alignment on, without annotations, comments before its records, and zero bytes.

    MMseqs2 ends each alignment of a database with a zero byte, which then begins the next line: what follows is
    rejected unless it begins with the same protein.
    """
    query, begin, in_annotation, begins = "", 0, False, True
    # Residues of the first record of a part while its lines come.
    first: str | None = None
    for number, line in numbered:
        begins |= line.startswith("\0")
        line = line.strip("\0")
        if line.startswith(">"):
            in_annotation = _ANNOTATION.match(line) is not None
            if not in_annotation:
                query, first = _checked_query(query, first, begin), "" if begins else None
                begin, begins = number, False
        elif first is not None and not in_annotation:
            first += line.strip()
        if not (in_annotation or not line or (begin == 0 and line.startswith("#"))):
            yield number, line
    _checked_query(query, first, begin)


def _checked_query(query: str, first: str | None, begin: int) -> str:
    """The protein with which an alignment begins, given the first record of one of its parts, if there was one."""
    if query and first and first != query:
        raise _Rejected(
            f"holds the alignment of another protein from line {begin}, after a zero byte; give one (`mmseqs unpackdb`"
            " divides a database)"
        )
    return query or first or ""


def _checked_lines(lines: Iterable[str], alignment: bool, table: bool) -> Iterator[str]:
    """Pass lines on; reject a file without records or with text before the first header.

    The parser would skip such text silently.
    """
    in_records = False
    numbered: Iterable[tuple[int, str]] = enumerate(lines, start=1)
    for number, line in _alignment_lines(numbered) if alignment else numbered:
        if "\0" in line:
            raise _Rejected(_NOT_TEXT)
        if line.startswith((">P1;", ">F1;")):
            shown = _shown(line.strip())
            raise _Rejected(
                f"is PIR, not FASTA: a description follows line {number}, {shown}; convert the file to FASTA"
            )
        if not in_records and line.strip():
            if not line.startswith(">"):
                # A column's name may consist of residues, too.
                bare = _is_sequence(line.strip()) and not table
                remedy = ADD_HEADERS if bare else "give protein sequences in FASTA format"
                raise _Rejected(
                    f"is not FASTA: line {number} is {_shown(line.strip())}, not a header '>identifier'; {remedy}"
                )
            in_records = True
        yield line
    if not in_records:
        raise _Rejected("is empty; give at least one protein")
