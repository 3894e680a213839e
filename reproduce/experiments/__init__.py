"""Hold every experiment by name. An experiment is data: a new one is a new table here, and no code elsewhere."""

from __future__ import annotations

from reproduce.experiments import amoebanet, resnet, unet
from reproduce.experiments.row import AS_PUBLISHED, COMPONENTS, LIKE_PUBLISHED, Experiment, Optimizer, Row, Scale

__all__ = ["AS_PUBLISHED", "COMPONENTS", "EXPERIMENTS", "LIKE_PUBLISHED", "Experiment", "Optimizer", "Row", "Scale"]

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        amoebanet.SPEED,
        amoebanet.MEMORY,
        unet.SPEED,
        unet.MEMORY,
        unet.ABLATION,
        resnet.SPEED,
    )
}
