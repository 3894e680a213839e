"""Test the pipelines that are made from a plan, in one process and over ranks."""

import io
import warnings
from contextlib import redirect_stderr
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from torchgpipe import GPipe, distributed_pipeline, pipeline
from torchgpipe.distributed import DistributedGPipe
from torchgpipe.plan import Impossible, Plan

from ...behaviours.compare import REORDERED, differences

BATCH = 8
OPTIONS: dict[str, Any] = {"batch_size": BATCH, "hardware": "a100x8", "memory": "1GiB"}


class Net(nn.Module):
    """A model that is no `nn.Sequential`, and so must be traced before it is partitioned."""

    def __init__(self, width: int = 4096) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def net(width: int = 8) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Net(width), torch.rand(2, width)


def made(**changed: Any) -> GPipe:
    module, sample = net()
    return pipeline(module, sample, **{"devices": ["cpu"], **OPTIONS, **changed})


def test_a_plan_can_be_with_the_loss() -> None:
    without, found = made(), made(criterion=mse_loss, target=torch.rand(2, 8))
    assert isinstance(found.plan, Plan) and isinstance(without.plan, Plan)
    assert found.plan.seconds > without.plan.seconds
    assert "with the loss" in str(found.plan)


def test_the_plan_is_kept_and_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    model = made()
    assert isinstance(model.plan, Plan)
    assert model.plan.balance == model.balance
    assert model.plan.chunks == model.chunks
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"{model.plan.summary}\n"
    for words in ("plan: GPipe on 1 device, balance [4], ", "a step in float32", "of 1.0 GiB on"):
        assert words in err
    assert GPipe(nn.Sequential(nn.Linear(2, 2)), [1], devices=["cpu"]).plan is None


@pytest.mark.parametrize(
    "given, name",
    [
        ({}, "GPipe"),
        ({"schedule": "1F1B"}, "1F1B"),
        ({"schedules": ["ZBH1"]}, "ZBH1"),
    ],
)
def test_schedules(given: dict[str, Any], name: str) -> None:
    assert made(**given).schedule.name == name


def test_several_schedules_are_compared() -> None:
    found = made(schedules=["GPipe", "1F1B"]).plan
    assert [name for name, _ in found.by_schedule] == ["GPipe", "1F1B"]


def test_one_schedule_or_several() -> None:
    with pytest.raises(ValueError, match="schedule= names the schedule to use, and schedules="):
        made(schedule="1F1B", schedules=["GPipe"])


def test_precision_and_headroom() -> None:
    assert made(autocast=torch.bfloat16).plan.precision == "autocast to bfloat16"
    assert made(headroom=1).plan.room == pytest.approx(2**30 / 2)


def test_fewer_devices_than_given() -> None:
    """Check that a plan uses one device, and warns, if more devices would be slower.

    The layers here are so small that copies between devices would take longer than the layers.
    """
    with pytest.warns(UserWarning, match="uses 1 of the 3 devices that it was given") as caught:
        model = made(devices=["cpu"] * 3)
    assert len(model.devices) == 1
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made(devices=["cpu"])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("hardware", ["a100x8", "here"])
def test_ranks_get_one_plan(hardware: str) -> None:
    module, sample = net()
    options = {**OPTIONS, "hardware": hardware, "schedules": ["1F1B", "GPipe"]}
    written = io.StringIO()
    with warnings.catch_warnings(), redirect_stderr(written):
        warnings.simplefilter("ignore")  # small layers are faster on one rank
        model = distributed_pipeline(module, sample, **options)
    assert isinstance(model, DistributedGPipe)
    assert (len(model.plan.balance), sum(model.balance)) == (2, 4)
    plans: list[Any] = [None, None]
    dist.all_gather_object(plans, (model.balance, model.chunks, model.plan.summary))
    assert plans[0] == plans[1]
    first = dist.get_rank() == 0
    assert written.getvalue() == (f"{model.plan.summary}\n" if first else "")

    x, target = torch.rand(BATCH, 8), torch.rand(BATCH, 8)
    draws: list[Any] = [None, None]
    dist.all_gather_object(draws, (x, target))
    x, target = draws[0]
    loss = model.step(mse_loss, x, target)
    plain, _ = net()
    expected = mse_loss(plain(x), target)
    expected.backward()
    gradients = {name: p.grad for name, p in plain.named_parameters()}
    found = {name: p.grad for name, p in model.named_parameters()}
    wanted = {name: gradients[name] for name in found}
    assert (
        differences({"loss": loss, **found}, {"loss": expected.detach(), **wanted}, REORDERED) == []
    )


@pytest.mark.ranks(2)
def test_all_ranks_raise_the_error_of_the_first() -> None:
    module, sample = net()
    with pytest.raises(Impossible, match="need"):
        distributed_pipeline(module, sample, **{**OPTIONS, "memory": "100B"})


@pytest.mark.ranks(2)
def test_fewer_ranks_would_be_faster() -> None:
    module, sample = net()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        distributed_pipeline(module, sample, **OPTIONS)
    told = [
        str(each.message) for each in caught if "of these 2 ranks would be" in str(each.message)
    ]
    assert len(told) == (1 if dist.get_rank() == 0 else 0)


def test_layers_are_timed_on_the_devices_of_the_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a plan from a profile is made on the first device, not where the sample is."""
    module, sample = net()
    seen: list[Any] = []

    def refused(layers: Any, sample: Any, **_: Any) -> None:
        seen.append(sample)
        raise Impossible("nothing is planned")

    monkeypatch.setattr("torchgpipe.plan.pipeline.plan", refused)
    for given in (sample, {"x": sample}):
        with pytest.raises(Impossible):
            pipeline(module, given, devices=["meta", "meta"], batch_size=BATCH)
    with pytest.raises(Impossible):
        made(devices=["meta"])
    with pytest.raises(Impossible):
        pipeline(module.to("meta"), sample.to("meta"), devices=["cpu"], batch_size=BATCH)

    assert seen.pop().device.type == "meta", "tensors without values cannot be moved"
    assert seen[0].device.type == seen[1]["x"].device.type == "meta"
    assert seen[2] is not None and seen[2].device.type == "cpu"
