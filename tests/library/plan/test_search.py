"""The search against all setups of small models: none is below the bound, and the result is near the best."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest
import torch
from torch import nn

from tests.library.layers import Pop, Stash
from torchgpipe.balance.minimise import minimise_heaviest
from torchgpipe.plan import load_hardware
from torchgpipe.plan.count.count import count
from torchgpipe.plan.count.optimizer import optimizer_named
from torchgpipe.plan.predict import Predictor, Setup
from torchgpipe.plan.search.balances import Work, heaviest
from torchgpipe.plan.search.search import search
from torchgpipe.plan.search.trial import Candidate, assess
from torchgpipe.schedules.named import NAMED
from torchgpipe.tensors.checkpoint import MODES

BATCH_SIZE, CHUNKS, NUMBERS = 12, [1, 2, 5, 12], [1, 2, 3]


def features() -> tuple[nn.Sequential, torch.Tensor]:
    widths = [64, 512, 2048, 256, 256, 1024, 64]
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths))), torch.empty(2, 128, 64)


def images() -> tuple[nn.Sequential, torch.Tensor]:
    """Return layers with a skip over several others, and with shrinking tensors."""
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


def every(predictor: Predictor, name: str) -> Iterator[Candidate]:
    """Yield every setup of the model."""
    layers = len(predictor.counts)
    for n in NUMBERS:
        for cuts in combinations(range(1, layers), n - 1):
            balance = tuple(b - a for a, b in pairwise((0, *cuts, layers)))
            for m in CHUNKS:
                for mode in MODES:
                    yield assess(
                        predictor,
                        Setup(BATCH_SIZE, balance, m, mode, optimizer_named(name, foreach=True)),
                    )


def even(predictor: Predictor, setup: Setup) -> tuple[int, ...]:
    """Return the balance with the smallest heaviest partition, by seconds of forward and backward."""
    seconds = predictor.layers(setup.sizes[0])
    costs = [f + b for f, b in zip(seconds.forward, seconds.backward, strict=True)]
    return tuple(minimise_heaviest(costs, len(setup.balance)))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("hardware", ["p40x8", "h100x8"])
@pytest.mark.parametrize("build", [features, images])
def test_against_every_setup(
    build: Callable[[], tuple[nn.Sequential, torch.Tensor]],
    hardware: str,
    device: str,
    optimizer: str,
) -> None:
    """With memory for all setups, for half, and for so few that moving one layer seldom gives another that fits."""
    predictor = Predictor(count(*build(), device=device), load_hardware(hardware))
    setups = list(every(predictor, optimizer))
    for x in setups:
        work, n = Work(predictor, replace(x.setup, balance=())), len(x.setup.balance)
        assert work.bound(n) <= work.bound_of(x.setup.balance) <= x.seconds
        assert heaviest(work.held, work.balance(n, 1.0)) <= x.peak
    peaks = sorted(each.peak for each in setups)
    evened: dict[tuple[int, int], tuple[int, ...]] = {}
    for memory, near in (
        (peaks[-1], 1.01),
        (peaks[len(peaks) // 2], 1.02),
        (peaks[len(peaks) // 20], 1.1),
    ):
        found = search(
            predictor,
            batch_size=BATCH_SIZE,
            memory=memory,
            partitions=NUMBERS,
            chunks=CHUNKS,
            optimizer=optimizer_named(optimizer, foreach=True),
        )
        for n, each in found.items():
            fitting = [x.seconds for x in setups if len(x.setup.balance) == n and x.peak <= memory]
            assert each.bound <= min(fitting, default=each.bound)
            if each.best is not None:
                assert each.best.peak <= memory
        fastest = min(x.seconds for x in setups if x.peak <= memory)
        least = min(each.limit for each in found.values())
        assert fastest <= least <= fastest * near
        for x in setups:  # it is never slower than the time-balanced setups, with any m and mode
            plain = evened.setdefault(
                (len(x.setup.balance), x.setup.chunks), even(predictor, x.setup)
            )
            assert x.peak > memory or x.setup.balance != plain or least <= x.seconds * (1 + 1e-9)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("build", [features, images])
def test_no_schedule_is_below_its_bound(
    build: Callable[[], tuple[nn.Sequential, torch.Tensor]], device: str
) -> None:
    predictor = Predictor(count(*build(), device=device), load_hardware("h100x8"))
    layers = len(predictor.counts)
    for name, n, m, mode in product(NAMED, NUMBERS, CHUNKS, MODES):
        setup = Setup(BATCH_SIZE, (), m, mode, optimizer_named("adam", foreach=True), schedule=name)
        work = Work(predictor, setup)
        for cuts in [*combinations(range(1, layers), work.stages(n) - 1)][::5]:
            balance = tuple(b - a for a, b in pairwise((0, *cuts, layers)))
            found = assess(predictor, replace(setup, balance=balance))
            assert work.bound(n) <= work.bound_of(balance) <= found.seconds
            assert heaviest(work.held, work.balance(n, 1.0)) <= found.peak
