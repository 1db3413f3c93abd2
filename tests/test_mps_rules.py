"""Rules of Apple GPUs, checked without one: no float64, no complex numbers, no operation without an MPS kernel.

PyTorch's own table of operations, which ships with it, says which of them have a kernel for MPS. Everything runs on the
CPU under a mode that sees every operation and every tensor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import torchgen
import yaml
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from esm_turbo import KVCalibrator, TurboEsm, TurboEsmForMaskedLM, TurboKVCache
from esm_turbo.config import PRESETS
from tests.helpers.models import CACHE_CONFIGS, make_calibration, make_esm, random_ids

pytestmark = pytest.mark.usefixtures("modes_only_watch")

MISSING_DTYPES = (torch.float64, torch.complex32, torch.complex64, torch.complex128)
# Kernels for MPS exist, but not for these dtypes.
MISSING_FOR_DTYPE = {"sort": (torch.bool,), "argsort": (torch.bool,), "topk": (torch.bool,)}


@cache
def operations_without_mps() -> frozenset[str]:
    """Operations that have a kernel for dense CPU tensors in some overload, and for MPS in none."""
    table = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"
    backends: dict[str, set[str]] = {}
    for entry in yaml.load(table.read_text(), Loader=yaml.CSafeLoader):
        name = entry["func"].partition("(")[0].partition(".")[0].removesuffix("_")
        for keys in entry.get("dispatch") or {}:
            backends.setdefault(name, set()).update(key.strip() for key in keys.split(","))
    return frozenset(name for name, keys in backends.items() if "CPU" in keys and "MPS" not in keys)


class MpsRules(TorchDispatchMode):
    """Raises if an Apple GPU would."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        namespace, _, name = func._schema.name.partition("::")
        name = name.removesuffix("_")
        self.operations.add(name)
        if namespace == "aten" and name in operations_without_mps():
            raise NotImplementedError(f"aten::{name} has no kernel for MPS")
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, output)):
            if isinstance(tensor, Tensor):
                if tensor.dtype in MISSING_DTYPES:
                    raise TypeError(f"aten::{name} handles {tensor.dtype}, which MPS has not")
                if tensor.dtype in MISSING_FOR_DTYPE.get(name, ()) and tensor is args[0]:
                    raise TypeError(f"aten::{name} of {tensor.dtype}")
        return output


PLANTED: dict[str, tuple[Callable[[], object], type[Exception]]] = {
    "float64": (lambda: torch.ones(2) * torch.ones(2, dtype=torch.float64), TypeError),
    "float64 made inside": (lambda: torch.arange(3).to(torch.float64).float(), TypeError),
    "float64 from numpy": (lambda: torch.from_numpy(torch.zeros(2).double().numpy() * 1.0).float() + 1, TypeError),
    "complex": (lambda: torch.polar(torch.ones(2), torch.ones(2)), TypeError),
    "frexp": (lambda: torch.frexp(torch.ones(2)), NotImplementedError),
    "geqrf": (lambda: torch.geqrf(torch.eye(2)), NotImplementedError),
    "mode": (lambda: torch.mode(torch.arange(3.0)), NotImplementedError),
    "sort of booleans": (lambda: torch.sort(torch.ones(3, dtype=torch.bool)), TypeError),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_violations_are_caught(name: str) -> None:
    violate, error = PLANTED[name]
    violate()
    with MpsRules(), pytest.raises(error):
        violate()


@pytest.fixture(scope="module", params=CACHE_CONFIGS)
def model(request: pytest.FixtureRequest, tiny_model: Callable[..., TurboEsmForMaskedLM]) -> TurboEsmForMaskedLM:
    """Eager attention, because PyTorch chooses its fused kernels by device."""
    config = CACHE_CONFIGS[request.param]
    model = tiny_model(preset=config, calibrated=True, attn_implementation="eager")
    # Fitting is NumPy in float64, on the CPU wherever the model is.
    model.esm.calibration.fit([config])
    return model


@torch.no_grad()
def use_a_cache(model: TurboEsmForMaskedLM, path: Path) -> None:
    """Runs prefill, extensions of every kind, appends, and everything that reshapes a cache."""
    ids, mask = random_ids([17, 9], masks=1, eos=True)
    new_ids, new_mask = random_ids([4, 2], seed=1, cls=False)
    cache = model(ids, mask, use_cache=True, output_hidden_states=True).past_key_values
    model(new_ids, new_mask, past_key_values=cache)
    both = torch.cat([mask, new_mask], dim=1)
    both[:, 3] = 0
    model(new_ids, both, torch.arange(4)[None] + 30, past_key_values=cache, use_cache=True)
    model(new_ids, past_key_values=cache, use_cache=True, append_mask=new_mask.bool())
    cache.crop(12)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0]))
    cache = TurboKVCache.cat([cache, cache.select(1)])
    cache.reorder_cache(torch.tensor([2, 1, 0]))
    cache.save(path)
    loaded = TurboKVCache.load(path, model=model)
    shared = loaded.select(0)
    model(new_ids, past_key_values=shared)
    model.predict_contacts(ids, mask)
    assert cache.nbytes == loaded.nbytes


