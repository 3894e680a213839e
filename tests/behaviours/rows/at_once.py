"""Several pipelines, or several threads, at once: each gets what it would get alone, or an error."""

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

from ...parts import Fails
from ...plain import Plain
from ..compare import REORDERED, differences
from ..parts.layers import linear, made, tied
from ..row import MODES, Row, step, total
from .random.draws import layers
from .unusual import long, masks_are_alike

TURNS = 12


def pause(x: Tensor) -> Tensor:
    """Let threads take turns in another order each time."""
    time.sleep(3e-3 * random.random())
    return x


def normed(*last: Callable[[], nn.Module]) -> Callable[[], nn.Sequential]:
    """Return what makes layers. Momentum is 0, for threads count mini-batches in any order."""
    return made(linear, lambda: nn.BatchNorm1d(4, momentum=0.0), nn.ReLU, linear, nn.Tanh, *last)


def inner(engine: Any, checkpoint: Any) -> nn.Module:
    return GPipe(
        normed()(), [3, 2], devices=["cpu"] * 2, chunks=2, engine=engine, checkpoint=checkpoint
    )


def in_one_loss(run: nn.Module, x: Tensor) -> nn.Module:
    other = copy.deepcopy(run)
    for p in other.parameters():
        p.data.neg_()
    total((run(x) * other(x), other(x))).backward()
    return other


def in_threads(run: nn.Module, _: Tensor, also: Callable[[Any], nn.Module]) -> Any:
    """Train a model and another one, or itself, each in a thread; plain layers in turn."""
    runs, xs, outputs = (
        [run, also(run)],
        torch.randn(2, TURNS, 9, 4),
        [list[Tensor](), list[Tensor]()],
    )

    def train(k: int) -> None:
        for x in xs[k]:
            y = runs[k](x)
            y.square().sum().backward()
            outputs[k].append(y.detach())

    with ThreadPoolExecutor(1 if isinstance(run, Plain) else 2) as pool:
        for done in [pool.submit(train, k) for k in (0, 1)]:
            done.result()
    return outputs, runs[1]


def sharing_layers(run: Any) -> Any:
    """Return a pipeline of the same layers on another engine."""
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


def drawing_in_threads(run: Any, x: Tensor, *, one_generator: bool) -> None:
    """One model draws, one does not. Threads that share a generator may disturb each other; then an error says so."""
    try:
        in_threads(run, x, lambda run: copy.deepcopy(run).eval())
    except RuntimeError as error:
        assert (
            one_generator
            and run.checkpoint != "never"
            and "more or fewer random numbers" in str(error)
        )
    run.zero_grad()


def the_same_bits(run: nn.Module, x: Tensor) -> list[str]:
    """One seed gives the same numbers in any order of threads, also to the caller."""
    found = []
    for _ in range(10):
        torch.manual_seed(7)
        found.append((step(run, x), torch.rand(4), [p.grad for p in run.parameters()]))
    return differences(found[1:], found[:-1])


def hooks_draw(run: Any, x: Tensor) -> bool:
    """If no layer draws, a recomputation restores no generator: the caller's thread keeps its numbers."""
    drawn: list[float] = []
    for layer in (run[1], run[2]):
        layer.register_full_backward_hook(lambda *_: drawn.append(torch.rand(()).item()))
    for _ in range(2):
        loss = run(x).sum()
        drawn.append(torch.rand(()).item())
        loss.backward()
    return len(drawn) == len(set(drawn)) >= 6


def drawing_meanwhile(x: Tensor) -> Tensor:
    thread = threading.Thread(target=torch.rand, args=(5,))
    if not is_recomputing():
        thread.start()
        thread.join()
    return F.dropout(x, 0.5)


def two_backwards(run: Any, x: Tensor) -> None:
    started, go_on = threading.Event(), threading.Event()
    run[0].at("backward", lambda: started.set() or go_on.wait(60))  # type: ignore[func-returns-value]
    run.observer = nullcontext  # each task has a graph of its own then
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


def tied_over() -> nn.Sequential:
    first = linear()
    return made(
        lambda: first, lambda: torch.sin, lambda: pause, lambda: tied(first), lambda: pause
    )()


APART = {"ranks": "they have to run mini-batches in one order"}
NOTICED = "more or fewer random"

ROWS = [
    # The second is used twice: plain parameters add both uses up before .grad, piped ones each.
    Row("two pipelines in one loss", normed(linear), use=in_one_loss, tolerance=REORDERED),
    # Both engines go backward for each inner micro-batch, so gradients are added up in another order.
    *(
        Row(
            f"a pipeline in a pipeline, {engine} {mode}",
            made(linear, partial(inner, engine, mode), nn.Tanh),
            partial(torch.randn, 12, 4),
            without={"ranks": "only one rank would run the inner one"},
            tolerance=REORDERED,
        )
        for engine in ("graph", "workers")
        for mode in MODES
    ),
    *(
        Row(
            f"two threads, {what}, m={m}",
            normed(linear),
            use=partial(in_threads, also=also),
            chunks=m,
            without=APART,
            tolerance=REORDERED,
        )
        for what, also in (
            ("one pipeline", lambda run: run),
            ("two pipelines", copy.deepcopy),
            ("two pipelines of the same layers", sharing_layers),
        )
        for m in (1, 3)
    ),
    *(
        Row(
            f"threads that draw, {what}",
            made(linear, nn.Tanh, linear, nn.Dropout),
            use=partial(drawing_in_threads, one_generator=one),
            without=APART | dict.fromkeys(but, ""),
        )
        for what, one, but in (
            ("one generator", True, ("workers", "one partition")),
            # A single micro-batch draws the numbers of a plain run, from the generator of all threads.
            ("each its own", False, ("graph", "one partition", "one micro-batch")),
        )
    ),
    Row(
        "the seed alone decides what is drawn",
        partial(layers, lambda x: torch.rand_like(pause(x))),
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
    Row(
        "a thread that draws amid the first pass",
        made(lambda: drawing_meanwhile, nn.Identity),
        long,
        (1, 1),
        use=masks_are_alike,
        refused={f"{e} {mode}": NOTICED for e in ("graph", "ranks") for mode in MODES[:2]},
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
        without={"ranks": "they refuse it"},
        tolerance=REORDERED,
    ),
]
