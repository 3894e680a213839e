"""Define all experiments, and a dictionary of experiments by name.

To add an experiment, define an object of the class `Experiment`, and add it to `ALL`. No other code
changes.
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
    """Map the name of each experiment that can be predicted to the id of its published table."""
    tables = {}
    for experiment in EXPERIMENTS.values():
        if experiment.table and experiment.measures != "accuracy":
            tables[experiment.name] = experiment.table
    return tables
