"""Tiny experiments for tests, which run within seconds.

As a script, this module is the command `python -m reproduce` with these experiments added.
"""

import os
import sys
import time
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

import reproduce.machine.devices
import reproduce.run.training
from reproduce.experiments import EXPERIMENTS
from reproduce.experiments.controls import controls
from reproduce.experiments.recipe import AccuracyScale
from reproduce.experiments.row import Experiment, Row, Scale
from reproduce.models.built import MODELS, Model

PROFILE_SECONDS = 0.05
CORES = 2  # does not depend on this machine: tests are small, and two threads run anywhere
SIZES: dict[str, dict[str, Any]] = {
    "AmoebaNet-D": {"size": (3, 16), "batch_size": 4},
    "U-Net": {"size": (1, 2), "batch_size": 8, "input_shape": (3, 64, 64)},
}
BALANCE = (1, 1, 1, 1, 1, 1, 1, 2)  # of a small AmoebaNet-D over eight partitions
KEPT = (
    "n2m1",
    "n2m4",
    "n8m4",
    "n8m4/pb",
    "naive n2",
    "naive n8",
    "checkpoint-only m4",
    "GPipe n2m4",
    "GPipe n8m4",
)


def tiny(experiment: Experiment, name: str) -> Experiment:
    """Return a copy of an experiment with a new name, smaller models and smaller batches.

    If the experiment measures memory, its scale `paper` (a set of sizes) is not made smaller.
    """

    def smaller(scale: Scale) -> Scale:
        rows = []
        for row in scale.rows:
            if row.name in KEPT or experiment.measures != "speed":
                balance = row.balance and BALANCE
                rows.append(replace(row, balance=balance, **SIZES[row.model]))
        return replace(scale, rows=tuple(rows))

    paper, small = experiment.scale("paper"), experiment.scale("small")
    if experiment.measures != "memory":
        paper = smaller(paper)
    small = replace(smaller(small), memory=0, warmup=0, steps=2)
    return replace(experiment, name=name, scales=(paper, small))


def tiny_accuracy(experiment: Experiment, name: str) -> Experiment:
    """Return a copy of an accuracy experiment with a new name and small trainings.

    Each training has two epochs of 32 samples.
    """
    small = experiment.scale("small")
    assert isinstance(small, AccuracyScale) and small.made is not None
    plain, *_, pipeline = small.rows
    recipe = replace(plain.recipe, epochs=2, lr_decay_epochs=(1,))
    made = {**small.made, "train_size": 32, "val_size": 16}
    rows = [replace(row, batch_size=16, recipe=recipe) for row in (plain, pipeline)]
    small = replace(small, rows=tuple(rows), made=made, memory=0, seeds=2)
    paper = experiment.scale("paper")
    return replace(experiment, name=name, scales=(paper, small))


class Words(nn.Module):
    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.words = nn.Embedding(num_classes, width)
        self.head = nn.Linear(width, num_classes)
        self.block = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)

    def forward(self, words: Tensor, weights: Tensor) -> dict[str, Tensor]:
        x = self.words(words) * weights
        scores = self.head(self.block(x))
        return {"scores": scores}


def sentence(
    shape: tuple[int, ...], classes: int, generator: Generator
) -> tuple[dict[str, Tensor], Tensor]:
    words = torch.randint(classes, (shape[0] + 1,), generator=generator)
    weights = torch.rand(*shape, 1, generator=generator)
    return {"words": words[:-1], "weights": weights}, words[1:]


def next_word(output: dict[str, Tensor], target: Tensor) -> Tensor:
    scores = output["scores"].flatten(0, 1)
    return F.cross_entropy(scores, target.flatten())


MODELS["words"] = Model(Words, ("width",), (5,), sentence)
ROW = Row(model="words", size=(8,), input_shape=(5,), num_classes=11, batch_size=4, loss=next_word)
ROWS = [row for row in controls(ROW, 1, (2,), None) if row.devices < 4]
SCALE = Scale(name="small", rows=tuple(ROWS), memory=0, cuda=False, steps=2)
WORDS = Experiment(name="tiny-words", title="Words", measures="speed", scales=(SCALE,))

TINY = {
    "tiny-words": WORDS,
    "tiny-words-memory": replace(WORDS, name="tiny-words-memory", measures="memory"),
    "tiny-words-ablation": replace(WORDS, name="tiny-words-ablation", measures="ablation"),
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
            seconds = float(os.environ["TINY_SLEEP"])
            time.sleep(seconds)
            return step(*arguments)

        training.step = slow
    sys.exit(main())
