"""List the experiments on AmoebaNet-D (L, D): speed over partitions and micro-batches, and memory over sizes."""

from __future__ import annotations

import math
from dataclasses import replace

from reproduce.experiments.controls import Balances, Sizes, controls, memory_rows, smaller
from reproduce.experiments.row import (
    AS_PUBLISHED,
    P40_MEMORY,
    PAPER_SCALE,
    SMALL_SCALE,
    Checkpoint,
    Experiment,
    GiB,
    Optimizer,
    Row,
    Scale,
)

BASE = Row(
    model="AmoebaNet-D",
    size=(18, 256),
    input_shape=(3, 224, 224),
    batch_size=64,  # of the rows at equal batch size: a multiple of every m, and naive on two P40s has room for it
    optimizer=Optimizer(name="SGD", options={"lr": 0.1, "momentum": 0.0}, state=0),
    loss="cross_entropy",
    num_classes=1000,
)

# --- speed -----------------------------------------------------------------------------------------------------

CHUNKS = (4, 32)
SAMPLES = 10_000  # of an epoch, as published

# name, n, m, batch size, balance, checkpoint, as published
PUBLISHED_SPEED: tuple[tuple[str, int, int, int, tuple[int, ...], Checkpoint], ...] = (
    ("n2m1", 2, 1, 96, (7, 17), "always"),
    ("n2m4", 2, 4, 256, (9, 15), "except_last"),
    ("n2m32", 2, 32, 1280, (9, 15), "except_last"),
    ("n4m1", 4, 1, 160, (3, 4, 5, 12), "always"),
    ("n4m4", 4, 4, 360, (3, 6, 7, 8), "except_last"),
    ("n4m32", 4, 32, 1152, (3, 6, 7, 8), "except_last"),
    ("n8m1", 8, 1, 196, (2, 2, 2, 2, 2, 3, 4, 7), "always"),
    ("n8m4", 8, 4, 480, (2, 2, 2, 3, 3, 4, 4, 4), "except_last"),
    ("n8m32", 8, 32, 1280, (2, 2, 2, 3, 3, 4, 4, 4), "except_last"),
)

BALANCES: Balances = {1: (24,), **{n: balance for _, n, _, _, balance, _ in PUBLISHED_SPEED}}


def as_published() -> tuple[Row, ...]:
    """List the published rows. Their batch sizes differ, and so do their checkpoint modes."""
    return tuple(
        replace(BASE, name=name, configuration=AS_PUBLISHED, partitions=n, chunks=m, batch_size=batch_size,
                balance=balance, checkpoint=checkpoint, over="n2m1", published=name,
                steps_per_epoch=math.ceil(SAMPLES / batch_size), skip_epochs=1)
        for name, n, m, batch_size, balance, checkpoint in PUBLISHED_SPEED
    )  # fmt: skip


SMALL = replace(BASE, size=(18, 16), batch_size=32)
SMALL_CHUNKS = (4, 8)  # micro-batches of 8 and 4 at equal batch size: smaller ones are slow by themselves on a core
SMALL_BATCHES = (19, 51, 256, 32, 72, 256, 39, 96, 256)  # a fifth of the published ones

SPEED = Experiment(
    name="amoebanet-speed",
    title="AmoebaNet-D: speed over n partitions and m micro-batches",
    measures="speed",
    table="tg-amoebanetd-speed",
    scales=(
        replace(PAPER_SCALE, rows=(*as_published(), *controls(BASE, 4, CHUNKS, BALANCES))),
        replace(
            SMALL_SCALE,
            rows=(*smaller(as_published(), SMALL, SMALL_BATCHES), *controls(SMALL, 4, SMALL_CHUNKS, None)),
            seconds=220,
        ),
    ),
)

# --- memory ----------------------------------------------------------------------------------------------------

RMSPROP = Optimizer(name="RMSprop", options={"foreach": False}, state=1)

MEMORY_BASE = replace(BASE, batch_size=128, optimizer=RMSPROP)
MEMORY_SMALL = replace(MEMORY_BASE, batch_size=16)

# name, (L, D) as published and at the small scale, m, balance, as published
SIZES: Sizes = (
    ("baseline", (18, 208), (18, 16), None, None),
    ("pipeline-1", (18, 416), (18, 32), None, (24,)),
    ("pipeline-2", (18, 544), (18, 40), None, (16, 8)),
    ("pipeline-4", (36, 544), (36, 40), None, (16, 12, 7, 7)),
    ("pipeline-8", (72, 512), (72, 40), None, (23, 16, 11, 6, 6, 5, 5, 6)),
)

MEMORY = Experiment(
    name="amoebanet-memory",
    title="AmoebaNet-D: parameters and memory over model size",
    measures="memory",
    table="tg-amoebanetd-memory",
    scales=(
        Scale(name="paper", rows=memory_rows(MEMORY_BASE, SIZES), memory=P40_MEMORY, cuda=True, steps=2),
        Scale(name="small", rows=memory_rows(MEMORY_SMALL, SIZES, small=True), memory=4 * GiB, cuda=False, steps=2),
    ),
)
