"""List the experiments on AmoebaNet-D (L, D): speed over partitions and micro-batches, and memory over sizes."""

from __future__ import annotations

import math
from dataclasses import replace

from reproduce.experiments.controls import Balances, Sizes, controls, memory_rows
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

CHUNKS = (1, 4, 32)
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
                balance=balance, checkpoint=checkpoint, over=f"n{n}m1", published=name,
                steps_per_epoch=math.ceil(SAMPLES / batch_size), skip_epochs=1)
        for name, n, m, batch_size, balance, checkpoint in PUBLISHED_SPEED
    )  # fmt: skip


def ours(base: Row, micro_batch: int, balances: Balances | None) -> tuple[Row, ...]:
    """List the controls. The published speed-ups are over rows that recompute everything, and so one of ours is."""
    return tuple(
        replace(row, over_published="checkpoint-only m1") if row.equal == "batch" else row
        for row in controls(base, micro_batch, CHUNKS, balances, published=lambda n, m: f"n{n}m{m}")
    )


SPEED = Experiment(
    name="amoebanet-speed",
    title="AmoebaNet-D: speed over n partitions and m micro-batches",
    measures="speed",
    table="tg-amoebanetd-speed",
    notes=(
        "over one device: over checkpoint-only m=1, which recomputes everything, as the published m=1 rows do",
        "published over m=1: throughput at (n, m) over that at (n, 1); the publication prints it over (2, 1)",
        "GPipe m=1 is the same work as naive: its distance from 1 is the noise of this run",
    ),
    scales=(
        replace(PAPER_SCALE, rows=(*ours(BASE, 4, BALANCES), *as_published())),
        replace(SMALL_SCALE, rows=ours(replace(BASE, size=(6, 32)), 1, None), steps=8, seconds=270),
    ),
)

# --- memory ----------------------------------------------------------------------------------------------------

RMSPROP = Optimizer(name="RMSprop", options={"foreach": False}, state=1)

MEMORY_BASE = replace(BASE, batch_size=128, optimizer=RMSPROP)
MEMORY_SMALL = replace(MEMORY_BASE, batch_size=32)

# name, (L, D) as published and at the small scale, m, balance, as published
SIZES: Sizes = (
    ("baseline", (18, 208), (18, 32), None, None),
    ("pipeline-1", (18, 416), (18, 64), None, (24,)),
    ("pipeline-2", (18, 544), (18, 80), None, (16, 8)),
    ("pipeline-4", (36, 544), (36, 80), None, (16, 12, 7, 7)),
    ("pipeline-8", (72, 512), (72, 80), None, (23, 16, 11, 6, 6, 5, 5, 6)),
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
