"""The context store: results, damage, killed processes, full disks, concurrency, memory and counts."""

import copy
import errno
import json
import logging
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from esm_turbo import ContextStore, TurboEsm, TurboKVCache, context_store
from esm_turbo.cli import app as cli
from esm_turbo.config import DEFAULT_PRESET, TurboConfig
from esm_turbo.context_store import context_key, is_store, store_info
from esm_turbo.files import artifacts
from esm_turbo.files.artifacts import read_artifact, write_artifact
from esm_turbo.files.writing import LOCK_FILE, FolderBusyError, only_writer
from esm_turbo.store import files as store_files
from esm_turbo.store import filling, partitions
from esm_turbo.store.partitions import FORMAT_VERSION
from esm_turbo.store.requests import context_requests
from esm_turbo.store.usage import USAGE_FILE
from esm_turbo.tasks.common.forwards import prefill_ids
from tests.helpers.killed_runs import killed_runs

SEQUENCES = ["MKTAYIAKQRQISFVKSHFSRQ", "GSGSWKDLAEX", "M", "mktay<mask>aakk", "ACDEFGHIKLMNPQRSTVWY" * 2]


@pytest.fixture(scope="module")
def tiny(turbo, tiny_model):
    """A small model with random weights; `tiny(preset="exact", **config)`."""

    def make(preset="exact", **config):
        return TurboEsm(tiny_model(preset=preset, **config), turbo.tokenizer)

    return make


@pytest.fixture(scope="module")
def compressed(tiny):
    return tiny(DEFAULT_PRESET)


@pytest.fixture
def prefilled(monkeypatch):
    """The sequences that a store computes, per call; tests that call prefill pass a string, not a list."""
    calls = []
    original = TurboEsm.prefill_within_call

    def noting(self, sequences, *arguments, **options):
        if isinstance(sequences, list):
            calls.append(sequences)
        return original(self, sequences, *arguments, **options)

    monkeypatch.setattr(TurboEsm, "prefill_within_call", noting)
    return calls


def assert_same(cache, expected):
    mine, theirs = dict(cache.named_tensors()), dict(expected.named_tensors())
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert tensor.dtype == theirs[name].dtype
        if name == "token_ids":
            # Undefined beyond a row's length.
            valid = torch.arange(tensor.shape[1]) < cache.lengths[:, None]
            assert torch.equal(tensor[valid], theirs[name][valid])
        else:
            assert torch.equal(tensor, theirs[name]), name


