"""Define all experiments, and a dictionary from names to experiments.

To add an experiment, define an object of the class `Experiment`, and add it to `ALL`. No other code
has to change.
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
    """Return the experiments that can be predicted.

    The result maps the name of each experiment to the id of its published table.
    """
    tables = {}
    for experiment in EXPERIMENTS.values():
        if experiment.table and experiment.measures != "accuracy":
            tables[experiment.name] = experiment.table
    return tables
