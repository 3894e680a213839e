"""Modes and types around the pipeline reach its layers: evaluation, no grad, inference, autocast, dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from torchgpipe import is_checkpointing, is_recomputing

from ..plain import piped
from .compare import assert_same_use, assert_transparent

BALANCE = [2, 1, 2]
BF16, FP16 = partial(torch.autocast, "cpu", torch.bfloat16), partial(torch.autocast, "cpu", torch.float16)
ON_META = partial(torch.device, "meta")
both_chunks = pytest.mark.parametrize("chunks", [1, 3])


def layers() -> nn.Sequential:
    last = parametrizations.weight_norm(nn.Linear(8, 4))
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.0), nn.Linear(8, 8), last)


def given() -> Tensor:
    return torch.randn(8, 6).requires_grad_()


class Modes(NamedTuple):
    inference: bool
    autocast: torch.dtype | None
    device: str
    grad: bool
    checkpointing: bool
    recomputing: bool


class Report(nn.Module):
    """Record the modes in which the layer runs."""

    def __init__(self, seen: set[Modes]) -> None:
        super().__init__()
        self.seen = seen

    def forward(self, x: Tensor) -> Tensor:
        autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        around = torch.is_inference_mode_enabled(), autocast, torch.get_default_device().type
        self.seen.add(Modes(*around, torch.is_grad_enabled(), is_checkpointing(), is_recomputing()))
        return x


def reporting() -> tuple[nn.Sequential, set[Modes]]:
    seen: set[Modes] = set()
    return nn.Sequential(Report(seen), nn.Linear(6, 6), Report(seen), nn.Linear(6, 6), Report(seen)), seen


@contextmanager
def cached() -> Iterator[None]:
    with torch.no_grad(), parametrize.cached():
        yield


@contextmanager
def enabled_again() -> Iterator[None]:
    with torch.no_grad(), torch.enable_grad():
        yield


# What surrounds the forward, the type of the output, and whether it takes a gradient.
AROUND: dict[str, tuple[Callable[[], Any], torch.dtype, bool]] = {
    "no_grad": (torch.no_grad, torch.float32, False),
    "inference_mode": (torch.inference_mode, torch.float32, False),
    "enable_grad within no_grad": (enabled_again, torch.float32, True),
    "autocast": (BF16, torch.bfloat16, True),
    "cached parametrizations": (cached, torch.float32, False),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("balance", [[5], BALANCE], ids=lambda b: f"n{len(b)}")
@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
@both_chunks
def test_around_forward(around: Any, balance: list[int], training: bool, chunks: int, way: dict[str, Any]) -> None:
    within, dtype, grad = around
    outcome = assert_transparent(
        layers().train(training), given(), balance, chunks=chunks, within=within, steps=2, **way
    )
    assert outcome.outputs[0].dtype == dtype
    assert outcome.takes_grad == [grad]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@both_chunks
def test_grad_and_inference_mode_reach_every_layer(mode: Any, chunks: int, way: dict[str, Any]) -> None:
    module, seen = reporting()
    inference = mode is torch.inference_mode
    with mode():
        y = piped(module, BALANCE, chunks, **way)(torch.randn(6, 6))
    assert seen == {Modes(inference, None, "cpu", grad=False, checkpointing=False, recomputing=False)}
    assert y.is_inference() == inference


def test_training_goes_on_after_inference(way: dict[str, Any]) -> None:
    module = layers()
    with torch.inference_mode():
        piped(module, BALANCE, **way).eval()(torch.randn(8, 6))
    assert_transparent(module.train(), given(), BALANCE, **way)


# What surrounds forward, and what backward; the autocast and the default device that layers meet in both passes.
PASSES: dict[str, tuple[Callable[[], Any], Callable[[], Any], torch.dtype | None, str]] = {
    "autocast in forward": (BF16, nullcontext, torch.bfloat16, "cpu"),
    "autocast in backward": (nullcontext, BF16, None, "cpu"),
    "autocast in both": (BF16, FP16, torch.bfloat16, "cpu"),
    "default device in forward": (ON_META, nullcontext, None, "meta"),
    "default device in backward": (nullcontext, ON_META, None, "cpu"),
}


@pytest.mark.parametrize("forward, backward, autocast, device", PASSES.values(), ids=PASSES)
def test_a_recomputation_has_the_modes_of_its_forward(
    forward: Any, backward: Any, autocast: torch.dtype | None, device: str, way: dict[str, Any]
) -> None:
    module, seen = reporting()
    x = torch.randn(6, 6)

    def use(run: nn.Module) -> None:
        with forward():
            y = run(x)
        with backward():
            y.backward(torch.ones_like(y))

    assert_same_use(use, module, BALANCE, **way)
    assert {modes[:3] for modes in seen} == {(False, autocast, device)}
    assert {modes.recomputing for modes in seen} == {False, way["checkpoint"] != "never"}


class Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return (x.real if x.is_complex() and not self.dtype.is_complex else x).to(self.dtype)


TYPES = [[torch.float16], [torch.bfloat16], [torch.complex64], [torch.float32, torch.complex128, torch.float64]]


@pytest.mark.parametrize("types", TYPES, ids=str)
def test_types(types: list[torch.dtype], way: dict[str, Any]) -> None:
    module = nn.Sequential(*(layer for d in types for layer in (Cast(d), nn.Linear(6, 6, dtype=d), nn.Tanh())))
    balance = [1, 1, 1] if len(types) == 1 else [2, 2, 2, 3]
    outcome = assert_transparent(module, torch.randn(8, 6, dtype=types[0]).requires_grad_(), balance, **way)
    assert outcome.outputs[0].dtype == types[-1]
