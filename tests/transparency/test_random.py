"""Random numbers: a recomputation draws what its forward drew, and a seed decides what that is."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from torchgpipe import GPipe, is_recomputing

from ..plain import Plain, piped
from .compare import EXACT, alike, total

CHUNKS = 4


class Draw(nn.Module):
    """In training, multiply by what `draw` returns for the input; record it, of first and second passes apart."""

    def __init__(self, draw: Callable[[Tensor], Tensor], *, pause: float = 0) -> None:
        super().__init__()
        self.draw = draw
        self.pause = pause
        self.first: list[Tensor] = []
        self.second: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.pause * random.random())
        drawn = self.draw(x) if self.training else torch.ones_like(x)
        (self.second if is_recomputing() else self.first).append(drawn.detach())
        return x * drawn


class Replay(nn.Module):
    """Multiply by what a `Draw` has recorded, in its order."""

    def __init__(self, recorded: list[Tensor]) -> None:
        super().__init__()
        self.recorded = iter(recorded)

    def forward(self, x: Tensor) -> Tensor:
        return x * next(self.recorded)


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(torch.ones_like(x), 0.5),
    "dropout in place": lambda x: F.dropout(torch.ones_like(x), 0.5, inplace=True),
    "rand": lambda x: torch.rand(x.shape),
    "randn": lambda x: torch.randn(x.shape),
    "normal": lambda x: torch.normal(torch.ones_like(x), 0.5),
    "randperm": lambda x: torch.randperm(x.size(1)).float(),
    "multinomial": lambda x: torch.multinomial(x.detach().abs() + 0.1, 6, replacement=True).float(),
    "uniform in place": lambda x: torch.empty_like(x).uniform_(),
    "poisson": lambda x: torch.poisson(torch.full_like(x, 4)),
    "gamma": lambda x: torch.distributions.Gamma(torch.full_like(x, 2), torch.ones_like(x)).rsample(),
    "rrelu": lambda x: F.rrelu(-torch.ones_like(x), training=True),
    "several": lambda x: torch.rand_like(x) * torch.randperm(6) + F.dropout(torch.ones_like(x)),
}


def drawing(draw: Callable[[Tensor], Tensor] = DRAWS["dropout"], **options: Any) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), Draw(draw, **options), nn.Tanh(), Draw(draw, **options), nn.Linear(6, 6))


def drawers(model: nn.Module) -> list[Draw]:
    return [layer for layer in model.modules() if isinstance(layer, Draw)]


def draws(model: nn.Module) -> list[Tensor]:
    return [t for layer in drawers(model) for t in layer.first]


def forget(model: nn.Module) -> None:
    for layer in drawers(model):
        layer.first, layer.second = [], []


def assert_recomputed_alike(model: nn.Module) -> None:
    """Assert that recomputations, which go from the last micro-batch to the first, drew what forwards drew."""
    for layer in drawers(model):
        assert same(layer.second[::-1], layer.first[: len(layer.second)])


def pipeline(module: nn.Sequential, **options: Any) -> GPipe:
    return piped(module, [2, 1, 2], CHUNKS, **options)


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_recomputation_draws_the_same(draw: Callable[[Tensor], Tensor], way: dict[str, Any]) -> None:
    module = drawing(draw)
    plain = Plain(module, chunks=CHUNKS)
    model = pipeline(module, **way)
    x = torch.randn(8, 6)
    y = model(x)
    total(y).backward()

    checkpointed = {"always": CHUNKS, "except_last": CHUNKS - 1, "never": 0}[way["checkpoint"]]
    assert_recomputed_alike(module)
    one, other = drawers(module)
    for k, layer in ((1, one), (3, other)):
        assert (len(layer.first), len(layer.second)) == (CHUNKS, checkpointed)
        assert not same(layer.first[:1] * CHUNKS, layer.first), "every micro-batch drew the same"
        plain[k] = Replay(layer.first)
    assert not same(one.first, other.first), "every partition drew the same"

    grads = [p.grad for p in model.parameters()]
    model.zero_grad()
    expected = plain(x)
    total(expected).backward()
    assert_close([y, grads], [expected, [p.grad for p in plain.parameters()]], **EXACT)


def recorded(steps: int = 3, *, seed: int = 7, pause: float = 0, **options: Any) -> list[Tensor]:
    """Return what some steps draw, with how the caller's own random numbers go on at the end."""
    module = drawing(pause=pause)
    model = pipeline(module, **options)
    torch.manual_seed(seed)
    for _ in range(steps):
        model(torch.ones(8, 6)).sum().backward()
    return [*draws(module), torch.rand(3)]


def test_a_seed_decides_the_draws(way: dict[str, Any]) -> None:
    calm = recorded(**way)
    assert same(calm, recorded(**way))
    assert not same(calm, recorded(seed=8, **way))


def test_threads_in_any_order_draw_the_same() -> None:
    calm = recorded(engine="workers")
    for _ in range(3):
        assert same(calm, recorded(engine="workers", pause=3e-3))


def test_checkpointing_does_not_change_the_draws(engine: str) -> None:
    never, *others = (recorded(engine=engine, checkpoint=c) for c in ("never", "except_last", "always"))
    assert all(same(never, other) for other in others)


def test_every_step_draws_anew(way: dict[str, Any]) -> None:
    module = drawing()
    model = pipeline(module, **way)
    for _ in range(3):
        model(torch.ones(8, 6))
    layer = drawers(module)[0]
    steps = [torch.cat(layer.first[k : k + CHUNKS]) for k in range(0, 3 * CHUNKS, CHUNKS)]
    assert not any(torch.equal(a, b) for a, b in zip(steps, [*steps[1:], steps[0]], strict=True))


