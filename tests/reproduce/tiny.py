"""Stand in for the real experiments with ones of seconds. Run as a script it is `python -m reproduce` with them."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from typing import Any

import reproduce.devices
import reproduce.training
from reproduce.experiments import EXPERIMENTS, Experiment

PROFILE_SECONDS = 0.05
CORES = 2  # whatever this machine has: tests run small things, and two threads run anywhere


SIZES: dict[str, dict[str, Any]] = {
    "AmoebaNet-D": {"size": (3, 16), "batch_size": 4},
    "U-Net": {"size": (1, 2), "batch_size": 8, "input_shape": (3, 64, 64)},
}


def tiny(experiment: Experiment, name: str) -> Experiment:
    """Return the experiment with a smaller `small` scale, as `name`."""
    small = experiment.scale("small")
    rows = tuple(
        replace(row, **SIZES[row.model])
        for row in small.rows
        if (row.equal != "micro-batch" and row.chunks != 32) or row.configuration == "pipeline"
    )
    scale = replace(small, rows=rows, memory=0, warmup=0, steps=2)
    return replace(experiment, name=name, scales=(experiment.scale("paper"), scale))


TINY = {
    name: tiny(EXPERIMENTS[original], name)
    for name, original in (
        ("tiny-speed", "amoebanet-speed"),
        ("tiny-memory", "amoebanet-memory"),
        ("tiny-ablation", "unet-ablation"),
    )
}

if __name__ == "__main__":
    EXPERIMENTS.update(TINY)
    reproduce.devices.cores = lambda: CORES
    reproduce.training.PROFILE_SECONDS = PROFILE_SECONDS
    from reproduce.cli import main

    if os.environ.get("TINY_SLEEP"):  # make every step last, to be interrupted
        step = reproduce.training.Training.step

        def slow(self: reproduce.training.Training) -> object:
            time.sleep(float(os.environ["TINY_SLEEP"]))
            return step(self)

        reproduce.training.Training.step = slow
    sys.exit(main())
