"""Finding the proteins of a file by the names that tables give them."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence

from esm_turbo.proteins.fasta import ProteinRecord, uniprot_parts

_SHOWN, _SHOWN_NAMES = 40, 3


class UnknownProteinError(ValueError):
    """No protein has the given name.

    Attributes:
        name: the name.
        noun: what it should be a name of, such as `target`.
        known: the identifiers that there are.
    """

    def __init__(self, name: str, noun: str, known: Sequence[str]) -> None:
        near = nearest(name, [*known, *(part for one in known for part in uniprot_parts(one))])
        hint = f"there are {listed(known)}" if near is None else f"did you mean {shown(near)}?"
        super().__init__(f"there is no usable {noun} {shown(name)}; {hint}")
        self.name = name
        self.noun = noun
        self.known = known


class ProteinIndex:
    """Proteins by identifier, by sequence, and by accession or entry name if the identifier is one of UniProt."""

    def __init__(self, records: Sequence[ProteinRecord], noun: str = "protein") -> None:
        self.noun = noun
        self.records = records
        self._by_id = {record.id: record for record in records}
        # The first of several with one sequence, if they are numbered alike: they are the same to the model.
        numbered = {(record.sequence, record.first_position): record for record in reversed(records)}
        several = Counter(sequence for sequence, _ in numbered)
        self._by_sequence = {sequence: one for (sequence, _), one in numbered.items() if several[sequence] == 1}
        self._by_part: dict[str, ProteinRecord | None] = {}
        for record in records:
            for part in dict.fromkeys(uniprot_parts(record.id)):
                # A part of two identifiers names neither.
                self._by_part[part] = None if part in self._by_part else record

    def find(self, name: str) -> ProteinRecord:
        """The protein of this name.

        Args:
            name: identifier, or a part of it; or the whole sequence, in either case.

        Raises:
            UnknownProteinError: there is none.
        """
        found = self._by_id.get(name) or self._by_part.get(name) or self._by_sequence.get(name.upper())
        if found is None:
            # The identifiers may have been reduced to accessions.
            found = next((self._by_id[part] for part in uniprot_parts(name) if part in self._by_id), None)
        if found is None:
            raise UnknownProteinError(name, self.noun, list(self._by_id))
        return found


def nearest(name: str, known: Sequence[str]) -> str | None:
    """The known name that is most like another one, in any case of letters; None if none is much like it."""
    by_lower = {one.lower(): one for one in reversed(known)}
    found = difflib.get_close_matches(name.lower(), by_lower, n=1) if len(name) <= _SHOWN else []
    return by_lower[found[0]] if found else None


def shown(name: str) -> str:
    """A name, quoted, for a message of one line."""
    return repr(name if len(name) <= _SHOWN else name[: _SHOWN - 3] + "...")


def listed(names: Sequence[str]) -> str:
    """The first of many names, for a message of one line."""
    rest = len(names) - _SHOWN_NAMES
    return ", ".join(map(shown, names[:_SHOWN_NAMES])) + (f" and {rest:,} more" if rest > 0 else "")
