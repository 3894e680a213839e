"""On CUDA: one device with several partitions, copies between two devices, streams, random numbers, memory."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe import GPipe, is_recomputing
from torchgpipe.skip import pop, skippable, stash

DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = pytest.mark.skipif(DEVICES < 1, reason="needs a CUDA device")
needs_two = pytest.mark.skipif(DEVICES < 2, reason="needs two CUDA devices")

ON_GPUS = [
    pytest.param(["cuda:0"], id="1 on one"),
    pytest.param(["cuda:0"] * 2, id="2 on one"),
    pytest.param(["cuda:0"] * 4, id="4 on one"),
    pytest.param(["cuda:0", "cuda:1"], id="2 on two", marks=needs_two),
    pytest.param(["cuda:0", "cuda:1", "cuda:0", "cuda:1"], id="4 on two, in turn", marks=needs_two),
]
# With the host as a second device, so that tensors cross, and streams wait, also where there is one GPU.
PLACES = [
    *ON_GPUS,
    pytest.param(["cpu", "cuda:0"], id="from the host"),
    pytest.param(["cuda:0", "cpu"], id="to the host"),
    pytest.param(["cuda:0", "cpu", "cuda:0", "cpu"], id="to the host and back"),
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
        return x + skip.to(x.device).sin()


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 32), Stash(), nn.Linear(32, 32), nn.Tanh(), nn.LayerNorm(32), Pop(), nn.Linear(32, 32), nn.ReLU()
    )


def balance(n: int) -> list[int]:
    return [8 // n] * n


def placed(devices: list[str]) -> tuple[nn.Sequential, Callable[[Tensor], Tensor]]:
    """Return the layers on these devices, and what runs them there one after another."""
    module = layers()
    places = [device for device in devices for _ in range(8 // len(devices))]
    for layer, place in zip(module, places, strict=True):
        layer.to(place)

    def run(x: Tensor) -> Tensor:
        for layer, place in zip(module, places, strict=True):
            x = layer(x.to(place))
        return x

    return module, run


@pytest.mark.parametrize("devices", PLACES)
@pytest.mark.parametrize("chunks", [1, 3, 8])
@pytest.mark.parametrize("streams", [True, False], ids=["copy streams", "no copy streams"])
def test_equals_plain(devices: list[str], checkpoint: Any, chunks: int, streams: bool) -> None:
    plain, run = placed(devices)
    model = GPipe(
        layers(), balance(len(devices)), devices=devices, chunks=chunks, checkpoint=checkpoint, copy_streams=streams
    )
    x = torch.randn(13, 16, device="cuda:0")
    x_plain, x_model = x.clone().requires_grad_(), x.clone().requires_grad_()
    for _ in range(3):
        expected = torch.cat([run(c) for c in x_plain.chunk(chunks)])
        found = model(x_model)
        assert found.device == model.devices[-1]
        assert torch.equal(found, expected)
        expected.square().sum().backward()
        found.square().sum().backward()
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, msg=lambda m, name=name: f"{name}: {m}")
    torch.testing.assert_close(x_model.grad, x_plain.grad)


def random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


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
    x = torch.randn(8, 16)
    before = random_state(model.devices[-1])
    model(x).sum().backward()
    assert len(record.masks[False]) == 4
    assert torch.equal(torch.stack(record.masks[False]), torch.stack(record.masks[True][::-1]))
    after = random_state(model.devices[-1])
    assert not torch.equal(after, before)
    y = model(x).sum()
    before = random_state(model.devices[-1])
    y.backward()
    assert torch.equal(random_state(model.devices[-1]), before), "backward took numbers of the caller's"


@pytest.mark.parametrize("devices", ON_GPUS)  # a copy to the host waits for it
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
    plain, run = placed(devices)
    model = GPipe(layers(), balance(len(devices)), devices=devices, chunks=4, checkpoint="always")
    x = torch.randn(8, 16, device="cuda:0")
    with torch.autocast("cuda", dtype=torch.bfloat16), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = torch.cat([run(c) for c in x.chunk(4)])
        found = model(x)
    assert found.dtype == expected.dtype
    expected.float().sum().backward()
    found.float().sum().backward()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        # Sums of four bfloat16 gradients in another order: eight bits of mantissa.
        torch.testing.assert_close(q.grad, p.grad, rtol=2**-6, atol=2**-6)


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
    assert all(torch.cuda.memory_allocated(d) <= used[d] for d in range(DEVICES))


def test_by_default_all_cuda_devices_are_taken() -> None:
    model = GPipe(nn.Sequential(*(nn.Linear(2, 2) for _ in range(DEVICES))), [1] * DEVICES)
    assert model.devices == [torch.device("cuda", index) for index in range(DEVICES)]
    assert [partition[0].weight.device for partition in model.partitions] == model.devices


@pytest.mark.parametrize("devices", PLACES)
@pytest.mark.parametrize("origin", ["cpu", "cuda:0"])
def test_the_input_comes_from_any_device(devices: list[str], origin: str) -> None:
    model = GPipe(layers(), balance(len(devices)), devices=devices, chunks=3)
    x = torch.randn(13, 16)
    expected = torch.cat([layers()(part) for part in x.chunk(3)])
    given = x.to(origin).requires_grad_()
    y = model(given)
    y.sum().backward()
    torch.testing.assert_close(y.cpu(), expected, rtol=1e-3, atol=1e-3)
    assert given.grad is not None
    assert given.grad.device == given.device


class Late(nn.Module):
    """Make the device busy before the result is there, in forward and backward; who does not wait reads too early."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Late.apply(x * self.scale)
        return y


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


