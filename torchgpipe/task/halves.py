"""The backward of a task in two halves: of its inputs at once, of its weights when there is time (arXiv:2401.10241).

    inputs ──▶ … ──▶ product ──▶ …      of inputs: everything but the sides of products
                        ▲
              weight ─▶ side            of weights: each product once more, for its weights alone, then its sides

Products are linear layers and convolutions: half of their work is for their weights. What else gives gradients to
parameters stays in the first half: one kernel gives them with those of the inputs (norms), or there is nothing to wait
for (embeddings). The first half is one run of autograd, which frees the graph. What is kept of a product is its input
and its output's gradient; of these the second half makes what autograd would have made, to the bit.

A side is what hangs from a product and nowhere else: a parameter, its transpose, its cast, a weight norm. Where a
weight has another use in the task, autograd adds both up before `.grad` has them, so both stay in the first half.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from torchgpipe.tensors._autograd import (
    averages_gradients,
    hooked_in_the_old_way,
    reads_saved,
    run_backward,
    saved_by,
    sharded,
    without_torch_function,
)
from torchgpipe.tensors.item import versions
from torchgpipe.tensors.microbatch import Flat

# At which of a product's inputs its two factors begin, and by which names its node has saved them.
_PRODUCTS = {
    "MmBackward0": (0, "self", "mat2"),
    "AddmmBackward0": (1, "mat1", "mat2"),
    "BmmBackward0": (0, "self", "mat2"),
    "BaddbmmBackward0": (1, "batch1", "batch2"),
    "ConvolutionBackward0": (0, "input", "weight"),
}
_SETTINGS = (
    "bias_sym_sizes_opt",
    "stride",
    "padding",
    "dilation",
    "transposed",
    "output_padding",
    "groups",
)

_Row = tuple[type, bool | None, tuple[int, ...]]
"""A node's class, whether what it saved can be read (None: it is no product), and its next nodes, -1 where none is."""

EXCHANGES = "FSDP2, DDP or replicate exchanges the gradients of its layers by itself"
NOTHING_LATER = "no linear layer or convolution has a weight that takes a gradient"
OLD_HOOK = "a hook by register_backward_hook sees all gradients of its layer; use register_full_backward_hook"
PACKED = (
    "what a layer saves is packed (torch.utils.checkpoint, saved_tensors_hooks), or no plain tensor"
)
PLANS = 64  # of a stage, at most: layers may do something else each time


_Plan = tuple[list[tuple[int, list[int]]], list[int], list[str]]
"""The products that have sides, each with its inputs where these begin; the leaves of the first half; and why."""


@dataclass(slots=True)
class _Later:
    """The gradients of one product's sides, which are still to be computed from what it has `saved`."""

    formula: Callable[..., Sequence[Tensor]]
    saved: Flat
    sides: list[GradientEdge]
    _versions: list[int | None] = field(default_factory=list)

    def catch(self, grads: Flat) -> None:
        """Take the gradient of the product's output, as a hook of its node."""
        self.saved = (grads[0], *self.saved)
        self._versions = versions(self.saved)

    def run(self, keep_graph: bool) -> None:
        """Add the gradients to the leaves of the sides; raise `RuntimeError` if what they need has changed."""
        if not self._versions or self.saved[0] is None:
            return
        if versions(self.saved) != self._versions:
            raise RuntimeError(
                "what a layer has saved, or the gradient of its output, was changed in place between the backward of "
                "inputs and that of weights; change neither in layers and hooks, or use a schedule without halves"
            )
        with torch.no_grad(), without_torch_function():
            grads = self.formula(*self.saved)
        run_backward(self.sides, grads, keep_graph=keep_graph)


def _run_all(later: list[_Later], keep_graph: bool) -> None:
    """Run each, and let it go once it is done."""
    while later:
        later.pop().run(keep_graph)


