"""Select the proteins of `calibration_data/` from a folder of source files.

    python scripts/select_calibration_proteins.py SOURCES [--out calibration_data] [--seed 0]

Run by maintainers. SOURCES has the files listed in `calibration_data/README.md`; the result depends only on their
content and the seed. Writes `proteins.fasta`, `manifest.tsv` and the numbers in `README.md`.
"""

import argparse
import csv
import gzip
import hashlib
import io
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from Bio.SeqUtils.ProtParamData import kd

from esm_turbo.files.writing import replacing
from esm_turbo.proteins.fasta import STANDARD_RESIDUES, ProteinRecord, read_fasta_strict, sha256_file

PDB_FILE = "pdb_chains_ss3.tsv.gz"
REFSEQ_FILE = "human_refseq.fasta.gz"
UNIPROT_FILE = "uniprot_archaea_viruses_mitochondria.fasta.gz"
HELD_OUT_FASTA = ("cath_val200.fasta", "paper_six.fasta")
HELD_OUT_PEPTIDES = "peptide_targets_dev.csv"
HELD_OUT_MUTANTS = "blat_ecolx_ranganathan2015.csv"

MIN_LENGTH, MAX_LENGTH = 30, 1022
LENGTH_BINS = ((30, 150), (151, 350), (351, 700), (701, 860), (861, 1022))
# Numbers of proteins by class and length bin; long chains of one structural class are rare in the sources.
TARGETS: dict[str, tuple[int, ...]] = {
    "mainly_alpha": (40, 39, 13, 6, 6),
    "mainly_beta": (42, 38, 14, 7, 3),
    "alpha_beta": (38, 36, 10, 2, 18),
    "little_structure": (64, 24, 5, 2, 1),
    "transmembrane": (36, 40, 14, 2, 24),
    "disordered": (46, 40, 14, 2, 14),
}

