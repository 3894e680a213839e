"""Random numbers: a recomputation draws what its forward drew, and a seed decides what that is."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchgpipe import GPipe
from torchgpipe.checkpoint import checkpointed

from ..plain import piped
from .compare import assert_same_outcome, assert_same_use, both, observe
from .draw import Draw, draw_from, drawing, forget, replay

BALANCE, CHUNKS = [2, 1, 2], 4
X = torch.ones(8, 6)

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(torch.ones_like(x), 0.5),
    "dropout in place": lambda x: F.dropout(torch.ones_like(x), 0.5, inplace=True),
    "normal": lambda x: torch.normal(torch.ones_like(x), 0.5),
    "multinomial": lambda x: torch.multinomial(x.detach().abs() + 0.1, 6, replacement=True).float(),
    "poisson": lambda x: torch.poisson(torch.full_like(x, 4)),
    "rrelu": lambda x: F.rrelu(-torch.ones_like(x), training=True),
    "uniform in place": lambda x: torch.empty_like(x).uniform_(),
    "gamma": lambda x: torch.distributions.Gamma(torch.full_like(x, 2), torch.ones_like(x)).rsample(),
    "several": lambda x: torch.rand_like(x) * torch.randperm(6) + F.dropout(torch.ones_like(x)),
}


def layers(draw: Callable[[Tensor], Tensor] = DRAWS["dropout"]) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), Draw(draw), nn.Tanh(), Draw(draw), nn.Linear(6, 6))


def alone(layer: nn.Module) -> nn.Sequential:
    """Return layers of which only one may draw: that of the second partition."""
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), layer, nn.Tanh(), nn.Linear(6, 6))


def pipeline(module: nn.Sequential, **options: Any) -> GPipe:
    return piped(module, BALANCE, CHUNKS, **options)


def step(model: nn.Module, x: Tensor = X) -> None:
    model(x).sum().backward()


def assert_recomputed_alike(model: nn.Module) -> None:
    """Assert that recomputations, which go from the last micro-batch to the first, drew what forwards drew."""
    for layer in drawing(model):
        assert same(layer.second[::-1], layer.first[: len(layer.second)])


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_recomputation_draws_the_same(draw: Callable[[Tensor], Tensor], way: dict[str, Any]) -> None:
    plain, model = both(layers(draw), BALANCE, CHUNKS, **way)
    x = torch.randn(8, 6).requires_grad_()
    outcome = observe(model, x)

    assert_recomputed_alike(model)
    for layer in drawing(model):
        assert (len(layer.first), len(layer.second)) == (CHUNKS, checkpointed(way["checkpoint"], CHUNKS))
    one, other = (layer.first for layer in drawing(model))
    assert not same(one[:1] * CHUNKS, one), "every micro-batch drew the same"
    assert not same(one, other), "every partition drew the same"

    replay(model, plain)
    assert_same_outcome(outcome, observe(plain, x))


def late(x: Tensor) -> Tensor:
    """Draw a moment later, so that threads take turns in any order."""
    time.sleep(3e-3 * random.random())
    return DRAWS["dropout"](x)


def drawn(seed: int = 7, draw: Callable[[Tensor], Tensor] = DRAWS["dropout"], **options: Any) -> list[Tensor]:
    """Return what three steps draw, with how the caller's own random numbers go on at the end."""
    module = layers(draw)
    model = pipeline(module, **options)
    torch.manual_seed(seed)
    for _ in range(3):
        step(model)
    return [*(x for layer in drawing(module) for x in layer.first), torch.rand(3)]


def test_the_seed_alone_decides_the_draws(engine: str) -> None:
    numbers = drawn(engine=engine)
    assert not same(numbers, drawn(8, engine=engine))
    for checkpoint in ("never", "except_last", "always"):
        for _ in range(2):
            assert same(numbers, drawn(draw=late, engine=engine, checkpoint=checkpoint))
    first_layer = [torch.cat(numbers[k : k + CHUNKS]) for k in range(0, 3 * CHUNKS, CHUNKS)]
    assert len({tuple(x.flatten().tolist()) for x in first_layer}) == 3, "two steps drew the same"


