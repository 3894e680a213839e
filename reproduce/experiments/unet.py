"""Define three experiments on U-Net: speed, memory, and an ablation.

The speed experiment varies the number of partitions. The memory experiment varies the size of the
model, which is written (B, C): B blocks in each cell and C base channels. The ablation adds three
components of the pipeline one by one:

- a dependency between micro-batches, which fixes the order of the backward tasks;
- separate CUDA streams for copies;
- portals, which copy a skip directly to the partition that uses it.
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
from reproduce.experiments.row import (
    AS_PUBLISHED,
    COMPONENTS,
    LIKE_PUBLISHED,
    PAPER_SCALE,
    PUBLISHED_NODE,
    SMALL_SCALE,
    Experiment,
    Row,
)

BASE = Row(
    model="U-Net",
    size=(5, 64),
    input_shape=(3, 192, 192),
    options={"depth": 5, "output_channels": 1},
    batch_size=64,  # for the rows at equal batch size; a naive row's batch fits on two P40s
    loss="binary_cross_entropy_with_logits",
    num_classes=None,
)
SMALL = replace(BASE, size=(5, 16), input_shape=(3, 96, 96), batch_size=32)

SAMPLES = 10_000  # in the published epoch

# --- speed -------------------------------------------------------------------------------------

PUBLISHED_SPEED: Published = (
    ("baseline", None, 40, None),
    ("pipeline-1", 2, 80, (241,)),
    ("pipeline-2", 32, 512, (104, 137)),
    ("pipeline-4", 16, 512, (30, 66, 84, 61)),
    ("pipeline-8", 40, 640, (16, 27, 31, 44, 22, 57, 27, 17)),
)

PUBLISHED = published_rows(BASE, PUBLISHED_SPEED, SAMPLES)
SMALL_BATCHES = (8, 16, 128, 128, 160)  # a fourth or a fifth of the published ones

SPEED = Experiment(
    name="unet-speed",
    title="U-Net: speed over n partitions",
    measures="speed",
    table="tg-unet-speed",
    scales=(
        paper_speed(BASE, PUBLISHED, micro_batch=8),
        small_speed(SMALL, PUBLISHED, batch_sizes=SMALL_BATCHES, seconds=200),
    ),
)

# --- memory ------------------------------------------------------------------------------------

# Each line: name, published (B, C), (B, C) of the small scale, m, published balance.
SIZES: Sizes = (
    ("baseline", (6, 72), (6, 4), None, None),
    ("pipeline-1", (11, 128), (11, 8), 32, (505,)),
    ("pipeline-2", (24, 128), (24, 8), 32, (526, 551)),
    ("pipeline-4", (24, 160), (24, 10), 32, (472, 54, 36, 515)),
    ("pipeline-8", (48, 160), (48, 10), 128, (800, 140, 62, 36, 36, 36, 36, 987)),
)

MEMORY_BASE = replace(BASE, batch_size=32)
MEMORY_SMALL = replace(BASE, batch_size=16, input_shape=(3, 64, 64))

MEMORY = Experiment(
    name="unet-memory",
    title="U-Net: parameters and memory over model size",
    measures="memory",
    table="tg-unet-memory",
    scales=memory_scales(MEMORY_BASE, MEMORY_SMALL, SIZES),
)

# --- ablation ----------------------------------------------------------------------------------

PUBLISHED_ABLATION = ("baseline", "dep-x-x", "dep-str-x", "dep-str-ptl")  # each adds one component
ABLATION_BALANCE = (34, 76, 70, 61)


def ablation_rows(base: Row) -> tuple[Row, ...]:
    """Return the rows of the ablation: pipelines with none, one, two and three components enabled.

    `base` has the settings that all of these rows have in common.
    """
    baseline = PUBLISHED_ABLATION[0]
    base = replace(base, over=baseline, partitions=4, chunks=8, checkpoint="except_last")
    rows = []
    for count, name in enumerate(PUBLISHED_ABLATION):
        components = COMPONENTS[:count]
        row = replace(base, name=name, published=name, components=components)
        rows.append(row)
    return tuple(rows)


ABLATION_BASE = replace(
    BASE,
    configuration=AS_PUBLISHED,
    batch_size=128,
    balance=ABLATION_BALANCE,
    steps_per_epoch=16,
    skip_epochs=1,
)
ABLATION_SMALL = replace(SMALL, configuration=LIKE_PUBLISHED, batch_size=64, link=PUBLISHED_NODE)

ABLATION = Experiment(
    name="unet-ablation",
    title="U-Net: dependency, streams and portals, added one by one",
    measures="ablation",
    table="tg-unet-ablation",
    scales=(
        replace(PAPER_SCALE, rows=ablation_rows(ABLATION_BASE)),
        replace(SMALL_SCALE, rows=ablation_rows(ABLATION_SMALL), seconds=60),
    ),
)
