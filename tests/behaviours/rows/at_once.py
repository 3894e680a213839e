"""Test cases with several pipelines or threads at once.

Each pipeline must compute the results that it has if it runs alone, or raise an error.
"""

import copy
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchgpipe import GPipe, is_recomputing

from ...library.layers import same
from ...parts import Fails
from ...plain import Plain
from ..compare import REORDERED, differences
from ..parts.layers import linear, made, tied
from ..row import MODES, Row, step, total
from .random.draws import layers
from .unusual import masking

TURNS = 12


# Layers.


def pause(x: Tensor) -> Tensor:
    """Return the input after a random pause, so that threads run in another order each time."""
    time.sleep(3e-3 * random.random())
    return x


def draw_after_pause(x: Tensor) -> Tensor:
    return torch.rand_like(pause(x))


def norm() -> nn.Module:
    """Return a batch norm whose running statistics never change (momentum 0).

    Statistics that change would depend on the order in which threads run.
    """
    return nn.BatchNorm1d(4, momentum=0.0)


def normed(*last: Callable[[], nn.Module]) -> Callable[[], nn.Sequential]:
    """Return a function that builds a model with a batch norm and the given last layers."""
    return made(linear, norm, nn.ReLU, linear, nn.Tanh, *last)


def inner(engine: Any, checkpoint: Any) -> nn.Module:
    """Return a pipeline that is a layer."""
    return GPipe(
        normed()(), [3, 2], devices=["cpu"] * 2, chunks=2, engine=engine, checkpoint=checkpoint
    )


def drawing_meanwhile(x: Tensor) -> Tensor:
    """Apply dropout. Before this, but not in a recomputation, another thread draws numbers.

    If both threads share a random generator, dropout draws different numbers in a recomputation.
    """
    if not is_recomputing():
        thread = threading.Thread(target=torch.rand, args=(5,))
        thread.start()
        thread.join()
    return F.dropout(x, 0.5)


def tied_over() -> nn.Sequential:
    first = linear()
    pausing = partial(same, pause)
    build = made(
        partial(same, first), partial(same, torch.sin), pausing, partial(tied, first), pausing
    )
    return build()


# Uses of the model.


def in_one_loss(run: nn.Module, x: Tensor) -> nn.Module:
    other = copy.deepcopy(run)
    for p in other.parameters():
        p.data.neg_()
    product = run(x) * other(x)
    total((product, other(x))).backward()
    return other


def in_threads(run: nn.Module, _: Tensor, also: Callable[[Any], nn.Module]) -> Any:
    """Train two models at the same time, each in its own thread.

    If the models are plain layers and not pipelines, they are trained one after the other. The
    pipelines must have the same results.

    Args:
        run: The first model.
        also: A function that takes the first model, and returns the second one.

    Returns:
        The outputs of both models, and the second model.
    """
    runs = [run, also(run)]
    xs = torch.randn(2, TURNS, 9, 4)
    outputs: list[list[Tensor]] = [[], []]

    def train(k: int) -> None:
        for x in xs[k]:
            y = runs[k](x)
            y.square().sum().backward()
            outputs[k].append(y.detach())

    with ThreadPoolExecutor(1 if isinstance(run, Plain) else 2) as pool:
        trainings = [pool.submit(train, 0), pool.submit(train, 1)]
        for training in trainings:
            training.result()
    return outputs, runs[1]


def sharing_layers(run: Any) -> Any:
    """Return a second pipeline, made of the same layers as the pipeline `run`."""
    if isinstance(run, Plain):
        return run
    return GPipe(
        run[:],
        [2, 2, 2],
        devices=["cpu"] * 3,
        chunks=run.chunks,
        checkpoint="always",
        engine="graph",
    )


def evaluating_copy(run: nn.Module) -> nn.Module:
    return copy.deepcopy(run).eval()


def drawing_in_threads(run: Any, x: Tensor, *, one_generator: bool) -> None:
    """Train a model that draws random numbers, while another thread evaluates a copy of it.

    If both threads use the same random generator (`one_generator`), they can disturb each other.
    Then the pipeline must raise an error.
    """
    try:
        in_threads(run, x, evaluating_copy)
    except RuntimeError as error:
        assert one_generator
        assert run.checkpoint != "never"
        assert "more or fewer random numbers" in str(error)
    run.zero_grad()


