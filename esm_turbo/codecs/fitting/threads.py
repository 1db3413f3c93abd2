"""Independent parts of a fit, in threads: NumPy sorts, sums and factorises outside of the interpreter's lock."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def run_threads(function: Callable[[_Item], _Result], items: Iterable[_Item]) -> list[_Result]:
    """Results of a function in the order of its arguments, in as many threads as PyTorch uses."""
    threads = torch.get_num_threads()
    if threads == 1:
        return list(map(function, items))
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(function, items))
