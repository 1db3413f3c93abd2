"""Masked positions replaced step by step, against plain loops and an independent model in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import EsmForMaskedLM

from esm_turbo import TurboEsm, TurboEsmForMaskedLM
from esm_turbo.proteins.fasta import STANDARD_RESIDUES
from esm_turbo.tasks.generation.unmasking import MaskedBatch
from tests.helpers.frozen_esm2 import FrozenEsm2
from tests.helpers.graphs import pool_without_cuda, stand_in
from tests.helpers.models import CLS, EOS, MASK, random_ids
from tests.helpers.plain_generation import (
    ATOL,
    PREFIX,
    STANDARD,
    assert_same_output,
    by_graphs_and_eagerly,
    full_logits,
    plain_draw,
)

MakeModel = Callable[..., TurboEsmForMaskedLM]


@pytest.mark.parametrize("order", ["left_to_right", "random", "confidence"])
@pytest.mark.parametrize(("per_step", "sweeps"), [(1, 1), (2, 1), (1, 2), (3, 3)])
def test_refreshing_at_every_step_is_the_plain_model(
    exact: TurboEsm, hf: EsmForMaskedLM, order: str, per_step: int, sweeps: int
) -> None:
    chosen = [3, 4, 9, 20, 22]
    output = exact.generate(
        PREFIX, positions=chosen, order=order, per_step=per_step, sweeps=sweeps, seed=[11], refresh_every=1
    )
    generator = torch.Generator().manual_seed(11)
    ids = [CLS, *exact.codes.encode(PREFIX, "it"), EOS]
    for column in chosen:
        ids[column] = MASK
    last: dict[int, float] = {}
    for sweep in range(sweeps):
        left = list(chosen)
        if order == "random":
            left = [chosen[i] for i in torch.randperm(5, generator=generator).tolist()]
        elif order == "confidence" and sweep:
            left.sort(key=lambda column: last[column])
        while left:
            if order == "confidence" and not sweep:
                logits = full_logits(hf, ids)
                left.sort(key=lambda column: -float(logits[column, STANDARD].softmax(-1).max()))
            now, left = left[:per_step], left[per_step:]
            for column in now:
                ids[column] = MASK
            logits = full_logits(hf, ids)
            for column in now if order == "confidence" and not sweep else sorted(now):
                ids[column], last[column] = plain_draw(logits[column], 1.0, generator)
    assert output.sequences == [exact.codes.decode(ids[1:-1])]
    assert output.positions == [chosen]
    expected = torch.tensor([[last[column] for column in chosen]])
    torch.testing.assert_close(torch.tensor(output.log_probs), expected, rtol=0, atol=ATOL)


@pytest.mark.parametrize("refresh", [0, 2, 50])
def test_a_step_against_the_cache_is_the_frozen_computation(
    exact: TurboEsm, tiny_frozen: FrozenEsm2, refresh: int
) -> None:
    rows = [random_ids([30], seed=1, eos=True)[0][0].tolist(), random_ids([12], seed=2, eos=True)[0][0].tolist()]
    chosen = [[4, 5, 20], [9]]
    for row, columns in zip(rows, chosen, strict=True):
        for column in columns:
            row[column] = MASK
    batch = MaskedBatch(exact, rows, chosen, refresh, 100)
    contexts = [list(row) for row in batch.rows]
    batch.logits()
    for column, token in ((5, 7), (20, 11)):
        batch.rows[0][column] = token
        output = batch.logits()
        for row, columns in enumerate(chosen):
            running = sorted(
                {c + k for c in columns for k in range(-refresh, refresh + 1)} & set(range(1, len(rows[row]) - 1))
            )
            expected = tiny_frozen.extend(
                contexts[row],
                tiny_frozen.context(contexts[row]),
                [batch.rows[row][c] for c in running],
                positions=running,
                hidden=tuple(running),
            ).logits[[running.index(c) for c in columns]]
            torch.testing.assert_close(output[row].double(), expected, rtol=0, atol=ATOL)


def test_tokens_run_per_step(exact: TurboEsm) -> None:
    shapes = []
    hook = exact.model.esm.register_forward_pre_hook(lambda module, args: shapes.append(tuple(args[0].shape)))
    try:
        exact.generate(
            PREFIX, positions=[5, 6, 15], num_return_sequences=4, refresh=1, refresh_every=2, order="left_to_right"
        )
    finally:
        hook.remove()
    # Step 0 runs the protein once for all samples. Adjacent positions share their neighbours.
    assert shapes == [(1, 24), (4, 7), (4, 24)]


def test_only_chosen_positions_change(turbo: TurboEsm) -> None:
    output = turbo.generate("MK<mask>AYIA<mask>QR", num_return_sequences=3)
    assert output.positions == [[3, 8]] * 3
    for sequence in output.sequences:
        assert (sequence[:2], sequence[3:7], sequence[8:]) == ("MK", "AYIA", "QR")
        assert {sequence[2], sequence[7]} <= set(STANDARD_RESIDUES)
    output = turbo.generate("MK<mask>AY", positions=[5])
    assert output.sequences[0].startswith("MK<mask>A")
    output = turbo.generate(["MKTAY", "GAVL"], positions=[[1], [2, 4]])
    assert (output.sequences[0][1:], output.sequences[1][0], output.sequences[1][2]) == ("KTAY", "G", "V")


def test_a_refresh_of_more_than_the_protein_is_all_of_it(exact: TurboEsm) -> None:
    options = {"positions": [1, 5], "seed": 1}
    all_of_it = exact.generate("MKTAYIAK", refresh=8, **options)
    assert exact.generate("MKTAYIAK", refresh=10**18, **options).sequences == all_of_it.sequences


def test_captured_steps_draw_what_eager_ones_draw(exact: TurboEsm, monkeypatch: pytest.MonkeyPatch) -> None:
    captures = stand_in(monkeypatch)
    monkeypatch.setattr(exact.model.esm.executor, "graphs", pool_without_cuda(captures))
    options = {"positions": [2, 5, 6, 9], "sweeps": 3, "refresh": 1, "refresh_every": 3, "seed": 4}
    graphs, eager = by_graphs_and_eagerly(exact, [PREFIX, "MKTAYIAKQR"], **options)
    assert captures
    assert_same_output(graphs, eager, ATOL)


@pytest.mark.gpu
@pytest.mark.parametrize("order", ["random", "confidence"])
def test_a_seed_draws_the_same_by_graphs(turbo: TurboEsm, tiny_model: MakeModel, order: str) -> None:
    cuda = TurboEsm(tiny_model(layers=4, head_dim=32).to("cuda"), turbo.tokenizer)
    options = {"positions": [2, 5, 6, 9], "order": order, "sweeps": 3, "refresh": 1, "refresh_every": 3}
    graphs, eager = by_graphs_and_eagerly(cuda, [PREFIX, "MKTAYIAKQR"], **options)
    assert len(cuda.model.esm.executor.graphs) > 0
    assert_same_output(graphs, eager, ATOL)
