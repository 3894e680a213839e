"""Modes and types around the pipeline reach its layers: evaluation, no grad, inference, autocast, dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from torchgpipe import is_checkpointing, is_recomputing

from ..plain import piped
from .compare import assert_same_use, assert_transparent

BALANCE = [2, 1, 2]
both_chunks = pytest.mark.parametrize("chunks", [1, 3])


def layers() -> nn.Sequential:
    last = parametrizations.weight_norm(nn.Linear(8, 4))
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.0), nn.Linear(8, 8), last)


def given() -> Tensor:
    return torch.randn(8, 6).requires_grad_()


class Report(nn.Module):
    """Record the modes in which the layer runs."""

    def __init__(self, seen: set[Any]) -> None:
        super().__init__()
        self.seen = seen

    def forward(self, x: Tensor) -> Tensor:
        grad = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), is_checkpointing()
        autocast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
        self.seen.add((*grad, autocast, is_recomputing()))
        return x


def reporting() -> tuple[nn.Sequential, set[Any]]:
    seen: set[Any] = set()
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
    "autocast": (lambda: torch.autocast("cpu", dtype=torch.bfloat16), torch.bfloat16, True),
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
    assert seen == {(False, inference, False, False, False)}
    assert y.is_inference() == inference


def test_training_goes_on_after_inference(way: dict[str, Any]) -> None:
    module = layers()
    with torch.inference_mode():
        piped(module, BALANCE, **way).eval()(torch.randn(8, 6))
    assert_transparent(module.train(), given(), BALANCE, **way)


# The type of autocast in forward, and in backward.
PASSES = {
    "in forward": (torch.bfloat16, None),
    "in backward": (None, torch.bfloat16),
    "in both": (torch.bfloat16, torch.float16),
}


@pytest.mark.parametrize("forward, backward", PASSES.values(), ids=PASSES)
def test_a_recomputation_has_the_autocast_of_its_forward(forward: Any, backward: Any, way: dict[str, Any]) -> None:
    module, seen = reporting()

    def use(run: nn.Module) -> None:
        with torch.autocast("cpu", dtype=forward, enabled=forward is not None):
            y = run(torch.randn(6, 6))
        with torch.autocast("cpu", dtype=backward, enabled=backward is not None):
            y.backward(torch.ones_like(y))

    assert_same_use(use, module, BALANCE, **way)
    assert {autocast for *_, autocast, _ in seen} == {forward or False}
    assert {recomputing for *_, recomputing in seen} == {False, way["checkpoint"] != "never"}


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
    outcome = assert_transparent(module, torch.randn(8, 6, dtype=types[0]).requires_grad_(), [1] * len(module), **way)
    assert outcome.outputs[0].dtype == types[-1]
