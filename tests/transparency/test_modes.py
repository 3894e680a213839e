"""Modes and types around the pipeline reach its layers: evaluation, no grad, inference, autocast, dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe import is_checkpointing, is_recomputing

from ..plain import piped
from .compare import alike, transparent

BALANCE = [2, 1, 2]
both_chunks = pytest.mark.parametrize("chunks", [1, 3])


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.0), nn.Linear(8, 8), nn.Linear(8, 4))


def given() -> Tensor:
    return torch.randn(8, 6).requires_grad_()


def bf16() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


class Report(nn.Module):
    """Record the modes in which the layer runs."""

    def __init__(self, seen: set[Any]) -> None:
        super().__init__()
        self.seen = seen

    def forward(self, x: Tensor) -> Tensor:
        autocast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
        self.seen.add((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast, is_recomputing()))
        return x


def reporting() -> tuple[nn.Sequential, set[Any]]:
    seen: set[Any] = set()
    return nn.Sequential(Report(seen), nn.Linear(6, 6), Report(seen), nn.Linear(6, 6), Report(seen)), seen


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("training", [True, False])
@both_chunks
def test_without_gradients(mode: Any, training: bool, chunks: int, way: dict[str, Any]) -> None:
    module = layers().train(training)
    outcome = transparent(module, given(), BALANCE, chunks=chunks, backward=None, within=mode, **way)
    assert outcome.takes_grad == [False]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@both_chunks
def test_grad_and_inference_mode_reach_every_layer(mode: Any, chunks: int, way: dict[str, Any]) -> None:
    module, seen = reporting()
    inference = mode is torch.inference_mode
    with mode():
        y = piped(module, BALANCE, chunks, **way)(torch.randn(6, 6))
    assert seen == {(False, inference, False, False)}
    assert y.is_inference() == inference


def test_nothing_is_checkpointed_where_nothing_goes_backward(way: dict[str, Any]) -> None:
    seen: list[bool] = []
    layer = nn.Linear(3, 3)
    layer.register_forward_hook(lambda *_: seen.append(is_checkpointing()))
    with torch.no_grad():
        piped(nn.Sequential(layer, nn.Tanh()), [1, 1], 2, **way)(torch.randn(4, 3))
    assert seen == [False, False]


def test_training_goes_on_after_inference(way: dict[str, Any]) -> None:
    module = layers()
    with torch.inference_mode():
        piped(module, BALANCE, **way).eval()(torch.randn(8, 6))
    transparent(module.train(), given(), BALANCE, **way)


def test_an_enabled_gradient_within_no_grad(way: dict[str, Any]) -> None:
    model = piped(layers(), BALANCE, **way)
    with torch.no_grad(), torch.enable_grad():
        y = model(torch.randn(8, 6))
    y.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("balance", [[5], BALANCE], ids=lambda b: f"n{len(b)}")
@both_chunks
def test_autocast(balance: list[int], chunks: int, way: dict[str, Any]) -> None:
    outcome = transparent(layers(), given(), balance, chunks=chunks, within=bf16, steps=2, **way)
    assert outcome.outputs[0].dtype == torch.bfloat16


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

    alike(use, module, BALANCE, **way)
    assert {autocast for _, _, autocast, _ in seen} == {forward or False}
    assert {recomputing for *_, recomputing in seen} == {False, way["checkpoint"] != "never"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128])
@pytest.mark.parametrize("balance", [[3], [1, 1, 1]], ids=lambda b: f"n{len(b)}")
def test_types(dtype: torch.dtype, balance: list[int], way: dict[str, Any]) -> None:
    module = nn.Sequential(nn.Linear(6, 8, dtype=dtype), nn.Tanh(), nn.Linear(8, 4, dtype=dtype))
    outcome = transparent(module, torch.randn(8, 6, dtype=dtype).requires_grad_(), balance, **way)
    assert outcome.outputs[0].dtype == dtype


def test_types_change_on_the_way(way: dict[str, Any]) -> None:
    class View(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.view_as_real(x).flatten(1) if x.is_complex() else torch.complex(x.double(), x.double())

    middle, last = nn.Linear(6, 6, dtype=torch.complex128), nn.Linear(12, 2, dtype=torch.float64)
    transparent(nn.Sequential(nn.Linear(6, 6), View(), middle, View(), last), given(), [1, 1, 1, 2], **way)


def test_the_type_of_a_pipeline_changes_like_a_modules(way: dict[str, Any]) -> None:
    def use(run: nn.Module) -> Tensor:
        y: Tensor = run.to(torch.float64)(torch.randn(8, 6, dtype=torch.float64))
        return y

    model = alike(use, nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)), [1, 2], **way)
    assert {p.dtype for p in model.parameters()} == {torch.float64}
