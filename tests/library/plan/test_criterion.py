"""Test plans with a loss."""

import re
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import BatchNorm1d, CrossEntropyLoss, Embedding, Linear, Module, Sequential
from torch.nn.functional import cross_entropy

import torchgpipe
from reproduce.machine.description import ROOT
from torchgpipe.plan import Impossible, Plan, load_hardware, plan
from torchgpipe.plan.count.loss import Loss
from torchgpipe.plan.predict.profiled import profile_layers
from torchgpipe.tensors.microbatch import MicroBatches


def next_word_of(scores: Tensor, ids: Tensor, *, weight: Tensor) -> Tensor:
    return cross_entropy(scores.flatten(0, 1), ids.flatten(), weight=weight)


class Words(Module):
    """A model that returns scores for each word of a large vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Embedding(1000, 8)
        self.second = Linear(8, 8)
        self.head = Linear(8, 1000)

    def forward(self, ids: Tensor) -> Any:
        return self.head(self.second(self.first(ids)))


def test_the_page_plans_with_the_loss() -> None:
    """Check that the code in docs/prediction.md plans with the time and memory of the loss."""
    page = (ROOT / "docs" / "prediction.md").read_text()
    _, _, after = page.partition("**The loss.**")
    _, code, _ = after.split("```", 2)
    names: dict[str, Any] = {"torch": torch, "nn": torch.nn, "torchgpipe": torchgpipe}
    names |= {"plan": plan, "model": Words(), "sample": torch.zeros(2, 16, dtype=torch.long)}
    exec(code.removeprefix("python"), names)
    layers = names["layers"]
    without = plan(layers, names["sample"], batch_size=64, devices=4, hardware="a100x8")
    found = names["p"]
    assert sum(found.balance) == len(layers)
    assert found.seconds > without.seconds
    assert "with the loss: " in str(found)
    best = without.by_devices[1].best
    beside = found.by_devices[1].best
    assert best is not None and beside is not None
    scores = 64 * 16 * 1000 * 4
    assert beside.peak > best.peak + scores / 2
    assert "without the loss" in str(without)


class Scores(NamedTuple):
    scores: Tensor
    ids: Tensor


class Structured(Words):
    """A model that returns its scores in a structure."""

    def forward(self, ids: Tensor) -> Scores:
        return Scores(super().forward(ids), ids)


@pytest.mark.parametrize("hardware", ["here", "a100x8"])
def test_a_criterion_gets_the_output_as_the_module_returns_it(hardware: str) -> None:
    weights = torch.rand(1000)
    seen = []

    class Criterion(CrossEntropyLoss):
        def forward(self, output: Any, target: Any) -> Any:
            seen.append((type(output), len(output.scores), len(target["ids"])))
            loss = super().forward(output.scores.transpose(1, 2), target["ids"])
            return loss, {"logged": 1}

    sample = torch.zeros(4, 16, dtype=torch.long)
    layers = torchgpipe.sequential(Structured(), sample)
    criterion = Criterion(weight=weights)
    target = {"ids": sample, "name": "text"}
    options: dict[str, Any] = {"batch_size": 8, "devices": 2, "memory": "1GiB"}
    options |= {"criterion": criterion, "target": target, "schedules": "1F1B"}
    found = plan(layers, sample, hardware=hardware, **options)
    assert all(type_ is Scores and ours == theirs for type_, ours, theirs in seen)
    assert {ours for _, ours, _ in seen} == {2, 4}
    loss = found.predictor.loss(4)
    assert loss.forward > 0 and loss.backward > 0
    assert criterion.weight is weights and weights.device.type == "cpu"


def test_a_criterion_needs_as_much_as_its_device_has() -> None:
    """Check that a plan is refused if its loss does not fit, and another schedule is advised."""
    layers = torchgpipe.sequential(Words(), torch.zeros(2, 16, dtype=torch.long))
    sample = torch.zeros(2, 16, dtype=torch.long)

    def criterion(scores: Tensor, ids: Tensor) -> Tensor:
        return cross_entropy(scores.flatten(0, 1), ids.flatten())

    asked: dict[str, Any] = {
        "batch_size": 64,
        "devices": 1,
        "hardware": load_hardware("p40x8"),
        "memory": "10MiB",
    }
    assert plan(layers, sample, **asked).chunks == 1
    with pytest.raises(Impossible, match="with the schedule 1F1B"):
        plan(layers, sample, **asked, criterion=criterion, target=sample)
    found = plan(layers, sample, **asked, criterion=criterion, target=sample, schedules="1F1B")
    assert found.chunks > 1


def next_word(scores: Tensor, ids: Tensor) -> Tensor:
    return cross_entropy(scores.flatten(0, 1), ids.flatten())


def planned(**changes: Any) -> Plan:
    sample = torch.zeros(4, 16, dtype=torch.long)
    asked: dict[str, Any] = {"batch_size": 8, "devices": 2, "hardware": "a100x8"}
    asked |= {"criterion": next_word, "target": sample, **changes}
    return plan(torchgpipe.sequential(Words(), sample), sample, **asked)


def test_the_loss_counts_as_work_and_not_as_bubble() -> None:
    found = planned(devices=1, chunks=1, checkpoint="never")
    assert found.bubble == pytest.approx(0, abs=1e-9)
    step = found.predictor.step(found.best.setup)
    whole = sum([task.end - task.start for task in step.tasks]) + step.loss
    assert step.busy(0) == pytest.approx(whole)
    assert step.loss == pytest.approx(sum(found.predictor.loss(8)))


def test_the_criterion_is_named_if_it_takes_longer_than_any_layer() -> None:
    def slow(scores: Tensor, ids: Tensor) -> Tensor:
        for _ in range(50):
            scores = scores.exp().log()
        return next_word(scores, ids)

    for schedule in ("GPipe", "1F1B"):
        one = planned(criterion=slow, devices=1, schedules=schedule)
        assert one.bottleneck.layer is None
        assert re.match(r"The criterion takes \d\d% of its work\.", one.reason)
        two = planned(criterion=slow, devices=2, schedules=schedule).on(2)
        assert "Device 1 works longest. The criterion takes" in two.reason
        assert planned(devices=1, schedules=schedule).bottleneck.layer is not None


@pytest.mark.parametrize("hardware", ["here", "a100x8"])
def test_planning_changes_neither_the_criterion_nor_gradients(hardware: str) -> None:
    class Criterion(Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = BatchNorm1d(16)
            self.seen = 0

        def forward(self, scores: Tensor, ids: Tensor) -> Tensor:
            self.seen += 1
            return next_word(self.norm(scores), ids)

    criterion = Criterion()
    before = {name: x.clone() for name, x in criterion.state_dict().items()}
    planned(criterion=criterion, hardware=hardware, memory="1GiB")
    assert criterion.seen == 0
    assert all(p.grad is None for p in criterion.parameters())
    for name, x in criterion.state_dict().items():
        assert torch.equal(x, before[name])


def test_a_profile_leaves_the_gradients_of_parameters_that_the_criterion_uses() -> None:
    sample = torch.zeros(4, 8)
    first, last = Linear(8, 8), Linear(8, 8)
    layers = Sequential(first, last)
    weight = first.weight
    weight.grad = torch.full_like(weight, 7.0)
    scores = torch.rand(4, 8, requires_grad=True).exp()

    def criterion(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean() + weight.square().mean().to(output.device)

    predictor = profile_layers(layers, sample, loss=Loss(criterion, scores, layers, sample))
    assert predictor.loss is not None
    assert torch.equal(weight.grad, torch.full_like(weight, 7.0))
    assert last.weight.grad is None


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"criterion": CrossEntropyLoss}, TypeError, r"the class .*: CrossEntropyLoss\(\)"),
        (
            {"criterion": cross_entropy, "target": None},
            TypeError,
            "^cross_entropy needs a target",
        ),
        (
            {"target": MicroBatches([torch.zeros(4, 16)])},
            TypeError,
            "target must be the target of the sample, but got MicroBatches",
        ),
        (
            {"criterion": lambda scores, ids: next_word(scores.detach(), ids)},
            ValueError,
            r"the criterion fails on .*: its loss has no graph: .* uses detach\(\)",
        ),
        (
            {"criterion": partial(next_word_of, weight=torch.ones(1000))},
            ValueError,
            r"the criterion fails on .* an nn.Module that has them as buffers",
        ),
    ],
)
def test_refuses_a_criterion(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as raised:
        planned(**changes)
    assert "\n" not in str(raised.value)
