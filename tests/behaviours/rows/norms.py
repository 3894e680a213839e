"""Normalization: running statistics see every micro-batch once, as those of plain layers do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...parts import Fails
from ..compare import REORDERED
from ..parts.layers import made
from ..row import Row, step, steps


def channels(norm: Callable[[], nn.Module]) -> Callable[[], nn.Sequential]:
    return made(lambda: nn.Conv2d(2, 4, 1), norm, nn.ReLU, nn.Flatten, lambda: nn.Linear(36, 3))


def in_mode(build: Callable[[], nn.Sequential], training: bool) -> nn.Sequential:
    return build() if training else build().eval()


def given(size: int = 14) -> Tensor:
    return torch.randn(size, 2, 3, 3).requires_grad_()


class Shifted(nn.BatchNorm2d):
    """A norm whose output depends on its statistics in training, too."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.running_mean is not None
        return x + self.running_mean.mean() + super().forward(x)


# Layers on inputs of shape (N, 2, 3, 3).
NORMS: dict[str, Callable[[], nn.Sequential]] = {
    "batch norm": channels(lambda: nn.BatchNorm2d(4)),
    "momentum none": channels(lambda: nn.BatchNorm2d(4, momentum=None)),
    "no running statistics": channels(lambda: nn.BatchNorm2d(4, track_running_stats=False)),
    "in evaluation by itself": channels(lambda: nn.BatchNorm2d(4).eval()),
    "instance norm": channels(lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
    "at the end": made(
        nn.Flatten, lambda: nn.Linear(18, 8), nn.Tanh, lambda: nn.Linear(8, 4), lambda: nn.BatchNorm1d(4)
    ),
    "at the start": made(
        lambda: nn.BatchNorm2d(2), nn.Tanh, nn.Flatten, lambda: nn.Linear(18, 8), lambda: nn.Linear(8, 4)
    ),
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
        vars(layer)["error"] = None
        norms = [x.track_running_stats for x in run.modules() if hasattr(x, "track_running_stats")]
        return [b.clone() for b in run.buffers()], norms, step(run, x)

    return use


def failing() -> nn.Sequential:
    return nn.Sequential(nn.BatchNorm2d(2), Fails(), nn.BatchNorm2d(2))


DEFERRED: dict[str, Any] = {"options": {"deferred_batch_norm": True}, "tolerance": REORDERED}  # of combined moments

ROWS = [
    *(Row(f"{what}{how}", partial(in_mode, build, training), given, balance, use=steps, chunks=4)
      for what, build in NORMS.items()
      for how, training, balance in (("", True, (1, 1, 3)), (", evaluation", False, (2, 3)))),
    *(Row(f"deferred, {batch} samples in {m}", channels(lambda: nn.BatchNorm2d(4)), partial(given, batch), balance,
          use=steps, chunks=m, **DEFERRED)
      for batch, m, balance in ((13, 8, (1, 4)), (12, 4, (2, 3)), (12, 1, (1, 1, 3)), (13, 20, (2, 1, 2)))),
    *(Row(f"deferred, a forward that fails in micro-batch {k}", failing, given, use=fails("forward", k), chunks=4,
          without={"one micro-batch": "there is no such one"}, **DEFERRED) for k in range(4)),
    Row("a recomputation that fails", failing, given, use=fails("recompute", 0), chunks=4,
        without={"one micro-batch": "the last rank has ended its backward by then, and would have to call close()"}),
]  # fmt: skip
