"""Modes and types around the pipeline reach its layers: evaluation, no grad, inference, autocast, dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe import GPipe, is_checkpointing, is_recomputing

BALANCE = [2, 1, 2]


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.0), nn.Linear(8, 8), nn.Linear(8, 4))


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


@pytest.mark.parametrize("chunks", [1, 3])
def test_evaluation(chunks: int, way: dict[str, Any], equals_plain: Callable[..., Any]) -> None:
    x = torch.randn(8, 6).requires_grad_()
    equals_plain(layers, x, BALANCE, chunks=chunks, prepare=lambda module: module.eval(), **way)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("chunks", [1, 3])
def test_without_gradients(
    mode: Any, training: bool, chunks: int, way: dict[str, Any], equals_plain: Callable[..., Any]
) -> None:
    outcome = equals_plain(
        layers,
        torch.randn(8, 6).requires_grad_(),
        BALANCE,
        chunks=chunks,
        backward=None,
        within=mode,
        prepare=lambda module: module.train(training),
        **way,
    )
    assert not any(outcome.takes_grad.values())


@pytest.mark.parametrize(
    "mode, expected",
    [(torch.no_grad, (False, False, False, False)), (torch.inference_mode, (False, True, False, False))],
)
@pytest.mark.parametrize("chunks", [1, 3])
def test_grad_and_inference_mode_reach_every_layer(mode: Any, expected: Any, chunks: int, way: dict[str, Any]) -> None:
    module, seen = reporting()
    model = GPipe(module, BALANCE, devices=["cpu"] * 3, chunks=chunks, **way)
    with mode():
        y = model(torch.randn(6, 6))
    assert seen == {expected}
    assert y.is_inference() == (mode is torch.inference_mode)


def test_nothing_is_checkpointed_where_nothing_goes_backward(way: dict[str, Any]) -> None:
    seen: list[bool] = []
    layer = nn.Linear(3, 3)
    layer.register_forward_hook(lambda *_: seen.append(is_checkpointing()))
    model = GPipe(nn.Sequential(layer, nn.Tanh()), [1, 1], devices=["cpu"] * 2, chunks=2, **way)
    with torch.no_grad():
        model(torch.randn(4, 3))
    assert seen == [False, False]


def test_training_goes_on_after_inference(way: dict[str, Any], equals_plain: Callable[..., Any]) -> None:
    def visited_before(module: nn.Sequential) -> None:
        with torch.inference_mode():
            GPipe(module, BALANCE, devices=["cpu"] * 3, chunks=3, **way).eval()(torch.randn(8, 6))
        module.train()

    equals_plain(layers, torch.randn(8, 6).requires_grad_(), BALANCE, prepare=visited_before, **way)


def test_an_enabled_gradient_within_no_grad(way: dict[str, Any]) -> None:
    model = GPipe(layers(), BALANCE, devices=["cpu"] * 3, chunks=3, **way)
    with torch.no_grad(), torch.enable_grad():
        y = model(torch.randn(8, 6))
    y.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def bf16(**options: Any) -> Callable[[], Any]:
    return lambda: torch.autocast("cpu", dtype=torch.bfloat16, **options)


@pytest.mark.parametrize("balance", [[5], BALANCE], ids=lambda b: f"n{len(b)}")
@pytest.mark.parametrize("chunks", [1, 3])
def test_autocast(balance: list[int], chunks: int, way: dict[str, Any], equals_plain: Callable[..., Any]) -> None:
    # Without autocast's cache of weights, each micro-batch casts anew and gradients are added in float32.
    uncached = bf16(cache_enabled=False)
    x = torch.randn(8, 6).requires_grad_()
    outcome = equals_plain(layers, x, balance, chunks=chunks, within=uncached, plain_within=uncached, **way)
    assert outcome.outputs["output 0"].dtype == torch.bfloat16


@pytest.mark.parametrize("balance", [[5], BALANCE], ids=lambda b: f"n{len(b)}")
def test_autocast_with_its_cache(balance: list[int], way: dict[str, Any], equals_plain: Callable[..., Any]) -> None:
    # With the cache, the plain run adds the micro-batches' gradients of a weight in bfloat16: 8 bits, and as
    # these are sums with cancellation, that is relative to the largest of the summands, which are of order 10.
    x = torch.randn(8, 6).requires_grad_()
    equals_plain(layers, x, balance, within=bf16(), tolerance={"rtol": 2**-6, "atol": 0.2}, steps=2, **way)


def test_autocast_reaches_both_passes_of_every_layer(way: dict[str, Any]) -> None:
    module, seen = reporting()
    model = GPipe(module, BALANCE, devices=["cpu"] * 3, chunks=3, **way)
    with bf16()():
        y = model(torch.randn(6, 6))
    y.sum().backward()
    assert {autocast for _, _, autocast, _ in seen} == {torch.bfloat16}
    assert {recomputing for *_, recomputing in seen} == {False, way["checkpoint"] != "never"}


def test_a_forward_outside_autocast_is_recomputed_outside(way: dict[str, Any], plainly: Any) -> None:
    # With a backward that is called within.
    module, seen = reporting()
    plain, model = plainly(module, 3), GPipe(module, BALANCE, devices=["cpu"] * 3, chunks=3, **way)
    x, grads = torch.randn(6, 6), []
    for run in (plain, model):
        module.zero_grad()
        y = run(x)
        with bf16()():
            y.backward(torch.ones(6, 6))
        grads.append([p.grad for p in module.parameters()])
    assert {autocast for _, _, autocast, _ in seen} == {False}
    assert all(map(torch.equal, *grads))


def test_a_forward_in_one_type_is_recomputed_in_it(way: dict[str, Any]) -> None:
    # With a backward that is called within another.
    module, seen = reporting()
    model = GPipe(module, BALANCE, devices=["cpu"] * 3, chunks=3, **way)
    with bf16()():
        y = model(torch.randn(6, 6))
    with torch.autocast("cpu", dtype=torch.float16):
        y.backward(torch.ones_like(y))
    assert {autocast for _, _, autocast, _ in seen} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128])
@pytest.mark.parametrize("balance", [[3], [1, 1, 1]], ids=lambda b: f"n{len(b)}")
def test_types(dtype: torch.dtype, balance: list[int], way: dict[str, Any], equals_plain: Callable[..., Any]) -> None:
    def build() -> nn.Sequential:
        return nn.Sequential(nn.Linear(6, 8, dtype=dtype), nn.Tanh(), nn.Linear(8, 4, dtype=dtype))

    outcome = equals_plain(build, torch.randn(8, 6, dtype=dtype).requires_grad_(), balance, **way)
    assert outcome.outputs["output 0"].dtype == dtype


def test_types_change_on_the_way(way: dict[str, Any], equals_plain: Callable[..., Any]) -> None:
    class View(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.view_as_real(x).flatten(1) if x.is_complex() else torch.complex(x.double(), x.double())

    def build() -> nn.Sequential:
        middle, last = nn.Linear(6, 6, dtype=torch.complex128), nn.Linear(12, 2, dtype=torch.float64)
        return nn.Sequential(nn.Linear(6, 6), View(), middle, View(), last)

    equals_plain(build, torch.randn(8, 6).requires_grad_(), [1, 1, 1, 2], **way)


def test_the_type_of_a_pipeline_changes_like_a_modules(way: dict[str, Any], plainly: Any) -> None:
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    model = GPipe(module, [1, 2], devices=["cpu"] * 2, chunks=3, **way).to(torch.float64)
    x = torch.randn(8, 6, dtype=torch.float64)
    assert torch.equal(model(x), plainly(module, 3)(x))
    assert {p.dtype for p in model.parameters()} == {torch.float64}