def the_same_bits(run: nn.Module, x: Tensor) -> list[str]:
    """Run a step ten times with the same seed. Return the differences between the results.

    Threads run in another order each time. This must change neither the random numbers of the
    layers, nor those that the caller draws afterwards.
    """
    found = []
    for _ in range(10):
        torch.manual_seed(7)
        shown = step(run, x)
        drawn = torch.rand(4)
        gradients = [p.grad for p in run.parameters()]
        found.append((shown, drawn, gradients))
    return differences(found[1:], found[:-1])


def hooks_draw(run: Any, x: Tensor) -> bool:
    """Draw random numbers in backward hooks and in the caller. Return whether all numbers differ.

    As the layers draw no random numbers, a recomputation must not change the state of the caller's
    generator. If it restored an earlier state, some numbers would be drawn twice.
    """
    drawn: list[float] = []

    def draw(*_: Any) -> None:
        drawn.append(torch.rand(()).item())

    run[1].register_full_backward_hook(draw)
    run[2].register_full_backward_hook(draw)
    for _ in range(2):
        loss = run(x).sum()
        draw()
        loss.backward()
    return len(drawn) == len(set(drawn)) >= 6


def two_backwards(run: Any, x: Tensor) -> None:
    """Run backward while another thread runs backward from the same loss."""
    started, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        started.set()
        go_on.wait(60)

    run[0].at("backward", wait)
    run.observer = nullcontext  # with an observer, each task has a graph of its own
    loss, weight = run(x).square().sum(), run[1].weight

    def gradient() -> Tensor:
        return torch.autograd.grad(loss, weight, retain_graph=True)[0]

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(gradient)
        assert started.wait(60)
        try:
            gradient()
        finally:
            go_on.set()
            assert torch.equal(first.result(60), gradient())


APART = {"ranks": "they have to run mini-batches in one order"}
NOTICED = "more or fewer random"
NOTICED_IN_RECOMPUTATION = {
    "graph always": NOTICED,
    "graph except_last": NOTICED,
    "ranks always": NOTICED,
    "ranks except_last": NOTICED,
}

# These results are equal only up to rounding. The loss calls a copy of the model twice. Without a
# pipeline, autograd adds up the gradients of both calls, and then adds the sum to `.grad`. A
# pipeline adds the gradients of each call to `.grad` separately.
ROWS = [Row("two pipelines in one loss", normed(linear), use=in_one_loss, tolerance=REORDERED)]
# Both engines run backward for each inner micro-batch, so gradients are added in another order.
for engine in ("graph", "workers"):
    for mode in MODES:
        row = Row(
            f"a pipeline in a pipeline, {engine} {mode}",
            made(linear, partial(inner, engine, mode), nn.Tanh),
            partial(torch.randn, 12, 4),
            without={"ranks": "only one rank would run the inner one"},
            tolerance=REORDERED,
        )
        ROWS.append(row)
for what, also in (
    ("one pipeline", same),
    ("two pipelines", copy.deepcopy),
    ("two pipelines of the same layers", sharing_layers),
):
    for m in (1, 3):
        row = Row(
            f"two threads, {what}, m={m}",
            normed(linear),
            use=partial(in_threads, also=also),
            chunks=m,
            without=APART,
            tolerance=REORDERED,
        )
        ROWS.append(row)
for what, one, but in (
    ("one generator", True, ("workers", "one partition")),
    # A single micro-batch draws the numbers that plain layers draw, from the global generator.
    ("each its own", False, ("graph", "one partition", "one micro-batch")),
):
    row = Row(
        f"threads that draw, {what}",
        made(linear, nn.Tanh, linear, nn.Dropout),
        use=partial(drawing_in_threads, one_generator=one),
        without=APART | dict.fromkeys(but, ""),
    )
    ROWS.append(row)
ROWS += [
    Row(
        "the seed alone decides what is drawn",
        partial(layers, draw_after_pause),
        balance=(2, 1, 2),
        chunks=4,
        use=the_same_bits,
    ),
    Row(
        "hooks that draw",
        made(nn.Tanh, linear, linear, nn.Tanh),
        balance=(2, 2),
        use=hooks_draw,
        without={"ranks": "each draws from a generator of its own"},
    ),
    masking(
        "a thread that draws amid the first pass",
        partial(same, drawing_meanwhile),
        refused=NOTICED_IN_RECOMPUTATION,
    ),
    Row(
        "two backwards",
        made(Fails, linear, linear, nn.Tanh),
        balance=(2, 2),
        chunks=1,
        use=two_backwards,
        refused={"": "two backwards"},
        without={"ranks": "they would wait for each other"},
    ),
    Row(
        "a parameter of two partitions",
        tied_over,
        balance=(3, 2),
        chunks=7,
        use=the_same_bits,
        tolerance=REORDERED,
    ),
]
