"""On CUDA: one device with several partitions, or several devices: results, random numbers, errors, memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe import GPipe

from .behaviours.compare import differences
from .behaviours.draw import Draw
from .cuda import DEVICES, balance, everywhere, layers, needs_cuda
from .parts import Fails

pytestmark = needs_cuda


def placed(devices: list[str]) -> tuple[nn.Sequential, Callable[[Tensor], Tensor]]:
    """Return the layers on these devices, and what runs them there one after another."""
    module = layers()
    places = [device for device, count in zip(devices, balance(devices), strict=True) for _ in range(count)]
    for layer, place in zip(module, places, strict=True):
        layer.to(place)

    def run(x: Tensor) -> Tensor:
        for layer, place in zip(module, places, strict=True):
            x = layer(x.to(place))
        return x

    return module, run


@everywhere
@pytest.mark.parametrize("chunks", [1, 3, 8])
@pytest.mark.parametrize("origin", ["cpu", "cuda:0"])
@pytest.mark.parametrize("streams", [True, False], ids=["copy streams", "no copy streams"])
def test_equals_plain(devices: list[str], checkpoint: Any, chunks: int, origin: str, streams: bool) -> None:
    plain, run = placed(devices)
    model = GPipe(
        layers(), balance(devices), devices=devices, chunks=chunks, checkpoint=checkpoint, copy_streams=streams
    )
    x = torch.randn(13, 16, device=origin)
    x_plain, x_model = x.clone().requires_grad_(), x.clone().requires_grad_()
    for _ in range(3):
        expected = torch.cat([run(part) for part in x_plain.to(devices[0]).chunk(chunks)])
        found = model(x_model)
        assert found.device == model.devices[-1]
        assert torch.equal(found, expected)
        expected.square().sum().backward()
        found.square().sum().backward()
    assert differences(model, plain, 1e-5) == []
    torch.testing.assert_close(x_model.grad, x_plain.grad)


@everywhere
def test_autocast(devices: list[str]) -> None:
    plain, run = placed(devices)
    model = GPipe(layers(), balance(devices), devices=devices, chunks=4, checkpoint="always")
    x = torch.randn(8, 16, device="cuda:0")
    with torch.autocast("cuda", dtype=torch.bfloat16), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = torch.cat([run(part) for part in x.chunk(4)])
        found = model(x)
    assert found.dtype == expected.dtype
    expected.float().sum().backward()
    found.float().sum().backward()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        # Sums of four bfloat16 gradients in another order: eight bits of mantissa.
        torch.testing.assert_close(q.grad, p.grad, rtol=2**-6, atol=2**-6)


def random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


@everywhere
def test_recomputation_drops_the_same(devices: list[str]) -> None:
    draw = Draw(lambda x: nn.functional.dropout(torch.ones_like(x), 0.5))
    model = GPipe(nn.Sequential(*layers()[:7], draw), balance(devices), devices=devices, chunks=4, checkpoint="always")
    x = torch.randn(8, 16)
    before = random_state(model.devices[-1])
    model(x).sum().backward()
    assert len(draw.first) == 4
    assert torch.equal(torch.stack(draw.first), torch.stack(draw.second[::-1]))
    assert not torch.equal(random_state(model.devices[-1]), before)
    y = model(x).sum()
    before = random_state(model.devices[-1])
    y.backward()
    assert torch.equal(random_state(model.devices[-1]), before), "backward took numbers of the caller's"


@everywhere
def test_dropping_frees_the_device(devices: list[str]) -> None:
    gc.collect()
    used = [torch.cuda.memory_allocated(d) for d in range(DEVICES)]
    model = GPipe(layers(), balance(devices), devices=devices, chunks=4)
    for _ in range(3):
        model(torch.randn(8, 16)).sum().backward()
    del model
    gc.collect()
    torch.cuda.synchronize()
    # cuBLAS keeps a workspace per stream that it has run on.
    torch._C._cuda_clearCublasWorkspaces()
    assert all(torch.cuda.memory_allocated(d) <= used[d] for d in range(DEVICES))


def test_by_default_all_cuda_devices_are_taken() -> None:
    model = GPipe(nn.Sequential(*(nn.Linear(2, 2) for _ in range(DEVICES))), [1] * DEVICES)
    assert model.devices == [torch.device("cuda", index) for index in range(DEVICES)]
    assert [next(partition.parameters()).device for partition in model.partitions] == model.devices


@everywhere
@pytest.mark.parametrize("when", ["forward", "recompute", "backward"])
def test_an_error_arrives_and_the_next_call_works(devices: list[str], when: str) -> None:
    module, fails = layers(), Fails()
    module[3] = fails
    model = GPipe(module, balance(devices), devices=devices, chunks=4, checkpoint="always")
    fails.fail(when, ZeroDivisionError("trouble"))
    x = torch.randn(8, 16)
    with pytest.raises(ZeroDivisionError, match="trouble") as caught:
        model(x).sum().backward()
    assert caught.traceback[-1].name == "reach", "the traceback does not go down to the layer"

    model.zero_grad()
    model(x).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@everywhere
def test_deferred_batch_norm(devices: list[str]) -> None:
    n = len(devices)
    module = nn.Sequential(*(nn.BatchNorm1d(16) for _ in range(n)))
    model = GPipe(module, [1] * n, devices=devices, chunks=4, checkpoint="always", deferred_batch_norm=True)
    plain = nn.BatchNorm1d(16).to(devices[0])
    x = torch.randn(14, 16, device=devices[0]) * 3 + 5
    model(x).sum().backward()
    plain(x)
    torch.testing.assert_close(model[0].running_mean, plain.running_mean)
    torch.testing.assert_close(model[0].running_var, plain.running_var)