def entries(folder):
    """A store's files by name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*.safetensors")}


def contexts(folder):
    # Unlike `rglob`, this passes over folders that others remove meanwhile.
    paths = (Path(at, name) for at, _, names in os.walk(folder) for name in names)
    return sorted(path for path in paths if len(path.stem) == 64 and path.suffix == ".safetensors")


def usage(store, *names):
    return tuple(store.info()["usage"][name] for name in names)


@pytest.mark.parametrize("preset", ["exact", "paper", DEFAULT_PRESET])
def test_it_returns_what_prefill_returns(tiny, tmp_path, prefilled, preset):
    turbo = tiny(preset)
    expected = TurboKVCache.cat([turbo.prefill(sequence) for sequence in SEQUENCES])
    store = ContextStore(tmp_path / "store")
    prefilled.clear()
    # One protein per batch: exactly as computed by a prefill of one.
    first = store.get_or_prefill(turbo, SEQUENCES, toks_per_batch=1)
    assert sorted(sequence for call in prefilled for sequence in call) == sorted(SEQUENCES)
    prefilled.clear()
    from_memory = store.get_or_prefill(turbo, SEQUENCES)
    from_disk = ContextStore(tmp_path / "store").get_or_prefill(turbo, SEQUENCES)
    assert prefilled == []
    for cache in (first, from_memory, from_disk):
        assert_same(cache, expected)
        assert cache.nbytes == expected.nbytes
        output = turbo.extend(cache, ["GSGS"] * len(SEQUENCES), refresh=4)
        assert torch.equal(output.logits, turbo.extend(expected, ["GSGS"] * len(SEQUENCES), refresh=4).logits)


def test_contexts_of_any_tokens_are_computed_once(compressed, tmp_path):
    store, exact, own = ContextStore(tmp_path), TurboConfig.from_preset("exact"), compressed.model.esm.turbo_config
    codes, computed = compressed.codes, []
    rows = [[codes.cls, 5, 6, codes.mask, codes.eos], [codes.cls, 5, 6, codes.mask]]

    def compute(row, arm):
        def run():
            computed.append(row)
            return prefill_ids(compressed, row, arm)

        return run

    for opened in (store, store, ContextStore(tmp_path)):
        for row in rows:
            for arm, config in (("frozen", exact), ("turbo", own)):
                cache = opened.get_or_compute(compressed, row, config, compute(row, arm))
                assert_same(cache, prefill_ids(compressed, row, arm))
                # A copy: the next look-up finds all of it.
                cache.crop(2)
    assert computed == [rows[0], rows[0], rows[1], rows[1]]
    assert usage(store, "missed") == (4,)
    # A plain context is the same by tokens and by sequence.
    cache = store.get_or_prefill(compressed, "MKTAY")
    found = store.get_or_compute(compressed, cache.token_ids[0].tolist(), own, lambda: pytest.fail("computed"))
    assert_same(found, cache)


def test_contexts_are_kept_under_their_own_tokens(compressed, e1, tmp_path):
    own, row = compressed.model.esm.turbo_config, [compressed.codes.cls, 5, 6]
    x, y = ([e1.codes.whole(e1.codes.encode(text, "it"))] for text in ("MXKTAY", "MKTAY"))
    front = e1.prefill("MKTAY,MKTAY")
    front.drop_front(len(y[0]))
    cache = prefill_ids(compressed, row, "turbo")
    wrong = [(compressed, [ids], cache, own) for ids in ([*row[:2], 7], [*row, 7], row[:2])]
    wrong += [(compressed, [row, row], cache, own), (compressed, [row], cache, TurboConfig.from_preset("exact"))]
    wrong += [(e1, ids, other, other.config) for ids, other in ((x, e1.prefill("MKTAY")), (y, front))]
    for turbo, *arguments in wrong:
        store = ContextStore(tmp_path / turbo.name)
        with pytest.raises(ValueError, match="the cache does not hold these tokens under these options"):
            store.keep(turbo, *arguments)
        assert store.info()["contexts"] == 0
    with pytest.raises(ValueError, match="what `hold` returned is in a store"):
        store.keep(e1, y, store.hold(e1, "MKTAY"), e1.model.base_model.turbo_config)
    kept = e1.prefill("MXKTAY")
    store.keep(e1, x, kept, kept.config)
    assert_same(store.get(e1, "MXKTAY")[0], kept)


def test_order_repeats_and_spelling(compressed, tmp_path, prefilled):
    store = ContextStore(tmp_path)
    cache = store.get_or_prefill(compressed, ["MKTAY", "GSGS", "mktay", "MKT AY*"], toks_per_batch=1)
    assert sorted(len(call) for call in prefilled) == [1, 1]
    assert cache.lengths.tolist() == [6, 5, 6, 6]
    assert_same(cache.select([2]), compressed.prefill("MKTAY"))
    assert_same(cache.select([1]), compressed.prefill("GSGS"))
    assert len(contexts(tmp_path)) == 2
    [one] = store.get(compressed, "GSGS")
    assert_same(one, compressed.prefill("GSGS"))


def test_get_computes_nothing(compressed, tmp_path, prefilled):
    store = ContextStore(tmp_path / "store")
    assert store.get(compressed, SEQUENCES) == [None] * 5
    assert not (tmp_path / "store").exists()
    store.get_or_prefill(compressed, SEQUENCES[:2])
    prefilled.clear()
    found = store.get(compressed, SEQUENCES)
    assert [cache is not None for cache in found] == [True, True, False, False, False]
    assert prefilled == []
    assert usage(store, "host", "missed") == (2, 5 + 2 + 3)


def test_a_context_is_found_by_its_key(compressed, tmp_path):
    store = ContextStore(tmp_path / "store", host_bytes=0)
    key = context_key(compressed, SEQUENCES[0].lower())
    assert store.load(compressed, key) is None
    expected = store.get_or_prefill(compressed, SEQUENCES[0])
    assert contexts(tmp_path)[0].stem == key
    assert_same(store.load(compressed, key), expected)
    outside = f"../{contexts(tmp_path)[0].parent.name}/{key}"
    assert [store.load(compressed, wrong) for wrong in ("", key[1:], key.upper(), outside, key + "\n")] == [None] * 5
    with pytest.raises(ValueError, match="position 3 is '!'"):
        context_key(compressed, "AC!")


def test_changes_of_a_result_do_not_reach_the_store(compressed, tmp_path):
    store = ContextStore(tmp_path)
    expected = compressed.prefill("MKTAYIAKQR")

    def append(cache):
        compressed.extend(cache, "GSGS", append=True)
        cache.crop(2)

    def overwrite(cache):
        for _, tensor in cache.named_tensors():
            tensor.zero_()

    # Of what was just computed, and of what is in memory.
    for change in (overwrite, append, overwrite, append):
        for cache in (store.get_or_prefill(compressed, "MKTAYIAKQR"), *store.get(compressed, "MKTAYIAKQR")):
            assert_same(cache, expected)
            change(cache)
    assert_same(ContextStore(tmp_path).get_or_prefill(compressed, "MKTAYIAKQR"), expected)


def test_token_dropout_counts_are_part_of_the_key(compressed, tmp_path):
    store = ContextStore(tmp_path)
    plain = store.get_or_prefill(compressed, "MKT<mask>AYIAKQR")
    assert_same(plain, compressed.prefill("MKT<mask>AYIAKQR"))
    # Its own counts, given.
    assert_same(store.get_or_prefill(compressed, "MKT<mask>AYIAKQR", 12, 1), plain)
    assert len(contexts(tmp_path)) == 1
    both = store.get_or_prefill(compressed, ["MKT<mask>AYIAKQR"] * 2, total_tokens=[20, 12], total_masks=[3, 1])
    assert len(contexts(tmp_path)) == 2
    assert_same(both.select([0]), compressed.prefill("MKT<mask>AYIAKQR", 20, 3))
    assert_same(both.select([1]), plain)
    assert any(not torch.equal(tensor[0], tensor[1]) for tensor in both.layers[1].packed.values())


def test_presets_have_their_own_partitions(tiny, tmp_path):
    store = ContextStore(tmp_path)
    models = [tiny(config) for config in ("exact", "paper", DEFAULT_PRESET, TurboConfig(bits=2, seed=3))]
    for turbo in models:
        assert_same(store.get_or_prefill(turbo, "MKTAYIAK"), turbo.prefill("MKTAYIAK"))
    info = store.info()
    assert info["contexts"] == 4
    names = {turbo.model.esm.turbo_config.name for turbo in models}
    assert {preset["preset"] for preset in info["presets"]} == names
    assert usage(store, "missed", "disk", "host") == (4, 0, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_store_is_of_one_precision(tiny, tmp_path, dtype):
    turbo, store, name = tiny(DEFAULT_PRESET), ContextStore(tmp_path), str(dtype).removeprefix("torch.")
    store.get_or_prefill(turbo, "MKTAYIAK")
    rounded = tiny(DEFAULT_PRESET)
    rounded.model.to(dtype)
    with pytest.raises(ValueError, match=f"made in float32, and the model computes in {name};"):
        store.get_or_prefill(rounded, "MKTAYIAK")
    with (
        torch.autocast("cpu", dtype),
        pytest.raises(ValueError, match=f"made in float32, and the model computes in float32-autocast-{name};"),
    ):
        store.get(turbo, "MKTAYIAK")
    assert store.info()["contexts"] == 1


def test_another_calibration_has_its_own_partition(turbo, tiny_esm, tmp_path):
    from esm_turbo import KVCalibrator, TurboEsmForMaskedLM

    made = []
    for seed in (0, 1):
        calibrator = KVCalibrator(tiny_esm(), sample_size=256)
        ids = torch.randint(4, 24, (4, 128), generator=torch.Generator().manual_seed(seed))
        calibrator.partial_fit(ids)
        model = TurboEsmForMaskedLM.from_esm(
            tiny_esm(), calibration=calibrator.finalize(presets=[]), preset=DEFAULT_PRESET
        )
        made.append(TurboEsm(model, turbo.tokenizer))
    store = ContextStore(tmp_path)
    for one in made:
        assert_same(store.get_or_prefill(one, "MKTAYIAK"), one.prefill("MKTAYIAK"))
        # In the memory of a device, too, where slots of one size are read by one codec.
        with store.hold(one, "MKTAYIAK") as held:
            expected = one.extend(one.prefill("MKTAYIAK"), "GSG").logits
            assert (one.extend(held, "GSG").logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert len(store.info()["presets"]) == 2


def test_another_model_is_refused(tiny, tmp_path):
    store = ContextStore(tmp_path)
    # A store without contexts belongs to no model yet.
    store.check_model(tiny(seed=1))
    store.get_or_prefill(tiny(), "MKTAY")
    store.check_model(tiny())
    before = entries(tmp_path)
    for other, message in (
        (tiny(seed=1), "contexts of another model"),
        (tiny(layers=3), "2 layers x 4 heads x 16.*the model has 3 layers"),
    ):
        for opened in (store, ContextStore(tmp_path)):
            for use in (
                opened.get_or_prefill,
                opened.get,
                opened.add,
                lambda turbo, _, it=opened: it.check_model(turbo),
            ):
                with pytest.raises(ValueError, match=message):
                    use(other, "MKTAY")
    assert entries(tmp_path) == before


@pytest.mark.parametrize("what", ["*-*/*/*.safetensors", "*-*/**/*.safetensors", "**/*.safetensors"])
def test_contexts_put_there_from_another_models_store_are_not_read(tiny, tmp_path, what):
    """Of its contexts, of their partitions too, and of its header too, as where the folder is exchanged."""
    one, other = tiny(), copy.deepcopy(tiny())
    with torch.no_grad():
        other.model.esm.encoder.layer[0].output.dense.weight.mul_(2)
    store = ContextStore(tmp_path / "one", host_bytes=0)
    store.get_or_prefill(one, "GSGSG")
    ContextStore(tmp_path / "other").get_or_prefill(other, "MKTAY")
    for path in (tmp_path / "other").glob(what):
        target = tmp_path / "one" / path.relative_to(tmp_path / "other")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    assert store.get(one, "MKTAY") == [None]


@pytest.mark.parametrize("trace", [True, False])
def test_a_model_that_changes_between_batches_keeps_nothing_of_what_follows(tiny, tmp_path, trace):
    turbo = copy.deepcopy(tiny())
    weight = turbo.model.esm.encoder.layer[0].output.dense.weight

    def progress(stage, done, total):
        if done:
            (weight.detach() if trace else weight.data).view(-1)[7] += 1

    with pytest.raises(ValueError, match="has changed since"):
        ContextStore(tmp_path).add(turbo, ["MKTAY", "GSGSG", "ACDEF"], toks_per_batch=1, progress=progress)
    assert len(list(tmp_path.glob("*-*/*/*.safetensors"))) == 1


def test_another_version_is_refused(tiny, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(store_files, "FORMAT_VERSION", 7)
        ContextStore(tmp_path).get_or_prefill(tiny(), "MKTAY")
    with pytest.raises(ValueError, match=f"context_store format version 7, this release reads {FORMAT_VERSION}"):
        ContextStore(tmp_path)
    assert cli.run(["info", str(tmp_path)]) == 2
    assert "context_store format version 7" in capsys.readouterr().err


def test_a_folder_of_something_else_is_refused(tiny, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"not a context store, but holds notes.txt"):
        ContextStore(tmp_path)
    with pytest.raises(ValueError, match="is a file"):
        ContextStore(tmp_path / "notes.txt")
    store = ContextStore(tmp_path / "empty")
    assert store.info()["model"] is None
    assert list(tmp_path.iterdir()) == [tmp_path / "notes.txt"]
    assert not is_store(tmp_path / "empty")


def test_a_damaged_header_is_an_error(tiny, tmp_path):
    ContextStore(tmp_path).get_or_prefill(tiny(), "MKTAY")
    path = tmp_path / "store.safetensors"
    for content in (b"", path.read_bytes()[:-3]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"store.safetensors: damaged"):
            ContextStore(tmp_path)
    write_artifact(path, "context_store", FORMAT_VERSION, {}, {"model": "tiny"})
    with pytest.raises(ValueError, match="an entry is missing or wrong"):
        ContextStore(tmp_path)


@pytest.mark.parametrize(
    ("sequences", "options", "message"),
    [
        ([], {}, "at least one sequence"),
        (["MKT", ""], {}, "sequence 2: holds no residues"),
        (["MKJ"], {}, "sequence 1: position 3 is 'J'"),
        (["MKT", "M"], {"total_tokens": [9]}, r"one number or one per sequence \(2\), got \[9\]"),
        (["MKT"], {"total_tokens": 2}, "`total_tokens` must be at least"),
        (["MKT"], {"total_masks": 4}, "`total_masks` must be smaller"),
        (["MKT"], {"toks_per_batch": 0}, "`toks_per_batch` must be an integer of at least 1"),
    ],
)
def test_bad_input_writes_nothing(compressed, tmp_path, sequences, options, message):
    folder = tmp_path / "store"
    for name in ("get_or_prefill", "add"):
        with pytest.raises(ValueError, match=message):
            getattr(ContextStore(folder), name)(compressed, sequences, **options)
    assert contexts(folder) == []


def test_wrong_options(tmp_path):
    with pytest.raises(ValueError, match="budget must be at least 0"):
        ContextStore(tmp_path, host_bytes=-1)
    with pytest.raises(ValueError, match="budget must be at least 0"):
        ContextStore(tmp_path, device_bytes=-1)
    with pytest.raises(ValueError, match="`lock_timeout` must be at least 0"):
        ContextStore(tmp_path, lock_timeout=-1)


def test_contexts_need_a_calibration(turbo, tiny_model, tmp_path):
    model = tiny_model()
    model.set_turbo(preset="paper")
    with pytest.raises(ValueError, match="esm-turbo calibrate"):
        ContextStore(tmp_path / "store").get_or_prefill(TurboEsm(model, turbo.tokenizer), "MKTAY")
    assert not (tmp_path / "store").exists()


def flip(path, at=-100):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def flip_header(path):
    flip(path, 200)


def cut(path):
    os.truncate(path, path.stat().st_size - 1)


def empty(path):
    os.truncate(path, 0)


def swap(path):
    [other] = [one for one in contexts(path.parents[2]) if one != path]
    shutil.copy(other, path)


def rewrite(path):
    tensors, metadata = read_artifact(path, "context", FORMAT_VERSION)
    write_artifact(path, "context", FORMAT_VERSION, tensors, metadata | {"layout": metadata["layout"][1:]})


def plant_folder(path):
    path.unlink()
    path.mkdir()
    (path / "note.txt").write_text("not a context")


@pytest.mark.parametrize("damage", [flip, flip_header, cut, empty, swap, rewrite, plant_folder])
def test_a_damaged_context_is_reported_and_computed_again(compressed, tmp_path, prefilled, caplog, damage):
    sequences = ["MKTAYIAK", "GSGSWKDL"]
    ContextStore(tmp_path).get_or_prefill(compressed, sequences, toks_per_batch=1)
    expected, key = entries(tmp_path), context_key(compressed, "MKTAYIAK")
    [path] = [one for one in contexts(tmp_path) if one.stem == key]
    good = path.read_bytes()
    damage(path)
    assert path.is_dir() or path.read_bytes() != good
    store = ContextStore(tmp_path)
    prefilled.clear()
    with caplog.at_level(logging.WARNING, "esm_turbo"):
        assert [cache is None for cache in store.get(compressed, sequences)] == [True, False]
        cache = store.get_or_prefill(compressed, sequences, toks_per_batch=1)
    assert prefilled == [["MKTAYIAK"]]
    [record] = caplog.records
    assert str(path) in record.getMessage() and "it is computed again" in record.getMessage()
    assert_same(cache, TurboKVCache.cat([compressed.prefill(sequence) for sequence in sequences]))
    assert entries(tmp_path) == expected
    assert usage(store, "damaged") == (1,)


def test_a_damaged_partition_is_reported_and_written_again(compressed, tmp_path, prefilled, caplog):
    store = ContextStore(tmp_path)
    store.get_or_prefill(compressed, ["MKTAYIAK"])
    expected = entries(tmp_path)
    [path] = tmp_path.glob("*/shelf.safetensors")
    cut(path)
    prefilled.clear()
    with caplog.at_level(logging.WARNING, "esm_turbo"):
        again = ContextStore(tmp_path)
        assert again.get(compressed, "MKTAYIAK") == [None]
        assert_same(again.get_or_prefill(compressed, "MKTAYIAK"), compressed.prefill("MKTAYIAK"))
    assert sum(str(path) in record.getMessage() for record in caplog.records) == 1
    # Its contexts are intact.
    assert prefilled == []
    assert entries(tmp_path) == expected


def proteins(count=8, seed=0):
    generator = random.Random(seed)
    return ["".join(generator.choices("ACDEFGHIKLMNPQRSTVWY", k=8 + 3 * index)) for index in range(count)]


def test_add_computes_what_is_missing_in_the_same_batches(compressed, tmp_path, prefilled):
    sequences = proteins()
    calls = []
    store = ContextStore(tmp_path / "a")
    assert store.add(compressed, sequences, toks_per_batch=60, progress=lambda *call: calls.append(call)) == 8
    whole = list(prefilled)
    assert len(whole) == 4 and len(whole[0][0]) == 29
    total = sum(map(len, sequences))
    assert calls[0] == ("prefill", 0, total) and calls[-1] == ("prefill", total, total)
    # The first batches are there already.
    other = ContextStore(tmp_path / "b")
    for batch in whole[:2]:
        other.add(compressed, batch, toks_per_batch=60)
    prefilled.clear()
    calls.clear()
    assert other.add(compressed, sequences, toks_per_batch=60, progress=lambda *call: calls.append(call)) == 8 - sum(
        map(len, whole[:2])
    )
    assert prefilled == whole[2:]
    assert calls[-1][1:] == (sum(len(s) for batch in whole[2:] for s in batch),) * 2
    assert ("check", 8, 8) in calls
    assert entries(tmp_path / "a") == entries(tmp_path / "b")
    prefilled.clear()
    assert other.add(compressed, sequences) == 0
    assert prefilled == []
    # Contexts that were only prepared are not counted as looked up.
    assert usage(other, "looked_up") == (0,)


@pytest.mark.slow
@pytest.mark.parametrize(("writers", "moments"), [(1, ["half"]), (2, ["before", "half", "after"])])
def test_killed_at_every_write_and_resumed(tiny_folder, tmp_path, prefilled, writers, moments):
    turbo = TurboEsm.from_pretrained(tiny_folder, preset="exact", device="cpu")
    sequences, whole = proteins(), tmp_path / "whole"
    ContextStore(whole).add(turbo, sequences, toks_per_batch=60)
    expected = entries(whole)
    # The store, its partition, and eight contexts in batches of one, two, two and three; each but the first has a list.
    writes = ["", "", "0", "list", "1", "2", "list", "3", "4", "list", "5", "6", "7"]
    ends = [(number, when) for number in range(1, len(writes) + 1) for when in moments]
    jobs = [
        {
            "job": "store", "out": str(tmp_path / f"{number}-{when}"), "kill_at": number, "when": when,
            "records": [["", sequence] for sequence in sequences], "toks_per_batch": 60, "writers": writers,
        }
        for number, when in ends
    ]  # fmt: skip
    last = jobs[-1] | {"kill_at": len(writes) + 1, "out": str(tmp_path / "last")}
    assert killed_runs(tiny_folder, [*jobs, last], tmp_path) == [-signal.SIGKILL] * len(jobs) + [0]
    for job, (number, when) in zip(jobs, ends, strict=True):
        prefilled.clear()
        store = ContextStore(job["out"], lock_timeout=0)
        computed = store.add(turbo, sequences, toks_per_batch=60)
        # No whole batch is lost or computed again.
        stored = sum(write.isdigit() for write in writes[: number - 1])
        stored += when == "after" and number == 3
        whole_batches = max(size for size in (0, 1, 3, 5) if size <= stored)
        assert computed == 8 - whole_batches
        assert {p.name for p in Path(job["out"]).iterdir() if p.is_file()} == {"store.safetensors", LOCK_FILE}
        assert entries(job["out"]) == expected


@pytest.fixture(scope="module")
def tiny_folder(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny().save_pretrained(folder)
    return folder


@pytest.fixture
def ahead(monkeypatch):
    """A batch is computed while the one before is written, as on a GPU."""
    monkeypatch.setattr(filling, "_writers", lambda _: 2)


def test_a_batch_is_computed_while_the_one_before_is_written(compressed, tmp_path, prefilled, monkeypatch, ahead):
    ContextStore(tmp_path / "whole").add(compressed, proteins(), toks_per_batch=60)
    batches = list(prefilled)
    assert len(batches) == 4
    prefilled.clear()
    original, begun = artifacts.save_file, []

    def while_the_next_is_computed(saved, path, metadata):
        if metadata["kind"] == "context":
            begun.append(len(prefilled))
            wait_until(lambda: len(prefilled) > 1)
        original(saved, path, metadata=metadata)

    monkeypatch.setattr(artifacts, "save_file", while_the_next_is_computed)
    done, store = [], ContextStore(tmp_path / "store")
    assert store.add(compressed, proteins(), toks_per_batch=60, progress=lambda *call: done.append(call[1])) == 8
    assert begun[0] <= 2 and prefilled == batches
    assert done == sorted(done) and len(done) == 5
    assert entries(tmp_path / "store") == entries(tmp_path / "whole")


FULL = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize("writers", [1, 2, 8])
@pytest.mark.parametrize(
    ("owner", "name", "stopped_at", "error", "message"),
    [
        (TurboEsm, "prefill_within_call", 3, OSError(errno.EIO, "Input/output error"), "Input/output error"),
        # The first of the contexts, after the two files of a new store, and the second of the third batch.
        (artifacts, "save_file", 3, FULL, r"[0-9a-f]{64}.safetensors: cannot be written \(.*No space left[^\n]*$"),
        (artifacts, "save_file", 7, FULL, "No space left"),
        (partitions.Staging, "publish", 3, OSError(errno.EIO, "Input/output error"), "Input/output error"),
    ],
    ids=["computing", "writing the first", "writing", "publishing"],
)
def test_what_stops_a_run_leaves_whole_batches(
    compressed, tmp_path, prefilled, monkeypatch, writers, owner, name, stopped_at, error, message
):
    ContextStore(tmp_path / "whole").add(compressed, proteins(), toks_per_batch=60)
    whole, calls = list(prefilled), []
    assert list(map(len, whole)) == [1, 2, 2, 3]
    original, folder = getattr(owner, name), tmp_path / "store"

    def fails(*arguments, **options):
        calls.append(arguments)
        if len(calls) >= stopped_at:
            raise error
        return original(*arguments, **options)

    monkeypatch.setattr(filling, "_writers", lambda _: writers)
    store = ContextStore(folder)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fails)
        with pytest.raises(OSError, match=message):
            store.add(compressed, proteins(), toks_per_batch=60)
    # After the failure, no thread of its batch, or of the next one that is written already, begins another file.
    assert len(calls) < stopped_at + (1 if writers == 1 else 2 * writers)
    # Nothing is claimed or half-written any more.
    assert store._files.claimed_by_others() == set()
    assert not [path for path in folder.rglob("*") if path.name.endswith(".tmp")]
    prefilled.clear()
    left = store.add(compressed, proteins(), toks_per_batch=60)
    assert prefilled == whole[len(whole) - len(prefilled) :] and left == sum(map(len, prefilled)) > 0
    assert entries(folder) == entries(tmp_path / "whole")


@pytest.mark.parametrize("writers", [1, 2])
def test_given_batches_are_added_one_ahead(compressed, tmp_path, prefilled, monkeypatch, writers):
    ContextStore(tmp_path / "whole").add(compressed, proteins(), toks_per_batch=60)
    whole = list(prefilled)
    monkeypatch.setattr(filling, "_writers", lambda _: writers)
    store, taken = ContextStore(tmp_path / "store"), []
    store.add(compressed, whole[1][0])
    prefilled.clear()
    results = store.add_batches(compressed, (taken.append(batch) or batch for batch in whole))
    for number, computed in enumerate(results, start=1):
        # What was there is not computed again.
        assert computed == len(whole[number - 1]) - (number == 2)
        assert len(taken) == min(number + (writers > 1), 4)
    assert number == 4 and prefilled == [whole[0], whole[1][1:], *whole[2:]]
    assert list(store.add_batches(compressed, whole)) == [0, 0, 0, 0]
    assert entries(tmp_path / "store").keys() == entries(tmp_path / "whole").keys()
    assert list(store.add_batches(compressed, [])) == []


def test_batches_that_do_not_fit_are_reported_and_the_others_stored(compressed, tmp_path, monkeypatch, ahead):
    original, failed = TurboEsm.prefill_within_call, {}

    def small(self, sequences, *arguments, **options):
        if max(map(len, sequences)) > 20:
            raise torch.OutOfMemoryError("out of memory")
        return original(self, sequences, *arguments, **options)

    monkeypatch.setattr(TurboEsm, "prefill_within_call", small)
    batches = [proteins()[3:6], proteins()[:3], proteins()[6:]]
    store = ContextStore(tmp_path)
    assert list(store.add_batches(compressed, batches, failed.__setitem__)) == [2, 3, 0]
    assert list(failed) == proteins()[5:] and "its 23 residues need more memory" in failed[proteins()[5]]
    with pytest.raises(MemoryError, match="a sequence: its 29 residues"):
        list(store.add_batches(compressed, [proteins()[7:]]))


def test_a_run_that_is_left_lets_go_of_its_claims(compressed, tmp_path, ahead):
    store = ContextStore(tmp_path)
    wanted = context_requests(compressed, proteins())
    running = store._fill(compressed, store_files.context_spec(compressed), wanted, set(), 60)
    assert next(running).computed == 1
    assert len(store._files.claimed_by_others()) == 2
    running.close()
    assert store._files.claimed_by_others() == set()
    batches = store.add_batches(compressed, [[sequence] for sequence in proteins()[::-1]])
    assert (next(batches), next(batches)) == (0, 1)
    assert len(store._files.claimed_by_others()) == 1
    batches.close()
    assert store._files.claimed_by_others() == set()
    assert store.add(compressed, proteins(), toks_per_batch=60) == 6


def test_contexts_are_written_while_others_hold_the_lock(compressed, tmp_path, monkeypatch):
    """Only when they are put among the others is it taken."""
    store, seen = ContextStore(tmp_path), []
    store.get_or_prefill(compressed, "MKTAY")
    original = artifacts.save_file

    def while_another_writes(saved, path, metadata):
        with only_writer(tmp_path, timeout=0, keep=True):
            seen.append(path)
            original(saved, path, metadata=metadata)

    monkeypatch.setattr(artifacts, "save_file", while_another_writes)
    assert store.add(compressed, proteins(5)) == len(seen) == 5
    # A reader takes none of them for a context of the store.
    assert {path.parent.name.startswith(".batch.") for path in map(Path, seen)} == {True}


def test_counts_that_cannot_be_written_do_not_matter(compressed, tmp_path, monkeypatch):
    store = ContextStore(tmp_path)
    store.get_or_prefill(compressed, "MKTAY")
    original = Path.open

    def no_usage(self, *arguments, **options):
        if self.name == USAGE_FILE:
            raise OSError(errno.EROFS, "Read-only file system")
        return original(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", no_usage)
    store.get_or_prefill(compressed, "MKTAY")
    store.close()
    assert usage(store, "host") == (1,)


def test_writers_wait_for_another_process_as_long_as_they_may(compressed, tmp_path):
    store = ContextStore(tmp_path, lock_timeout=0.1)
    expected = store.get_or_prefill(compressed, "MKTAY")
    with only_writer(tmp_path, keep=True):
        assert_same(ContextStore(tmp_path).get_or_prefill(compressed, "MKTAY"), expected)
        with pytest.raises(FolderBusyError, match=r"another process is writing into it \(waited 0.1 s\)"):
            store.get_or_prefill(compressed, ["MKTAY", "GSGS"])
        with pytest.raises(FolderBusyError):
            store.add(compressed, "GSGS")
    assert len(contexts(tmp_path)) == 1


def test_contexts_that_another_process_writes_are_not_computed(compressed, tmp_path, prefilled, monkeypatch):
    store = ContextStore(tmp_path)
    store.get_or_prefill(compressed, "MKTAY")
    original = store_files.only_writer

    def late(folder, **options):
        # Another process writes while this one waits.
        monkeypatch.setattr(store_files, "only_writer", original)
        ContextStore(tmp_path).get_or_prefill(compressed, "GSGS")
        prefilled.clear()
        return original(folder, **options)

    monkeypatch.setattr(store_files, "only_writer", late)
    assert_same(store.get_or_prefill(compressed, "GSGS"), compressed.prefill("GSGS"))
    assert prefilled == []


CROWD = """
import json, os, sys, time, traceback
import torch
torch.set_num_threads(1)
from esm_turbo import ContextStore, TurboEsm
model, folder, sequences = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
turbo = TurboEsm.from_pretrained(model, preset="exact", device="cpu")
expected = [turbo.prefill(sequence).layers[1].packed["keys"] for sequence in sequences]

