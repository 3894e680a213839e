"""List the speed experiment on ResNet-101: few samples per micro-batch, and up to 1667 micro-batches."""

from __future__ import annotations

from dataclasses import replace

from reproduce.experiments.controls import Balances, Published, controls, published_rows
from reproduce.experiments.row import PAPER_SCALE, SMALL_SCALE, Experiment, Optimizer, Row

BASE = Row(
    model="ResNet-101",
    size=(),
    input_shape=(3, 224, 224),
    batch_size=192,  # of the rows at equal batch size: a multiple of every m, and naive on two P40s has room for it
    optimizer=Optimizer(name="SGD", options={"lr": 0.1, "momentum": 0.0}, state=0),
    loss="cross_entropy",
    num_classes=1000,
)
# Four thin bottlenecks. A side of 64 leaves 2 x 2 pixels at the end, so that a lone sample can be normalized.
SMALL = replace(BASE, model="ResNet", size=(1, 16, 1), input_shape=(3, 64, 64))

CHUNKS = (4, 32)
SAMPLES = 50_000  # of an epoch, as published

# name, m, batch size as published and at the small scale, balance, as published
PUBLISHED: Published = (
    ("baseline", None, 118, 16, None),
    ("pipeline-1", 2, 220, 32, (370,)),
    ("pipeline-2", 1667, 25000, 1667, (135, 235)),
    ("pipeline-4", 256, 5632, 512, (44, 92, 124, 110)),
    ("pipeline-8", 150, 5400, 450, (26, 22, 33, 44, 44, 66, 66, 69)),
)

BALANCES: Balances = {len(balance): balance for *_, balance in PUBLISHED if balance}

SPEED = Experiment(
    name="resnet101-speed",
    title="ResNet-101: speed over n partitions",
    measures="speed",
    table="tg-resnet101-speed",
    scales=(
        replace(PAPER_SCALE, rows=(*published_rows(BASE, PUBLISHED, SAMPLES), *controls(BASE, 15, CHUNKS, BALANCES))),
        replace(
            SMALL_SCALE,
            rows=(*published_rows(SMALL, PUBLISHED, SAMPLES, small=True), *controls(SMALL, 2, CHUNKS, None)),
            seconds=100,
        ),
    ),
)
