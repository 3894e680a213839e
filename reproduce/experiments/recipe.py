"""Define the settings of accuracy experiments.

These are recipes (the learning rate in each epoch), rows (configurations of a training), and scales
(sets of rows of one size).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from reproduce.experiments.row import Row, Scale
from reproduce.records.places import Json


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The number of epochs of a training, and its learning rate at each time.

    1. During the first `warmup_epochs`, the learning rate grows linearly, from `base_lr` to
       `base_lr * max(1, batch_size / base_batch_size)`. The learning rate changes after each
       mini-batch (Goyal et al., arXiv:1706.02677, section 2.2).
    2. At each epoch in `lr_decay_epochs`, the learning rate is multiplied by `lr_decay`.
    """

    epochs: int
    base_lr: float
    base_batch_size: int = 256
    warmup_epochs: int
    lr_decay_epochs: tuple[int, ...]
    lr_decay: float

    def peak_lr(self, batch_size: int) -> float:
        """Return the learning rate after the warm-up."""
        return self.base_lr * max(1.0, batch_size / self.base_batch_size)

    def learning_rate(self, batch_size: int, epoch: float) -> float:
        """Return the learning rate for mini-batches of `batch_size` samples at a given time.

        `epoch` is the time since the training began, in epochs: 2.5 is in the middle of the third
        epoch.
        """
        warmed_up = 1.0 if self.warmup_epochs == 0 else min(1.0, epoch / self.warmup_epochs)
        rate = self.base_lr + warmed_up * (self.peak_lr(batch_size) - self.base_lr)
        decays = sum(epoch >= at for at in self.lr_decay_epochs)
        return rate * self.lr_decay**decays

    def config(self, batch_size: int) -> dict[str, Json]:
        """Return the recipe as a dictionary. Its keys are names from the published table."""
        return {
            "lr": self.peak_lr(batch_size),
            "base_lr": self.base_lr,
            "lr_scaling": f"linear in batch/{self.base_batch_size}, at least 1",
            "warmup_epochs": self.warmup_epochs,
            "lr_decay_epochs": list(self.lr_decay_epochs),
            "lr_decay": self.lr_decay,
            "epochs": self.epochs,
        }


@dataclass(frozen=True, kw_only=True)
class AccuracyRow(Row):
    """A row of an accuracy experiment: the settings of a training for all epochs of a recipe.

    Attributes:
        num_classes: The number of classes of the data set.
        recipe: The number of epochs, and the learning rate.
        gpus: The number of devices of `torch.nn.DataParallel`, for a row without a pipeline.
        data: Settings that say how the data set is read, as pairs of a name and a value. They are
            stored in the record (the file of results), under the names in the published table.
    """

    num_classes: int = 1000
    recipe: Recipe
    gpus: int = 1
    data: tuple[tuple[str, Json], ...] = ()

    @property
    def devices(self) -> int:
        """Return the number of devices that the training needs."""
        return self.partitions or self.gpus

    def config(self) -> dict[str, Json]:
        """Return all settings of the training, for a record (a file of results).

        The keys are names from the published table.
        """
        return {
            **super().config(),
            **self.recipe.config(self.batch_size),
            "gpus": self.devices,
            "deferred_batch_norm": self.deferred_batch_norm,
            **dict(self.data),
        }


@dataclass(frozen=True, kw_only=True)
class AccuracyScale(Scale):
    """A scale (set of sizes) of an accuracy experiment: its trainings, and their data.

    Attributes:
        rows: The settings of each training.
        seeds: The number of times that each row is trained, each time from another seed.
        made: The arguments of the generated data set `Gratings`. It is None if the user provides
            the data.
    """

    rows: tuple[AccuracyRow, ...]
    steps: int = 0  # unused: the recipe's epochs decide
    seeds: int
    made: Mapping[str, Json] | None

    def settings(self) -> dict[str, Json]:
        """Return the number of seeds and the arguments of the generated data, for the results."""
        return {"seeds": self.seeds, "made": self.made and dict(self.made)}
