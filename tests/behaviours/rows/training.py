"""What whoever trains by a pipeline relies on; benchmarks/conformance.py makes a table of who does it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...parts import Fails
from .. import actions as do
from ..compare import REORDERED
from ..parts.layers import freeze, layer, linear, tied
from ..parts.wiring import OnFirst
from ..pipe import Training, batch, mlp, squares

SPLIT = "how a mini-batch is split"
PASSED = "what passes between partitions"
RANDOM = "random numbers and batch norm"
GRADIENTS = "gradients"
STEPS = "criteria and optimizers"
STATE = "state files"
EVALUATION = "evaluation"
FAILURES = "an exception"


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


def raising_in(phase: str) -> nn.Sequential:
    """Return layers of which the middle one raises once: in forward, or in backward."""
    fails = Fails()
    fails.fail(phase, ValueError(do.ON_PURPOSE))
    return mlp(fails)


def with_functions(*functions: Callable[..., Any]) -> Callable[[], nn.Sequential]:
    """Return what makes the usual layers with functions in the middle."""
    return lambda: mlp(*map(layer, functions))


def between(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Sequential]:
    return lambda: mlp(*(layer() for layer in layers))


def masked() -> nn.Sequential:
    product = layer(lambda x, mask: x * mask)
    return nn.Sequential(
        nn.Linear(4, 3), layer(lambda x: (x, x > 0)), OnFirst(nn.Linear(3, 3)), product
    )


def handed_on() -> nn.Sequential:
    twice, total = layer(lambda x: (x, x)), layer(lambda x, skip: x + skip)
    return nn.Sequential(
        nn.Linear(4, 3), twice, OnFirst(nn.Linear(3, 3)), OnFirst(nn.Tanh()), total, nn.Linear(3, 3)
    )


def tied_within() -> nn.Sequential:
    first = linear()
    return nn.Sequential(first, nn.Tanh(), tied(first), nn.Linear(4, 3))


def tied_over() -> nn.Sequential:
    first = linear()
    return nn.Sequential(first, nn.Tanh(), linear(), tied(first))


def with_unused() -> nn.Sequential:
    layers = mlp()
    layers[2].register_parameter("unused", nn.Parameter(torch.ones(2)))
    return layers


def raising(output: Tensor, target: Tensor) -> Tensor:
    """A criterion that raises if the target is zero."""
    if not target.any():
        raise ValueError(do.ON_PURPOSE)
    return squares(output, target)


def bad_target() -> tuple[Tensor, Tensor]:
    return batch()[0], torch.zeros(8, 3)


turned = partial(torch.transpose, dim0=1, dim1=2)
sgd = partial(torch.optim.SGD, lr=0.1)
decayed = partial(
    torch.optim.SGD, lr=0.01, weight_decay=0.1
)  # changes also what has a gradient of zero
adam = partial(torch.optim.Adam, lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
normed = between(lambda: nn.BatchNorm1d(6))
dropped = between(nn.Dropout, lambda: nn.Linear(6, 6), nn.Dropout)
NORMED = "Running statistics are what evaluation uses."
RAISES = "Every rank raises, and none hangs or is killed."
T = Training

ROWS = [
    T(
        "equal micro-batches",
        SPLIT,
        "The ordinary case: losses and gradients are those of the mini-batch.",
    ),
    T(
        "one micro-batch",
        SPLIT,
        "Whoever tries a pipeline, or looks for an error, begins without micro-batches.",
        chunks=1,
    ),
    T(
        "uneven micro-batches",
        SPLIT,
        "A batch seldom divides: no sample may be lost, or count twice.",
        given=partial(batch, 14),
    ),
    T(
        "fewer micro-batches than asked for",
        SPLIT,
        "13 samples in 8 are seven micro-batches, as `torch.chunk` has it.",
        given=partial(batch, 13),
        chunks=8,
    ),
    T(
        "fewer samples than micro-batches",
        SPLIT,
        "The last batch of a data set may be that small.",
        given=partial(batch, 3),
    ),
    T(
        "a smaller second batch",
        SPLIT,
        "So an epoch ends, unless its last samples are dropped.",
        action=do.trained(batch(8), batch(4, 1)),
        optimizer=sgd,
    ),
    T(
        "a larger second batch",
        SPLIT,
        "Batch sizes grow on purpose, and buffers must grow with them.",
        action=do.trained(batch(4), batch(8, 1)),
        optimizer=sgd,
    ),
    T(
        "a longer second sequence",
        SPLIT,
        "Text and audio have another length in each batch.",
        action=do.trained(do.sequence(5), do.sequence(7)),
        optimizer=sgd,
    ),
    T(
        "several inputs",
        PASSED,
        "Models take a mask, or a second sequence, beside their input.",
        lambda: nn.Sequential(layer(lambda a, b: a * b), *mlp()),
        (2, 3),
        lambda: ((batch()[0], batch()[0] + 1), batch()[1]),
    ),
    T(
        "several outputs",
        PASSED,
        "A model may return scores and boxes, and its criterion take both.",
        lambda: mlp().append(layer(lambda y: (y, y * 2))),
        (2, 3),
        action=lambda pipe: pipe.evaluate().step(),
        criterion=lambda ys, target: ((ys[0] + ys[1] - target) ** 2).sum(),
    ),
    T(
        "whole numbers as input",
        PASSED,
        "Tokens take no gradient.",
        lambda: nn.Sequential(nn.Embedding(5, 4), *mlp()),
        (2, 3),
        lambda: (torch.arange(8) % 5, batch()[1]),
    ),
    T(
        "a mask of booleans between partitions",
        PASSED,
        "An attention mask goes through every partition.",
        masked,
    ),
    T(
        "bfloat16 between partitions",
        PASSED,
        "Types are the layers', not the pipeline's.",
        with_functions(Tensor.bfloat16, Tensor.float),
        (3, 3),
    ),
    T(
        "a transposed tensor between partitions",
        PASSED,
        "`transpose` and `permute` end many a layer.",
        with_functions(turned, turned),
        (3, 3),
        partial(do.sequence, 5),
    ),
    T(
        "a partition that begins in place",
        PASSED,
        "`ReLU(inplace=True)` may come first in a partition.",
        lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 3)),
        (1, 2),
    ),
    T(
        "a tensor that the next partition ignores",
        PASSED,
        "It takes no gradient, and nobody may wait for one.",
        with_functions(lambda x: (x, x * 2), lambda x, _: x),
        (3, 3),
    ),
    T(
        "a constant beside a tensor with gradient",
        PASSED,
        "A float mask, or positions, take no gradient.",
        with_functions(lambda x: (x, x.detach() * 2), lambda x, y: x * y),
        (3, 3),
    ),
    T(
        "a skip over a partition, handed on",
        PASSED,
        "A tuple takes it through the partition between.",
        handed_on,
        (2, 2, 2),
    ),
    T(
        "a skip over a partition, in a model as it is written",
        PASSED,
        "So U-Nets and encoders are written.",
        Residual,
        ("b", "c"),
        sample=batch()[0],
    ),
    T(
        "the input's gradient",
        PASSED,
        "Adversarial training, and whatever comes before the pipeline, need it.",
        action=do.input_gradient,
    ),
    T(
        "one seed, one result",
        RANDOM,
        "A run can be repeated.",
        dropped,
        (3, 4),
        action=do.as_with(),
    ),
    T(
        "dropout equal over balances",
        RANDOM,
        "A seed gives the same masks wherever layers are split.",
        dropped,
        (3, 4),
        action=do.as_with(balance=(2, 5)),
        unlike="which numbers a task draws depends on its partition",
    ),
    T(
        "dropout of another partition",
        RANDOM,
        "Partitions have masks of their own, though ranks have one seed.",
        lambda: nn.Sequential(
            nn.Linear(4, 6),
            layer(lambda x: (x, nn.functional.dropout(x))),
            layer(do.second_mask),
            nn.Linear(6, 3),
        ),
        action=do.masks,
    ),
    T(
        "recomputation draws the same masks",
        RANDOM,
        "Or gradients are those of another network.",
        dropped,
        (3, 4),
        action=do.as_with(checkpoint="always"),
    ),
    T(
        "batch norm, by micro-batch",
        RANDOM,
        f"{NORMED} Each micro-batch counts once.",
        normed,
        (3, 2),
    ),
    T(
        "batch norm under recomputation",
        RANDOM,
        "Recomputation may not count it a second time.",
        normed,
        (3, 2),
        checkpoint="always",
    ),
    T(
        "batch norm, by mini-batch",
        RANDOM,
        f"{NORMED} Each mini-batch counts once, each sample alike.",
        lambda: nn.Sequential(nn.BatchNorm1d(4), *mlp()),
        (3, 2),
        partial(batch, 14),
        do.of_the_mini_batch,
        deferred_batch_norm=True,
    ),
    T(
        "two accumulated steps",
        GRADIENTS,
        "Accumulation adds gradients; the second step may not change the first's.",
        action=lambda pipe: pipe.step().step(*batch(8, 1)),
        tolerance=REORDERED,
    ),
    T(
        "tied weights within a partition",
        GRADIENTS,
        "The gradient is the sum over all uses.",
        tied_within,
        (3, 1),
        tolerance=REORDERED,
    ),
    T(
        "tied weights of two partitions",
        GRADIENTS,
        "Embedding and output layer of language models share a weight.",
        tied_over,
        action=do.losses,
        optimizer=sgd,
        tolerance=REORDERED,
        refused={"ranks": "are one parameter"},
    ),
    T(
        "a frozen first partition",
        GRADIENTS,
        "Fine-tuning leaves the first layers as they are.",
        partial(freeze, mlp, 0),
    ),
    T(
        "a frozen last partition",
        GRADIENTS,
        "Gradients go through layers that take none.",
        partial(freeze, mlp, 2, 3),
    ),
    T(
        "a parameter that is not used",
        GRADIENTS,
        "It has no gradient, and weight decay leaves it as it is.",
        with_unused,
        action=do.trained(batch()),
        optimizer=decayed,
    ),
    T(
        "nothing flows back",
        GRADIENTS,
        "Behind a layer that detaches, weight decay leaves parameters as they are.",
        with_functions(Tensor.detach),
        (2, 3),
        action=do.trained(batch()),
        optimizer=decayed,
    ),
    T(
        "a mean over the mini-batch",
        STEPS,
        "The most used criterion.",
        criterion=nn.functional.mse_loss,
        mean=True,
    ),
    T(
        "a loss scale",
        STEPS,
        "Half precision needs one; gradients are scaled as the loss is.",
        criterion=lambda y, target: scaler.scale(squares(y, target)),
    ),
    T(
        "clipping",
        STEPS,
        "The norm is that of all gradients, not of one partition's.",
        action=do.trained(batch()),
        optimizer=sgd,
        clip=0.5,
    ),
    T(
        "Adam",
        STEPS,
        "Five steps, compared by parameters.",
        action=do.trained(*do.seeded(5)),
        optimizer=adam,
    ),
    T(
        "two pipelines in turn",
        STEPS,
        "A generator and its critic; a teacher and its pupil.",
        action=do.in_turn,
        optimizer=sgd,
    ),
    T("autocast", STEPS, "It reaches every partition, in backward too.", action=do.in_autocast),
    T(
        "names and values",
        STATE,
        "All ranks together write what the model alone would write.",
        normed,
        (3, 2),
        action=lambda pipe: pipe,
    ),
    T(
        "another balance",
        STATE,
        "A training goes on with another split, or on other machines.",
        balance=(1, 3),
        action=do.moved,
        optimizer=sgd,
    ),
    T(
        "going on",
        STATE,
        "After a restart it is as if nothing had happened, the optimizer's state included.",
        action=do.going_on,
        optimizer=adam,
    ),
    T(
        "outputs",
        EVALUATION,
        "They are the model's, without dropout.",
        between(nn.Dropout),
        (3, 2),
        action=lambda pipe: pipe.evaluate(),
    ),
    T(
        "batch norm",
        EVALUATION,
        "Evaluation uses running statistics and leaves them as they are.",
        normed,
        (3, 2),
        action=lambda pipe: pipe.step().evaluate(*batch(8, 1)),
    ),
    T(
        "between two steps of training",
        EVALUATION,
        "Evaluation leaves training as it is.",
        action=do.between_steps,
        optimizer=adam,
    ),
    T(
        "a larger batch than in training",
        EVALUATION,
        "Evaluation needs less memory, so batches are larger.",
        action=lambda pipe: pipe.train().evaluate(*batch(16)),
        optimizer=sgd,
    ),
    T(
        "an uneven batch",
        EVALUATION,
        "The last samples of a test set count as well.",
        action=lambda pipe: pipe.evaluate(*batch(14)),
    ),
    *(
        T(
            f"in {phase} of the {place} partition",
            FAILURES,
            RAISES,
            partial(raising_in, phase),
            balance,
            action=do.raised,
        )
        for phase in ("forward", "backward")
        for place, balance in (("first", (3, 2)), ("last", (2, 3)))
    ),
    T("in the criterion", FAILURES, RAISES, given=bad_target, action=do.raised, criterion=raising),
    T(
        "is told to every rank",
        FAILURES,
        "Whichever log is read, it says what went wrong.",
        partial(raising_in, "forward"),
        (2, 3),
        action=do.told,
    ),
    T(
        "then the next mini-batch",
        FAILURES,
        "A program that leaves out a bad batch goes on with right gradients.",
        given=bad_target,
        action=do.next_batch,
        criterion=raising,
    ),
]