@pytest.mark.parametrize("balance, chunks", [([3], 3), ([1, 1, 1], 1)], ids=["one partition", "one micro-batch"])
def test_what_does_not_overlap_draws_what_a_plain_run_draws(
    balance: list[int], chunks: int, way: dict[str, Any]
) -> None:
    def use(run: nn.Module) -> list[Tensor]:
        outputs = []
        for _ in range(2):
            run.zero_grad()
            outputs.append(run(X))
            outputs[-1].square().sum().backward()
        return outputs

    module = nn.Sequential(nn.Linear(6, 6), nn.Dropout(), nn.Linear(6, 6))
    assert_same_use(use, module, balance, chunks=chunks, **way)


def test_backward_leaves_the_callers_numbers_alone(way: dict[str, Any]) -> None:
    y = pipeline(layers(), **way)(X)
    before = torch.get_rng_state()
    y.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "no layer draws"])
def test_a_pipeline_that_draws_nothing_takes_nothing(training: bool, way: dict[str, Any]) -> None:
    model = pipeline(alone(nn.Identity() if training else nn.Dropout()), **way).train(training)
    for _ in range(2):
        before = torch.get_rng_state()
        step(model)
        assert torch.equal(torch.get_rng_state(), before)


# Steps in turn: whether layers draw, and the size of the mini-batch.
STEPS = {
    "from evaluation to training and back": [(False, 8), (True, 8), (False, 8), (True, 8), (True, 8)],
    # A single sample goes through another engine, with random numbers of its own.
    "sizes": [(True, size) for size in (1, 8, 1, 1, 8, 8, 3)],
}


@pytest.mark.parametrize("engine", ["auto", "graph", "workers", "ranks"])
@pytest.mark.parametrize("by_mode", [True, False], ids=["by mode", "by the layer"])
@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_steps_that_differ(steps: list[tuple[bool, int]], by_mode: bool, way: dict[str, Any]) -> None:
    draws = True

    def draw(x: Tensor) -> Tensor:
        return torch.rand_like(x) if draws or by_mode else torch.ones_like(x)

    model = pipeline(layers(draw), **way)
    for draws, size in steps:
        forget(model)
        step(model.train(draws or not by_mode), torch.ones(size, 6))
        assert_recomputed_alike(model)
        assert all(bool(layer.first) == model.training for layer in drawing(model))


def test_a_first_draw_in_a_later_micro_batch(way: dict[str, Any]) -> None:
    """A worker finds out from the first micro-batch whether its layers draw; where it was wrong, it says so."""

    def draw(x: Tensor) -> Tensor:
        return torch.rand_like(x) if x.detach()[0, 0] > 5 else torch.ones_like(x)

    module = nn.Sequential(Draw(draw), nn.Linear(6, 6), nn.Tanh(), nn.Tanh(), nn.Tanh())
    model = pipeline(module, **way)
    y = model(torch.arange(8.0).unsqueeze(1).expand(8, 6))  # micro-batches of two samples
    if way["engine"] != "graph" and way["checkpoint"] == "always":
        with pytest.raises(RuntimeError, match="in a later micro-batch, but not in the first one"):
            y.sum().backward()
    else:
        y.sum().backward()
        assert_recomputed_alike(module)


def test_a_generator_of_a_layers_own(way: dict[str, Any]) -> None:
    layer = draw_from(torch.Generator().manual_seed(3))
    model = pipeline(alone(layer), **way)
    expected = draw_from(torch.Generator().manual_seed(3))
    for _ in range(3):
        forget(model)
        step(model)
        assert same(layer.first, [expected.draw(torch.ones(2, 6)) for _ in range(CHUNKS)])
        assert_recomputed_alike(model)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of a first pass, which has no graph
# Before torch 2.13, what `checkpoint` holds is not closed where the layer raises, but wherever the error is freed.
@pytest.mark.filterwarnings("ignore:.*_checkpoint_without_reentrant:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_within_plain_checkpointing(use_reentrant: bool, way: dict[str, Any]) -> None:
    plain, model = both(alone(Draw(DRAWS["dropout"], use_reentrant=use_reentrant)), BALANCE, CHUNKS, **way)
    if way["engine"] == "workers":
        with pytest.raises(RuntimeError, match=r"within torch\.utils\.checkpoint"):
            model(X)
        return
    outcome = observe(model, X)
    assert_recomputed_alike(model)
    replay(model, plain)
    assert_same_outcome(outcome, observe(plain, X))
