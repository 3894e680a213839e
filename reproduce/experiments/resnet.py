"""List the speed experiment on ResNet-101: few samples per micro-batch, and up to 1667 micro-batches."""

from __future__ import annotations

from dataclasses import replace

from reproduce.experiments.controls import Balances, Published, controls, published_rows, smaller
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
SMALL = replace(BASE, model="thin ResNet-101", size=(32, 2), input_shape=(3, 112, 112), batch_size=32)

CHUNKS, SMALL_CHUNKS = (4, 32), (4, 8)
SAMPLES = 50_000  # of an epoch, as published

PUBLISHED: Published = (
    ("baseline", None, 118, None),
    ("pipeline-1", 2, 220, (370,)),
    ("pipeline-2", 1667, 25000, (135, 235)),
    ("pipeline-4", 256, 5632, (44, 92, 124, 110)),
    ("pipeline-8", 150, 5400, (26, 22, 33, 44, 44, 66, 66, 69)),
)
AS_THERE = published_rows(BASE, PUBLISHED, SAMPLES)
SMALL_BATCHES = (16, 32, 1667 * 8, 256 * 8, 150 * 8)

BALANCES: Balances = {len(balance): balance for *_, balance in PUBLISHED if balance}

SPEED = Experiment(
    name="resnet101-speed",
    title="ResNet-101: speed over n partitions",
    measures="speed",
    table="tg-resnet101-speed",
    scales=(
        replace(PAPER_SCALE, rows=(*AS_THERE, *controls(BASE, 15, CHUNKS, BALANCES))),
        replace(
            SMALL_SCALE,
            rows=(*smaller(AS_THERE, SMALL, SMALL_BATCHES), *controls(SMALL, 4, SMALL_CHUNKS, None)),
            seconds=200,
        ),
    ),
)
