"""Copies between the host and a device."""

from __future__ import annotations

import pytest
import torch

from esm_turbo.codecs.transfers import to_device, to_host

CPU = torch.device("cpu")


def test_on_the_cpu_nothing_is_copied() -> None:
    x = torch.arange(3)
    assert to_device(x, CPU) is x
    assert to_host(x) is x


@pytest.mark.gpu
def test_values_there_and_back_while_the_device_is_busy() -> None:
    device = torch.device("cuda")
    busy = torch.rand(4096, 4096, device=device)
    for number in range(20):
        busy = busy @ busy / busy.norm()
        # The host's tensor is freed, and its memory used again, before the device has read it.
        sent = to_device(torch.full((1000,), number), device)
        back = to_host(sent + 1)
        torch.cuda.synchronize()
        assert back.is_pinned()
        assert (back == number + 1).all()
    assert to_device(sent, device) is sent