def test_one_partition_draws_what_a_plain_run_draws(checkpoint: str) -> None:
    def use(run: nn.Module) -> list[Tensor]:
        outputs = []
        for _ in range(2):
            run.zero_grad()
            outputs.append(run(torch.ones(8, 6)))
            outputs[-1].square().sum().backward()
        return outputs

    alike(use, nn.Sequential(nn.Linear(6, 6), nn.Dropout(), nn.Linear(6, 6)), [3], checkpoint=checkpoint)


def test_backward_leaves_the_callers_numbers_alone(way: dict[str, Any]) -> None:
    y = pipeline(drawing(), **way)(torch.ones(8, 6))
    before = torch.get_rng_state()
    y.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("p", [0.5, None], ids=["evaluation", "no layer draws"])
def test_a_pipeline_that_draws_nothing_takes_nothing(p: float | None, way: dict[str, Any]) -> None:
    middle = nn.Identity() if p is None else nn.Dropout(p)
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), middle, nn.Tanh(), nn.Tanh())
    model = pipeline(module, **way).train(p is None)
    for _ in range(2):
        before = torch.get_rng_state()
        model(torch.ones(8, 6)).sum().backward()
        assert torch.equal(torch.get_rng_state(), before)


def test_from_evaluation_to_training_and_back(way: dict[str, Any]) -> None:
    module = drawing()
    model = pipeline(module, **way)
    for training in (False, True, False, True, True):
        forget(module)
        model.train(training)
        model(torch.ones(8, 6)).sum().backward()
        assert all(bool((t == 1).all()) != training for t in draws(module))
        assert_recomputed_alike(module)


def test_mini_batches_of_different_sizes(checkpoint: str) -> None:
    # A single sample goes through another engine, with random numbers of its own.
    module = drawing()
    model = pipeline(module, engine="auto", checkpoint=checkpoint)
    for size in (1, 8, 1, 1, 8, 8, 3):
        forget(module)
        model(torch.ones(size, 6)).sum().backward()
        assert_recomputed_alike(module)


def test_a_first_draw_in_a_later_step(way: dict[str, Any]) -> None:
    late = False

    def draw(x: Tensor) -> Tensor:
        return torch.rand_like(x) if late else torch.ones_like(x)

    module = drawing(draw)
    model = pipeline(module, **way)
    for late in (False, True, True):  # noqa: B007 (draw looks at it)
        forget(module)
        model(torch.ones(8, 6)).sum().backward()
        assert_recomputed_alike(module)


def test_a_first_draw_in_a_later_micro_batch(way: dict[str, Any]) -> None:
    """A worker finds out from the first micro-batch whether its layers draw; where it was wrong, it says so."""

    def draw(x: Tensor) -> Tensor:
        return torch.rand_like(x) if x.detach()[0, 0] > 5 else torch.ones_like(x)

    module = nn.Sequential(Draw(draw), nn.Linear(6, 6), nn.Tanh(), nn.Tanh(), nn.Tanh())
    model = pipeline(module, **way)
    y = model(torch.arange(8.0).unsqueeze(1).expand(8, 6))  # micro-batches of two samples
    if way["engine"] == "workers" and way["checkpoint"] == "always":
        with pytest.raises(RuntimeError, match="in a later micro-batch, but not in the first one"):
            y.sum().backward()
    else:
        y.sum().backward()
        assert_recomputed_alike(module)


def test_another_thread_that_draws_disturbs_nothing(way: dict[str, Any]) -> None:
    def draw(x: Tensor) -> Tensor:
        if not is_recomputing():
            thread = threading.Thread(target=torch.rand, args=(3,))
            thread.start()
            thread.join()
        return torch.ones_like(x)

    module = nn.Sequential(Draw(draw), nn.Linear(6, 6), nn.Tanh(), nn.Tanh(), nn.Tanh())
    pipeline(module, **way)(torch.ones(8, 6)).sum().backward()


def test_a_generator_of_a_layers_own(way: dict[str, Any]) -> None:
    own, expected = (torch.Generator().manual_seed(3) for _ in range(2))
    noise = Draw(lambda x: torch.rand(x.shape, generator=own))
    noise.generator = own
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Tanh(), noise, nn.Linear(6, 6))
    model = pipeline(module, **way)
    for _ in range(3):
        model(torch.ones(8, 6)).sum().backward()
    assert same(noise.first, [torch.rand(2, 6, generator=expected) for _ in range(3 * CHUNKS)])
    recomputed = len(noise.second) // 3
    for step in range(3):
        first = noise.first[step * CHUNKS : step * CHUNKS + recomputed]
        assert same(noise.second[step * recomputed : (step + 1) * recomputed][::-1], first)


# The older kind warns in a first pass, which has no graph.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [True, False])
def test_within_plain_checkpointing(reentrant: bool, way: dict[str, Any]) -> None:
    class Checkpointed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(super().forward, x, use_reentrant=reentrant)
            return y

    def linear() -> nn.Module:
        return nn.Linear(6, 6, bias=False)

    inner = Checkpointed(linear(), nn.Dropout(0.5), linear())
    model = pipeline(nn.Sequential(linear(), inner, nn.Identity(), nn.Identity(), linear()), **way)
    x = torch.randn(8, 6, requires_grad=True)
    if way["engine"] == "workers":
        with pytest.raises(RuntimeError, match=r"within torch\.utils\.checkpoint"):
            model(x)
        return
    # The layers are linear in x. So with the same mask in both passes, the gradient times x is the output.
    y = model(x).sum()
    y.backward()
    assert_close((x.grad * x.detach()).sum(), y.detach())
