"""Modes around the pipeline reach its layers: evaluation, no grad, inference, autocast, a default device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from torchgpipe import is_checkpointing, is_recomputing

from ..parts.layers import WIDTH, linear, real
from ..row import Row, step

BF16, FP16 = partial(torch.autocast, "cpu", torch.bfloat16), partial(torch.autocast, "cpu", torch.float16)
ON_META = partial(torch.device, "meta")


def layers(*, training: bool = True) -> nn.Sequential:
    last = parametrizations.weight_norm(nn.Linear(8, 4))
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Dropout(0.0), nn.Linear(8, 8), last).train(training)


class Report(nn.Module):
    """Note the modes in which the layer runs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def forward(self, x: Tensor) -> Tensor:
        autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        modes = [torch.is_inference_mode_enabled(), autocast, torch.get_default_device().type]
        if torch.is_inference_mode_enabled() or (not torch.is_grad_enabled() and not is_checkpointing()):
            modes += [torch.is_grad_enabled(), is_checkpointing(), is_recomputing()]
        self.seen.add(str(modes))
        return x


def reporting() -> nn.Sequential:
    return nn.Sequential(Report(), linear(), Report(), linear(), Report())


def seen(run: nn.Module) -> list[str]:
    """Return what was seen by all reports; with a partition for each rank, each has one."""
    return sorted(set().union(*(m.seen for m in run.modules() if isinstance(m, Report))))


@contextmanager
def cached() -> Iterator[None]:
    with torch.no_grad(), parametrize.cached():
        yield


@contextmanager
def enabled_again() -> Iterator[None]:
    with torch.no_grad(), torch.enable_grad():
        yield


def within(forward: Callable[[], Any], backward: Callable[[], Any] = nullcontext) -> Callable[[nn.Module, Tensor], Any]:
    """Run two forwards within a context, each with its backward within another."""

    def use(run: nn.Module, x: Tensor) -> Any:
        shown = []
        for _ in range(2):
            run.zero_grad()
            with forward():
                y = run(x)
            shown += [y.detach(), y.requires_grad, y.is_inference()]
            if y.requires_grad:
                with backward():
                    y.backward(torch.ones_like(y))
            shown.append(seen(run))
        return shown

    return use


def after_inference(run: nn.Module, x: Tensor) -> Any:
    with torch.inference_mode():
        run.eval()(x)
    return step(run.train(), x)


# What surrounds the forward.
AROUND: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "enable_grad within no_grad": enabled_again,
    "autocast": BF16,
    "cached parametrizations": cached,
}
# What surrounds forward, and what backward: a recomputation has the modes of its forward.
PASSES: dict[str, tuple[Callable[[], Any], ...]] = {
    "no_grad reaches every layer": (torch.no_grad,),
    "inference_mode reaches every layer": (torch.inference_mode,),
    "autocast in forward": (BF16, nullcontext),
    "autocast in backward": (nullcontext, BF16),
    "autocast in both": (BF16, FP16),
    "default device in forward": (ON_META, nullcontext),
    "default device in backward": (nullcontext, ON_META),
}

ROWS = [
    *(Row(f"{what}{'' if training else ' in evaluation'}", partial(layers, training=training), balance=(2, 1, 2),
          use=within(context)) for what, context in AROUND.items() for training in (True, False)),
    *(Row(what, reporting, partial(real, grad=False), (2, 1, 2), use=within(*contexts))
      for what, contexts in PASSES.items()),
    Row("training after inference", layers, balance=(2, 1, 2), use=after_inference),
]  # fmt: skip
