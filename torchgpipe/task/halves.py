"""Split the backward of a task: compute gradients of inputs first, gradients of weights later.

Zero bubble schedules need this (Qi et al., arXiv:2401.10241), because the previous stage waits only
for the gradients of inputs. In this file, a product is a convolution, or a matrix product such as
that of a linear layer. The part of the graph that leads from a weight to a product is called a
side. The two halves are:

    inputs ──▶ … ──▶ product ──▶ …      first half: everything except the sides of products
                        ▲
              weight ─▶ side            second half: each product's gradient for its weight,
                                        then the backward of its sides

The first half is one run of autograd, which frees the graph. For each product, its input and the
gradient of its output are kept. From these two tensors, the second half computes exactly the weight
gradients that autograd would have computed.

Only products are split, because about half of the work of their backward is for the weight. All
other operators with parameters stay in the first half: a norm computes the gradients of its input
and of its parameters by one kernel, and an embedding has no gradient of its input.

A side consists of nodes that nothing else uses: the parameter alone, or its transpose, its cast, or
a weight norm. If a task uses a weight in two products, autograd adds the two gradients before it
writes to `.grad`. So such a weight gets its gradients in the first half.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from torchgpipe.task.sides import NO_SPLIT, PRODUCTS, Row, Split, find_split, numbered
from torchgpipe.tensors._autograd import (
    averages_gradients,
    hooked_in_the_old_way,
    run_backward,
    saved_by,
    sharded,
    without_torch_function,
)
from torchgpipe.tensors.item import versions
from torchgpipe.tensors.microbatch import Flat

_SETTINGS = (
    "bias_sym_sizes_opt",
    "stride",
    "padding",
    "dilation",
    "transposed",
    "output_padding",
    "groups",
)

EXCHANGES = "FSDP2, DDP or replicate exchanges the gradients of its layers by itself"
NOTHING_LATER = "no linear layer or convolution has a weight that takes a gradient"
OLD_HOOK = (
    "a hook by register_backward_hook sees all gradients of its layer; use "
    "register_full_backward_hook"
)
SPLITS = 64
"""The largest number of splits that a stage keeps, because each task may have another graph."""


@dataclass(slots=True)
class _Later:
    """The computation of the weight gradients of one matrix product, to be run later.

    Attributes:
        formula: A function of the tensors in `saved` that returns the gradients.
        saved: The gradient of the product's output, which `catch` adds, and then the tensors that
            autograd has saved for the product.
        sides: The edges from the product to the parts of the graph that lead to its parameters.
    """

    formula: Callable[..., Sequence[Tensor]]
    saved: Flat
    sides: list[GradientEdge]
    _versions: list[int | None] = field(default_factory=list)

    def catch(self, grads: Flat) -> None:
        """Keep the gradient of the product's output.

        Autograd calls this method, as a hook, before the backward of the product's node.
        """
        self.saved = (grads[0], *self.saved)
        self._versions = versions(self.saved)

    def run(self, keep_graph: bool) -> None:
        """Compute the weight gradients, and run the backward from the product to its parameters.

        Args:
            keep_graph: Whether to keep the graph of this backward, so that it can run again.

        Raises:
            RuntimeError: If a tensor in `saved` was changed in place since it was kept.
        """
        if not self._versions or self.saved[0] is None:
            return
        if versions(self.saved) != self._versions:
            raise RuntimeError(
                "a tensor that a layer has saved, or the gradient of its output, was changed in "
                "place between the backward of inputs and the backward of weights; do not change "
                "these tensors in layers and hooks, or use a schedule that does not split backwards"
            )
        with torch.no_grad(), without_torch_function():
            grads = self.formula(*self.saved)
        run_backward(self.sides, grads, keep_graph=keep_graph)


def _run_all(later: list[_Later], keep_graph: bool) -> None:
    """Compute the weight gradients of all products in `later`; free the tensors kept for them."""
    while later:
        later.pop().run(keep_graph)


class Halves:
    """Split the backward of a stage's tasks: gradients of inputs first, gradients of weights later.

    This object decides once for each structure of graphs which gradients are computed later. Its
    `str()` tells the user how many matrix products get their weight gradients later, and why other
    products get them at once.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._splits: dict[tuple[Row, ...], Split] = {}
        # The reason for which no task's backward is split, or nothing.
        self._whole = EXCHANGES if sharded(modules) or averages_gradients(modules) else ""

    def __str__(self) -> str:
        reasons: dict[str, None] = {}
        count = 0
        for each in self._splits.values():
            count = max(count, len(each.later))
            reasons.update(dict.fromkeys(each.reasons))
        if self._whole:
            return f"backward is not split: {self._whole}"
        if count:
            return "; ".join(
                [f"weight gradients of {count} matrix products are computed later", *reasons]
            )
        if self._splits:
            return f"backward is not split: {'; '.join(reasons) or NOTHING_LATER}"
        return "no backward yet"

    def run_inputs(
        self, roots: Sequence[GradientEdge], grads: Sequence[Tensor], *, keep_graph: bool
    ) -> Callable[[], None] | None:
        """Run the first half of a task's backward; return a function that runs the second half.

        The second half computes the weight gradients of matrix products. If the backward cannot be
        split, all gradients are computed at once, and the result is `None`.

        Args:
            roots: The edges at which the backward starts.
            grads: The gradient of each root.
            keep_graph: Whether to keep the graph, so that another backward can use it.
        """
        if not self._whole and hooked_in_the_old_way(self._modules):
            self._whole = OLD_HOOK
        if self._whole:
            run_backward(roots, grads, keep_graph=keep_graph)
            return None
        nodes, rows = numbered(roots)
        chosen = self._split_of(roots, nodes, rows) if rows else NO_SPLIT
        if not chosen.later:
            run_backward(roots, grads, keep_graph=keep_graph)
            return None
        later, hooks = [], []
        ends = [GradientEdge(nodes[k], 0) for k in chosen.now]
        for k, places in chosen.later:
            each = _taken_from(nodes[k], places)
            later.append(each)
            hooks.append(nodes[k].register_prehook(each.catch))
            ends.append(GradientEdge(nodes[k], 0))
        try:
            run_backward(roots, grads, keep_graph=keep_graph, ends=ends)
        finally:
            for hook in hooks:
                hook.remove()
        return partial(_run_all, later[::-1], keep_graph)

    def _split_of(
        self, roots: Sequence[GradientEdge], nodes: list[Any], rows: tuple[Row, ...]
    ) -> Split:
        """Decide how the backward of a graph is split; graphs with equal `rows` are split alike.

        Args:
            roots: The edges at which the backward starts.
            nodes: The nodes of the graph.
            rows: A description of each node. All of them together describe the graph's structure.
        """
        if rows not in self._splits:
            if len(self._splits) == SPLITS:
                self._splits.clear()
            root = self._modules[0]
            tensors: list[tuple[str, Any]] = [*root.named_parameters(), *root.named_buffers()]
            names = {x: name for name, x in tensors}
            named = [names.get(getattr(node, "variable", None), "") for node in nodes]
            begins = {nodes.index(edge.node) for edge in roots}
            self._splits[rows] = find_split(rows, begins, named)
        return self._splits[rows]


