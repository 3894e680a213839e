"""Define the speed experiment and the memory experiment on AmoebaNet-D.

The speed experiment varies the numbers of partitions and micro-batches. The memory experiment
varies the size of the model, which is written (L, D): L normal cells and D filters.
"""

from dataclasses import replace

from reproduce.experiments.controls import (
    Published,
    Sizes,
    memory_scales,
    paper_speed,
    published_rows,
    small_speed,
)
from reproduce.experiments.row import Experiment, Optimizer, Row

# Rows that are compared at equal batch size have a batch size of 64. This number is divisible by
# all numbers of micro-batches of these rows. A micro-batch of 64 samples still fits on two P40s.
BASE = Row(model="AmoebaNet-D", size=(18, 256), batch_size=64)

# --- speed -------------------------------------------------------------------------------------

SAMPLES = 10_000  # in the published epoch

PUBLISHED_SPEED: Published = (
    ("n2m1", 1, 96, (7, 17)),
    ("n2m4", 4, 256, (9, 15)),
    ("n2m32", 32, 1280, (9, 15)),
    ("n4m1", 1, 160, (3, 4, 5, 12)),
    ("n4m4", 4, 360, (3, 6, 7, 8)),
    ("n4m32", 32, 1152, (3, 6, 7, 8)),
    ("n8m1", 1, 196, (2, 2, 2, 2, 2, 3, 4, 7)),
    ("n8m4", 4, 480, (2, 2, 2, 3, 3, 4, 4, 4)),
    ("n8m32", 32, 1280, (2, 2, 2, 3, 3, 4, 4, 4)),
)

PUBLISHED = published_rows(BASE, PUBLISHED_SPEED, SAMPLES)
SMALL = replace(BASE, size=(18, 16), batch_size=32)
SMALL_BATCHES = (19, 51, 256, 32, 72, 256, 39, 96, 256)  # a fifth of the published ones

SPEED = Experiment(
    name="amoebanet-speed",
    title="AmoebaNet-D: speed over n partitions and m micro-batches",
    measures="speed",
    table="tg-amoebanetd-speed",
    scales=(
        paper_speed(BASE, PUBLISHED, micro_batch=4),
        small_speed(SMALL, PUBLISHED, batch_sizes=SMALL_BATCHES, seconds=120),
    ),
)

# --- memory ------------------------------------------------------------------------------------

RMSPROP = Optimizer(name="RMSprop", options={"foreach": False}, state=1)

MEMORY_BASE = replace(BASE, batch_size=128, optimizer=RMSPROP)

# Each line: name, published (L, D), (L, D) of the small scale, m, published balance.
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
    scales=memory_scales(MEMORY_BASE, replace(MEMORY_BASE, batch_size=16), SIZES),
)
