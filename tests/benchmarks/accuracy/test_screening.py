"""Targets, decoys, and presets of the screening."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.accuracy import screening
from esm_turbo import TurboEsm


def test_every_target_has_its_peptide_and_decoys() -> None:
    made = screening.screens()
    assert len({screen.name for screen in made}) == 92
    lengths = [len(screen.target) for screen in made]
    assert lengths == sorted(lengths)
    peptides = {screen.candidates[0] for screen in made}
    for screen in made:
        own, *decoys = screen.candidates
        shuffled, swapped = decoys[: screening.SHUFFLED], decoys[screening.SHUFFLED :]
        assert len(swapped) == screening.SWAPPED == len(set(swapped))
        assert all(Counter(one) == Counter(own) for one in shuffled)
        assert set(swapped) <= peptides - {own}
    assert screening.screens() == made


def test_a_selection_of_targets_covers_all_lengths() -> None:
    made, some = screening.screens(), screening.screens(10)
    assert len(some) == 10 and some[0] == made[0]
    assert len(some[-1].target) > 500
    cases = list(screening.cases(10))
    assert [case.name for case in cases] == [f"group {i} of 10" for i in range(1, 11)]
    assert len(list(screening.cases())) == 23


def test_the_share_of_decoys_ranked_below() -> None:
    assert screening._ahead(1.0, [2.0, 1.0, 0.5, 3.0]) == 0.625


def test_the_preset_is_restored(turbo: TurboEsm) -> None:
    before = turbo.model.esm.turbo_config
    assert screening.with_preset(turbo, "turbo1", lambda: turbo.model.esm.turbo_config.name) == "turbo1"
    with pytest.raises(RuntimeError):
        screening.with_preset(turbo, "exact", lambda: (_ for _ in ()).throw(RuntimeError("stop")))
    assert turbo.model.esm.turbo_config == before
