"""Tests of pipelines on CUDA, in one process and over ranks.

A pipeline must compute what its layers compute, and must free its memory. Its streams must wait for
the tensors that they need, and for nothing else.
"""

import contextlib
import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, cuda
from torch.nn import BatchNorm1d, LayerNorm, Linear, Module, Parameter, ReLU, Sequential
from torch.nn.functional import dropout
from torch.testing import assert_close

from torchgpipe import GPipe

from .behaviours.compare import REORDERED
from .behaviours.parts.draw import Draw
from .behaviours.row import Row, steps, unlike
from .gpus import DEVICES, ON_GPUS, WITH_HOST, needs, ways
from .library.layers import Pop, Stash
from .parts import Fails
from .plain import piped

pytestmark = needs(1)

Options = dict[str, Any]
Places = list[str]
"""The devices of a pipeline's partitions."""


def layers(last: Callable[[], Module] = ReLU) -> Sequential:
    return Sequential(
        Linear(16, 32),
        Stash(torch.sin),
        Linear(32, 32),
        Fails(),
        LayerNorm(32),
        Pop(),
        Linear(32, 32),
        last(),
    )


def given() -> Tensor:
    return torch.randn(14, 16).requires_grad_()


def balance(devices: Sequence[str]) -> list[int]:
    count = len(devices)
    return [8 // count] * count


def in_bfloat16(run: Any, value: Any) -> Any:
    with torch.autocast("cuda", torch.bfloat16):
        return steps(run, value)


def with_norm() -> Sequential:
    return layers(lambda: BatchNorm1d(32))


def with_shared_weight() -> Sequential:
    """Return a model whose layers 2 and 6, two linear layers, share a weight."""
    module = layers()
    module[6].weight = module[2].weight
    return module


# Gradients are equal only up to rounding, because kernels on other streams can add numbers in
# another order. The differences are larger in bfloat16, which has only eight significant bits.
BEHAVIOURS = [
    Row("usual", layers, given, use=steps, tolerance=REORDERED),
    Row("batch norm", with_norm, given, use=steps, tolerance=REORDERED),
    Row("a shared weight", with_shared_weight, given, use=steps, tolerance=REORDERED),
    Row("autocast", layers, given, use=in_bfloat16, tolerance=2**-6),
]


def generators() -> list[Tensor]:
    """Return the states of the random generators of the CPU and of all GPUs."""
    return [torch.get_rng_state(), *cuda.get_rng_state_all()]


def assert_all_have_gradients(model: Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        assert p.grad.isfinite().all()


@ways(*ON_GPUS)
@pytest.mark.parametrize("row", BEHAVIOURS, ids=lambda row: row.name)
@pytest.mark.parametrize("chunks", [1, 3, 8])
def test_behaviours(row: Row, chunks: int, engine: str, devices: Places, checkpoint: Any) -> None:
    """Check that a pipeline has the same outputs, gradients and buffers as its layers alone.

    Without a pipeline, the layers are on the first device.
    """
    row = replace(row, balance=balance(devices), chunks=chunks)
    assert unlike(row, "", engine, checkpoint, devices) == []


@pytest.mark.parametrize("devices", WITH_HOST)
def test_a_weight_of_a_gpu_and_the_host(devices: Places, checkpoint: Any) -> None:
    """Train a model in which a layer on a GPU and a layer on the CPU share a weight.

    The weight must stay one parameter, on the device of the first of these layers.
    """
    torch.manual_seed(0)
    module, plain = with_shared_weight(), with_shared_weight()
    plain.load_state_dict(module.state_dict())
    model = GPipe(module, balance(devices), devices=devices, chunks=4, checkpoint=checkpoint)
    assert module[6].weight is module[2].weight
    x = torch.randn(8, 16)
    plain(x).sum().backward()
    model(x.to(devices[0])).sum().backward()
    for (name, p), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert p.grad is not None and p.grad.device == p.device
        assert_close(p.grad.cpu(), other.grad, msg=name)
    with torch.no_grad():
        assert_close(model(x.to(devices[0])).cpu(), plain(x))


@ways(*ON_GPUS, *WITH_HOST)
def test_a_recomputation_drops_the_same(engine: str, devices: Places) -> None:
    draw = Draw(lambda x: dropout(torch.ones_like(x), 0.5))
    options: Options = {"engine": engine, "devices": devices, "checkpoint": "always"}
    model = piped(layers(lambda: draw), balance(devices), 4, **options)
    y = model(torch.randn(8, 16))
    before = generators()
    y.sum().backward()
    assert len(draw.first) == 4
    assert torch.equal(torch.stack(draw.first), torch.stack(draw.second[::-1]))
    assert all(map(torch.equal, before, generators())), "backward took numbers of the caller's"


@ways(*ON_GPUS, *WITH_HOST)
@pytest.mark.parametrize("when", ["forward", "recompute", "backward"])
def test_an_error_arrives_and_the_next_call_works(engine: str, devices: Places, when: str) -> None:
    options: Options = {"engine": engine, "devices": devices, "checkpoint": "always"}
    model = piped(layers(), balance(devices), 4, **options)
    x = torch.randn(8, 16)
    for calls_before in range(3):
        model[3].fail(when, ZeroDivisionError("trouble"), calls_before=calls_before)
        with pytest.raises(ZeroDivisionError, match="trouble"):
            model(x).sum().backward()
        cuda.synchronize()  # nothing waits for the rank that failed
        if engine == "ranks":
            model._pipeline.close()  # the last rank can have ended its backward already
        model.zero_grad()
        model(x).sum().backward()
    assert_all_have_gradients(model)


class Late(Module):
    """A layer that keeps the GPU busy for a millisecond before it computes, also in backward.

    Code that does not wait for this layer reads its result too early, and so gets wrong numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return _Late.apply(x * self.scale)


class _Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        cuda._sleep(2_000_000)  # about a millisecond
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        cuda._sleep(2_000_000)
        return grads[0] * 2


@ways(*ON_GPUS, *WITH_HOST)
@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("streams", [True, False], ids=["copy streams", "no copy streams"])
def test_nothing_is_read_before_it_is_there(
    engine: str, devices: Places, checkpoint: Any, streams: bool
) -> None:
    n = len(devices)
    options: Options = {"engine": engine, "devices": devices, "checkpoint": checkpoint}
    if engine == "graph":
        options["copy_streams"] = streams
    module = Sequential(*(Late() for _ in range(n)))
    model = piped(module, [1] * n, **options)
    # A copy of so many numbers takes a while. The numbers are small integers, so sums are exact.
    numbers = torch.randint(3, (6, 1 << 18)).float()
    x = numbers.to(devices[0]).requires_grad_()
    for step in range(1, 4):
        y = model(x)
        y.sum().backward()
        assert torch.equal(y.detach().to(devices[0]), x.detach() * 2**n)
        assert x.grad is not None
        assert torch.equal(x.grad, torch.full_like(x, float(2**n * step)))


@ways(*ON_GPUS, *WITH_HOST)
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_step_reads_nothing_before_it_is_there(
    engine: str, devices: Places, checkpoint: Any, schedule: str
) -> None:
    """Check that in a step, too, tasks and copies wait for the tensors that they need."""
    n = len(devices)
    module = Sequential(*(Late() for _ in range(n)))
    options: Options = {"engine": engine, "devices": devices, "schedule": schedule}
    model = piped(module, [1] * n, checkpoint=checkpoint, **options)
    numbers = torch.randint(3, (6, 1 << 18)).float()
    x = numbers.to(devices[0]).requires_grad_()
    for step in range(1, 4):
        loss = model.step(lambda y, _: y.sum(), x, None, reduction="sum")
        assert loss.item() == pytest.approx(numbers.sum().item() * 2**n)
        assert x.grad is not None
        assert torch.equal(x.grad, torch.full_like(x, float(2**n * step)))


@ways(*ON_GPUS)
def test_a_pinned_input_may_be_refilled_after_the_call(engine: str, devices: Places) -> None:
    n = len(devices)
    model = piped(Sequential(*(Late() for _ in range(n))), [1] * n, engine=engine, devices=devices)
    numbers = torch.randint(3, (6, 1 << 18)).float()
    pinned = numbers.pin_memory()
    for _ in range(3):
        cuda._sleep(20_000_000)  # the copy begins some ten milliseconds later
        y = model(pinned)
        pinned.zero_()
        assert torch.equal(y.detach().cpu(), numbers * 2**n)
        pinned.copy_(numbers)


class Noted(Module):
    """A layer that records a CUDA event after each forward, to show when the GPU has run it.

    Args:
        slow: The index of a forward that takes about a second, or `None` if there is none.
    """

    def __init__(self, slow: int | None = None) -> None:
        super().__init__()
        self.slow = slow
        self.done: list[cuda.Event] = []

    def forward(self, x: Tensor) -> Tensor:
        if len(self.done) == self.slow:
            cuda._sleep(2_000_000_000)
        y = x + 1
        self.done.append(cuda.current_stream(x.device).record_event())
        return y


@needs(2)
def test_a_device_works_while_the_one_before_is_busy_with_the_next_micro_batch() -> None:
    first, second = Noted(), Noted()
    model = GPipe(Sequential(first, second), [1, 1], devices=["cuda:0", "cuda:1"], chunks=2)
    x = torch.zeros(2, 16, device="cuda:0")
    for slow in (None, 1):  # at the first use, CUDA can wait for all streams
        cuda.synchronize(0)
        cuda.synchronize(1)
        first.slow = slow
        first.done.clear()
        second.done.clear()
        with torch.no_grad():
            y = model(x)
    second.done[0].synchronize()
    assert not first.done[1].query()
    assert torch.equal(y.cpu(), torch.full((2, 16), 2.0))


@pytest.mark.parametrize("devices", [*ON_GPUS, *WITH_HOST])
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_stream_of_the_callers_own(devices: Places, checkpoint: Any) -> None:
    """Check that a pipeline works on streams that the caller has made current.

    The test calls the backward on other streams than the forward.
    """
    model = GPipe(layers(), balance(devices), devices=devices, chunks=3, checkpoint=checkpoint)
    x = torch.randn(13, 16, device=devices[0])
    y = model(x)
    y.square().sum().backward()
    expected = [y.detach()] + [p.grad for p in model.parameters()]
    model.zero_grad()

    streams = [cuda.Stream(d) for d in range(DEVICES)]
    for stream in streams:
        stream.wait_stream(cuda.current_stream(stream.device))
    with contextlib.ExitStack() as stack:
        for stream in streams:
            stack.enter_context(cuda.stream(stream))
        y = model(x)
        loss = y.square().sum()
    for stream in streams:
        cuda.current_stream(stream.device).wait_stream(stream)
    loss.backward()
    cuda.synchronize()
    found = [y.detach()] + [p.grad for p in model.parameters()]
    assert_close(found, expected)


@pytest.mark.parametrize("devices", ON_GPUS)  # not with the CPU: a copy to the CPU waits
def test_no_host_synchronization_within_a_step(devices: Places, checkpoint: Any) -> None:
    model = GPipe(layers(), balance(devices), devices=devices, chunks=4, checkpoint=checkpoint)
    x = torch.randn(8, 16, device=model.devices[0])
    model(x).sum().backward()
    cuda.synchronize()
    model.zero_grad()
    # In this mode of PyTorch, an operation that makes the host wait raises an error.
    cuda.set_sync_debug_mode("error")
    try:
        model(x).sum().backward()
    finally:
        cuda.set_sync_debug_mode("default")
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("devices", ON_GPUS)
def test_clipping_gradients_does_not_make_the_host_wait(devices: Places) -> None:
    model = GPipe(layers(), balance(devices), devices=devices, chunks=4)
    model(torch.randn(8, 16, device=model.devices[0])).sum().backward()
    model.clip_grad_norm_(1.0)
    cuda.synchronize()
    cuda.set_sync_debug_mode("error")
    try:
        norm = model.clip_grad_norm_(1.0)
    finally:
        cuda.set_sync_debug_mode("default")
    assert norm.item() <= 1.001, "the gradients were clipped before"


@pytest.mark.parametrize("devices", [*ON_GPUS, *WITH_HOST])
def test_dropping_frees_the_device(devices: Places) -> None:
    gc.collect()
    used = [cuda.memory_allocated(d) for d in range(DEVICES)]
    model = GPipe(layers(), balance(devices), devices=devices, chunks=4)
    for _ in range(3):
        model(torch.randn(8, 16)).sum().backward()
    del model
    gc.collect()
    cuda.synchronize()
    # cuBLAS keeps a workspace for each stream that it has run on.
    torch._C._cuda_clearCublasWorkspaces()
    for d in range(DEVICES):
        assert cuda.memory_allocated(d) <= used[d]


@ways()
def test_pinned_memory_is_used_again(engine: str, devices: Places) -> None:
    model = piped(layers(), balance(devices), 4, engine=engine, devices=devices)
    pinned = []
    for _ in range(20):
        model(torch.randn(8, 16)).sum().backward()
        stats = cuda.host_memory_stats()
        pinned.append(stats.get("num_host_alloc", 0))
    assert pinned[-1] <= 2 * pinned[2], pinned  # timing decides which blocks are free
    assert pinned[-1] > 0 or len({*devices}) > 1
