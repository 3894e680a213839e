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
NORMED = "Evaluation uses the running statistics."

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
        "With the same seed, a training can be repeated with the same results.",
        dropped,
        (3, 4),
        action=as_with(),
    ),
    Training(
        "dropout equal over balances",
        RANDOM,
        "A seed should give the same dropout masks, wherever the layers are split.",
        dropped,
        (3, 4),
        action=as_with(balance=(2, 5)),
        unlike="which numbers a task draws depends on its partition",
    ),
    Training(
        "dropout of another partition",
        RANDOM,
        "Two partitions must draw different masks, even if all ranks start with the same seed.",
        with_two_masks,
        action=masks,
    ),
    Training(
        "recomputation draws the same masks",
        RANDOM,
        "With other masks, the gradients would be those of another network.",
        dropped,
        (3, 4),
        action=as_with(checkpoint="always"),
    ),
    Training(
        "batch norm, by micro-batch",
        RANDOM,
        f"{NORMED} Each micro-batch must update them exactly once.",
        normed,
        (3, 2),
    ),
    Training(
        "batch norm under recomputation",
        RANDOM,
        "A recomputation must not update the running statistics a second time.",
        normed,
        (3, 2),
        checkpoint="always",
    ),
    Training(
        "batch norm, by mini-batch",
        RANDOM,
        f"{NORMED} Each mini-batch must update them exactly once, and all samples must count "
        "equally.",
        normed_first,
        (3, 2),
        partial(batch, 14),
        of_the_mini_batch,
        deferred_batch_norm=True,
    ),
    Training(
        "two accumulated steps",
        GRADIENTS,
        "The second step adds its gradients to those of the first step, and must not change "
        "those of the first step.",
        action=accumulated,
        tolerance=REORDERED,
    ),
    Training(
        "tied weights within a partition",
        GRADIENTS,
        "The gradient of a shared weight must be the sum over all of its uses.",
        tied_within,
        (3, 1),
        tolerance=REORDERED,
    ),
    Training(
        "tied weights of two partitions",
        GRADIENTS,
        "In many language models, the embedding and the output layer share a weight. Over ranks, "
        "each of the two ranks has a copy of this weight, and the copies must stay equal.",
        tied_over,
        action=losses,
        optimizer=sgd,
        tolerance=REORDERED,
    ),
    Training(
        "a frozen first partition",
        GRADIENTS,
        "Fine-tuning often leaves the first layers unchanged.",
        first_frozen,
    ),
    Training(
        "a frozen last partition",
        GRADIENTS,
        "Gradients must pass through layers whose parameters get none.",
        last_frozen,
    ),
    Training(
        "a parameter that is not used",
        GRADIENTS,
        "Such a parameter must get no gradient, so that weight decay does not change it.",
        with_unused,
        action=one_step,
        optimizer=decayed,
    ),
    Training(
        "nothing flows back",
        GRADIENTS,
        "If a layer detaches its output, the parameters before it must get no gradient, so that "
        "weight decay does not change them.",
        with_functions(Tensor.detach),
        (2, 3),
        action=one_step,
        optimizer=decayed,
    ),
    Training(
        "a mean over the mini-batch",
        STEPS,
        "This is the most common kind of criterion.",
        criterion=mse_loss,
        mean=True,
    ),
    Training(
        "a loss scale",
        STEPS,
        "Training in half precision needs a loss scale. The gradients must be scaled like the "
        "loss.",
        criterion=scaled,
    ),
    Training(
        "clipping",
        STEPS,
        "The norm must be that of all gradients, not that of a single partition's gradients.",
        action=one_step,
        optimizer=sgd,
        clip=0.5,
    ),
    Training(
        "Adam",
        STEPS,
        "The parameters after five steps are compared.",
        action=trained(*seeded(5)),
        optimizer=adam,
    ),
    Training(
        "two pipelines in turn",
        STEPS,
        "Some trainings use two models alternately, such as a generator and its critic.",
        action=in_turn,
        optimizer=sgd,
    ),
    Training(
        "autocast",
        STEPS,
        "Autocast must be on in every partition, also during a recomputation in backward.",
        action=in_autocast,
    ),
]