KMER = 10
MAX_SHARED_KMERS = 2
TM_WINDOW, TM_HYDROPATHY, MIN_TM_SEGMENTS = 19, 1.6, 3
MAX_LITTLE_STRUCTURE, MIN_HELIX, MIN_STRAND = 0.30, 0.15, 0.10
MANIFEST_COLUMNS = (
    "id",
    "source",
    "source_file",
    "licence",
    "class",
    "length",
    "helix",
    "strand",
    "tm_segments",
    "charge_hydropathy",
    "sha256",
)
SUMMARY_BEGIN, SUMMARY_END = "<!-- summary: begin -->", "<!-- summary: end -->"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A candidate protein with the evidence for its class; fractions are of its residues."""

    id: str
    sequence: str
    structural_class: str
    source: str
    source_file: str
    licence: str
    helix: float | None
    strand: float | None
    tm_segments: int
    charge_hydropathy: float

    @property
    def stratum(self) -> tuple[str, int]:
        """Class and index of the length bin."""
        return self.structural_class, length_bin(len(self.sequence))


def length_bin(length: int) -> int:
    """Index in `LENGTH_BINS` of a length in residues."""
    return next(index for index, (low, high) in enumerate(LENGTH_BINS) if low <= length <= high)


def structural_class_of_ss3(ss3: str) -> str:
    """Classify a chain by its secondary structure, a string of H (helix), E (strand) and C (other).

    A total of helix and strand below 30 % is little structure. The other limits are those of Nakashima, Nishikawa and
    Ooi (J. Biochem. 99:153, 1986): strand below 10 % is mainly alpha, helix below 15 % mainly beta.
    """
    helix, strand = ss3.count("H") / len(ss3), ss3.count("E") / len(ss3)
    if helix + strand < MAX_LITTLE_STRUCTURE:
        return "little_structure"
    if strand < MIN_STRAND:
        return "mainly_alpha"
    return "mainly_beta" if helix < MIN_HELIX else "alpha_beta"


def transmembrane_segments(sequence: str) -> int:
    """Count non-overlapping windows of 19 residues with a mean hydropathy of at least 1.6.

    The window and limit for membrane-spanning segments are those of Kyte and Doolittle (J. Mol. Biol. 157:105, 1982).
    """
    # The scale has one decimal. In whole tenths the sums are exact, and so is the comparison at the limit.
    tenths = [round(10 * kd[residue]) for residue in sequence]
    least = round(10 * TM_HYDROPATHY) * TM_WINDOW
    count, start = 0, 0
    while start + TM_WINDOW <= len(tenths):
        spans = sum(tenths[start : start + TM_WINDOW]) >= least
        count += spans
        start += TM_WINDOW if spans else 1
    return count


def charge_hydropathy(sequence: str) -> float:
    """Distance from the charge-hydropathy boundary; natively unfolded proteins are above 0.

    |net charge per residue| - (2.785 H - 1.151), with H the mean Kyte-Doolittle hydropathy scaled to 0...1 (Uversky,
    Gillespie and Fink, Proteins 41:415, 2000).
    """
    count = Counter(sequence)
    net_charge = abs(count["K"] + count["R"] - count["D"] - count["E"])
    # H is this sum over 90 and the length; in whole numbers the sign is exact.
    tenths = sum(round(10 * kd[residue]) + 45 for residue in sequence)
    return (90_000 * net_charge - 2_785 * tenths + 1_151 * 90 * len(sequence)) / (90_000 * len(sequence))


def kmers(sequence: str) -> set[str]:
    """Distinct 10-mers of a sequence."""
    return {sequence[start : start + KMER] for start in range(len(sequence) - KMER + 1)}


def read_candidates(sources: Path) -> list[Candidate]:
    """Read the proteins that have a class, a length in range, and only standard residues."""
    return [*_pdb_candidates(sources / PDB_FILE), *_refseq_candidates(sources), *_uniprot_candidates(sources)]


def _usable(sequence: str) -> bool:
    return MIN_LENGTH <= len(sequence) <= MAX_LENGTH and set(sequence) <= set(STANDARD_RESIDUES)


def _pdb_candidates(path: Path) -> Iterator[Candidate]:
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file, delimiter="\t"):
            sequence, ss3 = row["sequence"], row["ss3"]
            if not _usable(sequence):
                continue
            segments = transmembrane_segments(sequence)
            # Two hydrophobic segments are ambiguous between a membrane protein and a soluble one.
            if segments == MIN_TM_SEGMENTS - 1:
                continue
            membrane = segments >= MIN_TM_SEGMENTS
            yield Candidate(
                id=row["chain"],
                sequence=sequence,
                structural_class="transmembrane" if membrane else structural_class_of_ss3(ss3),
                source="PDB",
                source_file=path.name,
                licence="CC0-1.0",
                helix=ss3.count("H") / len(ss3),
                strand=ss3.count("E") / len(ss3),
                tm_segments=segments,
                charge_hydropathy=charge_hydropathy(sequence),
            )


def _refseq_candidates(sources: Path) -> Iterator[Candidate]:
    for record in read_fasta_strict(sources / REFSEQ_FILE):
        yield from _by_sequence(record, "RefSeq (human)", REFSEQ_FILE, "public domain", may_be_disordered=True)


def _uniprot_candidates(sources: Path) -> Iterator[Candidate]:
    for record in read_fasta_strict(sources / UNIPROT_FILE):
        group = record.description.rpartition("[")[2].rstrip("]").lower()
        # Proteins of halophilic archaea are highly charged and folded: the boundary does not hold for them.
        yield from _by_sequence(
            record,
            f"UniProtKB/Swiss-Prot ({group})",
            UNIPROT_FILE,
            "CC-BY-4.0",
            may_be_disordered=group == "viruses",
        )


def _by_sequence(
    record: ProteinRecord, source: str, source_file: str, licence: str, *, may_be_disordered: bool
) -> Iterator[Candidate]:
    """Yield the protein if its sequence alone determines its class: transmembrane or disordered."""
    if not _usable(record.sequence):
        return
    segments = transmembrane_segments(record.sequence)
    distance = charge_hydropathy(record.sequence)
    if segments >= MIN_TM_SEGMENTS:
        structural_class = "transmembrane"
    elif may_be_disordered and segments == 0 and distance > 0:
        structural_class = "disordered"
    else:
        return
    yield Candidate(
        record.id,
        record.sequence,
        structural_class,
        source,
        source_file,
        licence,
        None,
        None,
        segments,
        distance,
    )


def held_out_sequences(sources: Path) -> Iterator[str]:
    """Yield the sequences of the evaluation sets, which must not be used in calibration."""
    for name in HELD_OUT_FASTA:
        yield from (record.sequence for record in read_fasta_strict(sources / name))
    with (sources / HELD_OUT_PEPTIDES).open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            yield row["Receptor Sequence"]
            yield row["Sequence"]
    with (sources / HELD_OUT_MUTANTS).open(encoding="utf-8", newline="") as file:
        mutants = [row["mutant"] for row in csv.DictReader(file)]
    wild_type = {int(mutant[1:-1]): mutant[0] for mutant in mutants}
    yield "".join(wild_type[position] for position in sorted(wild_type))


def select(
    candidates: Iterable[Candidate],
    held_out: Iterable[str],
    targets: Mapping[str, Sequence[int]],
    seed: int = 0,
) -> list[Candidate]:
    """Select proteins that share at most two 10-mers with each other and with all held-out sequences together.

    Args:
        candidates: To select from; their order does not matter.
        held_out: Sequences of evaluation sets.
        targets: Numbers of proteins by class and length bin.
        seed: Of the choice among candidates of the same class and length.

    Returns:
        The proteins, ordered so that every prefix is as balanced as the whole (see `interleave`).

    Raises:
        ValueError: A class has too few proteins of some length.
    """
    shuffled = sorted(candidates, key=lambda candidate: _digest(f"{seed} {candidate.id}"))
    strata: dict[tuple[str, int], list[Candidate]] = {
        (name, index): [] for name, counts in targets.items() for index in range(len(counts))
    }
    for candidate in shuffled:
        if candidate.stratum in strata:
            strata[candidate.stratum].append(candidate)
    held_out_kmers = set().union(*map(kmers, held_out))
    chosen_kmers: set[str] = set()
    chosen: dict[tuple[str, int], list[Candidate]] = {}
    # The scarcest first, before others exclude them by shared 10-mers.
    for stratum in sorted(strata, key=lambda key: len(strata[key]) - targets[key[0]][key[1]]):
        wanted = targets[stratum[0]][stratum[1]]
        chosen[stratum] = []
        for candidate in strata[stratum]:
            if len(chosen[stratum]) == wanted:
                break
            own = kmers(candidate.sequence)
            if max(len(own & held_out_kmers), len(own & chosen_kmers)) <= MAX_SHARED_KMERS:
                chosen[stratum].append(candidate)
                chosen_kmers |= own
        if len(chosen[stratum]) < wanted:
            low, high = LENGTH_BINS[stratum[1]]
            raise ValueError(
                f"{stratum[0]}, {low} to {high} residues: {len(chosen[stratum])} distinct proteins for "
                f"{wanted}; lower the target or add a source"
            )
    return interleave({stratum: chosen[stratum] for stratum in strata})


def interleave(groups: Mapping[tuple[str, int], Sequence[Candidate]]) -> list[Candidate]:
    """Merge groups so that every prefix of the result has the class and length proportions of the whole.

    Each step takes from the group whose class, length bin and own count together lag furthest behind.

    Args:
        groups: Proteins by class and length bin; each group keeps its order.
    """
    waiting = {key: deque(group) for key, group in groups.items() if group}
    sizes: Counter[object] = Counter()
    for key, group in waiting.items():
        sizes.update(dict.fromkeys((key, *key), len(group)))
    total = sum(map(len, waiting.values()))
    placed: Counter[object] = Counter()
    merged: list[Candidate] = []
    while waiting:
        share = (len(merged) + 1) / total
        behind = {key: sum(share * sizes[part] - placed[part] for part in (key, *key)) for key in waiting}
        key = max(behind, key=behind.__getitem__)
        placed.update((key, *key))
        merged.append(waiting[key].popleft())
        if not waiting[key]:
            del waiting[key]
    return merged


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def fasta_text(proteins: Iterable[Candidate]) -> str:
    """Proteins as FASTA with their class in the header, 80 residues per line."""
    lines = []
    for protein in proteins:
        lines.append(f">{protein.id} class={protein.structural_class}")
        lines += [protein.sequence[start : start + 80] for start in range(0, len(protein.sequence), 80)]
    return "\n".join(lines) + "\n"


def manifest_text(proteins: Iterable[Candidate]) -> str:
    """One tab-separated line per protein: source, licence, class, evidence and digest."""
    text = io.StringIO()
    writer = csv.writer(text, delimiter="\t", lineterminator="\n")
    writer.writerow(MANIFEST_COLUMNS)
    for protein in proteins:
        fractions = ["" if value is None else f"{value:.4f}" for value in (protein.helix, protein.strand)]
        writer.writerow(
            [
                protein.id,
                protein.source,
                protein.source_file,
                protein.licence,
                protein.structural_class,
                len(protein.sequence),
                *fractions,
                protein.tm_segments,
                f"{protein.charge_hydropathy:.4f}",
                _digest(protein.sequence),
            ]
        )
    return text.getvalue()


def summary_text(proteins: Sequence[Candidate], sources: Path, seed: int) -> str:
    """Counts by class, length and source, and the digests of the source files, as Markdown."""
    ranges = [f"{low}-{high}" for low, high in LENGTH_BINS]
    lines = [
        f"| class | {' | '.join(ranges)} | proteins | residues |",
        "| --- |" + " ---: |" * (len(ranges) + 2),
    ]
    for name in [*TARGETS, "all"]:
        members = [protein for protein in proteins if name in ("all", protein.structural_class)]
        bins = Counter(length_bin(len(protein.sequence)) for protein in members)
        counts = " | ".join(str(bins[index]) for index in range(len(ranges)))
        residues = sum(len(protein.sequence) for protein in members)
        lines.append(f"| {name} | {counts} | {len(members)} | {residues:,} |")
    residues = sum(len(protein.sequence) for protein in proteins)
    past = [sum(max(0, len(protein.sequence) - start) for protein in proteins) / residues for start in (350, 700)]
    lines += [
        "",
        f"Residues past position 350: {past[0]:.1%}; past position 700: {past[1]:.1%}. Seed {seed}.",
    ]
    lines += ["", "| source | proteins |", "| --- | ---: |"]
    by_source = Counter(protein.source for protein in proteins)
    lines += [f"| {source} | {count} |" for source, count in sorted(by_source.items())]
    lines += ["", "| source file | SHA-256 |", "| --- | --- |"]
    lines += [f"| `{name}` | `{sha256_file(sources / name)}` |" for name in (PDB_FILE, REFSEQ_FILE, UNIPROT_FILE)]
    return "\n".join(lines)


def with_summary(readme: str, summary: str) -> str:
    """Replace the text between the summary marks of a README, or append it with marks."""
    block = f"{SUMMARY_BEGIN}\n{summary}\n{SUMMARY_END}"
    before, begin, rest = readme.partition(SUMMARY_BEGIN)
    _, end, after = rest.partition(SUMMARY_END)
    return before + block + after if begin and end else f"{readme}{block}\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(description="Select the calibration proteins from a folder of source files.")
    parser.add_argument("sources", type=Path, help="folder with the source files and the evaluation sets")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parents[1] / "calibration_data")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        candidates, held_out = read_candidates(options.sources), held_out_sequences(options.sources)
        proteins = select(candidates, held_out, TARGETS, options.seed)
        summary = summary_text(proteins, options.sources, options.seed)
        options.out.mkdir(parents=True, exist_ok=True)
        readme = options.out / "README.md"
        prose = readme.read_text(encoding="utf-8") if readme.exists() else ""
        for path, text in (
            (options.out / "proteins.fasta", fasta_text(proteins)),
            (options.out / "manifest.tsv", manifest_text(proteins)),
            (readme, with_summary(prose, summary)),
        ):
            with replacing(path) as temporary:
                temporary.write_text(text, encoding="utf-8", newline="\n")
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
