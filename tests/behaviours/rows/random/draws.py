"""Test cases with layers that draw random numbers."""

from collections.abc import Callable
from functools import partial
from itertools import combinations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...compare import REORDERED
from ...parts.draw import Draw, drawing
from ...parts.layers import draw_from, linear, made
from ...row import Row, step, steps

Drawn = Callable[[Tensor], Tensor]

WRONG = "in a later micro-batch, but not in the first one"
WITHIN = r"within torch\.utils\.checkpoint"
AUTO: dict[str, Any] = {"options": {"engine": "auto"}, "without": {"ranks": "they are one engine"}}
THREE_PARTITIONS: dict[str, Any] = {"chunks": 4, "balance": (2, 1, 2)}


# Functions that draw random numbers in the shape of a layer's input.


def dropout(x: Tensor) -> Tensor:
    return F.dropout(torch.ones_like(x), 0.5)


def dropout_in_place(x: Tensor) -> Tensor:
    return F.dropout(torch.ones_like(x), 0.5, inplace=True)


def normal(x: Tensor) -> Tensor:
    return torch.normal(torch.ones_like(x), 0.5)


def multinomial(x: Tensor) -> Tensor:
    weights = x.detach().abs() + 0.1
    return torch.multinomial(weights, 4, replacement=True).float()


def poisson(x: Tensor) -> Tensor:
    return torch.poisson(torch.full_like(x, 4))


def rrelu(x: Tensor) -> Tensor:
    return F.rrelu(-torch.ones_like(x), training=True)


def uniform_in_place(x: Tensor) -> Tensor:
    return torch.empty_like(x).uniform_()


def gamma(x: Tensor) -> Tensor:
    twos, ones = torch.full_like(x, 2), torch.ones_like(x)
    return torch.distributions.Gamma(twos, ones).rsample()


def randint(x: Tensor) -> Tensor:
    return torch.randint(100, x.shape).float()


def bernoulli_in_place(x: Tensor) -> Tensor:
    return torch.empty_like(x).bernoulli_(0.5)


def normal_of_a_size(x: Tensor) -> Tensor:
    return torch.normal(0.0, 1.0, x.shape)


def binomial(x: Tensor) -> Tensor:
    count, probability = torch.full_like(x, 9), torch.full_like(x, 0.5)
    return torch.binomial(count, probability)


def dirichlet(x: Tensor) -> Tensor:
    return torch._sample_dirichlet(torch.ones_like(x))


def attention(x: Tensor, probability: float) -> Tensor:
    q = x[None]
    return F.scaled_dot_product_attention(q, q, q, dropout_p=probability)[0]


def attention_with_dropout(x: Tensor) -> Tensor:
    return attention(x.detach(), 0.5)


def initialization(x: Tensor) -> Tensor:
    return nn.Linear(4, len(x)).weight.detach()


def of_the_default_generator(x: Tensor) -> Tensor:
    return torch.rand(x.shape, generator=torch.default_generator)


def several(x: Tensor) -> Tensor:
    uniform = torch.rand_like(x)
    permutation = torch.randperm(4)
    return uniform * permutation + F.dropout(torch.ones_like(x))


DRAWS: dict[str, Drawn] = {
    "dropout": dropout,
    "dropout in place": dropout_in_place,
    "normal": normal,
    "multinomial": multinomial,
    "poisson": poisson,
    "rrelu": rrelu,
    "uniform in place": uniform_in_place,
    "gamma": gamma,
    "randint": randint,
    "bernoulli in place": bernoulli_in_place,
    "normal of a size": normal_of_a_size,
    "binomial": binomial,
    "dirichlet": dirichlet,
    "attention with dropout": attention_with_dropout,
    "initialization": initialization,
    "the default generator, given": of_the_default_generator,
    "several": several,
}


def set_back(x: Tensor) -> Tensor:
    """Draw random numbers. Check that a layer can set and restore the random generator's state."""
    state = torch.get_rng_state()
    first = torch.rand_like(x)
    torch.set_rng_state(state)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        seeded = torch.Generator().manual_seed(3)
        expected = torch.rand(x.shape, generator=seeded)
        assert torch.rand_like(x).equal(expected), "the seed was not set"
    assert first.equal(torch.rand_like(x)), "the state was not set back"
    return first


def sometimes(x: Tensor) -> Tensor:
    """Draw random numbers, but only in some micro-batches.

    A worker thread learns from the first micro-batch whether its layers draw random numbers. If
    only a later micro-batch draws any, the worker raises an error.
    """
    if x.detach()[0, 0] > 5:
        return torch.rand_like(x)
    return torch.ones_like(x)


# Functions that draw nothing, although PyTorch marks some of their operators as random.


def dropout_in_evaluation() -> nn.Module:
    return nn.Dropout().eval()


def attention_without_dropout() -> Drawn:
    return partial(attention, probability=0.0)


