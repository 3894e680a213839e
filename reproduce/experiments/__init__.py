"""Hold every experiment by name.

An experiment is data: to add one, add a table here; no other code changes. This folder may import
`models`, `records` and `machine`.
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
    """Return the names of the experiments that can be predicted, each with its published table."""
    tables = {}
    for experiment in EXPERIMENTS.values():
        if experiment.table and experiment.measures != "accuracy":
            tables[experiment.name] = experiment.table
    return tables
