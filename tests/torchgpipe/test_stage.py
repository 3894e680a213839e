"""A stage: one partition with its skips, as a function from a row of tensors to a row of tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

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
    skips = skip_layout(partitions, portals=portals)
    return [Stage(j, partition, CPU, skips[j]) for j, partition in enumerate(partitions)]


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
        assert between.arrivals == between.departures == ()
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


@pytest.mark.parametrize(
    ("layer", "frozen", "trainable"),
    [(nn.ReLU(), False, False), (nn.Linear(1, 1), False, True), (nn.Linear(1, 1), True, False)],
    ids=["none", "some", "frozen"],
)
def test_trainable(layer: nn.Module, frozen: bool, trainable: bool) -> None:
    layer.requires_grad_(not frozen)
    [stage] = stages(nn.Sequential(layer))
    assert stage.trainable() == trainable


# Layers with running statistics, for inputs of shape (4, 2, 3); and layers that have none to update.
NORMS: dict[str, nn.Module] = {
    "batch norm": nn.BatchNorm1d(2),
    "cumulative": nn.BatchNorm1d(2, momentum=None),
    "nested": nn.Sequential(nn.ReLU(), nn.Sequential(nn.BatchNorm1d(2))),
    "instance norm": nn.InstanceNorm1d(2, track_running_stats=True),
    "without statistics": nn.BatchNorm1d(2, track_running_stats=False),
    "evaluation": nn.BatchNorm1d(2).eval(),
}


class TestRunningStatistics:
    @pytest.mark.parametrize("layer", NORMS.values(), ids=NORMS.keys())
    def test_are_left_alone(self, layer: nn.Module) -> None:
        [stage] = stages(nn.Sequential(layer))
        x = torch.rand(4, 2, 3)
        before = {key: value.clone() for key, value in layer.state_dict().items()}
        attributes = [(m.training, getattr(m, "track_running_stats", None)) for m in layer.modules()]

        with stage.running_statistics_left_alone():
            second = stage.run((x,), True)[0][0]

        assert layer.state_dict().keys() == before.keys()
        assert all(torch.equal(value, before[key]) for key, value in layer.state_dict().items())
        assert [(m.training, getattr(m, "track_running_stats", None)) for m in layer.modules()] == attributes
        # The output is what a first pass gives.
        assert torch.equal(second, stage.run((x,), True)[0][0])  # type: ignore[arg-type]

    def test_follow_otherwise(self) -> None:
        layer = nn.BatchNorm1d(2)
        [stage] = stages(nn.Sequential(layer))
        stage.run((torch.rand(4, 2) + 1,), True)
        assert layer.running_mean is not None
        assert layer.running_mean.min() > 0

    def test_are_back_after_an_error(self) -> None:
        layer = nn.BatchNorm1d(2)
        mean, var = layer.running_mean, layer.running_var
        [stage] = stages(nn.Sequential(layer))

        with pytest.raises(ZeroDivisionError), stage.running_statistics_left_alone():
            raise ZeroDivisionError

        assert layer.track_running_stats
        assert layer.running_mean is mean
        assert layer.running_var is var

    def test_deferred_norms_look_after_themselves(self) -> None:
        deferred = DeferredBatchNorm.convert_deferred_batch_norm(nn.Sequential(nn.BatchNorm1d(2)), chunks=2)
        [stage] = stages(deferred)
        assert stage.deferred_norms == [deferred[0]]
        with stage.running_statistics_left_alone():
            assert deferred[0].track_running_stats
