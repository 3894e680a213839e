"""On CUDA: streams wait for what they need, and for nothing else; nor does the host."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe import GPipe

from .cuda import DEVICES, ON_GPUS, balance, everywhere, layers, needs_cuda, needs_two

pytestmark = needs_cuda


class Late(nn.Module):
    """Make the device busy before the result is there, in forward and backward; who does not wait reads too early."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return _Late.apply(x * self.scale)


class _Late(torch.autograd.Function):
    CYCLES = 2_000_000  # about a millisecond

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        torch.cuda._sleep(_Late.CYCLES)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        torch.cuda._sleep(_Late.CYCLES)
        return grads[0] * 2


@everywhere
@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("streams", [True, False], ids=["copy streams", "no copy streams"])
def test_nothing_is_read_before_it_is_there(devices: list[str], checkpoint: Any, streams: bool) -> None:
    n = len(devices)
    module = nn.Sequential(*(Late() for _ in range(n)))
    model = GPipe(module, [1] * n, devices=devices, chunks=3, checkpoint=checkpoint, copy_streams=streams)
    # Large enough that a copy takes a while; small whole numbers, so that every sum is exact.
    x = torch.randint(3, (6, 1 << 18), device=devices[0]).float().requires_grad_()
    for step in range(1, 4):
        y = model(x)
        y.sum().backward()
        assert torch.equal(y.detach().to(devices[0]), x.detach() * 2**n)
        assert x.grad is not None
        assert torch.equal(x.grad, torch.full_like(x, float(2**n * step)))


class Noted(nn.Module):
    """Mark the end of each forward by an event; let the one of micro-batch `slow` take about a second."""

    def __init__(self, slow: int | None = None) -> None:
        super().__init__()
        self.slow = slow
        self.done: list[torch.cuda.Event] = []

    def forward(self, x: Tensor) -> Tensor:
        if len(self.done) == self.slow:
            torch.cuda._sleep(1000 * _Late.CYCLES)
        y = x + 1
        self.done.append(torch.cuda.current_stream(x.device).record_event())
        return y


@needs_two
def test_a_device_works_while_the_one_before_is_busy_with_the_next_micro_batch() -> None:
    first, second = Noted(), Noted()
    model = GPipe(nn.Sequential(first, second), [1, 1], devices=["cuda:0", "cuda:1"], chunks=2)
    x = torch.zeros(2, 16, device="cuda:0")
    for slow in (None, 1):  # what CUDA does once, on first use, may wait for everything
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        first.slow = slow
        first.done.clear()
        second.done.clear()
        with torch.no_grad():
            y = model(x)
    second.done[0].synchronize()
    assert not first.done[1].query()
    assert torch.equal(y.cpu(), torch.full((2, 16), 2.0))


@everywhere
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_stream_of_the_callers_own(devices: list[str], checkpoint: Any) -> None:
    """The pipeline computes on the streams that are current when it is called; backward may be called on others."""
    model = GPipe(layers(), balance(devices), devices=devices, chunks=3, checkpoint=checkpoint)
    x = torch.randn(13, 16, device=devices[0])
    y = model(x)
    y.square().sum().backward()
    expected = [y.detach(), *(p.grad for p in model.parameters())]
    model.zero_grad()

    streams = [torch.cuda.Stream(d) for d in range(DEVICES)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
    with contextlib.ExitStack() as stack:
        for stream in streams:
            stack.enter_context(torch.cuda.stream(stream))
        y = model(x)
        loss = y.square().sum()
    for stream in streams:
        torch.cuda.current_stream(stream.device).wait_stream(stream)
    loss.backward()
    torch.cuda.synchronize()

    found = [y.detach(), *(p.grad for p in model.parameters())]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("devices", ON_GPUS)  # a copy to the host waits for it
def test_no_host_synchronization_within_a_step(devices: list[str], checkpoint: Any) -> None:
    model = GPipe(layers(), balance(devices), devices=devices, chunks=4, checkpoint=checkpoint)
    x = torch.randn(8, 16, device=model.devices[0])
    model(x).sum().backward()
    torch.cuda.synchronize()
    model.zero_grad()
    torch.cuda.set_sync_debug_mode("error")  # of PyTorch: whoever makes the host wait raises an error
    try:
        model(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(p.grad is not None for p in model.parameters())
