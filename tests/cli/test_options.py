"""The options of every command: names, defaults, and help."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from esm_turbo.cli.commands import app
from esm_turbo.serve.limits import Limits

LIMITS = Limits()
MODEL = {"--model": None, "--device": None, "--device-map": None, "--dtype": None, "--threads": None}
CALIBRATED = MODEL | {"--calibration": None}
CACHES = CALIBRATED | {"--preset": None}
STORED = CACHES | {"--store": None}
PARALLEL = {"--devices": None, "--workers": None, "--shard": None}
PARALLEL |= {"--engine": "local", "--address": None}
FILES = {"--unknown": None, "--remove-gaps": False, "--accessions": False, "--json": None}
PLOT = {"--plot": None}
OPTIONS: dict[str, dict[str, Any]] = {
    "demo": {"--device": None, "--json": None},
    "calibrate": FILES | MODEL | PLOT | PARALLEL | {"--out": ..., "--max-residues": None, "--toks-per-batch": 4096},
    "embed": FILES
    | STORED
    | PLOT
    | PARALLEL
    | {
        "--repr-layers": (-1,),
        "--include": None,
        "--toks-per-batch": None,
        "--truncation-seq-length": None,
        "--window": None,
        "--overlap": None,
        "--memory": None,
        "--format": None,
        "--names": None,
        "--groups": None,
        "--group-column": None,
        "--nogpu": False,
    },
    "generate": FILES
    | STORED
    | PLOT
    | {
        "--max-new-tokens": None,
        "--positions": None,
        "--order": None,
        "--per-step": 1,
        "--sweeps": 1,
        "--num-return-sequences": 1,
        "--temperature": 1.0,
        "--top-k": None,
        "--top-p": 1.0,
        "--allowed": (),
        "--banned": "",
        "--seed": 0,
        "--refresh": None,
        "--refresh-every": None,
        "--toks-per-batch": None,
        "--out": None,
    },
    "binders": FILES
    | STORED
    | {
        "--length": ...,
        "--num-return-sequences": 10,
        "--top-k": 3,
        "--top-p": 1.0,
        "--temperature": 1.0,
        "--per-step": None,
        "--sweeps": 1,
        "--allowed": None,
        "--banned": "",
        "--seed": 0,
        "--arm": None,
        "--refresh": 8,
        "--top": 10,
        "--toks-per-batch": None,
        "--out": None,
    },
    "store": FILES | CACHES | PARALLEL | {"--toks-per-batch": None},
    "evaluate": FILES
    | CALIBRATED
    | PLOT
    | {
        "--preset": ("exact", "turbo3"),
        "--max-proteins": 10,
        "--extend-ks": (1, 8, 32),
        "--refresh-ws": (0, 8, 32),
        "--outlier-scales": (),
        "--outlier-proteins": 8,
        "--outlier-calibration-proteins": 60,
        "--backend": "auto",
    },
    "score": FILES
    | STORED
    | PLOT
    | PARALLEL
    | {
        "--arm": None,
        "--refresh": 8,
        "--place": "masked",
        "--top": None,
        "--top-k": 10,
        "--toks-per-batch": None,
        "--out": None,
        "--backend": "auto",
    },
    "variants": FILES
    | STORED
    | PLOT
    | PARALLEL
    | {
        "--columns": None,
        "--method": "masked",
        "--arm": None,
        "--refresh": 8,
        "--first-position": None,
        "--protein-column": None,
        "--measured": None,
        "--top": None,
        "--toks-per-batch": None,
        "--out": None,
        "--backend": "auto",
    },
    "serve": CACHES
    | {
        "--host": "127.0.0.1",
        "--port": 8080,
        "--store": None,
        "--token-file": None,
        "--allowed-host": (),
        "--max-residues": LIMITS.residues,
        "--max-candidates": LIMITS.candidates,
        "--max-contexts": LIMITS.contexts,
        "--queue": LIMITS.queue,
        "--timeout": LIMITS.seconds,
        "--resident-mib": 1024,
        "--toks-per-batch": None,
        "--backend": "auto",
    },
    "status": {"--json": None},
    "merge": {"--json": None},
    "info": {"--calibration": None, "--length": 1024, "--batch": 1, "--json": None},
    "warmup": CACHES | {"--json": None},
}


def texts_of(command: str) -> dict[str, str]:
    """Types and texts of options by name, as the help of a command shows them."""
    page = io.StringIO()
    app.help_print([command], console=Console(file=page, width=400))
    rows = [line.strip("│* ").split() for line in page.getvalue().splitlines()]
    return {row[0]: " ".join(row[1:]) for row in rows if row and row[0].startswith("--")}


def test_every_command_is_listed() -> None:
    assert {name for name in app if not name.startswith("-")} == set(OPTIONS)


@pytest.mark.parametrize("command", OPTIONS)
def test_names_and_defaults(command: str) -> None:
    arguments = [one for one in app[command].assemble_argument_collection() if one.name.startswith("--")]
    found = {one.name: ... if one.required else one.field_info.default for one in arguments}
    assert found == OPTIONS[command]


@pytest.mark.parametrize("command", OPTIONS)
def test_help_shows_every_option_with_a_sentence(command: str) -> None:
    texts = texts_of(command)
    assert set(texts) >= set(OPTIONS[command])
    for name in OPTIONS[command]:
        sentence = texts[name].split("[")[0].strip()
        # A type, such as STR, comes first.
        assert len(sentence.split()) > 2 and sentence.endswith("."), name


def test_shared_options_have_one_text() -> None:
    helps = [texts_of(command) for command in OPTIONS]
    for name in ("--model", "--device", "--dtype", "--unknown", "--json", "--backend"):
        assert len({texts[name] for texts in helps if name in texts}) == 1, name
