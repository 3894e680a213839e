"""Test plans with a loss."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import CrossEntropyLoss, Embedding, Linear, Module
from torch.nn.functional import cross_entropy

import torchgpipe
from reproduce.machine.description import ROOT
from torchgpipe.plan import Impossible, load_hardware, plan


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
