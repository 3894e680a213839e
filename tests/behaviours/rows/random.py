"""Random numbers and norms: a recomputation draws what its forward drew, and counts nothing a second time.

`Draw` (../parts/draw.py) writes down what first passes drew, and the plain layers take the same.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...parts import Fails
from ..compare import REORDERED
from ..parts.draw import Draw, drawing
from ..parts.layers import draw_from, linear, made
from ..row import Row, step, steps

Drawn = Callable[[Tensor], Tensor]


def attention(x: Tensor, dropout: float) -> Tensor:
    q = x[None]
    return F.scaled_dot_product_attention(q, q, q, dropout_p=dropout)[0]


def set_back(x: Tensor) -> Tensor:
    state, seeded = torch.get_rng_state(), torch.Generator().manual_seed(3)
    first = torch.rand_like(x)
    torch.set_rng_state(state)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        assert torch.rand_like(x).equal(torch.rand(x.shape, generator=seeded)), (
            "the seed was not set"
        )
    assert first.equal(torch.rand_like(x)), "the state was not set back"
    return first


DRAWS: dict[str, Drawn] = {
    "dropout": lambda x: F.dropout(torch.ones_like(x), 0.5),
    "dropout in place": lambda x: F.dropout(torch.ones_like(x), 0.5, inplace=True),
    "normal": lambda x: torch.normal(torch.ones_like(x), 0.5),
    "multinomial": lambda x: torch.multinomial(x.detach().abs() + 0.1, 4, replacement=True).float(),
    "poisson": lambda x: torch.poisson(torch.full_like(x, 4)),
    "rrelu": lambda x: F.rrelu(-torch.ones_like(x), training=True),
    "uniform in place": lambda x: torch.empty_like(x).uniform_(),
    "gamma": lambda x: torch.distributions.Gamma(
        torch.full_like(x, 2), torch.ones_like(x)
    ).rsample(),
    "randint": lambda x: torch.randint(100, x.shape).float(),
    "bernoulli in place": lambda x: torch.empty_like(x).bernoulli_(0.5),
    "normal of a size": lambda x: torch.normal(0.0, 1.0, x.shape),
    "binomial": lambda x: torch.binomial(torch.full_like(x, 9), torch.full_like(x, 0.5)),
    "dirichlet": lambda x: torch._sample_dirichlet(torch.ones_like(x)),
    "attention with dropout": lambda x: attention(x.detach(), 0.5),
    "initialization": lambda x: nn.Linear(4, len(x)).weight.detach(),
    "the default generator, given": lambda x: torch.rand(
        x.shape, generator=torch.default_generator
    ),
    "several": lambda x: torch.rand_like(x) * torch.randperm(4) + F.dropout(torch.ones_like(x)),
}


def layers(draw: Drawn = DRAWS["uniform in place"]) -> nn.Sequential:
    return nn.Sequential(linear(), Draw(draw), nn.Tanh(), Draw(draw), linear())


def alone(layer: Callable[[], nn.Module]) -> Callable[[], nn.Sequential]:
    """Return layers of which only one may draw: that of the second partition."""
    return made(linear, nn.Tanh, layer, nn.Tanh, linear)


def assert_apart(run: nn.Module) -> None:
    """Assert that no two tasks of a pipeline have drawn the same."""
    drawn = [x for layer in drawing(run) for x in layer.first]
    if not any(layer.recorded for layer in drawing(run)):
        assert not any(x.equal(y) for k, x in enumerate(drawn) for y in drawn[:k]), (
            "two tasks drew the same"
        )


def all_differ(run: nn.Module, x: Tensor) -> Any:
    """Run a step; no two micro-batches, and no two partitions, have drawn the same."""
    shown = step(run, x)
    assert_apart(run)
    return shown


def under_way(run: nn.Module, x: Tensor) -> Any:
    """Two mini-batches whose backwards are pending draw different numbers."""
    outputs = [run(x), run(x)]
    for y in outputs:
        y.sum().backward()
    assert_apart(run)
    return [y.detach() for y in outputs]


def takes_nothing(act: Callable[[], object]) -> bool:
    """Return whether the caller's numbers stay where they are."""
    before = torch.get_rng_state()
    act()
    return torch.equal(torch.get_rng_state(), before)