@pytest.mark.parametrize("devices", PLACES)
@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("streams", [True, False], ids=["copy streams", "no copy streams"])
def test_nothing_is_read_before_it_is_there(devices: list[str], checkpoint: Any, streams: bool) -> None:
    n = len(devices)
    model = GPipe(
        nn.Sequential(*(Late() for _ in range(n))),
        [1] * n,
        devices=devices,
        chunks=3,
        checkpoint=checkpoint,
        copy_streams=streams,
    )
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


@pytest.mark.parametrize("devices", PLACES)
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_stream_of_the_callers_own(devices: list[str], checkpoint: Any) -> None:
    """The pipeline computes on the streams that are current when it is called; backward may be called on others."""
    model = GPipe(layers(), balance(len(devices)), devices=devices, chunks=3, checkpoint=checkpoint)
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


def test_a_checkpointed_run_keeps_only_the_inputs_of_tasks() -> None:
    width, kept = 256, {}
    for checkpoint in ("always", "never"):
        torch.manual_seed(0)
        block = [nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()]
        model = GPipe(nn.Sequential(*block), [4], devices=["cuda:0"], chunks=4, checkpoint=checkpoint)
        x = torch.randn(1024, width, device="cuda:0")
        model(x).sum().backward()
        model.zero_grad(set_to_none=False)
        gc.collect()
        before = torch.cuda.memory_allocated(0)
        y = model(x)
        kept[checkpoint] = torch.cuda.memory_allocated(0) - before - y.nbytes
        y.sum().backward()
        del y
    activation = 1024 * width * 4
    # The micro-batches' inputs are views of x; their outputs have been concatenated.
    assert kept["always"] < activation / 2
    # What both tanh gave.
    assert kept["never"] >= 2 * activation


class Fails(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        if self.where == ("recompute" if is_recomputing() else "forward"):
            raise ZeroDivisionError(self.where)
        y: Tensor = _Fails.apply(x, self)
        return y


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Fails) -> Tensor:
        ctx.layer = layer
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        if ctx.layer.where == "backward":
            raise ZeroDivisionError("backward")
        return grads[0], None


@pytest.mark.parametrize("devices", PLACES)
@pytest.mark.parametrize("where", ["forward", "recompute", "backward"])
def test_an_error_arrives_and_the_next_call_works(devices: list[str], where: str) -> None:
    fails = Fails(where)
    module = layers()
    module[3] = fails
    model = GPipe(module, balance(len(devices)), devices=devices, chunks=4, checkpoint="always")
    x = torch.randn(8, 16)
    with pytest.raises(ZeroDivisionError, match=where) as caught:
        model(x).sum().backward()
    assert {"forward", "backward"} & {entry.name for entry in caught.traceback[-1:]}

    fails.where = ""
    model.zero_grad()
    model(x).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("devices", PLACES)
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
