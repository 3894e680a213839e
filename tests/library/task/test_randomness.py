"""Randomness: two passes of a task draw the same, whoever else draws. What layers see of it is in tests/behaviours."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from torchgpipe.task.ambient import Ambient
from torchgpipe.task.randomness import PrivateGenerator, Randomness, SeededDefault

from ...behaviours.rows.random import DRAWS

X = torch.ones(4, 4)


def private(seed: int = 7, drew: Callable[[], None] = lambda: None) -> PrivateGenerator:
    return PrivateGenerator(seed, drew)


def seeded() -> Randomness:
    """Return the random numbers of a rank's task."""
    both = SeededDefault(7, lambda: None)
    return Randomness(private=lambda: both)


# What sets the generators of a task, and whether its first pass draws from the default one.
WAYS: dict[str, tuple[Callable[[], Randomness], bool]] = {
    "set back": (lambda: Randomness([torch.default_generator]), True),
    "private": (lambda: Randomness(private=private), False),
    "both": (lambda: Randomness([torch.Generator()], private), False),
    "seeded": (seeded, False),
}


@pytest.mark.parametrize("way, default", WAYS.values(), ids=WAYS)
def test_both_passes_draw_the_same(way: Callable[[], Randomness], default: bool) -> None:
    def draw() -> Tensor:
        return torch.cat([torch.rand(4), torch.poisson(torch.full((16,), 5.0))])

    randomness, before = way(), torch.get_rng_state()
    with randomness.first():
        first = [draw(), draw()]
    randomness.ended()
    assert torch.equal(torch.get_rng_state(), before) != default
    torch.rand(3)
    before = torch.get_rng_state()
    with pytest.raises(ArithmeticError), randomness.again():
        second = [draw(), draw()]
        raise ArithmeticError
    assert all(map(torch.equal, first, second))
    assert torch.equal(torch.get_rng_state(), before), "the second pass has moved the default generator"
    assert not torch.equal(first[0], draw())


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_the_default_generator_draws_what_a_private_one_draws(draw: Callable[[Tensor], Tensor]) -> None:
    drew: list[str] = []
    with private(2**61):
        expected = draw(X)
    before = torch.get_rng_state()
    with SeededDefault(2**61, lambda: drew.append("drew")):
        found = draw(X)
    assert torch.equal(found, expected)
    assert drew == ["drew"]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "first, second, message",
    [
        (lambda: torch.manual_seed(0), lambda: None, r"set the default generator \(torch.manual_seed\)"),
        (lambda: torch.rand(2), lambda: torch.rand(3), "drew more or fewer random numbers than its first pass"),
        (lambda: torch.rand(2), lambda: None, "drew more or fewer random numbers than its first pass"),
    ],
)
def test_a_seeded_task_refuses(first: Callable[[], object], second: Callable[[], object], message: str) -> None:
    randomness, before = seeded(), torch.get_rng_state()
    with pytest.raises(RuntimeError, match=message):
        with randomness.first():
            first()
        with randomness.again():
            second()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["randint", "poisson"])  # takes a generator, or takes the default one
def test_one_within_another(name: str) -> None:
    draw = partial(DRAWS[name], X)
    drew: list[None] = []
    with private(2):
        alone = draw()
    with private(1, lambda: drew.append(None)) as outer:
        with private(2):
            assert torch.equal(draw(), alone)
        assert drew == []
        assert outer.in_use()
        draw()
    assert drew
    assert not PrivateGenerator.in_use()


def test_an_operator_that_fails_puts_the_default_generator_back() -> None:
    before = torch.get_rng_state()
    with private(), pytest.raises(RuntimeError):
        torch.poisson(torch.tensor([-1.0]))
    assert torch.equal(torch.get_rng_state(), before)


def test_threads_at_once_draw_what_they_draw_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("several", "poisson")  # both take the default generator

    def several(seed: int) -> Tensor:
        with private(seed):
            return torch.stack([DRAWS[names[seed]](X) for _ in range(10)])

    expected = [several(k) for k in range(2)]
    before, results = torch.get_rng_state(), [torch.empty(0)] * 2
    set_state = torch.set_rng_state
    # Threads take turns while the default generator is in another state.
    monkeypatch.setattr(torch, "set_rng_state", lambda state: (set_state(state), time.sleep(1e-3)))  # type: ignore[func-returns-value]

    def run(k: int) -> None:
        results[k] = several(k)

    threads = [threading.Thread(target=run, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert all(map(torch.equal, results, expected))
    assert torch.equal(torch.get_rng_state(), before)


def test_workers_draw_within_a_recomputation_that_waits_for_them() -> None:
    """As those of a pipeline among the layers of another."""
    randomness, drawn = Randomness([torch.default_generator]), list[Tensor]()
    with randomness.first():
        pass
    randomness.ended()

    def work() -> None:
        with ambient.entered(), private():
            drawn.append(torch.randperm(9))

    with randomness.again():
        ambient = Ambient(())
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(60)
        assert drawn, "the worker waits for what its caller holds"
