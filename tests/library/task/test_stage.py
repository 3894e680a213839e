"""A stage: what its partition consists of, and which partitions run one at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torchgpipe import GPipe
from torchgpipe.task.batchnorm import DeferredBatchNorm
from torchgpipe.task.stage import Stage


def stage_of(*layers: nn.Module) -> Stage:
    stage = Stage(0, nn.Sequential(*layers), torch.device("cpu"))
    assert stage.look()
    stage.connect([])
    return stage


# What is done to a partition, and whether it consists of other modules after it.
CHANGES: dict[str, tuple[Callable[[Any], object], bool]] = {
    "nothing": (lambda inner: None, False),
    "a parameter replaced": (lambda inner: setattr(inner[0], "weight", nn.Parameter(torch.ones(2, 2))), False),
    "a layer replaced": (lambda inner: inner.__setitem__(0, nn.Linear(2, 2)), True),
    "a layer appended": (lambda inner: inner.append(nn.ReLU()), True),
    "a layer of another class": (lambda inner: setattr(inner[0], "__class__", nn.Bilinear), True),
}


@pytest.mark.parametrize("change, changed", CHANGES.values(), ids=CHANGES)
def test_what_a_partition_consists_of_is_looked_up_anew(change: Callable[[Any], object], changed: bool) -> None:
    inner = nn.Sequential(nn.Linear(2, 2))
    stage = stage_of(inner)
    assert not stage.look()
    change(inner)
    assert stage.look() == changed
    inner.append(DeferredBatchNorm(2))
    stage.look()
    assert stage.deferred_norms == [inner[-1]]


LAYER, OTHER, THIRD, RELU = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2), nn.ReLU()
BOTH = nn.Sequential(LAYER, OTHER, nn.Linear(2, 2))
PIPELINE = GPipe(nn.Sequential(nn.Linear(2, 2)), [1], devices=["cpu"])

# The layers of two partitions, and whether one has to wait while the other runs.
TOGETHER: dict[str, tuple[list[nn.Module], list[nn.Module], bool]] = {
    "nothing in common": ([nn.Linear(2, 2)], [nn.Linear(2, 2)], False),
    "a layer in common": ([LAYER], [nn.ReLU(), nn.Sequential(LAYER)], True),
    "a layer in common with each of two": ([LAYER, OTHER], [OTHER], True),
    "a layer in common with one that has": ([BOTH], [BOTH[2], THIRD], True),
    "an activation in common": ([nn.Linear(2, 2), RELU], [RELU], False),
    "a pipeline and its layers": ([PIPELINE], list(PIPELINE), False),
}


@pytest.mark.parametrize("ours, theirs, waits", TOGETHER.values(), ids=TOGETHER)
def test_which_partitions_run_one_at_a_time(ours: list[nn.Module], theirs: list[nn.Module], waits: bool) -> None:
    # Some of these layers are in another partition already, which has a lock of its own.
    *_, one, other = (stage_of(*layers) for layers in ([LAYER], [OTHER], [THIRD], ours, theirs))

    def locks(stage: Stage) -> set[Any]:
        return {*getattr(stage.lock, "_locks", [stage.lock])}

    assert bool(locks(one) & locks(other)) == waits
    # Locks that are several are taken in one order by all.
    assert not any(hasattr(lock, "_locks") for stage in (one, other) for lock in locks(stage))
    with one.lock, one.lock, other.lock:
        pass
