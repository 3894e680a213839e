"""Test the random generators of tasks, and the seeds with which these generators start.

A task is the forward or the recomputation of one partition for one micro-batch. The numbers that
layers draw are tested in tests/behaviours.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe import GPipe
from torchgpipe.engine import batch
from torchgpipe.engine.seeds import Seeds
from torchgpipe.random import generators, seeded
from torchgpipe.random.generators import SEED_STEP, seed_apart
from torchgpipe.random.seeded import PrivateGenerator, SeededDefault
from torchgpipe.task.guards.guard import GuardedTask
from torchgpipe.task.guards.modes import AmbientModes
from torchgpipe.task.guards.randomness import Randomness
from torchgpipe.task.stage import Stage, seed_gpus_apart

from ...behaviours.rows.random.draws import DRAWS

X = torch.ones(4, 4)


def private(seed: int = 7, drew: Callable[[], None] = lambda: None) -> PrivateGenerator:
    return PrivateGenerator(seed, drew)


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_the_default_generator_draws_what_a_private_one_draws(
    draw: Callable[[Tensor], Tensor],
) -> None:
    drew: list[str] = []
    with private(2**61):
        expected = draw(X)
    before = torch.get_rng_state()
    with SeededDefault(2**61, lambda: drew.append("drew")):
        found = draw(X)
    assert torch.equal(found, expected)
    assert drew == ["drew"]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", [SeededDefault, PrivateGenerator])
@pytest.mark.parametrize(
    "count, error", [(3, RuntimeError), (0, RuntimeError), (2, ArithmeticError)]
)
def test_a_seeded_task_refuses_to_draw_more_or_fewer_numbers_again(
    count: int, error: type[Exception], kind: Callable[..., Any]
) -> None:
    both = kind(7, lambda: None)
    before = torch.get_rng_state()
    with both:
        torch.rand(2)
    with pytest.raises(error, match=r"drew more or fewer random numbers|its own"), both:
        torch.rand(count)
        if error is ArithmeticError:
            raise error("its own")
    assert torch.equal(torch.get_rng_state(), before)


def test_an_operator_that_fails_puts_the_default_generator_back() -> None:
    before = torch.get_rng_state()
    with private(), pytest.raises(RuntimeError):
        torch.poisson(torch.tensor([-1.0]))
    assert torch.equal(torch.get_rng_state(), before)


def test_threads_at_once_draw_what_they_draw_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def several(name: str) -> Tensor:
        with private():
            drawn = [DRAWS[name](X) for _ in range(10)]
        return torch.stack(drawn)

    names = ("several", "poisson")  # both draw from the default generator
    expected = [several(name) for name in names]
    before = torch.get_rng_state()
    set_state = seeded._set_default

    def set_and_wait(state: Any) -> None:
        """Set the state of the generator, and pause to let other threads run."""
        set_state(state)
        time.sleep(1e-3)

    monkeypatch.setattr(seeded, "_set_default", set_and_wait)
    with ThreadPoolExecutor(2) as pool:
        found = [*pool.map(several, names)]
    for drawn, drawn_alone in zip(found, expected, strict=True):
        assert torch.equal(drawn, drawn_alone)
    assert torch.equal(torch.get_rng_state(), before)


def test_workers_draw_within_a_recomputation_that_waits_for_them() -> None:
    """Check that another thread can draw numbers while a recomputation waits for this thread.

    This happens if a layer calls another pipeline, whose worker threads draw random numbers.
    """
    randomness = Randomness([torch.default_generator])
    drawn: list[Tensor] = []
    task = GuardedTask(randomness)
    randomness.before_first_pass(task)
    randomness.after_first_pass(task, ())

    def work() -> None:
        with ambient.entered(), private():
            drawn.append(torch.randperm(9))

    with randomness.before_recomputation(task) or nullcontext():
        ambient = AmbientModes(())
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(60)
        assert drawn, "the worker waits for what its caller holds"


def numbers(
    meanwhile: Callable[[], object] = lambda: None, *, alone: bool = False
) -> list[list[float]]:
    """Run a mini-batch over two partitions, and return the random numbers that were drawn.

    Only the first partition draws numbers, once for each of three micro-batches. The function
    `meanwhile` runs after that.
    """
    seeds = Seeds(2, recomputes=True, grad=True, distributed=alone)
    drawn: list[list[float]] = []
    stages = [Stage(j, nn.Identity(), torch.device("cpu")) for j in range(2)]
    for stage in stages:
        assert stage.look()
    with seeds:
        for i in range(3):
            for stage in stages:
                with seeds.seeded_randomness(i, stage, True).around():
                    if stage.index == 0:
                        drawn.append(torch.rand(4).tolist())
        meanwhile()
    return drawn


def test_ranks_draw_what_workers_draw() -> None:
    state = torch.get_rng_state()
    workers = numbers()
    torch.set_rng_state(state)
    ranks = numbers(alone=True)
    assert ranks == workers
    assert numbers(alone=True) != workers


def test_mini_batches_under_way_at_once_draw_different_numbers() -> None:
    inner: list[list[float]] = []
    outer = numbers(lambda: inner.extend(numbers()))
    for drawn in inner:
        assert drawn not in outer


def test_within_an_outer_pipelines_task() -> None:
    """Check the random numbers of an inner pipeline that runs within a task of an outer one.

    The inner pipeline runs two mini-batches. The outer task draws one seed for each of them, and
    nothing else. Its recomputation draws the same seeds again, so that the inner mini-batches draw
    the same numbers.
    """
    before = torch.get_rng_state()
    found = []
    for _ in range(2):
        drew: list[str] = []
        with private(7, partial(drew.append, "a number")):
            first = numbers()
            second = numbers()
        assert len(drew) == 2
        assert first != second
        found.append((first, second))
    assert torch.equal(torch.get_rng_state(), before)
    task, recomputation = found
    assert task == recomputation


def test_gpus_with_the_same_seed_get_seeds_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that GPUs draw different numbers after `torch.manual_seed`, with generators of the CPU.

    A GPU keeps the seed that the user has given it, and the first GPU keeps the common seed.
    """
    gpus = {torch.device("cuda", k): torch.Generator() for k in range(4)}
    monkeypatch.setattr(
        generators, "default_generators", lambda device: [torch.default_generator, gpus[device]]
    )
    first, second, third, own = gpus.values()
    for seed in (5, 6):
        torch.manual_seed(seed)
        for generator in gpus.values():
            generator.manual_seed(seed)
        own.manual_seed(77)
        numbers = {device: k for k, device in enumerate(gpus)}
        seed_apart(numbers)
        seeds = [generator.initial_seed() for generator in gpus.values()]
        assert seeds[0] == seed
        assert seeds[3] == 77
        assert len({*seeds}) == 4
        drawn = [
            torch.rand(4, generator=generator).tolist() for generator in (first, second, third)
        ]
        assert drawn[0] != drawn[1] != drawn[2] != drawn[0]
        seed_apart(numbers)
        assert seeds == [generator.initial_seed() for generator in gpus.values()]
    # Another pipeline has the GPUs in another order.
    seed_apart({device: 3 - k for k, device in enumerate(gpus)})
    assert len({generator.initial_seed() for generator in gpus.values()}) == 4
    # On ranks, each process has one GPU of the pipeline.
    torch.manual_seed(6)
    expected = (6 + SEED_STEP * 2) % 2**63
    first.manual_seed(6)
    seed_apart({torch.device("cuda", 0): 2})
    assert first.initial_seed() == expected


def test_the_number_of_a_gpu_is_that_of_its_first_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []
    monkeypatch.setattr("torchgpipe.task.stage.seed_apart", given.append)
    stages = [Stage(index, nn.Sequential(), torch.device("cpu")) for index in range(5)]
    seed_gpus_apart(stages, [0, 1, 2, 0, 1])
    for stage, k in zip(stages, (1, 0, 1, 0), strict=False):
        stage.device, stage.runs_later = torch.device("cuda", k), True
    seed_gpus_apart(stages, [0, 1, 2, 0, 1])
    assert given == [{}, {torch.device("cuda", 1): 0, torch.device("cuda", 0): 0}]


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_a_step_gives_each_device_a_number_of_its_own(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that `step` in one process seeds each GPU, although one program runs all devices."""
    given: list[Any] = []
    monkeypatch.setattr(batch, "seed_gpus_apart", lambda _, placement: given.append(placement))
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = GPipe(layers, [1, 1], devices=["cpu"] * 2, engine="graph", schedule=schedule)
    monkeypatch.setattr("torchgpipe.tensors.accelerator.KIND", "cpu")
    batch.Batch(model._programs_engine, 2, "never", None)
    assert [[*placement] for placement in given] == [[0, 1]]
