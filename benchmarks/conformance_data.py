"""Checks of what goes in, and of what goes from layer to layer: batches, tensors, random numbers, batch norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.any_model import difference
from benchmarks.conformance_engines import Found, Make, Pipeline
from benchmarks.conformance_parts import Checks, Function, On, batch, mlp

CHECKS = Checks()
check = CHECKS.add

SPLIT = "how a mini-batch is split"
PASSED = "what passes between partitions"
RANDOM = "random numbers and batch norm"


def stepped(pipe: Pipeline, *batches: Any) -> Pipeline:
    """Run a step with each mini-batch."""
    for each in batches:
        pipe.step(*each)
    return pipe


@check(SPLIT, "equal micro-batches", "The ordinary case: losses and gradients are those of the mini-batch.")
def _(make: Make) -> Pipeline:
    return stepped(make(mlp(), [2, 2]), batch(8))


@check(SPLIT, "one micro-batch", "Whoever tries a pipeline, or looks for an error, begins without micro-batches.")
def _(make: Make) -> Pipeline:
    return stepped(make(mlp(), [2, 2], chunks=1), batch(8))


@check(SPLIT, "uneven micro-batches", "A batch seldom divides: no sample may be lost, or count twice.")
def _(make: Make) -> Pipeline:
    return stepped(make(mlp(), [2, 2]), batch(14))


@check(SPLIT, "fewer micro-batches than asked for", "13 samples in 8 are seven micro-batches, as `torch.chunk` has it.")
def _(make: Make) -> Pipeline:
    return stepped(make(mlp(), [2, 2], chunks=8), batch(13))


@check(SPLIT, "fewer samples than micro-batches", "The last batch of a data set may be that small.")
def _(make: Make) -> Pipeline:
    return stepped(make(mlp(), [2, 2]), batch(3))


@check(SPLIT, "a smaller second batch", "So an epoch ends, unless its last samples are dropped.")
def _(make: Make) -> Pipeline:
    pipe = make(mlp(), [2, 2], optimizer=sgd)
    pipe.train(*batch(8))
    pipe.train(*batch(4, seed=1))
    return pipe


@check(SPLIT, "a larger second batch", "Batch sizes grow on purpose, and buffers must grow with them.")
def _(make: Make) -> Pipeline:
    pipe = make(mlp(), [2, 2], optimizer=sgd)
    pipe.train(*batch(4))
    pipe.train(*batch(8, seed=1))
    return pipe


@check(SPLIT, "a longer second sequence", "Text and audio have another length in each batch.")
def _(make: Make) -> Pipeline:
    pipe = make(mlp(), [2, 2], optimizer=sgd)
    for length in (5, 7):
        x, target = batch(8 * length, seed=length)
        pipe.train(x.view(8, length, 4), target.view(8, length, 3))
    return pipe


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Return the simplest optimizer."""
    return torch.optim.SGD(parameters, lr=0.1)


@check(PASSED, "several inputs", "Models take a mask, or a second sequence, beside their input.")
def _(make: Make) -> Pipeline:
    x, target = batch(8)
    layers = nn.Sequential(Function(lambda xs: xs[0] * xs[1]), *mlp())
    return stepped(make(layers, [2, 3]), ((x, x + 1), target))


@check(PASSED, "several outputs", "A model may return scores and boxes, and its criterion take both.")
def _(make: Make) -> Pipeline:
    layers = mlp().append(Function(lambda y: (y, y * 2)))
    pipe = make(layers, [2, 3], criterion=lambda ys, target: ((ys[0] + ys[1] - target) ** 2).sum())
    pipe.evaluate(*batch(8))
    return stepped(pipe, batch(8))


@check(PASSED, "whole numbers as input", "Tokens take no gradient.")
def _(make: Make) -> Pipeline:
    layers = nn.Sequential(nn.Embedding(5, 4), *mlp())
    return stepped(make(layers, [2, 3]), (torch.arange(8) % 5, batch(8)[1]))


@check(PASSED, "a mask of booleans between partitions", "An attention mask goes through every partition.")
def _(make: Make) -> Pipeline:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 3), Function(lambda x: (x, x > 0)), On(0, nn.Linear(3, 3)),
                           Function(lambda xs: xs[0] * xs[1]))  # fmt: skip
    return stepped(make(layers, [2, 2]), batch(8))


@check(PASSED, "bfloat16 between partitions", "Types are the layers', not the pipeline's.", by_micro_batch=True)
def _(make: Make) -> Pipeline:
    layers = mlp(Function(lambda x: x.bfloat16()), Function(lambda x: x.float()))
    return stepped(make(layers, [3, 3]), batch(8))


@check(PASSED, "a transposed tensor between partitions", "`transpose` and `permute` end many a layer.")
def _(make: Make) -> Pipeline:
    x, target = batch(8 * 5)
    layers = mlp(Function(lambda x: x.transpose(1, 2)), Function(lambda x: x.transpose(1, 2)))
    return stepped(make(layers, [3, 3]), (x.view(8, 5, 4), target.view(8, 5, 3)))


