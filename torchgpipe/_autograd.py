"""The one place that touches what PyTorch does not promise to keep.

`tests/torchgpipe/test_autograd_adapter.py` fails, by name, when one of these moves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

__all__ = ["accumulates", "keeps_graph", "run_backward"]

_engine = torch.autograd.Variable._execution_engine
_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph


def run_backward(roots: Sequence[GradientEdge], grads: Sequence[Tensor], *, keep_graph: bool) -> None:
    """Accumulate gradients into the leaves behind `roots`.

    The same as `torch.autograd.backward(roots, grads)` without its checks, which cost more than the backward
    of a small layer.
    """
    _engine.run_backward(
        tuple(roots), tuple(grads), keep_graph, False, (), allow_unreachable=True, accumulate_grad=True
    )


def keeps_graph() -> bool:
    """Return whether the backward in progress was asked to keep its graph (`retain_graph=True`)."""
    return bool(_keeps_graph())


def accumulates() -> bool:
    """Return whether the backward in progress accumulates into every leaf.

    It does not under `torch.autograd.grad(…)` and `backward(inputs=…)`.
    """
    return bool(_engine.is_checkpoint_valid())
