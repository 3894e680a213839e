"""Test cases about the split into micro-batches, and about tensors passed between partitions."""

from functools import partial

import torch
from torch import Tensor, nn

from ...parts.layers import layer
from ...parts.wiring import OnFirst
from ...pipe import Training, batch, mlp
from .actions import evaluated_then_stepped, input_gradient, sequence, trained
from .models import sgd, with_functions

SPLIT = "how a mini-batch is split"
PASSED = "what passes between partitions"

SAMPLE, _ = batch()

Two = tuple[Tensor, Tensor]


class Residual(nn.Module):
    """A module whose last layer also uses the first layer's output."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x).tanh()
        b = self.b(a).tanh()
        result: Tensor = self.c(b + a)
        return result


# Functions as layers.


def product(a: Tensor, b: Tensor) -> Tensor:
    return a * b


def total(a: Tensor, b: Tensor) -> Tensor:
    return a + b


def only_the_first(a: Tensor, _: Tensor) -> Tensor:
    return a


def twice(x: Tensor) -> Two:
    return x, x


def with_double(x: Tensor) -> Two:
    return x, x * 2


def with_constant(x: Tensor) -> Two:
    return x, x.detach() * 2


def with_mask(x: Tensor) -> Two:
    return x, x > 0


def turned(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


# Models.


def of_two_inputs() -> nn.Sequential:
    return nn.Sequential(layer(product), *mlp())


def of_two_outputs() -> nn.Sequential:
    return mlp().append(layer(with_double))


def embedded() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(5, 4), *mlp())


def masked() -> nn.Sequential:
    on_first = OnFirst(nn.Linear(3, 3))
    return nn.Sequential(nn.Linear(4, 3), layer(with_mask), on_first, layer(product))


def beginning_in_place() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 3))


def handed_on() -> nn.Sequential:
    between = [OnFirst(nn.Linear(3, 3)), OnFirst(nn.Tanh())]
    ends = [layer(total), nn.Linear(3, 3)]
    return nn.Sequential(nn.Linear(4, 3), layer(twice), *between, *ends)


# Inputs and losses.


def two_inputs() -> tuple[Two, Tensor]:
    x, target = batch()
    return (x, x + 1), target


def tokens() -> Two:
    _, target = batch()
    numbers = torch.arange(8) % 5
    return numbers, target


def squares_of_sum(outputs: Two, target: Tensor) -> Tensor:
    a, b = outputs
    return ((a + b - target) ** 2).sum()


ROWS = [
    Training(
        "equal micro-batches",
        SPLIT,
        "This is the ordinary case. Losses and gradients must be those of the mini-batch.",
    ),
    Training(
        "one micro-batch",
        SPLIT,
        "Whoever tries a pipeline, or looks for an error, begins with a single micro-batch.",
        chunks=1,
    ),
    Training(
        "uneven micro-batches",
        SPLIT,
        "Few batches divide into equal parts. No sample may be lost or count twice.",
        given=partial(batch, 14),
    ),
    Training(
        "fewer micro-batches than asked for",
        SPLIT,
        "If 13 samples are split into 8 micro-batches, as by `torch.chunk`, there are only 7.",
        given=partial(batch, 13),
        chunks=8,
    ),
    Training(
        "fewer samples than micro-batches",
        SPLIT,
        "The last batch of a data set may have fewer samples than there are micro-batches.",
        given=partial(batch, 3),
    ),
    Training(
        "a smaller second batch",
        SPLIT,
        "An epoch ends with a smaller batch, unless its last samples are dropped.",
        action=trained(batch(8), batch(4, 1)),
        optimizer=sgd,
    ),
    Training(
        "a larger second batch",
        SPLIT,
        "Some trainings increase the batch size. The buffers that receive tensors must then "
        "grow, too.",
        action=trained(batch(4), batch(8, 1)),
        optimizer=sgd,
    ),
    Training(
        "a longer second sequence",
        SPLIT,
        "Texts and audio have another length in each batch.",
        action=trained(sequence(5), sequence(7)),
        optimizer=sgd,
    ),
    Training(
        "several inputs",
        PASSED,
        "Some models take a mask or a second sequence beside their input.",
        of_two_inputs,
        (2, 3),
        two_inputs,
    ),
    Training(
        "several outputs",
        PASSED,
        "A model may return scores and boxes, and its criterion may take both.",
        of_two_outputs,
        (2, 3),
        action=evaluated_then_stepped,
        criterion=squares_of_sum,
    ),
    Training(
        "whole numbers as input",
        PASSED,
        "The input may be tokens, which get no gradient.",
        embedded,
        (2, 3),
        tokens,
    ),
    Training(
        "a mask of booleans between partitions",
        PASSED,
        "An attention mask may have to pass through every partition.",
        masked,
    ),
    Training(
        "bfloat16 between partitions",
        PASSED,
        "The layers decide which type a tensor has, and the pipeline must keep this type.",
        with_functions(Tensor.bfloat16, Tensor.float),
        (3, 3),
    ),
    Training(
        "a transposed tensor between partitions",
        PASSED,
        "Many layers end with `transpose` or `permute`, so that their output is not contiguous.",
        with_functions(turned, turned),
        (3, 3),
        partial(sequence, 5),
    ),
    Training(
        "a partition that begins in place",
        PASSED,
        "The first layer of a partition may be `ReLU(inplace=True)`.",
        beginning_in_place,
        (1, 2),
    ),
    Training(
        "a tensor that the next partition ignores",
        PASSED,
        "Such a tensor gets no gradient, so no partition may wait for its gradient.",
        with_functions(with_double, only_the_first),
        (3, 3),
    ),
    Training(
        "a constant beside a tensor with gradient",
        PASSED,
        "A float mask or a tensor of positions gets no gradient.",
        with_functions(with_constant, product),
        (3, 3),
    ),
    Training(
        "a skip over a partition, handed on",
        PASSED,
        "The partition in between gets the skip in a tuple, and passes it on.",
        handed_on,
        (2, 2, 2),
    ),
    Training(
        "a skip over a partition, in a model as it is written",
        PASSED,
        "In many models, such as U-Nets, the code of `forward` uses the output of an early layer "
        "again later.",
        Residual,
        ("b", "c"),
        sample=SAMPLE,
    ),
    Training(
        "the input's gradient",
        PASSED,
        "Adversarial training needs this gradient, and so do layers before the pipeline.",
        action=input_gradient,
    ),
]
