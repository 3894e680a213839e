"""Test cases about the tensors and tuples that layers take and return.

For some outputs, such as numbers or scalar losses, the pipeline must raise an error.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ....library.layers import same
from ....plain import Plain
from ...parts.layers import Do, linear, made, real
from ...parts.wiring import OnFirst
from ...row import Row, step, steps

Two = tuple[Tensor, Tensor]

plain = partial(real, grad=False)


def first() -> nn.Module:
    return OnFirst(linear())


def of(*layers: Any) -> Any:
    """Return a function that builds a model with one layer for each argument.

    An argument is a function that the layer calls in its forward, such as `product`. The only
    exceptions are `linear` and `first`, which are functions that build the layer.
    """
    factories = []
    for given in layers:
        builds = given in (linear, first)
        factories.append(given if builds else partial(same, given))
    return made(*factories)


# Inputs.


def ids() -> Tensor:
    """Return an integer for each sample."""
    return torch.arange(8).remainder(5)


def two() -> Two:
    return real(), real()


def one_without_grad() -> Two:
    return plain(), real()


def with_ids() -> Two:
    return plain(), ids()


def with_a_scalar() -> Two:
    return real(), torch.tensor(1.0)


def of_two_sizes() -> Two:
    return real(), torch.zeros(4)


# Layers that are functions of one tensor or of several.


def product(a: Tensor, b: Tensor) -> Tensor:
    return a * b


def only_the_first(a: Tensor, *_: Tensor) -> Tensor:
    return a


def both(a: Tensor, b: Tensor) -> Two:
    return a, b


def doubled(a: Tensor) -> Two:
    return a, a


def in_a_tuple(a: Tensor) -> tuple[Tensor]:
    return (a,)


def with_sum(a: Tensor) -> Two:
    return a, a.sum(1)


def with_loss(a: Tensor) -> Two:
    return a, a.sum()


def to_three(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return a, b, a + b


def to_two(a: Tensor, b: Tensor, c: Tensor) -> Two:
    return a * c, b


def to_four(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return a, b, a, b


def with_exp(a: Tensor) -> Two:
    return a, a.exp()


def swapped(a: Tensor, b: Tensor) -> Two:
    return b, a


def views(a: Tensor) -> Two:
    return a[:, :2], a.view(-1, 2, 2)


def sum_of_views(a: Tensor, b: Tensor) -> Tensor:
    return a + b.sum(1)


def transposed_twice(a: Tensor) -> Tensor:
    return a.t().t()


def scaled_by_ids(a: Tensor, k: Tensor) -> Two:
    scale = (1 + k).unsqueeze(1)
    return a * scale, k


def first_half(a: Tensor, k: Tensor) -> Two:
    return a[:, :2], k


def with_largest(a: Tensor) -> Two:
    return a, a.argmax(1)


def gathered(a: Tensor, k: Tensor) -> Two:
    return a.gather(1, k.unsqueeze(1)), k


def largest_first(a: Tensor) -> Two:
    return a.argmax(1), a


def second_exp(k: Tensor, a: Tensor) -> Two:
    return k, a.exp()


def with_detached(a: Tensor) -> Two:
    return a, a.detach()


def product_and_second(a: Tensor, b: Tensor) -> Two:
    return a * b, b


def plus_one(k: Tensor) -> Tensor:
    return k + 1


def scaled_by_requires_grad(x: Tensor) -> Tensor:
    return x * (3 if x.requires_grad else 4)


def nothing(_: Tensor) -> None:
    return None


def with_a_number(a: Tensor) -> tuple[Tensor, float]:
    return a, 2.0


def nested(a: Tensor) -> tuple[Tensor, tuple[Tensor, None]]:
    return a.sin(), (a.exp(), None)


def of_nested(a: Tensor, inner: tuple[Tensor, None]) -> Tensor:
    assert inner[1] is None
    return a * inner[0]


def in_a_dictionary(a: Tensor) -> dict[str, Any]:
    return {"a": a.sin(), "more": [a.exp(), "text", 1, True], "scale": 0.5}


def changed_dictionary(given: dict[str, Any]) -> dict[str, Any]:
    b, *others = given["more"]
    return given | {"more": [b * given["a"], *others]}


def of_a_dictionary(given: dict[str, Any]) -> Any:
    b, text, one, true = given["more"]
    assert (text, one, true) == ("text", 1, True) and true is True
    return b + given["a"] * given["scale"]


@dataclass
class Shown:
    a: Tensor
    name: str


def in_a_class(a: Tensor) -> Shown:
    return Shown(a.sin(), "a")


def of_a_class(given: Shown) -> Tensor:
    assert given.name == "a"
    return given.a.exp()


def no_output(_: Tensor) -> tuple[()]:
    return ()


def tensor_or_tuple(a: Tensor) -> Any:
    """Return the tensor, or, for the last micro-batch (which is smaller), a tuple with the tensor.

    Outputs of different types cannot be concatenated, so the pipeline must raise an error.
    """
    if len(a) > 2:
        return a
    return (a,)


def maybe_detached(self: Any, a: Tensor) -> Two:
    if self.detach:
        return a, a.detach()
    return a, 1 * a


def asking(a: Tensor, b: Tensor) -> Tensor:
    """Return `a + b`. First take the exp of `a` unless it requires grad, and of `b` if it does."""
    if not a.requires_grad:
        a = a.exp()
    if b.requires_grad:
        b = b.exp()
    return a + b


ask_of_detached = made(
    linear, lambda: Do(maybe_detached, detach=True), partial(same, asking), linear
)


# Uses of the model.


def undivided(run: Any, x: Tensor) -> Any:
    """Run a step of a model that returns a scalar loss, with a single micro-batch.

    Layers without a pipeline (`Plain`) are called directly here, because the usual call of `Plain`
    concatenates the outputs of micro-batches, and scalars cannot be concatenated.
    """
    y = nn.Sequential.forward(run, x) if isinstance(run, Plain) else run(x)
    y.backward()
    return y.detach()


def at_last(run: Any, x: Tensor) -> Any:
    """Run three steps of a model whose second layer detaches its output from the second step on.

    Return the outputs of the third step. Only then does the next partition of a pipeline notice
    that the layer's output no longer has a graph.
    """
    for number in range(3):
        run[1].detach = number > 0
        x.grad = None
        shown = step(run, x)
    return shown


ROWS = [
    Row("in, one without grad", of(product, linear, linear), one_without_grad),
    Row("in, unused", of(only_the_first, linear, linear), two),
    Row("of one", of(in_a_tuple, first, first), lambda: (real(),)),
    Row("out", of(linear, linear, with_sum)),
    Row("all the way", of(first, first, first), two),
    Row("longer and shorter", of(to_three, to_two, to_four), two),
    Row("the same tensor twice", of(doubled, product, linear)),
    Row("an input is an output", of(only_the_first, with_exp, swapped)),
    Row("views", of(views, sum_of_views, transposed_twice)),
    Row("an integer goes along", of(first, scaled_by_ids, first_half), with_ids),
    Row("an integer is made", of(linear, with_largest, gathered)),
    Row("an integer is first", of(largest_first, second_exp, both)),
    Row("detached", of(linear, with_detached, product_and_second)),
    Row("detached, and the next partition asks", ask_of_detached, balance=(2, 2), use=steps),
    Row("detached from some step on", ask_of_detached, balance=(2, 2), use=at_last),
    Row(
        "a layer that asks what takes a gradient",
        of(linear, scaled_by_requires_grad, linear),
        use=steps,
        balance=(2, 1),
    ),
    Row("nothing takes grad", of(both, both, both), with_ids),
    Row("only integers", of(plus_one, doubled, product), ids),
    Row("no parameters", of(torch.sin, torch.exp, torch.square)),
    Row("a loss of one micro-batch", of(linear, linear, Tensor.sum), chunks=1, use=undivided),
    Row(
        "nothing",
        of(linear, nothing, linear),
        refused={"": "output of partition 1 must be .* got NoneType"},
    ),
    Row("a tensor and a number", of(linear, with_a_number, product)),
    Row("a tuple in a tuple, and None", of(linear, nested, of_nested)),
    Row("a dictionary with a list", of(linear, in_a_dictionary, of_a_dictionary)),
    Row("a structure twice", of(in_a_dictionary, changed_dictionary, of_a_dictionary)),
    Row(
        "a structure with another class",
        of(linear, in_a_class, of_a_class),
        refused={"ranks": "a layer returned a Shown in a structure for another rank"},
    ),
    Row("no output", of(linear, no_output, linear), refused={"": "got an empty tuple"}),
    Row(
        "a tensor or a tuple",
        of(linear, linear, tensor_or_tuple),
        refused={"": "micro-batch 0 returned a tensor and micro-batch 2 returned a tuple"},
    ),
]
for m in (1, 3):
    row = Row(
        f"a scalar in, {m} micro-batches",
        of(only_the_first, linear, linear),
        with_a_scalar,
        chunks=m,
        refused={"": "needs a batch dimension, but tensor 1 is a scalar"},
    )
    ROWS.append(row)
ROWS += [
    Row(
        "two batch sizes in",
        of(only_the_first, linear, linear),
        of_two_sizes,
        refused={"": r"the same batch size \(dimension 0\), but the sizes are \[8, 4\]"},
    ),
    Row(
        "a loss beside a tensor",
        of(linear, linear, with_loss),
        refused={"": "returned a scalar"},
    ),
    Row("a loss", of(linear, linear, Tensor.sum), refused={"": "returned a scalar; move a loss"}),
]
