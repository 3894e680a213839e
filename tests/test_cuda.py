"""On CUDA: one device with several partitions, copies between two devices, streams, random numbers, memory."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe import GPipe, is_recomputing
from torchgpipe.skip import pop, skippable, stash

DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = pytest.mark.skipif(DEVICES < 1, reason="needs a CUDA device")
needs_two = pytest.mark.skipif(DEVICES < 2, reason="needs two CUDA devices")

PLACES = [
    pytest.param(["cuda:0"], id="1 on one"),
    pytest.param(["cuda:0"] * 2, id="2 on one"),
    pytest.param(["cuda:0"] * 4, id="4 on one"),
    pytest.param(["cuda:0", "cuda:1"], id="2 on two", marks=needs_two),
    pytest.param(["cuda:0", "cuda:1", "cuda:0", "cuda:1"], id="4 on two, in turn", marks=needs_two),
]


@skippable(stash=["skip"])
class Stash(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("skip", x)
        return torch.tanh(x)


@skippable(pop=["skip"])
class Pop(nn.Module):
    def forward(self, x: Tensor) -> Any:
        skip = yield pop("skip")
        return x + skip.sin()


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 32), Stash(), nn.Linear(32, 32), nn.Tanh(), nn.LayerNorm(32), Pop(), nn.Linear(32, 32), nn.ReLU()
    )


def balance(n: int) -> list[int]:
    return [8 // n] * n


@pytest.mark.parametrize("devices", PLACES)
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("chunks", [1, 3, 8])
@pytest.mark.parametrize("streams", [True, False], ids=["copy streams", "no copy streams"])
def test_equals_plain(devices: list[str], checkpoint: Any, chunks: int, streams: bool) -> None:
    plain = layers().to("cuda:0")
    model = GPipe(
        layers(), balance(len(devices)), devices=devices, chunks=chunks, checkpoint=checkpoint, copy_streams=streams
    )
    x = torch.randn(13, 16, device="cuda:0")
    x_plain, x_model = x.clone().requires_grad_(), x.clone().requires_grad_()
    for _ in range(3):
        expected = torch.cat([plain(c) for c in x_plain.chunk(chunks)])
        found = model(x_model)
        assert found.device == model.devices[-1]
        assert torch.equal(found.to(expected.device), expected)
        expected.square().sum().backward()
        found.square().sum().backward()
    # Gradients of the micro-batches are summed up in another order under checkpointing.
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad.to("cuda:0"), p.grad, msg=lambda m, name=name: f"{name}: {m}")
    torch.testing.assert_close(x_model.grad, x_plain.grad)


class RecordMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.masks: dict[bool, list[Tensor]] = {False: [], True: []}

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.dropout(x, 0.5)
        self.masks[is_recomputing()].append((y == 0).detach())
        return y


@pytest.mark.parametrize("devices", PLACES)
def test_recomputation_drops_the_same(devices: list[str]) -> None:
    record = RecordMask()
    module = nn.Sequential(*list(layers())[:7], record)
    model = GPipe(module, balance(len(devices)), devices=devices, chunks=4, checkpoint="always")
    before = torch.cuda.get_rng_state(model.devices[-1])
    model(torch.randn(8, 16)).sum().backward()
    assert len(record.masks[False]) == 4
    assert torch.equal(torch.stack(record.masks[False]), torch.stack(record.masks[True][::-1]))
    assert not torch.equal(torch.cuda.get_rng_state(model.devices[-1]), before)


@pytest.mark.parametrize("devices", PLACES)
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_no_host_synchronization_within_a_step(devices: list[str], checkpoint: Any) -> None:
    model = GPipe(layers(), balance(len(devices)), devices=devices, chunks=4, checkpoint=checkpoint)
    x = torch.randn(8, 16, device=model.devices[0])
    model(x).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("devices", PLACES)
def test_autocast(devices: list[str]) -> None:
    plain = layers().to("cuda:0")
    model = GPipe(layers(), balance(len(devices)), devices=devices, chunks=4, checkpoint="always")
    x = torch.randn(8, 16, device="cuda:0")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        expected = torch.cat([plain(c) for c in x.chunk(4)])
        found = model(x)
    assert found.dtype == expected.dtype
    expected.float().sum().backward()
    found.float().sum().backward()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        # Sums of four bfloat16 gradients in another order: eight bits of mantissa.
        torch.testing.assert_close(q.grad.to("cuda:0"), p.grad, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("devices", PLACES)
def test_dropping_frees_the_device(devices: list[str]) -> None:
    gc.collect()
    used = [torch.cuda.memory_allocated(d) for d in range(DEVICES)]
    model = GPipe(layers(), balance(len(devices)), devices=devices, chunks=4)
    for _ in range(3):
        model(torch.randn(8, 16)).sum().backward()
    del model
    gc.collect()
    torch.cuda.synchronize()
    # cuBLAS keeps a workspace per stream that it has run on.
    torch._C._cuda_clearCublasWorkspaces()
    assert [torch.cuda.memory_allocated(d) for d in range(DEVICES)] <= used
