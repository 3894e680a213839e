"""Hold every experiment by name. An experiment is data: a new one is a new table here, and no code elsewhere."""

from __future__ import annotations

from reproduce.experiments import amoebanet, resnet_accuracy
from reproduce.experiments.recipe import AccuracyRow, AccuracyScale
from reproduce.experiments.row import AS_PUBLISHED, Experiment, Optimizer, Row, Scale

__all__ = ["AS_PUBLISHED", "EXPERIMENTS", "AccuracyRow", "AccuracyScale", "Experiment", "Optimizer", "Row", "Scale"]

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        amoebanet.SPEED,
        amoebanet.MEMORY,
        resnet_accuracy.ACCURACY,
    )
}
