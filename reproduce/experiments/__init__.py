"""Hold every experiment by name. An experiment is data: to add one, add a table here; no other code changes.
It may import `models`, `records` and `machine`."""

from reproduce.experiments import amoebanet, resnet, unet, zoo
from reproduce.experiments.recipe import AccuracyRow, AccuracyScale
from reproduce.experiments.row import (
    AS_PUBLISHED,
    COMPONENTS,
    EQUAL_LAYERS,
    LIKE_PUBLISHED,
    PLANNED,
    PUBLISHED_BALANCE,
    Experiment,
    Optimizer,
    Row,
    Scale,
)

__all__ = [
    "AS_PUBLISHED", "COMPONENTS", "EQUAL_LAYERS", "EXPERIMENTS", "LIKE_PUBLISHED", "PLANNED", "PUBLISHED_BALANCE",
    "AccuracyRow", "AccuracyScale", "Experiment", "Optimizer", "Row", "Scale",
]  # fmt: skip

ALL = (
    amoebanet.SPEED, amoebanet.MEMORY, unet.SPEED, unet.MEMORY, unet.ABLATION, resnet.SPEED, resnet.ACCURACY, zoo.SPEED
)  # fmt: skip
EXPERIMENTS: dict[str, Experiment] = {experiment.name: experiment for experiment in ALL}
