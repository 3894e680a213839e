"""Recipes: the learning rate is warmed up and decays where the publication says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reproduce.experiments.resnet import TRAINING


@pytest.mark.parametrize(
    ("batch_size", "rates"),
    [
        (256, {0: 0.1, 29.99: 0.1, 30: 0.01, 60: 0.001, 80: 0.0001}),  # nothing to warm up to
        (128, {5: 0.1}),  # "at least 1"
        (1024, {0: 0.1, 1: 0.175, 4: 0.4}),
        (4096, {2: 0.85, 89.9: 0.0016}),
    ],
)
def test_learning_rate(batch_size: int, rates: dict[float, float]) -> None:
    assert {epoch: TRAINING.recipe.learning_rate(batch_size, epoch) for epoch in rates} == pytest.approx(rates)
    assert replace(TRAINING.recipe, warmup_epochs=0).learning_rate(batch_size, 0) == TRAINING.recipe.peak(batch_size)
