"""What a plan says no setup can beat: nothing does, and the plan is close to it. `-s` prints how close."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
import torch
from torch import nn

from benchmarks.certificate import compared, generated
from benchmarks.generated import Case, generate
from torchgpipe.checkpoint import Mode
from torchgpipe.plan import Impossible, plan
from torchgpipe.plan.count import count
from torchgpipe.plan.hardware import load_hardware
from torchgpipe.plan.memory import alone_memory, setup_memory
from torchgpipe.plan.needs import Needs
from torchgpipe.plan.optimizer import optimizer_named
from torchgpipe.plan.predict import Predictor, Setup
from torchgpipe.plan.search import MODES, search
from torchgpipe.plan.trial import assess

GOAL = 0.01


def predictor_of(case: Case, device: str = "cuda") -> Predictor:
    return Predictor(count(case.module, case.sample, device=device), load_hardware(case.hardware))


def setup_of(case: Case) -> Setup:
    layers = (len(case.module),)
    return Setup(case.batch_size, layers, 1, "never", optimizer_named(case.optimizer, foreach=True))


def memory_of(case: Case, predictor: Predictor) -> float:
    (whole,) = setup_memory(predictor.counts, setup_of(case))
    return whole.peak * case.room if case.room is not None else float("inf")


def balances(layers: int, n: int) -> list[tuple[int, ...]]:
    return [tuple(b - a for a, b in pairwise((0, *cuts, layers))) for cuts in combinations(range(1, layers), n - 1)]


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 40))])
def test_nothing_beats_the_bound(seed: int) -> None:
    """Of all balances of small models, with several m and every mode."""
    case = replace(generate(seed, layers=(3, 7)), batch_size=12)
    predictor, layers = predictor_of(case), len(case.module)
    memory = memory_of(case, predictor)
    fastest = {
        n: min(
            (x.seconds for m in (1, 2, 5, 12) for mode in MODES for balance in balances(layers, n)
             if (x := assess(predictor, replace(setup_of(case), balance=balance, chunks=m, checkpoint=mode))).peak
             <= memory),
            default=float("inf"),
        )
        for n in range(1, min(3, layers) + 1)
    }  # fmt: skip
    try:
        found = search(predictor, batch_size=12, memory=memory, partitions=list(fastest), chunks=[1, 2, 5, 12],
                       optimizer=setup_of(case).optimizer)  # fmt: skip
    except Impossible:
        assert min(fastest.values()) == float("inf")
        return
    for n, seconds in fastest.items():
        assert found[n].bound <= seconds * (1 + 1e-9)
    fastest_found = min(each.limit for each in found.values())
    assert (
        min(fastest.values()) * (1 - 1e-9) <= fastest_found <= min(each.bound for each in found.values()) * (1 + GOAL)
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 40))])
@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_no_partition_needs_less_than_the_bound(seed: int, mode: Mode, kind: str) -> None:
    case = replace(generate(seed, layers=(3, 7)), batch_size=12)
    predictor, layers = predictor_of(case, kind), len(case.module)
    for m in (1, 3, 12):
        setup = replace(setup_of(case), chunks=m, checkpoint=mode)
        least = Needs(predictor.counts, setup.sizes[0], range(layers + 1)).at_least(setup)
        for a, b in combinations(range(layers + 1), 2):
            assert least[a, b] <= alone_memory(predictor.counts, setup, a, b).peak
        for n in (1, 2, 3):
            for balance in balances(layers, n):
                cut = replace(setup, balance=balance)
                for (a, b), device in zip(cut.cuts, setup_memory(predictor.counts, cut), strict=True):
                    assert alone_memory(predictor.counts, setup, a, b).peak <= device.peak


@pytest.mark.parametrize("number", [8, pytest.param(60, marks=pytest.mark.slow)])
def test_plans_are_close_to_their_bounds_and_never_worse_than_other_balancers(number: int) -> None:
    """Of generated models, of which not all fit."""
    gaps = []
    for _, build in generated(number):
        plan, *others = compared(build()).values()
        if plan:
            assert all(plan["seconds"] <= each["seconds"] * (1 + 1e-9) for each in others if each)
            gaps.append(plan["seconds"] / plan["bound"] - 1)
        else:
            assert not any(others)
    assert len(gaps) >= number * 0.8
    assert sum(gap <= GOAL for gap in gaps) >= 0.95 * len(gaps)


def test_every_number_of_devices_has_its_best() -> None:
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(12)))
    found = plan(model, torch.empty(2, 512), batch_size=4096, devices=5, hardware="p40x8")
    assert list(found.by_devices) == [1, 2, 3, 4, 5]
    assert found.seconds == min(each.limit for each in found.by_devices.values())
    assert found.bound == min(each.bound for each in found.by_devices.values()) <= found.seconds
    assert found.gap == found.seconds / found.bound - 1


def test_models_with_very_many_layers_are_cut_at_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """And then only the bound without memory holds."""
    monkeypatch.setattr("torchgpipe.plan.balances.MOST_CUTS", 4)
    case = replace(generate(3), devices=3)
    predictor = predictor_of(case)
    memory = max(device.peak for device in setup_memory(predictor.counts, setup_of(case))) * 0.6
    few = search(predictor, batch_size=case.batch_size, memory=memory, partitions=[3])[3]
    monkeypatch.undo()
    every = search(predictor, batch_size=case.batch_size, memory=memory, partitions=[3])[3]
    assert few.bound <= every.limit <= few.limit < float("inf")
