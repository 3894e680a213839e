"""Recipes: the learning rate is warmed up and decays where the publication says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reproduce.experiments.resnet_accuracy import BASE

RECIPE = BASE.recipe


@pytest.mark.parametrize(
    ("batch_size", "epoch", "learning_rate"),
    [
        (256, 0, 0.1),  # nothing to warm up to
        (256, 29.99, 0.1),
        (256, 30, 0.01),
        (256, 60, 0.001),
        (256, 80, 0.0001),
        (128, 5, 0.1),  # "at least 1"
        (1024, 0, 0.1),
        (1024, 1, 0.175),
        (1024, 4, 0.4),
        (4096, 2, 0.85),
        (4096, 89.9, 0.0016),
    ],
)
def test_learning_rate(batch_size: int, epoch: float, learning_rate: float) -> None:
    assert RECIPE.learning_rate(batch_size, epoch) == pytest.approx(learning_rate)


def test_without_warm_up_it_starts_at_its_peak() -> None:
    assert replace(RECIPE, warmup_epochs=0).learning_rate(1024, 0) == pytest.approx(0.4)
