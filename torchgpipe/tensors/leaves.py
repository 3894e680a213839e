"""Find the leaves of an autograd graph, and disable the hooks of leaves for a while."""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from torchgpipe.tensors._autograd import ONLY_WHOLE

sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""Return the number of this thread's next autograd node. Each thread counts its own nodes."""


def leaves_behind(y: Tensor, since: int) -> tuple[list[Tensor], bool, bool]:
    """Find the leaves of the autograd graph of a tensor, and two properties of the graph.

    Args:
        y: The tensor.
        since: A sequence number of this thread's nodes, from `sequence_number`.

    Returns:
        Three values: the leaves; whether the graph has a node that works only in a backward to all
        leaves (see `ONLY_WHOLE`); and whether the graph has a node that was made before `since`.
    """
    leaves: list[Tensor] = []
    only_whole = older = False
    for node in _nodes_behind([get_gradient_edge(y).node]):
        only_whole |= node.name() in ONLY_WHOLE
        if node.next_functions:
            older |= node._sequence_nr() < since
        elif hasattr(node, "variable"):
            leaves.append(node.variable)
    return leaves, only_whole, older


def leaves_of(roots: Iterable[Any], ends: Collection[Any] = ()) -> list[Tensor]:
    """Return the leaves that a backward from some autograd nodes reaches.

    Args:
        roots: The nodes at which the backward would begin.
        ends: Nodes at which the backward would stop.
    """
    last = [node for node in _nodes_behind(roots, ends) if not node.next_functions]
    return [node.variable for node in last if hasattr(node, "variable")]


def _nodes_behind(roots: Iterable[Any], ends: Collection[Any] = ()) -> list[Any]:
    """Return the autograd nodes `roots`, and all nodes that a backward from them reaches.

    The backward would stop at the nodes `ends`, which are not part of the result.
    """
    unseen = [*roots]
    found: dict[Any, None] = {}
    while unseen:
        node = unseen.pop()
        if node is not None and node not in found and node not in ends:
            found[node] = None
            unseen.extend([following for following, _ in node.next_functions])
    return [*found]


@contextmanager
def without_hooks(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Disable the hooks of `leaves` that `Tensor.register_hook` has set, within this context.

    So the hooks do not run for each gradient of a sum, but only once, when a leaf gets the sum.
    """
    hooked = [(x, x._backward_hooks) for x in leaves if x._backward_hooks]
    try:
        for x, _ in hooked:
            x._backward_hooks = None
        yield
    finally:
        for x, hooks in hooked:
            x._backward_hooks = hooks
