"""Define all experiments, and a dictionary of experiments by name.

An experiment is data: to add one, add an `Experiment` here; no other code changes. This folder may
import `models`, `records` and `machine`.
"""

from reproduce.experiments import amoebanet, resnet, unet, zoo
from reproduce.experiments.row import Experiment

ALL = (
    amoebanet.SPEED,
    amoebanet.MEMORY,
    unet.SPEED,
    unet.MEMORY,
    unet.ABLATION,
    resnet.SPEED,
    resnet.ACCURACY,
    zoo.SPEED,
)
EXPERIMENTS: dict[str, Experiment] = {experiment.name: experiment for experiment in ALL}


def predictable() -> dict[str, str]:
    """Return the names of the experiments that can be predicted, with their published tables."""
    tables = {}
    for experiment in EXPERIMENTS.values():
        if experiment.table and experiment.measures != "accuracy":
            tables[experiment.name] = experiment.table
    return tables