def fill(store):
    return store.add(turbo, sequences, toks_per_batch=60)

def read(store):
    until, missing = time.monotonic() + 60, set(range(len(sequences)))
    while missing and time.monotonic() < until:
        for index, cache in enumerate(store.get(turbo, sequences)):
            if cache is not None:
                # Batches of other sizes round differently on some processors.
                torch.testing.assert_close(cache.layers[1].packed["keys"], expected[index])
                missing.discard(index)
    return 100 + len(missing)

children = []
for work in (fill, fill, read, read, read):
    child = os.fork()
    if child == 0:
        code = 200
        try:
            with ContextStore(folder, host_bytes=1 << 16) as store:
                code = work(store)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    children.append(child)
print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
"""


@pytest.mark.slow
def test_two_processes_fill_a_store_and_three_read_it(tiny_folder, tmp_path):
    sequences = proteins(24, seed=3)
    done = subprocess.run(
        [sys.executable, "-c", CROWD, tiny_folder, tmp_path / "shared", json.dumps(sequences)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    *computed, _, _, _ = codes = json.loads(done.stdout)
    # Each context was computed once, and every process found all of them, undamaged.
    assert sum(computed) == 24 and codes[2:] == [100] * 3, done.stderr
    usage = store_info(tmp_path / "shared")["usage"]
    assert usage["damaged"] == 0 and usage["looked_up"] >= 3 * 24
    alone = TurboEsm.from_pretrained(tiny_folder, preset="exact", device="cpu")
    ContextStore(tmp_path / "alone").add(alone, sequences, toks_per_batch=60)
    assert entries(tmp_path / "shared") == entries(tmp_path / "alone")


def test_a_full_disk_is_named_where_contexts_are_claimed(compressed, tmp_path, monkeypatch):
    def write_text(path, *_, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", write_text)
    with pytest.raises(OSError, match=re.escape(str(tmp_path / "store"))) as raised:
        ContextStore(tmp_path / "store").add(compressed, ["MKTAYI"])
    assert raised.value.errno == errno.ENOSPC


def test_claimed_contexts_come_last_and_are_read_once_they_are_there(compressed, tmp_path, prefilled):
    sequences = proteins()
    other, store = ContextStore(tmp_path), ContextStore(tmp_path)
    store.get_or_prefill(compressed, "MKTAY")
    key = context_key(compressed, sequences[-1])
    prefilled.clear()
    with other._files.claim([key]):

        def add():
            return store.add(compressed, sequences, toks_per_batch=60)

        with ThreadPoolExecutor(1) as pool:
            filling = pool.submit(add)
            wait_until(lambda: len(contexts(tmp_path)) == 8)
            assert not filling.done()
            assert sequences[-1] not in [sequence for batch in prefilled for sequence in batch]
            # As the other process would.
            ContextStore(tmp_path, lock_timeout=0.5).get_or_prefill(compressed, sequences[-1])
            assert filling.result(timeout=60) == 7
    assert sum(map(len, prefilled)) == 8


@pytest.mark.parametrize("ends", ["it is killed", "it takes too long"])
def test_claimed_contexts_are_computed_if_their_process_does_not(compressed, tmp_path, prefilled, ends):
    store = ContextStore(tmp_path, lock_timeout=60 if ends == "it is killed" else 0.5)
    store.get_or_prefill(compressed, "MKTAY")
    key = context_key(compressed, "GSGSW")
    code = (
        "import sys, time; from pathlib import Path; from esm_turbo.store.files import StoreFiles\n"
        "with StoreFiles(Path(sys.argv[1])).claim(sys.argv[2:]): print('held', flush=True); time.sleep(600)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, tmp_path, key], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        assert store._files.claimed_by_others() == {key}
        if ends == "it is killed":
            threading.Timer(0.3, holder.kill).start()
        begin = time.monotonic()
        assert store.add(compressed, ["GSGSW"]) == 1
        assert time.monotonic() - begin > 0.2
        if ends == "it is killed":
            assert store._files.claimed_by_others() == set()
    finally:
        holder.kill()
        holder.wait()
    # Another run removes what is left of the claim.
    ContextStore(tmp_path).add(compressed, ["AAAAA"])
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".tmp")] == []


def wait_until(condition):
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.parametrize("what", ["store", "partition", "header"])
def test_a_store_that_was_removed_while_in_use_begins_anew(compressed, tmp_path, what):
    folder = tmp_path / "store"
    store = ContextStore(folder, host_bytes=0)
    before = store.get_or_prefill(compressed, ["MKTAY"])
    held = store.hold(compressed, ["MKTAY"])
    if what == "header":
        (folder / "store.safetensors").unlink()
    else:
        shutil.rmtree(folder if what == "store" else next(folder.glob("turbo*")))
    # What is held is in memory, and nothing else is there any more.
    assert held.get_seq_length() == 6
    assert [found is None for found in store.get(compressed, ["GSWKD"])] == [True]
    assert store.add(compressed, ["MKTAY", "GSWKD"]) == (1 if what == "header" else 2)
    again = ContextStore(folder)
    assert again.info()["contexts"] == 2
    for found in (store.get(compressed, ["MKTAY"])[0], again.get(compressed, ["MKTAY"])[0]):
        assert found.token_ids.tolist() == before.token_ids.tolist()


def test_threads_share_a_store(compressed, tmp_path):
    store = ContextStore(tmp_path, host_bytes=1 << 14)
    sequences = proteins(6)
    expected = {sequence: compressed.prefill(sequence) for sequence in sequences}

    def work(seed):
        for sequence in random.Random(seed).sample(sequences, len(sequences)) * 2:
            assert_same(store.get_or_prefill(compressed, sequence), expected[sequence])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


@pytest.mark.parametrize("method", ["get_or_prefill", "hold", "add"])
def test_nobody_waits_for_what_is_computed(compressed, tmp_path, monkeypatch, method):
    """Neither readers of the same object nor another process that writes."""
    store = ContextStore(tmp_path)
    store.add(compressed, "MKTAY")
    began, go_on = threading.Event(), threading.Event()
    prefill = context_store.prefill_wanted

    def slow(*args):
        began.set()
        assert go_on.wait(60)
        return prefill(*args)

    monkeypatch.setattr(context_store, "prefill_wanted", slow)
    with ThreadPoolExecutor(2) as pool:
        computing = pool.submit(getattr(store, method), compressed, "GSGSG")
        try:
            assert began.wait(60)
            for use in (store.get, store.get_or_prefill, store.hold):
                assert pool.submit(use, compressed, "MKTAY").result(30) is not None
            with only_writer(tmp_path, timeout=0, keep=True):
                assert not computing.done()
        finally:
            go_on.set()
        computing.result(60)
    assert store.get(compressed, "GSGSG")[0] is not None


@pytest.mark.parametrize("method", ["get_or_prefill", "hold", "add", "keep"])
def test_readers_do_not_wait_while_another_process_writes(compressed, tmp_path, method):
    store = ContextStore(tmp_path)
    config, ids = compressed.model.esm.turbo_config, [compressed.codes.cls, 5, 6]
    store.add(compressed, "MKTAY")
    arguments = (compressed, "GSGSG")
    if method == "keep":
        arguments = compressed, [ids], prefill_ids(compressed, ids, "turbo"), config
    waiting = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        with only_writer(tmp_path, keep=True):
            original = store._files.locked

            def locked():
                waiting.set()
                return original()

            store._files.locked = locked
            writing = pool.submit(getattr(store, method), *arguments)
            assert waiting.wait(60)
            assert pool.submit(store.get, compressed, "MKTAY").result(30)[0] is not None
            assert not writing.done()
        writing.result(60)
    assert len(contexts(tmp_path)) == 2


def test_read_only(compressed, tmp_path, prefilled):
    ContextStore(tmp_path).get_or_prefill(compressed, "MKTAY")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.name != USAGE_FILE}
    store = ContextStore(tmp_path, read_only=True)
    prefilled.clear()
    cache = store.get_or_prefill(compressed, ["MKTAY", "GSGS"])
    assert prefilled == [["GSGS"]]
    assert_same(cache.select([1]), compressed.prefill("GSGS"))
    config, row = compressed.model.esm.turbo_config, [compressed.codes.cls, 5, 6]
    expected = prefill_ids(compressed, row, "turbo")
    assert_same(store.get_or_compute(compressed, row, config, lambda: prefill_ids(compressed, row, "turbo")), expected)
    for add in (store.add, lambda *arguments: next(store.add_batches(*arguments))):
        with pytest.raises(ValueError, match="opened with `read_only`"):
            add(compressed, ["GSGS"])
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.name != USAGE_FILE} == before


def test_temporary_files_of_killed_writers_are_removed(compressed, tmp_path):
    store = ContextStore(tmp_path)
    store.get_or_prefill(compressed, "MKTAY")
    [path] = contexts(tmp_path)
    left = [
        path.with_name(f".{path.name}.abcd1234.tmp"),
        path.parents[1] / ".shelf.safetensors.abcd1234.tmp",
        tmp_path / ".store.safetensors.abcd1234.tmp",
    ]
    for one in left:
        one.write_bytes(b"half")
    mine = path.with_name("notes.tmp")
    mine.write_text("mine")
    again = ContextStore(tmp_path)
    again.get(compressed, "MKTAY")
    # Reading removes nothing: another process may be writing.
    assert all(one.exists() for one in left)
    again.add(compressed, "GSGS")
    assert not any(one.exists() for one in left)
    assert mine.exists()
    assert (tmp_path / LOCK_FILE).exists()


def test_hits_by_place(compressed, tmp_path):
    store = ContextStore(tmp_path)
    store.get_or_prefill(compressed, SEQUENCES)
    assert usage(store, "missed", "disk", "host", "device") == (5, 0, 0, 0)
    store.get_or_prefill(compressed, SEQUENCES)
    assert usage(store, "missed", "disk", "host", "device") == (5, 0, 5, 0)
    store.close()
    assert store.info()["memory"]["host"]["contexts"] == 0
    store.get_or_prefill(compressed, SEQUENCES[:2])
    assert usage(store, "missed", "disk", "host", "device") == (5, 2, 5, 0)
    info = store.info()["usage"]
    assert info["looked_up"] == 12
    assert info["hit_rate"] == pytest.approx(7 / 12)
    assert info["hit_rates"] == {"device": 0, "host": pytest.approx(5 / 12), "disk": pytest.approx(2 / 12)}
    # Another process sees the counts of this one.
    store.close()
    assert ContextStore(tmp_path).info()["usage"] == info


def test_a_budget_is_kept(compressed, tmp_path):
    sequences = proteins(6)
    # Batches of one, as a prefill of one sequence is.
    ContextStore(tmp_path).add(compressed, sequences, toks_per_batch=1)
    sizes = [path.stat().st_size for path in contexts(tmp_path)]
    store = ContextStore(tmp_path, host_bytes=max(sizes) + min(sizes))
    for _ in range(2):
        for sequence in sequences:
            store.get_or_prefill(compressed, sequence)
            assert store.info()["memory"]["host"]["bytes"] <= max(sizes) + min(sizes)
    memory = store.info()["memory"]["host"]
    assert memory["contexts"] >= 1 and memory["evicted"] > 0
    # The largest alone, and nothing.
    largest = ContextStore(tmp_path, host_bytes=max(sizes) // 2)
    largest.get(compressed, sequences[-1])
    nothing = ContextStore(tmp_path, host_bytes=0)
    assert_same(nothing.get_or_prefill(compressed, sequences[0]), compressed.prefill(sequences[0]))
    for one in (largest, nothing):
        memory = one.info()["memory"]["host"]
        assert (memory["bytes"], memory["contexts"], memory["evicted"]) == (0, 0, 0)


def test_the_least_recently_used_is_evicted(compressed, tmp_path):
    sequences = ["MKTAYIAK", "GSGSWKDL", "ACDEFGHI", "LMNPQRST"]
    ContextStore(tmp_path).add(compressed, sequences)
    store = ContextStore(tmp_path)
    store.get(compressed, sequences[0])
    size = store.info()["memory"]["host"]["bytes"]
    store = ContextStore(tmp_path, host_bytes=3 * size)
    in_memory = []
    for turn in random.Random(0).choices(range(4), k=40):
        before = usage(store, "host", "disk")
        store.get(compressed, sequences[turn])
        found = tuple(after - once for after, once in zip(usage(store, "host", "disk"), before, strict=True))
        assert found == ((1, 0) if turn in in_memory else (0, 1))
        in_memory = [*(one for one in in_memory if one != turn), turn][-3:]
        memory = store.info()["memory"]["host"]
        assert (memory["bytes"], memory["contexts"]) == (size * len(in_memory), len(in_memory))


def test_counts_survive_damaged_lines_and_are_added_up(compressed, tmp_path):
    store = ContextStore(tmp_path)
    store.get_or_prefill(compressed, "MKTAY")
    store.close()
    path = tmp_path / USAGE_FILE
    with path.open("a") as file:
        file.write('nonsense\n[]\n{"host": 3}\n{"host": "x"}\n{"disk"')
    assert usage(ContextStore(tmp_path), "missed", "host", "disk") == (1, 3, 0)
    with path.open("a") as file:
        file.write("\n" + '{"disk": 1}\n' * 6000)
    before = store_info(tmp_path)["usage"]
    assert before["disk"] == 6000
    # The next writer replaces them by one line.
    ContextStore(tmp_path).get_or_prefill(compressed, "GSGS")
    assert path.stat().st_size < 1000
    assert store_info(tmp_path)["usage"]["disk"] == 6000
    assert store_info(tmp_path)["usage"]["missed"] == 2


def test_no_counts_where_there_is_no_store(compressed, tmp_path):
    store = ContextStore(tmp_path)
    store.get(compressed, "MKTAY")
    store.close()
    assert list(tmp_path.iterdir()) == []


def test_counts_are_written_when_a_store_is_garbage_collected(compressed, tmp_path):
    store = ContextStore(tmp_path)
    store.get_or_prefill(compressed, "MKTAY")
    store.get_or_prefill(compressed, "MKTAY")
    del store
    assert store_info(tmp_path)["usage"]["host"] == 1


@pytest.mark.gpu
def test_tiers_on_a_device(tiny, tmp_path):
    turbo = tiny(DEFAULT_PRESET)
    turbo.model.to("cuda")
    # A graph pads to other shapes, and its sums round differently.
    turbo.model.esm.captures = False
    expected = TurboKVCache.cat([turbo.prefill(sequence) for sequence in SEQUENCES])
    logits = turbo.extend(expected, ["GSGS"] * 5).logits
    store = ContextStore(tmp_path)
    for _ in range(2):
        cache = store.get_or_prefill(turbo, SEQUENCES, toks_per_batch=1)
        assert cache.device.type == "cuda"
        assert torch.equal(turbo.extend(cache, ["GSGS"] * 5).logits, logits)
    assert usage(store, "missed", "device", "host", "disk") == (5, 5, 0, 0)
    [one] = store.get(turbo, SEQUENCES[0])
    turbo.extend(one, "GSGS", append=True)
    one.crop(3)
    assert torch.equal(turbo.extend(store.get_or_prefill(turbo, SEQUENCES), ["GSGS"] * 5).logits, logits)
    memory = store.info()["memory"]
    assert memory["device"]["contexts"] == memory["host"]["contexts"] == 5
    # From pinned memory only, and from disk.
    host = ContextStore(tmp_path, device_bytes=0)
    disk = ContextStore(tmp_path, device_bytes=0, host_bytes=0)
    for _ in range(2):
        for other in (host, disk):
            assert torch.equal(turbo.extend(other.get_or_prefill(turbo, SEQUENCES), ["GSGS"] * 5).logits, logits)
    assert all(context.buffer.is_pinned() for context, _ in host._lookup._host._contexts.values())
    assert host.info()["memory"]["device"]["contexts"] == 0


@pytest.mark.gpu
def test_batches_that_a_device_computes_ahead_are_those_of_one_after_the_other(tiny, tmp_path, monkeypatch):
    turbo = tiny(DEFAULT_PRESET)
    turbo.model.to("cuda")
    # A graph is made by the second batch of a shape, and a store's first run would have made it for the next.
    turbo.model.esm.captures = False
    sequences = proteins(40)
    ContextStore(tmp_path / "ahead").add(turbo, sequences, toks_per_batch=200)
    with torch.inference_mode():
        ContextStore(tmp_path / "inference").add(turbo, sequences, toks_per_batch=200)
    monkeypatch.setattr(filling, "_writers", lambda _: 1)
    ContextStore(tmp_path / "after").add(turbo, sequences, toks_per_batch=200)
    assert entries(tmp_path / "ahead") == entries(tmp_path / "after") == entries(tmp_path / "inference")


@pytest.mark.gpu
def test_contexts_written_by_a_device_are_read_on_the_host(tiny, tmp_path):
    on_device, on_host = tiny(DEFAULT_PRESET), tiny(DEFAULT_PRESET)
    on_device.model.to("cuda")
    written = ContextStore(tmp_path).get_or_prefill(on_device, SEQUENCES, toks_per_batch=1)
    store = ContextStore(tmp_path)
    read = store.get_or_prefill(on_host, SEQUENCES)
    assert usage(store, "disk") == (5,)
    assert_same(read, written.to("cpu"))
    # Contexts in memory for one device do not serve another.
    assert_same(store.get_or_prefill(on_device, SEQUENCES).to("cpu"), read)


def test_links_planted_in_a_store_are_not_followed(compressed, tmp_path):
    folder, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    elsewhere.mkdir()
    ContextStore(folder).add(compressed, SEQUENCES)
    paths = contexts(folder)
    # A file, whose target stays as it is.
    target = elsewhere / "context"
    paths[0].rename(target)
    paths[0].symlink_to(target)
    before = target.read_bytes()
    assert ContextStore(folder).add(compressed, SEQUENCES) == 1
    assert not paths[0].is_symlink() and target.read_bytes() == before
    # The file of counts.
    counts = elsewhere / "counts"
    counts.write_text("mine")
    (folder / USAGE_FILE).unlink(missing_ok=True)
    (folder / USAGE_FILE).symlink_to(counts)
    ContextStore(folder).get_or_prefill(compressed, SEQUENCES[0])
    assert counts.read_text() == "mine"
    # A folder.
    inner = paths[1].parent
    moved = elsewhere / "inner"
    inner.rename(moved)
    inner.symlink_to(moved)
    (moved / paths[1].name).unlink()
    with pytest.raises(ValueError, match="is a symbolic link, which is not followed here; remove it"):
        ContextStore(folder).add(compressed, SEQUENCES)
    assert paths[1].name not in os.listdir(moved)


def test_a_process_in_another_folder_opens_the_same_store(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    pickled = pickle.dumps(ContextStore("contexts", host_bytes=0))
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert pickle.loads(pickled).folder == tmp_path / "contexts"