def _taken_from(node: Any, places: list[int]) -> _Later:
    """Return an object (`_Later`) that later computes the weight gradients of one matrix product.

    Args:
        node: The autograd node of the product.
        places: The indices of those arguments of the product whose gradients are computed later.
    """
    name = type(node).__name__
    first, *names = PRODUCTS[name]
    sides = [GradientEdge(*node.next_functions[place]) for place in places]
    formula: Callable[..., Sequence[Tensor]]
    if name == "ConvolutionBackward0":
        settings = [saved_by(node, setting) for setting in _SETTINGS]
        formula = partial(_of_convolution, settings, places)
        saved = [saved_by(node, x) for x in names]
        return _Later(formula, tuple(saved), sides)
    factors, saved = [], []
    for place in places:
        if place >= first:
            k = place - first
            factors.append((k, name[0] != "B" and _lies_by_columns(node, names[k])))
            saved.append(saved_by(node, names[1 - k]))
    beta = saved_by(node, "beta") if first else 1
    alpha = saved_by(node, "alpha") if first else 1
    formula = partial(_of_matrices, places[0] < first, factors, beta, alpha)
    return _Later(formula, tuple(saved), sides)


def _lies_by_columns(node: Any, name: str) -> bool:
    """Return whether a factor of a matrix product is stored in column-major order.

    Autograd stores the gradient of such a factor in column-major order, too.

    Args:
        node: The autograd node of the product.
        name: The name of the factor in PyTorch, such as "mat1".
    """
    rows, _ = saved_by(node, f"{name}_sym_sizes")
    return tuple(saved_by(node, f"{name}_sym_strides")) == (1, rows)


def _of_matrices(
    summand: bool,
    factors: list[tuple[int, bool]],
    beta: Any,
    alpha: Any,
    grad: Tensor,
    *others: Tensor,
) -> list[Tensor]:
    found: list[Tensor] = []
    if summand:
        found.append(grad if beta == 1 else grad * beta)
    times = torch.bmm if grad.dim() == 3 else torch.mm
    for (right, columns), other in zip(factors, others, strict=True):
        x, y = (grad.mT, other.conj()) if columns else (grad, other.mT.conj())
        product = times(x, y) if right == columns else times(y, x)
        product = product.mT if columns else product
        found.append(product if alpha == 1 else product * alpha)
    return found


def _of_convolution(
    settings: list[Any], places: list[int], grad: Tensor, x: Tensor, weight: Tensor
) -> list[Tensor]:
    found = torch.ops.aten.convolution_backward(
        grad, x, weight, *settings, [k in places for k in range(3)]
    )
    return [found[place] for place in places]
