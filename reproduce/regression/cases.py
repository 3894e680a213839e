"""Define the training steps (cases) that `python -m reproduce regression` times for torchgpipe.

Each case is a training step on CPU devices with one thread each. There are four kinds of cases:

- `MACHINERY`: The layers compute next to nothing, so the time is the pipeline's own overhead.
- `TRAINING`: The models are small versions of AmoebaNet-D and U-Net.
- `OVERLAP`: The layers are large matrix products, which show whether devices work at the same time.
- `WAITING`: The layers compute next to nothing, as in `MACHINERY`, but wall-clock time is measured
  instead of CPU time. It shows whether threads wake up late.

A case imports torchgpipe, and the models that use torchgpipe, only when the case is prepared. By
then, the caller has put one version of torchgpipe on `sys.path`: the version to be timed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reproduce.regression.ranks import over_ranks
from reproduce.regression.timed import Case

if TYPE_CHECKING:
    from torchgpipe import GPipe

Model = Literal["linear", "AmoebaNet-D", "U-Net", "matrices"]
Mode = Literal["always", "except_last", "never"]
Loss = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Training:
    """A training step to time.

    Attributes:
        model: The name of the model.
        balance: The number of layers of each partition.
        m: The number of micro-batches.
        checkpoint: Which micro-batches are checkpointed: `GPipe`'s argument of the same name.
        batch: The number of samples in the mini-batch.
        engine: `GPipe`'s argument of the same name, or None for `GPipe`'s default.
        schedule: The schedule with which `model.step` runs the step. None runs the step with
            `model(x)` and `loss.backward()` instead.
    """

    model: Model
    balance: tuple[int, ...]
    m: int
    checkpoint: Mode
    batch: int
    engine: str | None = None
    schedule: str | None = None

    def __call__(self) -> Callable[[], Tensor]:
        """Build the model, and return a function that runs a training step and returns the loss.

        A training step is a forward pass, the loss, a backward pass and an optimizer step.
        """
        from torchgpipe import GPipe

        torch.manual_seed(0)
        layers, x, loss = self._build()
        # Older versions have fewer options, so only those that the case needs are given.
        options: dict[str, Any] = {"engine": self.engine, "schedule": self.schedule}
        model = GPipe(
            layers,
            self.balance,
            devices=["cpu"] * len(self.balance),
            chunks=self.m,
            checkpoint=self.checkpoint,
            **{name: value for name, value in options.items() if value is not None},
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step() -> Tensor:
            value = self._train(model, x, loss)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return value.detach()

        return step

    def _train(self, model: "GPipe", x: Tensor, loss: Loss) -> Tensor:
        """Run a forward pass, compute the loss, run a backward pass, and return the loss."""
        if self.schedule is not None:
            return model.step(lambda y, _: loss(y), x, None)
        value = loss(model(x))
        value.backward()
        return value

    def _build(self) -> tuple[nn.Sequential, Tensor, Loss]:
        """Return the layers, an input mini-batch, and a function from the output to the loss.

        The function takes only the output, because it already knows the target.
        """
        if self.model == "linear":  # nearly all of the step is overhead of the pipeline
            small = [nn.Linear(8, 8) for _ in self.balance]
            return nn.Sequential(*small), torch.randn(self.batch, 8), Tensor.mean
        if self.model == "matrices":
            # Matrix products release Python's global interpreter lock (GIL), so partitions can
            # compute at the same time. All layers are equal, so partitions take equal time.
            count = sum(self.balance)
            large = [nn.Linear(512, 512, bias=False) for _ in range(count)]
            return nn.Sequential(*large), torch.randn(self.batch, 512), _mean_square
        from reproduce.models.built import amoebanetd, unet

        if self.model == "AmoebaNet-D":
            # AmoebaNet-D cannot be smaller than with 3 layers and 8 filters. The images are as
            # large as those in the papers.
            classes = torch.randint(1000, (self.batch,))
            model = amoebanetd(3, 8)
            images = torch.rand(self.batch, 3, 224, 224)
            return model, images, lambda y: F.cross_entropy(y, classes)
        # This small U-Net has 3 levels, 1 convolution in each cell, and 8 channels at the first
        # level. Some of its skip connections go from the first partition to the second.
        mask = torch.randint(2, (self.batch, 1, 32, 32)).float()
        model = unet(3, 1, 8)
        images = torch.rand(self.batch, 3, 32, 32)
        return model, images, lambda y: F.binary_cross_entropy_with_logits(y, mask)


def _mean_square(y: Tensor) -> Tensor:
    return y.square().mean()


def training(model: Model, batch: int, m: int, balance: tuple[int, int]) -> tuple[Case, ...]:
    """Return three cases (timed training steps) of a model, all with the same mini-batch.

    The first case is naive model parallelism, the second one is checkpointing without pipeline
    parallelism, and the third one is GPipe.

    Args:
        model: The name of the model.
        batch: The number of samples in the mini-batch.
        m: The number of micro-batches in the second and the third case.
        balance: The number of layers of each of the two partitions in the first and third case.
    """
    return (
        Case(f"{model} naive", Training(model, balance, 1, "never", batch)),
        Case(f"{model} checkpoint-only", Training(model, (sum(balance),), m, "always", batch)),
        Case(f"{model} GPipe", Training(model, balance, m, "except_last", batch)),
    )


TRAINING = (*training("AmoebaNet-D", 2, 2, (4, 5)), *training("U-Net", 8, 2, (20, 21)))
MODES: tuple[Mode, ...] = ("never", "always")


def machinery(**options: Any) -> Training:
    """Return a training step whose layers compute next to nothing.

    So the time of the step is the pipeline's own overhead. `options` are fields of `Training`, such
    as `checkpoint`.
    """
    return Training("linear", (1, 1), 8, batch=8, **options)


MACHINERY = (
    *[Case(f"machinery {mode}", machinery(checkpoint=mode), steps=4) for mode in MODES],
    Case("machinery graph", machinery(checkpoint="always", engine="graph"), steps=2),
    Case("machinery 1F1B", machinery(checkpoint="never", schedule="1F1B"), steps=2),
    Case("machinery ZBH1", machinery(checkpoint="never", schedule="ZBH1"), steps=2),
)
OVERLAP = tuple(
    Case(f"overlap {mode}", Training("matrices", (2, 2), 8, mode, 512), clock="wall")
    for mode in MODES
)
WAITING = (
    # The steps over ranks come first, because they fork: no other case has started threads yet.
    Case("ranks GPipe", partial(over_ranks, "GPipe"), steps=2, clock="wall"),
    Case("ranks 1F1B", partial(over_ranks, "1F1B"), steps=2, clock="wall"),
    Case("waiting always", machinery(checkpoint="always"), steps=2, clock="wall"),
    Case("waiting ZBH1", machinery(checkpoint="never", schedule="ZBH1"), steps=2, clock="wall"),
)
CASES = (*WAITING, *MACHINERY, *TRAINING, *OVERLAP)