def test_a_cache_keeps_the_rules(model: TurboEsmForMaskedLM, tmp_path: Path) -> None:
    with MpsRules() as rules:
        use_a_cache(model, tmp_path / "cache.safetensors")
    assert {"bmm", "gather", "scatter", "sort", "cat", "exp"} <= rules.operations
    assert len(rules.operations) > 30


def test_half_precision_keeps_the_rules(model: TurboEsmForMaskedLM, tmp_path: Path) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        with MpsRules():
            use_a_cache(copy.deepcopy(model).to(dtype), tmp_path / "cache.safetensors")


def test_calibration_keeps_the_rules() -> None:
    """What runs on the model's device is `partial_fit`; fitting is NumPy on the CPU.

    Which kernel attention has is PyTorch's choice on each device: here its plain form.
    """
    hf = make_esm(attn_implementation="eager")
    calibrator = KVCalibrator(hf, sample_size=64)
    with sdpa_kernel(SDPBackend.MATH), MpsRules():
        calibrator.partial_fit(*random_ids([40, 33], eos=True))
        calibrator.partial_fit(*random_ids([70, 12], seed=1, eos=True))
    assert calibrator.n_residues_seen_ == 155 - 8


def test_new_codecs_keep_the_rules(tiny_model: Callable[..., TurboEsmForMaskedLM], tmp_path: Path) -> None:
    """A calibration read from a file, whose tables are prepared on the device."""
    hf = make_esm(attn_implementation="eager")
    make_calibration(hf).fit(PRESETS).save(tmp_path / "calibration.safetensors")
    for preset in PRESETS:
        model = TurboEsmForMaskedLM.from_esm(hf, calibration=tmp_path / "calibration.safetensors", preset=preset)
        ids, mask = random_ids([9, 5])
        with torch.no_grad(), MpsRules():
            cache = model(ids, mask, use_cache=True).past_key_values
            model(ids, mask, past_key_values=cache)


def test_the_entry_point_keeps_the_rules(tiny_model: Callable[..., TurboEsmForMaskedLM]) -> None:
    model = tiny_model(preset="paper", attn_implementation="eager")
    model.esm.calibration.fit(["paper"])
    turbo = TurboEsm(model, TurboEsm.from_pretrained(preset="exact", calibration=False, device="cpu").tokenizer)
    with MpsRules():
        cache = turbo.prefill(["MKTAYIAKQRQ", "GAV<mask>L"], total_tokens=20, total_masks=2)
        turbo.extend(cache, ["IS<mask>", "L"], append=True)
        turbo.extend(cache.select(0), ["IS", "L", "V"])