class Halves:
    """How the backward of a stage is split, which is found out once for each structure that its graph has.

    Its text says how many products have weights for later, and which could have, and why they have not.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._plans: dict[tuple[_Row, ...], _Plan] = {}
        # Why no task's backward is split, as far as the layers show.
        self._whole = EXCHANGES if sharded(modules) or averages_gradients(modules) else ""

    def __str__(self) -> str:
        plans = [*self._plans.values()]
        reasons = (
            [self._whole]
            if self._whole
            else [*dict.fromkeys([why for *_, whys in plans for why in whys])]
        )
        count = max([len(later) for later, *_ in plans if not self._whole], default=0)
        if not count:
            return (
                f"whole: {'; '.join(reasons) or NOTHING_LATER}"
                if reasons or plans
                else "no backward yet"
            )
        return "; ".join([f"weights of {count} products later", *reasons])

    def run_inputs(
        self, roots: Sequence[GradientEdge], grads: Sequence[Tensor], *, keep_graph: bool
    ) -> Callable[[], None] | None:
        """Go backward from `roots`, but for the sides of products; return what does these, if there are some."""
        self._whole = self._whole or (OLD_HOOK if hooked_in_the_old_way(self._modules) else "")
        nodes, rows = ([], ()) if self._whole else _numbered(roots)
        if rows and rows not in self._plans:
            if len(self._plans) == PLANS:
                self._plans.clear()
            root = self._modules[0]
            names: dict[Any, str] = {
                x: k for k, x in (*root.named_parameters(), *root.named_buffers())
            }
            named = [names.get(getattr(node, "variable", None), "") for node in nodes]
            self._plans[rows] = _plan(rows, {nodes.index(edge.node) for edge in roots}, named)
        places, now, _ = self._plans[rows] if rows else ([], [], [])
        later = [_taken_from(nodes[k], each) for k, each in places]
        hooks = [
            nodes[k].register_prehook(late.catch)
            for (k, _), late in zip(places, later, strict=True)
        ]
        ends = [GradientEdge(nodes[k], 0) for k in (*now, *(k for k, _ in places))] if later else []
        try:
            run_backward(roots, grads, keep_graph=keep_graph, ends=ends)
        finally:
            for hook in hooks:
                hook.remove()
        return partial(_run_all, later[::-1], keep_graph) if later else None


def _numbered(roots: Iterable[GradientEdge]) -> tuple[list[Any], tuple[_Row, ...]]:
    """Return all nodes below `roots` in a fixed order, and the structure of the graph."""
    nodes: list[Any] = [*dict.fromkeys([edge.node for edge in roots])]
    numbers, rows = {node: k for k, node in enumerate(nodes)}, []
    for node in nodes:  # which grows meanwhile
        below = []
        for child, _ in node.next_functions:
            k = -1 if child is None else numbers.setdefault(child, len(nodes))
            if k == len(nodes):
                nodes.append(child)
            below.append(k)
        product = _PRODUCTS.get(type(node).__name__)
        rows.append(
            (type(node), None if product is None else reads_saved(node, product[1:]), tuple(below))
        )
    return nodes, tuple(rows)


def _plan(rows: Sequence[_Row], roots: Iterable[int], named: Sequence[str]) -> _Plan:
    next_nodes = [[x for x in below if x >= 0] for _, _, below in rows]
    uses = Counter([x for below in next_nodes for x in below]) + Counter(roots)
    custom = [issubclass(kind, BackwardCFunction) for kind, _, _ in rows]
    reasons: dict[str, None] = {}

    def side(begin: int) -> set[int]:
        """Return the nodes of a side that begins at a node, none if it is no side."""
        found = [begin] if begin >= 0 else []
        for k in found:  # which grows meanwhile
            if (
                rows[k][1] is not None or custom[k]
            ):  # a custom Function may do anything, and the entrance is one
                return set()
            found += [x for x in dict.fromkeys(next_nodes[k]) if x not in found]
        within = sum([len(next_nodes[k]) for k in found])
        if sum([uses[k] for k in found]) == within + 1:
            return {*found}
        if len(found) == within + 1:  # a chain, which ends in a leaf
            reasons[f"{named[found[-1]]!r} is used more than once"] = None
        return set()

    later, aside = [], set[int]()
    for k, (kind, readable, below) in enumerate(rows):
        if readable is False:
            reasons[PACKED] = None
        for x in next_nodes[k] if custom[k] else ():
            if named[x]:
                reasons[
                    f"{named[x]!r} has its gradient from a custom Function ({kind.__name__})"
                ] = None
        sides = {place: found for place, x in enumerate(below) if readable and (found := side(x))}
        first = _PRODUCTS[kind.__name__][0] if readable else 0
        # To add up a bias's gradient takes less than to keep it. One kernel gives those of a filter and its bias.
        apart = kind.__name__ == "ConvolutionBackward0" and [
            p for p in (1, 2) if below[p] >= 0 and p not in sides
        ]
        if sides.keys() & {first, first + 1} and not apart:
            later.append((k, [*sides]))
            aside.update(*sides.values())
    now = [k for k, below in enumerate(next_nodes) if not below and k not in aside]
    return later, now, [*reasons]


def _taken_from(node: Any, places: list[int]) -> _Later:
    name = type(node).__name__
    first, *names = _PRODUCTS[name]
    sides = [GradientEdge(*node.next_functions[place]) for place in places]
    if name == "ConvolutionBackward0":
        settings = [saved_by(node, setting) for setting in _SETTINGS]
        return _Later(
            partial(_of_convolution, settings, places),
            tuple([saved_by(node, x) for x in names]),
            sides,
        )
    factors = [place - first for place in places if place >= first]
    beta, alpha = [saved_by(node, scale) if first else 1 for scale in ("beta", "alpha")]
    # Where a factor lies by columns, autograd lets its gradient do so, too.
    lies = [(f"{names[k]}_sym_sizes", f"{names[k]}_sym_strides") for k in factors if name[0] != "B"]
    columns = [tuple(saved_by(node, y)) == (1, saved_by(node, x)[0]) for x, y in lies] or [
        False,
        False,
    ]
    formula = partial(
        _of_matrices, places[0] < first, [*zip(factors, columns, strict=False)], beta, alpha
    )
    return _Later(formula, tuple([saved_by(node, names[1 - k]) for k in factors]), sides)


def _of_matrices(
    summand: bool,
    factors: list[tuple[int, bool]],
    beta: Any,
    alpha: Any,
    grad: Tensor,
    *others: Tensor,
) -> list[Tensor]:
    found = [grad if beta == 1 else grad * beta] if summand else []
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