def times_own_numbers(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return x * torch.rand(4, generator=generator)


QUIET: dict[str, Callable[[], Any]] = {
    "nothing": nn.Identity,
    "dropout in evaluation": dropout_in_evaluation,
    "attention without dropout": attention_without_dropout,
    "a generator of the layer's own": lambda: times_own_numbers,
}


# Layers.


def layers(draw: Drawn = uniform_in_place) -> nn.Sequential:
    return nn.Sequential(linear(), Draw(draw), nn.Tanh(), Draw(draw), linear())


def alone(layer: Callable[[], nn.Module]) -> Callable[[], nn.Sequential]:
    """Return a function that builds a model in which only the given layer may draw random numbers.

    The layer is in the second partition.
    """
    return made(linear, nn.Tanh, layer, nn.Tanh, linear)


def of_one_generator() -> nn.Sequential:
    generator = torch.Generator()
    return nn.Sequential(draw_from(generator), draw_from(generator))


def rising() -> Tensor:
    return torch.arange(8.0).unsqueeze(1).repeat(1, 4)


# Uses of the model.


def assert_apart(run: nn.Module) -> None:
    """Assert that no two tasks of a pipeline drew the same random numbers."""
    drawn: list[Tensor] = []
    for layer in drawing(run):
        if layer.recorded:
            return  # these layers use the pipeline's numbers
        drawn += layer.first
    for one, other in combinations(drawn, 2):
        assert not one.equal(other), "two tasks drew the same"


def all_differ(run: nn.Module, x: Tensor) -> Any:
    """Run a step. Check that all micro-batches and partitions draw different random numbers."""
    shown = step(run, x)
    assert_apart(run)
    return shown


def under_way(run: nn.Module, x: Tensor) -> Any:
    """Run two forwards, then their backwards. Check that no two tasks draw the same numbers."""
    outputs = [run(x), run(x)]
    for y in outputs:
        y.sum().backward()
    assert_apart(run)
    return [y.detach() for y in outputs]


def takes_nothing(act: Callable[[], object]) -> bool:
    """Return whether a call of `act` takes no random numbers from the caller's generator."""
    before = torch.get_rng_state()
    act()
    return torch.equal(torch.get_rng_state(), before)


def backward_takes_nothing(run: nn.Module, x: Tensor) -> bool:
    return takes_nothing(run(x).sum().backward)


def steps_take_nothing(run: nn.Module, x: Tensor) -> list[bool]:
    return [takes_nothing(partial(step, run, x)) for _ in range(2)]


def in_and_out_of_training(run: nn.Module, x: Tensor) -> Any:
    return [step(run.train(mode), x) for mode in (False, True, False, True, True)]


def sizes(run: nn.Module, x: Tensor) -> Any:
    """Run steps with different batch sizes, and return their outputs and gradients.

    Some batches have only one sample, and so a single micro-batch. Then no two tasks can run at the
    same time.
    """
    found = []
    for size in (1, 8, 1, 1, 8, 8, 3):
        shown = step(run, x[:size])
        gradients = [p.grad for p in run.parameters()]
        found.append((shown, gradients))
    return found


ROWS: list[Row] = []
for what, draw in DRAWS.items():
    ROWS.append(Row(what, partial(layers, draw), use=all_differ, **THREE_PARTITIONS))
ROWS += [
    Row(
        "`fork_rng`, `set_rng_state` in a layer",
        partial(layers, set_back),
        use=all_differ,
        **THREE_PARTITIONS,
        note="A layer that reads or sets the random state reads or sets the state of its "
        "partition and micro-batch.",
    ),
    Row("several steps", layers, use=steps, **THREE_PARTITIONS),
    Row(
        "backward leaves the caller's numbers alone",
        layers,
        **THREE_PARTITIONS,
        use=backward_takes_nothing,
    ),
    Row(
        "two forwards, then two backwards",
        layers,
        use=under_way,
        **THREE_PARTITIONS,
        tolerance=REORDERED,
    ),
]
for what, quiet in QUIET.items():
    name = f"no numbers are taken by {what}"
    ROWS.append(Row(name, alone(quiet), use=steps_take_nothing, **THREE_PARTITIONS))
for what, balance, m in (("one partition", (3,), 3), ("one micro-batch", (1, 1, 1), 1)):
    row = Row(
        f"{what} draws the numbers of a plain run",
        made(linear, nn.Dropout, linear),
        balance=balance,
        use=steps,
        chunks=m,
    )
    ROWS.append(row)
for what, use in (
    ("from evaluation to training and back", in_and_out_of_training),
    ("sizes", sizes),
):
    ROWS.append(Row(what, layers, use=use, **THREE_PARTITIONS))
    ROWS.append(Row(f"{what}, any engine", layers, use=use, **THREE_PARTITIONS, **AUTO))
ROWS += [
    Row(
        "a first draw in a later micro-batch",
        made(partial(Draw, sometimes), linear, nn.Tanh, nn.Tanh, nn.Tanh),
        rising,
        refused={"workers always": WRONG, "ranks always": WRONG},
        **THREE_PARTITIONS,
    ),
    Row("a generator of a layer's own", alone(draw_from), use=steps, **THREE_PARTITIONS),
    Row(
        "a generator of two partitions",
        of_one_generator,
        balance=(1, 1),
        refused={"": "same torch.Generator"},
    ),
    Row(
        "`torch.utils.checkpoint` around dropout in a layer",
        alone(partial(Draw, use_reentrant=False)),
        refused={"workers": WITHIN},
        note="A worker thread cannot repeat the random numbers when this inner checkpoint "
        "recomputes the layer.",
        **THREE_PARTITIONS,
    ),
    Row(
        "within plain checkpointing, reentrant",
        alone(partial(Draw, use_reentrant=True)),
        refused={"workers": WITHIN},
        **THREE_PARTITIONS,
        without={"ranks": "tested by autograd.grad, which that kind refuses"},
    ),
]
