"""Layers and backends of `torch.compile` for tests of compiled layers, and ways to train them."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

CHUNKS = 4


class Counting(nn.Module):
    """A layer that counts its calls in a buffer.

    Its output depends on this count, and on whether the layer is in training mode.
    """

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        y = self.linear(x) + self.count
        return y.tanh() if self.training else y


class Counted:
    """A backend of `torch.compile` that compiles nothing, and counts how often it is called."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: Any, inputs: object) -> Any:
        self.count += 1
        return graph


class OtherMaskWithoutGraph:
    """A backend of `torch.compile` whose code draws another dropout mask if it makes no graph.

    It compiles nothing. In `with_graph`, it records for each compilation whether gradients were on.
    """

    def __init__(self) -> None:
        self.with_graph: list[bool] = []

    def __call__(self, graph: Any, inputs: object) -> Any:
        with_graph = torch.is_grad_enabled()
        self.with_graph.append(with_graph)
        draws = any("dropout" in str(node.target) for node in graph.graph.nodes)

        def run(*args: Any) -> Any:
            if draws and not with_graph:
                torch.rand(1)
            return graph(*args)

        return run


def by_call(run: Any, x: Tensor, target: Tensor) -> None:
    loss = mse_loss(run(x), target)
    run.eval()  # a recomputation still runs in training mode
    loss.backward()
    run.train()


def by_step(run: Any, x: Tensor, target: Tensor) -> None:
    run.step(mse_loss, x, target)
