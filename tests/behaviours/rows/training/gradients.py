"""Test cases about random numbers, batch norm, gradients, loss functions and optimizers."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, mse_loss

from ...compare import REORDERED
from ...parts.layers import freeze, layer, linear, tied
from ...pipe import Training, batch, mlp, squares
from .actions import (
    accumulated,
    as_with,
    in_autocast,
    in_turn,
    losses,
    masks,
    of_the_mini_batch,
    second_mask,
    seeded,
    trained,
)
from .models import adam, between, normed, sgd, with_functions

RANDOM = "random numbers and batch norm"
GRADIENTS = "gradients"
STEPS = "criteria and optimizers"
NORMED = "Running statistics are what evaluation uses."

# Weight decay also changes parameters whose gradient is zero.
decayed = partial(torch.optim.SGD, lr=0.01, weight_decay=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
one_step = trained(batch())
dropped = between(nn.Dropout, partial(nn.Linear, 6, 6), nn.Dropout)


def with_dropped(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, dropout(x)


def with_two_masks() -> nn.Sequential:
    first, second = layer(with_dropped), layer(second_mask)
    return nn.Sequential(nn.Linear(4, 6), first, second, nn.Linear(6, 3))


def normed_first() -> nn.Sequential:
    return nn.Sequential(nn.BatchNorm1d(4), *mlp())


def tied_within() -> nn.Sequential:
    first = linear()
    return nn.Sequential(first, nn.Tanh(), tied(first), nn.Linear(4, 3))


def tied_over() -> nn.Sequential:
    first = linear()
    return nn.Sequential(first, nn.Tanh(), linear(), tied(first))


def first_frozen() -> nn.Sequential:
    return freeze(mlp, 0)


def last_frozen() -> nn.Sequential:
    return freeze(mlp, 2, 3)


def with_unused() -> nn.Sequential:
    layers = mlp()
    layers[2].register_parameter("unused", nn.Parameter(torch.ones(2)))
    return layers


def scaled(output: Tensor, target: Tensor) -> Tensor:
    loss: Tensor = scaler.scale(squares(output, target))
    return loss


ROWS = [
    Training(
        "one seed, one result",
        RANDOM,
        "A run can be repeated.",
        dropped,
        (3, 4),
        action=as_with(),
    ),
    Training(
        "dropout equal over balances",
        RANDOM,
        "A seed gives the same masks wherever layers are split.",
        dropped,
        (3, 4),
        action=as_with(balance=(2, 5)),
        unlike="which numbers a task draws depends on its partition",
    ),
    Training(
        "dropout of another partition",
        RANDOM,
        "Partitions have masks of their own, though ranks have one seed.",
        with_two_masks,
        action=masks,
    ),
    Training(
        "recomputation draws the same masks",
        RANDOM,
        "Or gradients are those of another network.",
        dropped,
        (3, 4),
        action=as_with(checkpoint="always"),
    ),
    Training(
        "batch norm, by micro-batch",
        RANDOM,
        f"{NORMED} Each micro-batch counts once.",
        normed,
        (3, 2),
    ),
    Training(
        "batch norm under recomputation",
        RANDOM,
        "Recomputation may not count it a second time.",
        normed,
        (3, 2),
        checkpoint="always",
    ),
    Training(
        "batch norm, by mini-batch",
        RANDOM,
        f"{NORMED} Each mini-batch counts once, each sample alike.",
        normed_first,
        (3, 2),
        partial(batch, 14),
        of_the_mini_batch,
        deferred_batch_norm=True,
    ),
    Training(
        "two accumulated steps",
        GRADIENTS,
        "Accumulation adds gradients; the second step may not change the first's.",
        action=accumulated,
        tolerance=REORDERED,
    ),
    Training(
        "tied weights within a partition",
        GRADIENTS,
        "The gradient is the sum over all uses.",
        tied_within,
        (3, 1),
        tolerance=REORDERED,
    ),
    Training(
        "tied weights of two partitions",
        GRADIENTS,
        "The embedding and the output layer of language models share a weight. Over ranks, each "
        "of the two ranks has a copy of it, and the copies stay equal.",
        tied_over,
        action=losses,
        optimizer=sgd,
        tolerance=REORDERED,
    ),
    Training(
        "a frozen first partition",
        GRADIENTS,
        "Fine-tuning leaves the first layers as they are.",
        first_frozen,
    ),
    Training(
        "a frozen last partition",
        GRADIENTS,
        "Gradients go through layers that take none.",
        last_frozen,
    ),
    Training(
        "a parameter that is not used",
        GRADIENTS,
        "It has no gradient, and weight decay leaves it as it is.",
        with_unused,
        action=one_step,
        optimizer=decayed,
    ),
    Training(
        "nothing flows back",
        GRADIENTS,
        "Behind a layer that detaches, weight decay leaves parameters as they are.",
        with_functions(Tensor.detach),
        (2, 3),
        action=one_step,
        optimizer=decayed,
    ),
    Training(
        "a mean over the mini-batch",
        STEPS,
        "The most used criterion.",
        criterion=mse_loss,
        mean=True,
    ),
    Training(
        "a loss scale",
        STEPS,
        "Half precision needs one; gradients are scaled as the loss is.",
        criterion=scaled,
    ),
    Training(
        "clipping",
        STEPS,
        "The norm is that of all gradients, not of one partition's.",
        action=one_step,
        optimizer=sgd,
        clip=0.5,
    ),
    Training(
        "Adam",
        STEPS,
        "Five steps, compared by parameters.",
        action=trained(*seeded(5)),
        optimizer=adam,
    ),
    Training(
        "two pipelines in turn",
        STEPS,
        "A generator and its critic; a teacher and its pupil.",
        action=in_turn,
        optimizer=sgd,
    ),
    Training(
        "autocast",
        STEPS,
        "It reaches every partition, in backward too.",
        action=in_autocast,
    ),
]
