"""Accuracy training: a row becomes what it says; an interrupted training goes on as if nothing had happened."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
import torch

from reproduce.experiments import EXPERIMENTS
from reproduce.machine.devices import Devices
from reproduce.run.accuracy.datasets import Gratings
from reproduce.run.accuracy.run import AccuracyTraining

CPU = Devices("cpu", 2, threads=1)
ROWS: dict[str, Any] = {
    row.name: replace(row, batch_size=16) for row in EXPERIMENTS["resnet101-accuracy"].scale("small").rows
}
PLAIN, PIPELINE = ROWS["plain"], ROWS["GPipe n2m4"]
DATA = Gratings(train_size=32, val_size=10, classes=8, image_size=32, noise=0.5, seed=0)
STEPS = 2  # in an epoch


def train(training: AccuracyTraining, epochs: range) -> list[float]:
    """Train, and return all losses."""
    return [float(training.step(*batch)) for epoch in epochs for batch in DATA.train_batches(16, 3, epoch)]


def test_rows_of_one_seed_start_alike() -> None:
    losses = [train(AccuracyTraining(row, CPU, 0, STEPS), range(2)) for row in (PLAIN, replace(PIPELINE, chunks=1))]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3), "and train alike where micro-batches do not matter"


def test_the_learning_rate_follows_the_recipe() -> None:
    recipe = replace(PLAIN.recipe, base_lr=0.1, base_batch_size=4, warmup_epochs=1, lr_decay_epochs=(2,), lr_decay=0.5)
    training = AccuracyTraining(replace(PLAIN, recipe=recipe), CPU, 0, STEPS)
    rates = []
    for batch in [batch for epoch in range(3) for batch in DATA.train_batches(16, 0, epoch)]:
        rates.append(training.learning_rate)
        training.step(*batch)
        assert training.optimizer.param_groups[0]["lr"] == rates[-1]
    assert rates == pytest.approx([0.1, 0.25, 0.4, 0.4, 0.2, 0.2])


def test_a_training_goes_on_to_the_bit() -> None:
    """Its state goes through a file, as a checkpoint does; random numbers drawn in between do not matter."""
    through, first, second = (AccuracyTraining(PIPELINE, CPU, seed, STEPS) for seed in (3, 3, 99))
    expected, begun = train(through, range(3)), train(first, range(1))
    random = torch.get_rng_state()
    torch.save(first.state(), file := io.BytesIO())
    torch.rand(7)
    second.load(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    assert torch.get_rng_state().equal(random) and begun + train(second, range(1, 3)) == expected
    for one, two in zip(through.layers.state_dict().values(), second.layers.state_dict().values(), strict=True):
        assert one.equal(two)


def test_top1_error_counts_wrong_classes() -> None:
    training = AccuracyTraining(PLAIN, CPU, 0, STEPS)
    images = DATA.val[0][..., :32, :32]
    with torch.no_grad():
        right = training.model.eval()(images).argmax(dim=1)
    right[:3] = (right[:3] + 1) % 8
    assert training.top1_error([(images[:7], right[:7]), (images[7:], right[7:])]) == pytest.approx(30)
    assert training.model.training