@check(PASSED, "a partition that begins in place", "`ReLU(inplace=True)` may come first in a partition.")
def _(make: Make) -> Pipeline:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 3))
    return stepped(make(layers, [1, 2]), batch(8))


@check(PASSED, "a tensor that the next partition ignores", "It takes no gradient, and nobody may wait for one.")
def _(make: Make) -> Pipeline:
    layers = mlp(Function(lambda x: (x, x * 2)), Function(lambda xs: xs[0]))
    return stepped(make(layers, [3, 3]), batch(8))


@check(PASSED, "a constant beside a tensor with gradient", "A float mask, or positions, take no gradient.")
def _(make: Make) -> Pipeline:
    layers = mlp(Function(lambda x: (x, x.detach() * 2)), Function(lambda xs: xs[0] * xs[1]))
    return stepped(make(layers, [3, 3]), batch(8))


@check(PASSED, "a skip over a partition, handed on", "A tuple takes it through the partition between.", ranks=3)
def _(make: Make) -> Pipeline:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 3), Function(lambda x: (x, x)), On(1, nn.Linear(3, 3)), On(1, nn.Tanh()),
                           Function(lambda xs: xs[0] + xs[1]), nn.Linear(3, 3))  # fmt: skip
    return stepped(make(layers, [2, 2, 2]), batch(8))


class Residual(nn.Module):
    """A model as it is written, in which the last part uses what the first made."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output."""
        a = self.a(x).tanh()
        result: Tensor = self.c(self.b(a).tanh() + a)
        return result


@check(PASSED, "a skip over a partition, in a model as it is written", "So U-Nets and encoders are written.", ranks=3)
def _(make: Make) -> Pipeline:
    torch.manual_seed(0)
    return stepped(make(Residual(), ["b", "c"], sample=batch(8)[0]), batch(8))


@check(PASSED, "the input's gradient", "Adversarial training, and whatever comes before the pipeline, need it.")
def _(make: Make) -> Found:
    x, target = batch(8)
    x.requires_grad_()
    make(mlp(), [2, 2]).step(x, target)
    return {"the input's gradient": x.grad} if x.grad is not None else {}


def dropped(make: Make, balance: Any = (3, 4), checkpoint: str = "never") -> Pipeline:
    """Run a step of layers with dropout, with one seed for all ranks."""
    torch.manual_seed(0)
    layers = mlp(nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.5))
    pipe = make(layers, list(balance), checkpoint=checkpoint)
    torch.manual_seed(7)
    return stepped(pipe, batch(8))


def equal(pipe: Pipeline, other: Pipeline) -> Found:
    """Return whether two pipelines have the same losses and gradients."""
    a, b = pipe.found(), other.found()
    return {"both are equal": all(not difference(x, b[name]) for name, x in a.items() if name in b)}


@check(RANDOM, "one seed, one result", "A run can be repeated.")
def _(make: Make) -> Found:
    return equal(dropped(make), dropped(make))


@check(RANDOM, "dropout equal over balances", "A seed gives the same masks wherever layers are split.")
def _(make: Make) -> Found:
    return equal(dropped(make, (3, 4)), dropped(make, (2, 5)))


@check(RANDOM, "dropout of another partition", "Partitions have masks of their own, though ranks have one seed.")
def _(make: Make) -> Found:
    differ: list[bool] = []

    def first(x: Tensor) -> tuple[Tensor, Tensor]:
        return x, nn.functional.dropout(x)

    def second(xs: tuple[Tensor, Tensor]) -> Tensor:
        x = nn.functional.dropout(xs[0])
        differ.append(not x.ne(0).equal(xs[1].ne(0)))
        return x + xs[1]

    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 6), Function(first), Function(second), nn.Linear(6, 3))
    pipe = make(layers, [2, 2])
    torch.manual_seed(7)
    pipe.step(*batch(8))
    return {"masks of two partitions differ": all(differ)} if differ else {}


@check(RANDOM, "recomputation draws the same masks", "Or gradients are those of another network.")
def _(make: Make) -> Found:
    return equal(dropped(make, checkpoint="always"), dropped(make))


NORMED = "Running statistics are what evaluation uses."


@check(RANDOM, "batch norm, by micro-batch", f"{NORMED} Each micro-batch counts once.", by_micro_batch=True)
def _(make: Make) -> Pipeline:
    return stepped(make(mlp(nn.BatchNorm1d(6)), [3, 2]), batch(8))


@check(RANDOM, "batch norm under recomputation", "Recomputation may not count it a second time.", by_micro_batch=True)
def _(make: Make) -> Pipeline:
    return stepped(make(mlp(nn.BatchNorm1d(6)), [3, 2], checkpoint="always"), batch(8))


def statistics(pipe: Pipeline) -> Found:
    """Return what batch norms keep."""
    return {n: x for n, x in pipe.found().items() if n.endswith(("running_mean", "running_var", "num_batches_tracked"))}


@check(RANDOM, "batch norm, by mini-batch", f"{NORMED} Each mini-batch counts once, each sample alike.")
def _(make: Make) -> Found:
    return statistics(stepped(make(mlp(nn.BatchNorm1d(6)), [3, 2], deferred_batch_norm=True), batch(14)))