def sizes(run: nn.Module, x: Tensor) -> Any:
    """A batch of one sample runs on another engine, which draws its own random numbers."""
    return [
        (step(run, x[:size]), [p.grad for p in run.parameters()]) for size in (1, 8, 1, 1, 8, 8, 3)
    ]


def sometimes(x: Tensor) -> Tensor:
    """A worker finds out from the first micro-batch whether its layers draw; where it was wrong, it says so."""
    return torch.rand_like(x) if x.detach()[0, 0] > 5 else torch.ones_like(x)


# What draws nothing, though PyTorch marks some of its operators as random.
QUIET: dict[str, Callable[[], Any]] = {
    "nothing": nn.Identity,
    "dropout in evaluation": lambda: nn.Dropout().eval(),
    "attention without dropout": lambda: lambda x: attention(x, 0.0),
    "a generator of the layer's own": lambda: (
        lambda x: x * torch.rand(4, generator=torch.Generator().manual_seed(1))
    ),
}


WRONG = "in a later micro-batch, but not in the first one"
WITHIN = r"within torch\.utils\.checkpoint"
AUTO: dict[str, Any] = {"options": {"engine": "auto"}, "without": {"ranks": "they are one engine"}}
MORE: dict[str, Any] = {"chunks": 4, "balance": (2, 1, 2)}


def channels(norm: Callable[[], nn.Module]) -> Callable[[], nn.Sequential]:
    return made(lambda: nn.Conv2d(2, 4, 1), norm, nn.ReLU, nn.Flatten, lambda: nn.Linear(36, 3))


def given(size: int = 14) -> Tensor:
    return torch.randn(size, 2, 3, 3).requires_grad_()


