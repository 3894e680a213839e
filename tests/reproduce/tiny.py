"""Tiny experiments, which take seconds. As a script, this is `python -m reproduce` with them."""

import os
import sys
import time
from dataclasses import replace
from typing import Any

import reproduce.machine.devices
import reproduce.run.training
from reproduce.experiments import EXPERIMENTS, AccuracyScale, Experiment, Scale

PROFILE_SECONDS = 0.05
CORES = 2  # independent of this machine: tests are small, and two threads run anywhere
SIZES: dict[str, dict[str, Any]] = {
    "AmoebaNet-D": {"size": (3, 16), "batch_size": 4},
    "U-Net": {"size": (1, 2), "batch_size": 8, "input_shape": (3, 64, 64)},
}
BALANCE = (1, 1, 1, 1, 1, 1, 1, 2)  # of a small AmoebaNet-D over eight partitions
KEPT = ("n2m1", "n2m4", "n8m4", "n8m4/pb", "naive n2", "naive n8", "checkpoint-only m4", "GPipe n2m4", "GPipe n8m4")


def tiny(experiment: Experiment, name: str) -> Experiment:
    """Return the experiment as `name`, with a smaller scale `small`; for speed, scale `paper` is smaller, too."""

    def smaller(scale: Scale) -> Scale:
        rows = (row for row in scale.rows if row.name in KEPT or experiment.measures != "speed")
        return replace(
            scale,
            rows=tuple(
                replace(row, balance=None if row.balance is None else BALANCE, **SIZES[row.model]) for row in rows
            ),
        )

    paper = experiment.scale("paper")
    small = replace(smaller(experiment.scale("small")), memory=0, warmup=0, steps=2)
    return replace(experiment, name=name, scales=(paper if experiment.measures == "memory" else smaller(paper), small))


def tiny_accuracy(experiment: Experiment, name: str) -> Experiment:
    """Return the experiment as `name`, with a scale `small` of two epochs of two steps."""
    small = experiment.scale("small")
    assert isinstance(small, AccuracyScale) and small.made is not None
    rows = tuple(
        replace(row, batch_size=16, recipe=replace(row.recipe, epochs=2, lr_decay_epochs=(1,)))
        for row in small.rows
        if row.name in ("plain", "GPipe n8m4")
    )
    made = {**small.made, "train_size": 32, "val_size": 16}
    scale = replace(small, rows=rows, made=made, memory=0, seeds=2)
    return replace(experiment, name=name, scales=(experiment.scale("paper"), scale))


TINY = {
    "tiny-speed": tiny(EXPERIMENTS["amoebanet-speed"], "tiny-speed"),
    "tiny-memory": tiny(EXPERIMENTS["amoebanet-memory"], "tiny-memory"),
    "tiny-ablation": tiny(EXPERIMENTS["unet-ablation"], "tiny-ablation"),
    "tiny-accuracy": tiny_accuracy(EXPERIMENTS["resnet101-accuracy"], "tiny-accuracy"),
}

if __name__ == "__main__":
    EXPERIMENTS.update(TINY)
    reproduce.machine.devices.cores = lambda: CORES
    reproduce.run.training.PROFILE_SECONDS = PROFILE_SECONDS
    from reproduce.cli.main import main

    if os.environ.get("TINY_SLEEP"):  # make every step slow, so that it can be interrupted
        training: Any = reproduce.run.training.Training
        step = training.step

        def slow(*arguments: object) -> object:
            time.sleep(float(os.environ["TINY_SLEEP"]))
            return step(*arguments)

        training.step = slow
    sys.exit(main())
