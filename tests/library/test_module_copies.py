"""Test modules with buffers that partitions on several devices use, such as rotary embeddings.

The CPU has one device only, but a pipeline takes `cpu:0` and `cpu:1` for two devices.
"""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe import GPipe

from ..gpus import ON_GPUS

TWO = ["cpu:0", "cpu:1"]


class Rotary(nn.Module):
    """Scales its input by a buffer. A real rotary embedding turns pairs of numbers instead."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0, 4.0]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Attention(nn.Module):
    """A module without own buffers, in which there is a module with a buffer."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.query = nn.Linear(4, 4)
        self.rotary = rotary

    def forward(self, x: Tensor) -> Tensor:
        return self.rotary(self.query(x))


def blocks(shared: nn.Module, count: int = 4) -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), shared) for _ in range(count)])


def rotary_of(block: nn.Module) -> Any:
    (found,) = [module for module in block.modules() if isinstance(module, Rotary)]
    return found


@pytest.mark.parametrize("attention", [False, True])
def test_each_device_has_a_copy_and_trains_as_without_a_pipeline(attention: bool) -> None:
    plain = blocks(Attention(Rotary()) if attention else Rotary())
    model = GPipe(copy.deepcopy(plain), [2, 2], devices=TWO, chunks=2)
    first, second, third, fourth = [rotary_of(block) for block in model]
    assert first is second
    assert third is fourth
    assert third is not first
    assert third.scale.data_ptr() != first.scale.data_ptr()

    x = torch.randn(4, 4)
    for each in (plain, model):
        each(x).sum().backward()
    expected = dict(plain.named_parameters())
    assert len(expected) == (10 if attention else 8)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name].grad)
    # The parameters of a module that was copied are still single parameters, with several names.
    assert len([*model.parameters()]) == len(expected)
    assert model.state_dict().keys() == plain.state_dict().keys()


def test_devices_that_are_equal_share_a_module() -> None:
    shared = Rotary()
    model = GPipe(blocks(shared), [2, 2], devices=["cpu", "cpu"])
    assert [rotary_of(block) for block in model] == [shared] * 4


def test_a_module_without_buffers_is_not_copied() -> None:
    shared = nn.Linear(4, 4)
    model: Any = GPipe(blocks(shared, 2), [1, 1], devices=TWO)
    assert [block[1] for block in model] == [shared, shared]


def test_a_layer_on_meta_gets_memory_on_each_device() -> None:
    def init(_: int, layer: nn.Module) -> None:
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()
            elif isinstance(module, Rotary):
                module.scale.fill_(2.0)

    with torch.device("meta"):
        layers = blocks(Rotary())
    model = GPipe(layers, [2, 2], devices=TWO, init=init)
    assert rotary_of(model[0]) is not rotary_of(model[3])
    for block in model:
        assert rotary_of(block).scale.tolist() == [2.0] * 4


class Caching(Rotary):
    """Keeps a tensor in a dictionary, which is not a buffer and so does not move to the device."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        width = x.shape[1]
        if width not in self.cache:
            self.cache[width] = self.scale[:width] + 1
        return x * self.cache[width]


def test_each_device_has_a_cache_of_its_own() -> None:
    model = GPipe(blocks(Caching(), 2), [1, 1], devices=TWO)
    model(torch.randn(4, 4))
    first, second = [rotary_of(block) for block in model]
    assert first.cache.keys() == second.cache.keys() == {4}
    assert first.cache[4] is not second.cache[4]


def test_a_module_that_is_replaced_is_not_kept_alive() -> None:
    model: Any = GPipe(blocks(Rotary(), 2), [1, 1], devices=TWO)
    first, second = [weakref.ref(rotary_of(block)) for block in model]
    for block in model:
        block[1] = Rotary()
    model(torch.randn(4, 4))
    gc.collect()
    assert first() is None
    assert second() is None


class Counting(nn.Module):
    """Counts its calls in a buffer, which it replaces by another tensor."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return x * self.calls


CHANGED = "two partitions have layers that change the same buffer"


@pytest.mark.parametrize("devices", [TWO, ["cpu", "cpu"]], ids=["two devices", "one device"])
def test_a_buffer_that_is_replaced_in_forward_is_refused(devices: list[str]) -> None:
    model = GPipe(blocks(Counting(), 2), [1, 1], devices=devices, chunks=2)
    with pytest.raises(RuntimeError, match=CHANGED):
        model(torch.randn(4, 4))


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("chunks", [1, 2])
def test_a_copied_buffer_that_changes_is_refused(chunks: int, deferred: bool) -> None:
    """Check that copies of a batch norm raise an error, because they would differ from each other.

    In evaluation mode, the batch norm changes no buffer, and so can run.
    """
    options: dict[str, Any] = {"devices": TWO, "chunks": chunks, "deferred_batch_norm": deferred}
    model = GPipe(blocks(nn.BatchNorm1d(4), 2), [1, 1], **options)
    with pytest.raises(RuntimeError, match=CHANGED):
        model(torch.randn(8, 4))
    model.eval()
    assert model(torch.randn(8, 4)).shape == (8, 4)


class Masking(nn.Module):
    """Makes its mask in its first forward. Until then, the buffer is `None`."""

    mask: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.ones(x.shape[1], device=x.device)
        return x * self.mask


def test_a_buffer_that_is_made_later_is_made_on_each_device() -> None:
    model: Any = GPipe(blocks(Masking(), 2), [1, 1], devices=TWO)
    model(torch.randn(4, 4))
    first, second = model[0][1], model[1][1]
    assert first is not second
    assert first.mask is not second.mask


def trained_buffer() -> nn.Module:
    module = Rotary()
    module.scale.requires_grad_()
    return module


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.compile(Rotary()), "compile after the pipeline is made"),
        (trained_buffer, "make it a parameter"),
    ],
)
def test_modules_that_cannot_be_copied_are_refused(make: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        GPipe(blocks(make(), 2), [1, 1], devices=TWO)
    GPipe(blocks(make(), 2), [1, 1], devices=["cpu", "cpu"])


@pytest.mark.parametrize("devices", ON_GPUS)
def test_blocks_on_gpus_have_buffers_on_their_gpus(devices: list[str]) -> None:
    """Check the gradients, and that no check of the copied buffers makes the host wait."""
    plain = blocks(Rotary(), len(devices)).double()
    x = torch.randn(8, 4, dtype=torch.float64)
    plain(x).sum().backward()
    expected = [p.grad for p in plain.parameters()]
    plain.zero_grad()  # it drops the gradients, and `expected` keeps them
    model = GPipe(plain, [1] * len(devices), devices=devices, chunks=4)
    given = x.to(model.devices[0])
    model(given).sum().backward()  # the first run makes the workspaces of cuBLAS
    model.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(given).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for p, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, grad, check_device=False)
