"""Define the speed experiment and the accuracy experiment on ResNet-101."""

from collections.abc import Iterator
from dataclasses import replace

from reproduce.experiments.controls import Published, paper_speed, published_rows, small_speed
from reproduce.experiments.recipe import AccuracyRow, AccuracyScale, Recipe
from reproduce.experiments.row import AS_PUBLISHED, P40_MEMORY, Experiment, GiB, Optimizer, Row

# --- speed -------------------------------------------------------------------------------------

SAMPLES = 50_000  # in the published epoch

PUBLISHED_SPEED: Published = (
    ("baseline", None, 118, None),
    ("pipeline-1", 2, 220, (370,)),
    ("pipeline-2", 1667, 25000, (135, 235)),
    ("pipeline-4", 256, 5632, (44, 92, 124, 110)),
    ("pipeline-8", 150, 5400, (26, 22, 33, 44, 44, 66, 66, 69)),
)

# Rows that are compared at equal batch size have a batch size of 192. This number is divisible by
# all numbers of micro-batches of these rows. With a single micro-batch of 192 samples, the model
# still fits on two P40s.
BASE = Row(model="ResNet-101", batch_size=192)
SMALL = replace(
    BASE, model="thin ResNet-101", size=(32, 2), input_shape=(3, 112, 112), batch_size=32
)

PUBLISHED = published_rows(BASE, PUBLISHED_SPEED, SAMPLES)
SMALL_BATCHES = (16, 32, 1667 * 8, 256 * 8, 150 * 8)

SPEED = Experiment(
    name="resnet101-speed",
    title="ResNet-101: speed over n partitions",
    measures="speed",
    table="tg-resnet101-speed",
    scales=(
        paper_speed(BASE, PUBLISHED, micro_batch=15),
        small_speed(SMALL, PUBLISHED, batch_sizes=SMALL_BATCHES, seconds=200),
    ),
)

# --- accuracy, of trainings by pipelines and data-parallel -------------------------------------

NESTEROV = Optimizer(
    name="SGD", options={"momentum": 0.9, "nesterov": True, "weight_decay": 1e-4}, state=1
)

TRAINING = AccuracyRow(
    configuration=AS_PUBLISHED,
    model="ResNet-101",
    batch_size=256,
    optimizer=NESTEROV,
    recipe=Recipe(
        epochs=90, base_lr=0.1, warmup_epochs=4, lr_decay_epochs=(30, 60, 80), lr_decay=0.1
    ),
    data=(
        ("dataset", "ImageNet"),
        ("train_crop", "RandomResizedCrop(224, scale=(0.08, 1.0)) + horizontal flip"),
        ("eval_crop", "Resize(256) + CenterCrop(224)"),
        ("dataloader_workers", 32),
        ("drop_last", True),
    ),
)

EIGHT = (26, 22, 33, 44, 44, 66, 66, 69)

# Each line: name, devices, batch size, m, balance, the row whose error this row is compared with.
PUBLISHED_ACCURACY = (
    ("reference-256", 8, 256, None, None, None),
    ("reference-8k", 256, 8192, None, None, "reference-256"),
    ("dataparallel-256", 2, 256, None, None, "reference-256"),
    ("dataparallel-1k", 8, 1024, None, None, "dataparallel-256"),
    ("dataparallel-4k", 8, 4096, None, None, "dataparallel-256"),
    ("pipeline-256", 2, 256, 4, (140, 230), "dataparallel-256"),
    ("pipeline-1k", 8, 1024, 64, EIGHT, "dataparallel-1k"),
    ("pipeline-4k", 8, 4096, 64, EIGHT, "dataparallel-256"),
)


def published_trainings() -> Iterator[AccuracyRow]:
    """Yield a row (the settings of a training) for each row of the published accuracy table."""
    for name, gpus, batch_size, m, balance, over in PUBLISHED_ACCURACY:
        row = replace(
            TRAINING, name=name, published=name, gpus=gpus, batch_size=batch_size, over=over
        )
        if balance is not None:
            row = replace(row, partitions=gpus, chunks=m, checkpoint="except_last", balance=balance)
        yield row


MADE = {"train_size": 1280, "val_size": 480, "classes": 8, "image_size": 32, "noise": 0.7}

SMALL_TRAINING = replace(
    TRAINING,
    model="ResNet",
    size=(1, 16, 1),
    input_shape=(3, 32, 32),
    # 32 samples per micro-batch at m = 4: with fewer, batch norm over micro-batches costs accuracy.
    batch_size=128,
    num_classes=8,
    recipe=Recipe(
        epochs=6,
        base_lr=0.0125,
        base_batch_size=32,
        warmup_epochs=1,
        lr_decay_epochs=(4, 5),
        lr_decay=0.1,
    ),
    data=(
        ("dataset", "gratings"),
        ("train_crop", "random"),
        ("eval_crop", "middle"),
        ("drop_last", True),
    ),
)

BALANCES = {2: (9, 42), 8: (1, 2, 1, 13, 8, 10, 6, 10)}  # as `balance_by_time` found them on a CPU

# Each line: name, n, m, whether batch norm is deferred, the published row that this row repeats.
SMALL_PIPELINES = (
    ("GPipe n2m2", 2, 2, True, None),
    ("GPipe n2m4", 2, 4, True, None),
    ("plain BN n2m4", 2, 4, False, "pipeline-256"),
    ("GPipe n8m4", 8, 4, True, None),
)


def small_trainings() -> Iterator[AccuracyRow]:
    """Yield the rows (configurations) of the scale `small`: plain training, then pipelines.

    The error rates of the pipelines are compared with the error rate of plain training.
    """
    yield replace(SMALL_TRAINING, name="plain", configuration="plain", published="dataparallel-256")
    for name, n, m, deferred, published in SMALL_PIPELINES:
        yield replace(
            SMALL_TRAINING,
            name=name,
            configuration="GPipe",
            partitions=n,
            chunks=m,
            checkpoint="except_last",
            balance=BALANCES[n],
            deferred_batch_norm=deferred,
            over="plain",
            published=published,
        )


ACCURACY = Experiment(
    name="resnet101-accuracy",
    title="ResNet-101: top-1 error, pipelines beside data-parallel training",
    measures="accuracy",
    table="tg-resnet101-accuracy",
    scales=(
        AccuracyScale(
            name="paper",
            rows=tuple(published_trainings()),
            memory=P40_MEMORY,
            cuda=True,
            seeds=1,
            made=None,
        ),
        AccuracyScale(
            name="small",
            rows=tuple(small_trainings()),
            memory=2 * GiB,
            cuda=False,
            seeds=5,
            made=MADE,
        ),
    ),
)
