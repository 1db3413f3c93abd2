"""Options of generation: values that are refused, and combinations."""

from __future__ import annotations

import pytest

from esm_turbo.tasks.generation.options import GenerationOptions


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "`max_new_tokens` must be an integer of at least 1, got 0"),
        ({"max_new_tokens": 2.0}, "got 2.0"),
        ({"order": "backwards"}, "`order` must be one of .*'random'.*, got 'backwards'"),
        ({"per_step": 0}, "`per_step` must be an integer of at least 1, got 0"),
        ({"sweeps": None}, "`sweeps` must be an integer of at least 1, got None"),
        ({"num_return_sequences": 0}, "`num_return_sequences` must be"),
        ({"temperature": -1}, "`temperature` must be from 1e-06 to 1000000, or 0 .*, got -1"),
        ({"temperature": 1e39}, "got 1e[+]39"),
        ({"temperature": 1e-45}, "or 0 for the most likely residue, got 1e-45"),
        ({"temperature": float("nan")}, "got nan"),
        ({"temperature": "1"}, "got '1'"),
        ({"temperature": None}, "got None"),
        ({"top_k": 0}, "`top_k` must be an integer of at least 1, got 0"),
        ({"top_p": 0}, "`top_p` must be above 0 and at most 1, got 0"),
        ({"top_p": 1.5}, "got 1.5"),
        ({"top_p": "a"}, "got 'a'"),
        ({"refresh": -1}, "`refresh` must be an integer of at least 0, got -1"),
        ({"refresh_every": 0}, "`refresh_every` must be an integer of at least 1, got 0"),
        *(
            ({"max_new_tokens": 2} | own, "cannot be combined with `max_new_tokens`")
            for own in ({"order": "random"}, {"positions": [1]}, {"sweeps": 2}, {"per_step": 2})
        ),
        ({"positions": [1], "return_cache": True}, "`return_cache` needs `max_new_tokens`"),
    ],
)
def test_options_that_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GenerationOptions(**options)
