"""Find the leaves of an autograd graph, and disable the hooks of leaves."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from torchgpipe.tensors._autograd import ONLY_WHOLE

sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""Return the number of this thread's next autograd node. Each thread counts its own nodes."""


def leaves_behind(y: Tensor, since: int) -> tuple[list[Tensor], bool, bool]:
    """Find the leaves of a graph.

    Args:
        y: The root of the graph.
        since: A result of `sequence_number`.

    Returns:
        The leaves; whether a backward has to go to all of them; and whether the graph has a node
        that is older than `since`.
    """
    leaves: list[Tensor] = []
    only_whole = older = False
    unseen = [get_gradient_edge(y).node]
    seen: set[Any] = {None}
    while unseen:
        node: Any = unseen.pop()
        if node in seen:
            continue
        seen.add(node)
        only_whole |= node.name() in ONLY_WHOLE
        edges = node.next_functions
        older |= bool(edges) and node._sequence_nr() < since
        if not edges and hasattr(node, "variable"):
            leaves.append(node.variable)
        unseen.extend([following for following, _ in edges])
    return leaves, only_whole, older


@contextmanager
def without_hooks(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Disable the hooks of these leaves (`register_hook`) within this context."""
    hooked = [(x, x._backward_hooks) for x in leaves if x._backward_hooks]
    try:
        for x, _ in hooked:
            x._backward_hooks = None
        yield
    finally:
        for x, hooks in hooked:
            x._backward_hooks = hooks
