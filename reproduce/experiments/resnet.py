"""List the speed experiment on ResNet-101: few samples per micro-batch, and up to 1667 micro-batches."""

from __future__ import annotations

from dataclasses import replace

from reproduce.experiments.controls import Published, published_rows, speed_experiment
from reproduce.experiments.row import Optimizer, Row

BASE = Row(
    model="ResNet-101",
    size=(),
    input_shape=(3, 224, 224),
    batch_size=192,  # of the rows at equal batch size: a multiple of every m, and naive on two P40s has room for it
    optimizer=Optimizer(name="SGD", options={"lr": 0.1, "momentum": 0.0}, state=0),
    loss="cross_entropy",
    num_classes=1000,
)
SMALL = replace(BASE, model="thin ResNet-101", size=(32, 2), input_shape=(3, 112, 112), batch_size=32)

SAMPLES = 50_000  # of an epoch, as published

PUBLISHED: Published = (
    ("baseline", None, 118, None),
    ("pipeline-1", 2, 220, (370,)),
    ("pipeline-2", 1667, 25000, (135, 235)),
    ("pipeline-4", 256, 5632, (44, 92, 124, 110)),
    ("pipeline-8", 150, 5400, (26, 22, 33, 44, 44, 66, 66, 69)),
)

SPEED = speed_experiment(
    "resnet101-speed",
    "ResNet-101: speed over n partitions",
    "tg-resnet101-speed",
    BASE,
    published_rows(BASE, PUBLISHED, SAMPLES),
    micro_batch=15,
    small=SMALL,
    batch_sizes=(16, 32, 1667 * 8, 256 * 8, 150 * 8),
    seconds=200,
)
