"""Test cases with norms, where a recomputation must not update running statistics again.

Deferred batch norm updates running statistics only once for each mini-batch.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ....parts import Fails
from ...compare import REORDERED
from ...parts.layers import made
from ...row import Row, step, steps


def given(size: int = 14) -> Tensor:
    x = torch.randn(size, 2, 3, 3)
    return x.requires_grad_()


def channels(norm: Callable[[], nn.Module]) -> Callable[[], nn.Sequential]:
    """Return a function that builds a model with the given norm. Inputs have shape (N, 2, 3, 3)."""
    conv, head = partial(nn.Conv2d, 2, 4, 1), partial(nn.Linear, 36, 3)
    return made(conv, norm, nn.ReLU, nn.Flatten, head)


class Shifted(nn.BatchNorm2d):
    """A batch norm whose output in training also depends on its running statistics."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.running_mean is not None
        shift = self.running_mean.mean()
        return x + shift + super().forward(x)


def batch_norm() -> nn.Module:
    return nn.BatchNorm2d(4)


def without_momentum() -> nn.Module:
    return nn.BatchNorm2d(4, momentum=None)


def without_statistics() -> nn.Module:
    return nn.BatchNorm2d(4, track_running_stats=False)


def in_evaluation() -> nn.Module:
    return nn.BatchNorm2d(4).eval()


def instance_norm() -> nn.Module:
    return nn.InstanceNorm2d(4, affine=True, track_running_stats=True)


def at_the_end() -> nn.Sequential:
    layers = [nn.Linear(18, 8), nn.Tanh(), nn.Linear(8, 4), nn.BatchNorm1d(4)]
    return nn.Sequential(nn.Flatten(), *layers)


def at_the_start() -> nn.Sequential:
    layers = [nn.Tanh(), nn.Flatten(), nn.Linear(18, 8), nn.Linear(8, 4)]
    return nn.Sequential(nn.BatchNorm2d(2), *layers)


NORMS: dict[str, Callable[[], nn.Sequential]] = {
    "batch norm": channels(batch_norm),
    "momentum none": channels(without_momentum),
    "no running statistics": channels(without_statistics),
    "in evaluation by itself": channels(in_evaluation),
    "instance norm": channels(instance_norm),
    "at the end": at_the_end,
    "at the start": at_the_start,
    "an output that depends on its statistics": channels(partial(Shifted, 4)),
}


def evaluating(build: Callable[[], nn.Sequential]) -> nn.Sequential:
    return build().eval()


def failing() -> nn.Sequential:
    return nn.Sequential(nn.BatchNorm2d(2), Fails(), nn.BatchNorm2d(2))


def fails(when: str, calls_before: int) -> Callable[[Any, Tensor], Any]:
    """Return a function that makes a layer raise an error in a step, and then runs a normal step.

    The failed step must not change the buffers of norms or their `track_running_stats`.

    Args:
        when: Where the layer raises the error: "forward", "recompute" or "backward".
        calls_before: The number of micro-batches that pass the layer before it raises the error.
    """

    def use(run: Any, x: Tensor) -> Any:
        run[1].fail(when, ArithmeticError("trouble"), calls_before=calls_before)
        failed = False
        try:
            step(run, x.detach() + 100)
        except ArithmeticError:
            failed = True
        assert failed or when == "recompute", "nothing has failed"
        norms = [module for module in run.modules() if hasattr(module, "track_running_stats")]
        tracking = [norm.track_running_stats for norm in norms]
        buffers = [buffer.clone() for buffer in run.buffers()]
        return buffers, tracking, step(run, x)

    return use


# Deferred batch norm combines the moments of micro-batches. The result is equal up to rounding.
DEFERRED: dict[str, Any] = {"options": {"deferred_batch_norm": True}, "tolerance": REORDERED}

ROWS: list[Row] = []
for what, build in NORMS.items():
    evaluation = partial(evaluating, build)
    ROWS.append(Row(what, build, given, (1, 1, 3), use=steps, chunks=4))
    ROWS.append(Row(f"{what}, evaluation", evaluation, given, (2, 3), use=steps, chunks=4))
for batch, m, balance in (
    (13, 8, (1, 4)),
    (12, 4, (2, 3)),
    (12, 1, (1, 1, 3)),
    (13, 20, (2, 1, 2)),
):
    row = Row(
        f"deferred, {batch} samples in {m}",
        NORMS["batch norm"],
        partial(given, batch),
        balance,
        use=steps,
        chunks=m,
        **DEFERRED,
    )
    ROWS.append(row)
for k in range(4):
    row = Row(
        f"deferred, a forward that fails in micro-batch {k}",
        failing,
        given,
        use=fails("forward", k),
        chunks=4,
        without={"one micro-batch": "there is no such one"},
        **DEFERRED,
    )
    ROWS.append(row)
close = "the last rank has ended its backward by then, and would have to call close()"
ROWS.append(
    Row(
        "a recomputation that fails",
        failing,
        given,
        use=fails("recompute", 0),
        chunks=4,
        without={"one micro-batch": close},
    )
)
