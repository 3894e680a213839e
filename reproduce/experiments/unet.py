"""List the experiments on U-Net (B, C): speed over partitions, memory over sizes, and the components one by one."""

from dataclasses import replace

from reproduce.experiments import row
from reproduce.experiments.controls import (
    Published,
    Sizes,
    memory_experiment,
    published_rows,
    speed_experiment,
)
from reproduce.experiments.row import Experiment, Row

BASE = Row(
    model="U-Net",
    size=(5, 64),
    input_shape=(3, 192, 192),
    options={"depth": 5, "output_channels": 1},
    batch_size=64,  # for the rows at equal batch size; it fits in naive on two P40s
    loss="binary_cross_entropy_with_logits",
    num_classes=None,
)
SMALL = replace(BASE, size=(5, 16), input_shape=(3, 96, 96), batch_size=32)

SAMPLES = 10_000  # in the published epoch

# --- speed -----------------------------------------------------------------------------------------------------

PUBLISHED_SPEED: Published = (
    ("baseline", None, 40, None),
    ("pipeline-1", 2, 80, (241,)),
    ("pipeline-2", 32, 512, (104, 137)),
    ("pipeline-4", 16, 512, (30, 66, 84, 61)),
    ("pipeline-8", 40, 640, (16, 27, 31, 44, 22, 57, 27, 17)),
)

SPEED = speed_experiment(
    "unet-speed",
    "U-Net: speed over n partitions",
    "tg-unet-speed",
    BASE,
    published_rows(BASE, PUBLISHED_SPEED, SAMPLES),
    micro_batch=8,
    small=SMALL,
    batch_sizes=(8, 16, 128, 128, 160),  # a fourth or a fifth of the published ones
    seconds=200,
)

# --- memory ----------------------------------------------------------------------------------------------------

# name, published (B, C), (B, C) of the small scale, m, published balance
SIZES: Sizes = (
    ("baseline", (6, 72), (6, 4), None, None),
    ("pipeline-1", (11, 128), (11, 8), 32, (505,)),
    ("pipeline-2", (24, 128), (24, 8), 32, (526, 551)),
    ("pipeline-4", (24, 160), (24, 10), 32, (472, 54, 36, 515)),
    ("pipeline-8", (48, 160), (48, 10), 128, (800, 140, 62, 36, 36, 36, 36, 987)),
)

MEMORY = memory_experiment(
    "unet-memory",
    "U-Net: parameters and memory over model size",
    "tg-unet-memory",
    replace(BASE, batch_size=32),
    replace(BASE, batch_size=16, input_shape=(3, 64, 64)),
    SIZES,
)

# --- ablation --------------------------------------------------------------------------------------------------

PUBLISHED_ABLATION = ("baseline", "dep-x-x", "dep-str-x", "dep-str-ptl")  # each adds one component
ABLATION_BALANCE = (34, 76, 70, 61)


def ablation_rows(base: Row) -> tuple[Row, ...]:
    """List the published rows, of four partitions."""
    return tuple(
        replace(
            base,
            name=name,
            published=name,
            over=PUBLISHED_ABLATION[0],
            components=row.COMPONENTS[:count],
            partitions=4,
            chunks=8,
            checkpoint="except_last",
        )
        for count, name in enumerate(PUBLISHED_ABLATION)
    )


ABLATION_BASE = replace(
    BASE,
    configuration=row.AS_PUBLISHED,
    batch_size=128,
    balance=ABLATION_BALANCE,
    steps_per_epoch=16,
    skip_epochs=1,
)
ABLATION_SMALL = replace(
    SMALL, configuration=row.LIKE_PUBLISHED, batch_size=64, link=row.PUBLISHED_NODE
)

ABLATION = Experiment(
    name="unet-ablation",
    title="U-Net: dependency, streams and portals, added one by one",
    measures="ablation",
    table="tg-unet-ablation",
    scales=(
        replace(row.PAPER_SCALE, rows=ablation_rows(ABLATION_BASE)),
        replace(row.SMALL_SCALE, rows=ablation_rows(ABLATION_SMALL), seconds=60),
    ),
)