class Shifted(nn.BatchNorm2d):
    """A norm whose output depends on its statistics in training, too."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.running_mean is not None
        return x + self.running_mean.mean() + super().forward(x)


TWO: Any = (lambda: nn.Linear(18, 8), nn.Tanh, lambda: nn.Linear(8, 4))
# Layers on inputs of shape (N, 2, 3, 3).
NORMS: dict[str, Callable[[], nn.Sequential]] = {
    "batch norm": channels(lambda: nn.BatchNorm2d(4)),
    "momentum none": channels(lambda: nn.BatchNorm2d(4, momentum=None)),
    "no running statistics": channels(lambda: nn.BatchNorm2d(4, track_running_stats=False)),
    "in evaluation by itself": channels(lambda: nn.BatchNorm2d(4).eval()),
    "instance norm": channels(lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
    "at the end": made(nn.Flatten, *TWO, lambda: nn.BatchNorm1d(4)),
    "at the start": made(lambda: nn.BatchNorm2d(2), nn.Tanh, nn.Flatten, *TWO[::2]),
    "an output that depends on its statistics": channels(lambda: Shifted(4)),
}


def fails(when: str, calls_before: int) -> Callable[[Any, Tensor], Any]:
    """Let a pass fail, and run another step: nothing is left of what failed."""

    def use(run: Any, x: Tensor) -> Any:
        layer = next(layer for layer in run.modules() if isinstance(layer, Fails))
        layer.fail(when, ArithmeticError("trouble"), calls_before=calls_before)
        failed = False
        try:
            step(run, x.detach() + 100)
        except ArithmeticError:
            failed = True
        assert failed or when == "recompute", "nothing has failed"
        norms = [x.track_running_stats for x in run.modules() if hasattr(x, "track_running_stats")]
        return [b.clone() for b in run.buffers()], norms, step(run, x)

    return use


def failing() -> nn.Sequential:
    return nn.Sequential(nn.BatchNorm2d(2), Fails(), nn.BatchNorm2d(2))


DEFERRED: dict[str, Any] = {
    "options": {"deferred_batch_norm": True},
    "tolerance": REORDERED,
}  # of combined moments

ROWS = [
    *(Row(what, partial(layers, draw), use=all_differ, **MORE) for what, draw in DRAWS.items()),
    Row(
        "`fork_rng`, `set_rng_state` in a layer",
        partial(layers, set_back),
        use=all_differ,
        **MORE,
        note="The state is that of the task.",
    ),
    Row("several steps", layers, use=steps, **MORE),
    Row(
        "backward leaves the caller's numbers alone",
        layers,
        **MORE,
        use=lambda run, x: takes_nothing(run(x).sum().backward),
    ),
    Row("two forwards, then two backwards", layers, use=under_way, **MORE, tolerance=REORDERED),
    *(
        Row(
            f"no numbers are taken by {what}",
            alone(layer),
            **MORE,
            use=lambda run, x: [takes_nothing(partial(step, run, x)) for _ in range(2)],
        )
        for what, layer in QUIET.items()
    ),
    *(
        Row(
            f"{what} draws the numbers of a plain run",
            made(linear, nn.Dropout, linear),
            balance=balance,
            use=steps,
            chunks=m,
        )
        for what, balance, m in (("one partition", (3,), 3), ("one micro-batch", (1, 1, 1), 1))
    ),
    *(
        Row(f"{what}{which}", layers, use=use, **MORE, **options)
        for what, use in (
            (
                "from evaluation to training and back",
                lambda run, x: [
                    step(run.train(mode), x) for mode in (False, True, False, True, True)
                ],
            ),
            ("sizes", sizes),
        )
        for which, options in (("", {}), (", any engine", AUTO))
    ),
    Row(
        "a first draw in a later micro-batch",
        made(lambda: Draw(sometimes), linear, *[nn.Tanh] * 3),
        lambda: torch.arange(8.0).unsqueeze(1).repeat(1, 4),
        refused={"workers always": WRONG, "ranks always": WRONG},
        **MORE,
    ),
    Row("a generator of a layer's own", alone(draw_from), use=steps, **MORE),
    Row(
        "a generator of two partitions",
        lambda: nn.Sequential(*map(draw_from, [torch.Generator()] * 2)),
        balance=(1, 1),
        refused={"": "one torch.Generator"},
    ),
    Row(
        "`torch.utils.checkpoint` around dropout in a layer",
        alone(lambda: Draw(use_reentrant=False)),
        refused={"workers": WITHIN},
        note="A worker cannot draw its numbers again.",
        **MORE,
    ),
    Row(
        "within plain checkpointing, reentrant",
        alone(lambda: Draw(use_reentrant=True)),
        refused={"workers": WITHIN},
        **MORE,
        without={"ranks": "tested by autograd.grad, which that kind refuses"},
    ),
    *(
        Row(
            f"{what}{how}",
            lambda build=build, training=training: build() if training else build().eval(),  # type: ignore[misc]
            given,
            balance,
            use=steps,
            chunks=4,
        )
        for what, build in NORMS.items()
        for how, training, balance in (("", True, (1, 1, 3)), (", evaluation", False, (2, 3)))
    ),
    *(
        Row(
            f"deferred, {batch} samples in {m}",
            channels(lambda: nn.BatchNorm2d(4)),
            partial(given, batch),
            balance,
            use=steps,
            chunks=m,
            **DEFERRED,
        )
        for batch, m, balance in (
            (13, 8, (1, 4)),
            (12, 4, (2, 3)),
            (12, 1, (1, 1, 3)),
            (13, 20, (2, 1, 2)),
        )
    ),
    *(
        Row(
            f"deferred, a forward that fails in micro-batch {k}",
            failing,
            given,
            use=fails("forward", k),
            chunks=4,
            without={"one micro-batch": "there is no such one"},
            **DEFERRED,
        )
        for k in range(4)
    ),
    Row(
        "a recomputation that fails",
        failing,
        given,
        use=fails("recompute", 0),
        chunks=4,
        without={
            "one micro-batch": "the last rank has ended its backward by then, and would have to call close()"
        },
    ),
]
