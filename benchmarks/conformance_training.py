"""Checks of what training does: gradients, criteria, optimizers, state files, evaluation."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.conformance_data import sgd, stepped
from benchmarks.conformance_engines import Found, Make, Pipeline, squares
from benchmarks.conformance_parts import Checks, Function, batch, mlp

CHECKS = Checks()
check = CHECKS.add

GRADIENTS = "gradients"
STEPS = "criteria and optimizers"
STATE = "state files"
EVALUATION = "evaluation"


@check(GRADIENTS, "two accumulated steps", "Accumulation adds gradients; the second step may not change the first's.")
def _(make: Make) -> Pipeline:
    return stepped(make(mlp(), [2, 2]), batch(8), batch(8, seed=1))


def tied(first: nn.Linear, second: nn.Linear) -> nn.Linear:
    """Return the second layer, with the parameters of the first."""
    second.weight, second.bias = first.weight, first.bias
    return second


@check(GRADIENTS, "tied weights within a partition", "The gradient is the sum over all uses.")
def _(make: Make) -> Pipeline:
    torch.manual_seed(0)
    first = nn.Linear(4, 4)
    layers = nn.Sequential(first, nn.Tanh(), tied(first, nn.Linear(4, 4)), nn.Linear(4, 3))
    return stepped(make(layers, [3, 1]), batch(8))


@check(GRADIENTS, "tied weights of two partitions", "Embedding and output layer of language models share a weight.")
def _(make: Make) -> Found:
    torch.manual_seed(0)
    first = nn.Linear(4, 4)
    pipe = make(nn.Sequential(first, nn.Tanh(), nn.Linear(4, 4), tied(first, nn.Linear(4, 4))), [2, 2], optimizer=sgd)
    for seed in range(3):
        pipe.train(*batch(8, seed, targets=4))
    return {name: x for name, x in pipe.found().items() if name.startswith("loss")}


def frozen(*numbers: int) -> nn.Sequential:
    """Return layers of which some take no gradient."""
    layers = mlp()
    for number in numbers:
        layers[number].requires_grad_(False)
    return layers


@check(GRADIENTS, "a frozen first partition", "Fine-tuning leaves the first layers as they are.")
def _(make: Make) -> Pipeline:
    return stepped(make(frozen(0), [2, 2]), batch(8))


@check(GRADIENTS, "a frozen last partition", "Gradients go through layers that take none.")
def _(make: Make) -> Pipeline:
    return stepped(make(frozen(2, 3), [2, 2]), batch(8))


def decayed(parameters: Any) -> torch.optim.Optimizer:
    """Return an optimizer that changes also what has a gradient of zero."""
    return torch.optim.SGD(parameters, lr=0.01, weight_decay=0.1)


@check(GRADIENTS, "a parameter that is not used", "It has no gradient, and weight decay leaves it as it is.")
def _(make: Make) -> Pipeline:
    layers = mlp()
    layers[2].register_parameter("unused", nn.Parameter(torch.ones(2)))
    pipe = make(layers, [2, 2], optimizer=decayed)
    pipe.train(*batch(8))
    return pipe


@check(GRADIENTS, "nothing flows back", "Behind a layer that detaches, weight decay leaves parameters as they are.")
def _(make: Make) -> Pipeline:
    pipe = make(mlp(Function(lambda x: x.detach())), [2, 3], optimizer=decayed)
    pipe.train(*batch(8))
    return pipe


@check(STEPS, "a mean over the mini-batch", "The most used criterion.")
def _(make: Make) -> Pipeline:
    return stepped(make(mlp(), [2, 2], criterion=nn.functional.mse_loss, mean=True), batch(8))


@check(STEPS, "a loss scale", "Half precision needs one; gradients are scaled as the loss is.")
def _(make: Make) -> Pipeline:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    return stepped(make(mlp(), [2, 2], criterion=lambda y, target: scaler.scale(squares(y, target))), batch(8))


@check(STEPS, "clipping", "The norm is that of all gradients, not of one partition's.")
def _(make: Make) -> Pipeline:
    pipe = make(mlp(), [2, 2], optimizer=sgd, clip=0.5)
    pipe.train(*batch(8))
    return pipe


def adam(parameters: Any) -> torch.optim.Optimizer:
    """Return an optimizer with a state."""
    return torch.optim.Adam(parameters, lr=0.01)


@check(STEPS, "Adam", "Five steps, compared by parameters.")
def _(make: Make) -> Pipeline:
    pipe = make(mlp(), [2, 2], optimizer=adam)
    for seed in range(5):
        pipe.train(*batch(8, seed))
    return pipe


@check(STEPS, "two pipelines in turn", "A generator and its critic; a teacher and its pupil.")
def _(make: Make) -> Found:
    pipes = [make(mlp(), [2, 2], optimizer=sgd) for _ in range(2)]
    for seed in range(2):
        for k, pipe in enumerate(pipes):
            pipe.train(*batch(8, seed + k))
    return {f"{k}: {name}": x for k, pipe in enumerate(pipes) for name, x in pipe.found().items()}


@check(STEPS, "autocast", "It reaches every partition, in backward too.", by_micro_batch=True)
def _(make: Make) -> Pipeline:
    pipe = make(mlp(), [2, 2])
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):  # with it, gradients are added up in bfloat16
        pipe.step(*batch(8))
    return pipe


@check(STATE, "names and values", "All ranks together write what the model alone would write.")
def _(make: Make) -> Pipeline:
    return make(mlp(nn.BatchNorm1d(6)), [3, 2])


@check(STATE, "another balance", "A training goes on with another split, or on other machines.")
def _(make: Make) -> Pipeline:
    pipe = make(mlp(), [1, 3], optimizer=sgd)
    pipe.train(*batch(8))
    pipe.save(make.folder)
    pipe = make(mlp(), [3, 1])
    pipe.load(make.folder)
    return stepped(pipe, batch(8, seed=1))


@check(STATE, "going on", "After a restart it is as if nothing had happened, the optimizer's state included.")
def _(make: Make) -> Pipeline:
    pipe = make(mlp(), [2, 2], optimizer=adam)
    for seed in range(2):
        pipe.train(*batch(8, seed))
    pipe.save(make.folder)
    pipe = make(mlp(), [2, 2], optimizer=adam)
    pipe.load(make.folder)
    pipe.train(*batch(8, seed=2))
    return pipe


@check(EVALUATION, "outputs", "They are the model's, without dropout.")
def _(make: Make) -> Pipeline:
    pipe = make(mlp(nn.Dropout(0.5)), [3, 2])
    pipe.evaluate(*batch(8))
    return pipe


@check(EVALUATION, "batch norm", "Evaluation uses running statistics and leaves them as they are.", by_micro_batch=True)
def _(make: Make) -> Pipeline:
    pipe = make(mlp(nn.BatchNorm1d(6)), [3, 2])
    pipe.step(*batch(8))
    pipe.evaluate(*batch(8, seed=1))
    return pipe


@check(EVALUATION, "between two steps of training", "Evaluation leaves training as it is.")
def _(make: Make) -> Pipeline:
    pipe = make(mlp(), [2, 2], optimizer=adam)
    for seed in range(2):
        pipe.train(*batch(8, seed))
        pipe.evaluate(*batch(8, seed=5))
    return pipe


@check(EVALUATION, "a larger batch than in training", "Evaluation needs less memory, so batches are larger.")
def _(make: Make) -> Pipeline:
    pipe = make(mlp(), [2, 2], optimizer=sgd)
    pipe.train(*batch(8))
    pipe.evaluate(*batch(16))
    return pipe


@check(EVALUATION, "an uneven batch", "The last samples of a test set count as well.")
def _(make: Make) -> Pipeline:
    pipe = make(mlp(), [2, 2])
    pipe.evaluate(*batch(14))
    return pipe
