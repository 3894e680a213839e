"""Define the experiment on well-known models: how much pipelines speed up the training.

The experiment does not reproduce a publication. Each model is trained without a pipeline on one
device, and by pipelines of 2, 4 and 8 partitions. All pipelines have eight micro-batches. For each
number of partitions, there are two pipelines:

- one with the balance that `torchgpipe.plan` finds from a profile;
- one with the same number of layers in each partition.
"""

from collections.abc import Iterator
from dataclasses import replace

from reproduce.experiments.controls import PARTITIONS
from reproduce.experiments.row import (
    EQUAL_LAYERS,
    PAPER_SCALE,
    PLANNED,
    SMALL_SCALE,
    Experiment,
    GiB,
    Optimizer,
    Row,
)
from reproduce.models.sizes import ZOO

CHUNKS = 8
BASE = Row(
    configuration="plain",
    model="",
    size=(224,),
    batch_size=128,
    equal="model",
    optimizer=Optimizer(name="SGD", options={"lr": 0.01, "momentum": 0.0}, state=0),
)
SMALL = replace(BASE, size=(64,), input_shape=(3, 64, 64), batch_size=32)


def rows(base: Row) -> Iterator[Row]:
    """Yield the rows of all models: for each model, first plain training, and then its pipelines.

    `base` has the settings that all rows have in common.
    """
    for name in ZOO:
        plain = replace(base, model=f"torchvision:{name}", name=name, over=name)
        yield plain
        for n in PARTITIONS:
            planned = replace(
                plain,
                name=f"{name} n{n}",
                configuration=PLANNED,
                partitions=n,
                chunks=CHUNKS,
                checkpoint="except_last",
            )
            yield planned
            yield replace(planned, name=f"{planned.name} equal", configuration=EQUAL_LAYERS)


SPEED = Experiment(
    name="zoo-speed",
    title="Ten models of torchvision: what a pipeline would give you",
    measures="speed",
    scales=(
        replace(PAPER_SCALE, rows=tuple(rows(BASE))),
        replace(SMALL_SCALE, rows=tuple(rows(SMALL)), memory=5 * GiB, steps=5),
    ),
)
