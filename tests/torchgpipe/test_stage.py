"""A stage: one partition with its skips, as a function from a row of tensors to a row of tensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe import GPipe
from torchgpipe.batchnorm import DeferredBatchNorm
from torchgpipe.skip import pop, skippable, stash
from torchgpipe.skip.layout import skip_layout
from torchgpipe.stage import Stage

CPU = torch.device("cpu")


@skippable(stash=["a", "b"])
class StashBoth(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("a", x * 10)
        yield stash("b", None)
        return x + 1


@skippable(pop=["a", "b"])
class PopBoth(nn.Module):
    def forward(self, x: Tensor) -> Any:
        a = yield pop("a")
        b = yield pop("b")
        assert b is None
        return x + a


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, -x


class Add(nn.Module):
    def forward(self, xs: tuple[Tensor, Tensor]) -> Tensor:
        assert isinstance(xs, tuple)
        return 3 * xs[0] + xs[1]


def stages(*partitions: nn.Sequential, portals: bool = True) -> list[Stage]:
    made = [Stage(j, partition, CPU) for j, partition in enumerate(partitions)]
    for stage in made:
        assert stage.look()
        stage.connect(skip_layout(partitions, portals=portals))
    return made


X = torch.tensor([1.0, 2.0])


@pytest.mark.parametrize(
    ("layers", "inputs", "atomic", "outputs"),
    [
        ([nn.Identity()], (X,), True, ((X,), True)),
        ([], (X,), True, ((X,), True)),
        ([Pair()], (X,), True, ((X, -X), False)),
        ([Add()], (X, X), False, ((4 * X,), True)),
        ([Pair(), Add()], (X,), True, ((2 * X,), True)),
        ([nn.Identity()], (X,), False, ((X,), False)),
        ([StashBoth(), PopBoth()], (X,), True, ((X + 1 + 10 * X,), True)),
    ],
    ids=["a tensor", "no layer", "one to two", "two to one", "inside", "a tuple of one", "skips inside"],
)
def test_run(
    layers: list[nn.Module], inputs: tuple[Tensor, ...], atomic: bool, outputs: tuple[tuple[Tensor, ...], bool]
) -> None:
    [stage] = stages(nn.Sequential(*layers))

    flat, out_atomic = stage.run(inputs, atomic)

    assert out_atomic == outputs[1]
    torch.testing.assert_close(flat, outputs[0], rtol=0, atol=0)


@pytest.mark.parametrize("portals", [True, False])
def test_skips_come_after_the_micro_batch(portals: bool) -> None:
    first, between, last = stages(
        nn.Sequential(StashBoth()), nn.Sequential(nn.Identity()), nn.Sequential(PopBoth()), portals=portals
    )

    flat, atomic = first.run((X,), True)
    assert atomic
    assert [departure.key.name for departure in first.departures] == ["a", "b"]
    assert torch.equal(flat[0], X + 1)  # type: ignore[arg-type]
    assert torch.equal(flat[1], 10 * X)  # type: ignore[arg-type]
    assert flat[2] is None

    if portals:
        assert between.arrivals == between.departures == []
    else:
        passed, atomic = between.run(flat, atomic)
        assert passed[1] is flat[1]
        flat = passed

    out, atomic = last.run(flat, atomic)
    assert atomic
    torch.testing.assert_close(out, (X + 1 + 10 * X,), rtol=0, atol=0)


class Bad(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return [x]


def test_the_output_is_checked() -> None:
    _, second = stages(nn.Sequential(nn.Identity()), nn.Sequential(Bad()))
    with pytest.raises(TypeError, match="output of partition 1 must be a tensor or a tuple of tensors, but got list"):
        second.run((X,), True)


class AddInPlace(nn.Module):
    def forward(self, xs: tuple[Tensor, Tensor]) -> Tensor:
        return xs[0].add_(xs[1])


@pytest.mark.parametrize(("shared", "refused"), [((False, False), False), ((False, True), False), ((True, True), True)])
def test_a_change_of_shared_memory_is_refused(shared: tuple[bool, ...], refused: bool) -> None:
    [stage] = stages(nn.Sequential(AddInPlace()))
    with pytest.raises(RuntimeError, match="partition 0 changed an input in place") if refused else nullcontext():
        stage.run((torch.ones(2), torch.ones(2)), False, shared)


# What is done to a partition, and whether it consists of other modules after it.
CHANGES: dict[str, tuple[Callable[[Any], object], bool]] = {
    "nothing": (lambda inner: None, False),
    "a parameter replaced": (lambda inner: setattr(inner[0], "weight", nn.Parameter(torch.ones(2, 2))), False),
    "a layer replaced": (lambda inner: inner.__setitem__(0, nn.Linear(2, 2)), True),
    "a layer appended": (lambda inner: inner.append(nn.ReLU()), True),
    "a layer of another class": (lambda inner: setattr(inner[0], "__class__", nn.Bilinear), True),
}


@pytest.mark.parametrize(("change", "changed"), CHANGES.values(), ids=CHANGES)
def test_what_a_partition_consists_of_is_looked_up_anew(change: Callable[[Any], object], changed: bool) -> None:
    inner = nn.Sequential(nn.Linear(2, 2))
    [stage] = stages(nn.Sequential(inner))
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


@pytest.mark.parametrize(("ours", "theirs", "waits"), TOGETHER.values(), ids=TOGETHER)
def test_which_partitions_run_one_at_a_time(ours: list[nn.Module], theirs: list[nn.Module], waits: bool) -> None:
    # Some of these layers are in another partition already, which has a lock of its own.
    *_, one, other = stages(*(nn.Sequential(*layers) for layers in ([LAYER], [OTHER], [THIRD], ours, theirs)))

    def locks(stage: Stage) -> set[Any]:
        return {*getattr(stage.lock, "_locks", [stage.lock])}

    assert bool(locks(one) & locks(other)) == waits
    # Locks that are several are taken in one order by all.
    assert not any(hasattr(lock, "_locks") for stage in (one, other) for lock in locks(stage))
    with one.lock, one.lock, other.lock:
        pass
