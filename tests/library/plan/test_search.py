"""Compare the search for the best setup with a trial of all setups, for small models.

A setup is a balance, a number of micro-batches, and a mode of checkpointing. The search must find a
setup that is nearly as fast as the best one. It also computes a lower bound, and no setup may be
faster than this bound.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, islice, pairwise, product
from math import inf

import pytest
import torch
from torch import Tensor, nn

from torchgpipe.balance.minimise import minimise_heaviest
from torchgpipe.plan import load_hardware
from torchgpipe.plan.count.count import count
from torchgpipe.plan.count.optimizer import optimizer_named
from torchgpipe.plan.predict.predict import Predictor
from torchgpipe.plan.predict.setup import Setup
from torchgpipe.plan.search.balances import Work, heaviest
from torchgpipe.plan.search.search import Aim, search
from torchgpipe.plan.search.trial import Candidate, Choices, assess
from torchgpipe.schedules.named import NAMED
from torchgpipe.tensors.checkpoint import MODES

from ..layers import Pop, Stash

BATCH_SIZE, CHUNKS, NUMBERS = 12, [1, 2, 5, 12], [1, 2, 3]
Build = Callable[[], tuple[nn.Sequential, Tensor]]


def features() -> tuple[nn.Sequential, Tensor]:
    widths = [64, 512, 2048, 256, 256, 1024, 64]
    layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
    return nn.Sequential(*layers), torch.empty(2, 128, 64)


def images() -> tuple[nn.Sequential, Tensor]:
    """Return a convolutional model with a skip, and a sample input for this model.

    The outputs of its last layers are smaller than those of its first layers.
    """
    layers = (
        nn.Conv2d(3, 16, 3, padding=1),
        Stash(),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        Pop(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 64, 3),
    )
    return nn.Sequential(*layers), torch.empty(2, 3, 32, 32)


def balance_between(cuts: tuple[int, ...], layers: int) -> tuple[int, ...]:
    """Return the balance: how many layers each partition has.

    Args:
        cuts: The index of the first layer of each partition, except for the first partition.
        layers: The number of layers of the model.
    """
    bounds = (0, *cuts, layers)
    return tuple(end - begin for begin, end in pairwise(bounds))


def every(predictor: Predictor, name: str) -> list[Candidate]:
    """Predict the seconds and the memory of every possible setup of a model."""
    layers = len(predictor.counts)
    optimizer = optimizer_named(name, foreach=True)
    found = []
    for n in NUMBERS:
        for cuts in combinations(range(1, layers), n - 1):
            balance = balance_between(cuts, layers)
            for m, mode in product(CHUNKS, MODES):
                setup = Setup(BATCH_SIZE, balance, m, mode, optimizer)
                found.append(assess(predictor, setup))
    return found


def even(predictor: Predictor, setup: Setup) -> tuple[int, ...]:
    """Return the balance for which the slowest partition takes the least time."""
    seconds = predictor.layers(setup.sizes[0])
    costs = [f + b for f, b in zip(seconds.forward, seconds.backward, strict=True)]
    return tuple(minimise_heaviest(costs, len(setup.balance)))


def assert_not_below_its_bound(found: Candidate, work: Work, n: int) -> None:
    """Assert that the time and the memory of a setup are not below their computed lower bounds."""
    assert work.bound(n) <= work.bound_of(found.setup.balance) <= found.seconds
    lightest = work.balance(n, 1.0)
    assert heaviest(work.held, lightest) <= found.peak


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("hardware", ["p40x8", "h100x8"])
@pytest.mark.parametrize("build", [features, images])
def test_against_every_setup(
    build: Build,
    hardware: str,
    device: str,
    optimizer: str,
) -> None:
    """Check the search with three sizes of memory: all, half, or only a few of the setups fit.

    The search is hardest if only a few setups fit. A change of such a setup by one layer, which
    moves to another partition, then seldom gives another setup that fits.
    """
    model, sample = build()
    predictor = Predictor(count(model, sample, device=device), load_hardware(hardware))
    setups = every(predictor, optimizer)
    evened: dict[tuple[int, int], tuple[int, ...]] = {}
    time_balanced = []
    for x in setups:
        work = Work(predictor, replace(x.setup, balance=()))
        assert_not_below_its_bound(x, work, len(x.setup.balance))
        key = (len(x.setup.balance), x.setup.chunks)
        if key not in evened:
            evened[key] = even(predictor, x.setup)
        if x.setup.balance == evened[key]:
            time_balanced.append(x)
    peaks = sorted(x.peak for x in setups)
    all_fit, half_fit, few_fit = peaks[-1], peaks[len(peaks) // 2], peaks[len(peaks) // 20]

    choices = Choices(BATCH_SIZE, optimizer_named(optimizer, foreach=True), CHUNKS)
    for memory, near in ((all_fit, 1.01), (half_fit, 1.02), (few_fit, 1.1)):
        (found,) = search(predictor, choices, NUMBERS, Aim(memory))
        fitting = [x for x in setups if x.peak <= memory]
        fastest = inf
        for x in fitting:
            assert found[len(x.setup.balance)].bound <= x.seconds
            fastest = min(fastest, x.seconds)
        least = inf
        for each in found.values():
            if each.best is not None:
                assert each.best.peak <= memory
            least = min(least, each.limit)
        assert fastest <= least <= fastest * near
        # The balance of these setups gives all partitions nearly equal times. They have all numbers
        # of micro-batches and modes of checkpointing. None that fits may be faster than the result.
        for x in time_balanced:
            if x.peak <= memory:
                assert least <= x.seconds * (1 + 1e-9)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("build", [features, images])
def test_no_schedule_is_below_its_bound(build: Build, device: str) -> None:
    model, sample = build()
    predictor = Predictor(count(model, sample, device=device), load_hardware("h100x8"))
    layers = len(predictor.counts)
    optimizer = optimizer_named("adam", foreach=True)
    for name, n, m, mode in product(NAMED, NUMBERS, CHUNKS, MODES):
        setup = Setup(BATCH_SIZE, (), m, mode, optimizer, schedule=name)
        work = Work(predictor, setup)
        every_cuts = combinations(range(1, layers), work.stages(n) - 1)
        for cuts in islice(every_cuts, 0, None, 5):
            balance = balance_between(cuts, layers)
            found = assess(predictor, replace(setup, balance=balance))
            assert_not_below_its_bound(found, work, n)
