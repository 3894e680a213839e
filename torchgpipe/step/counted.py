"""Find out over which targets a criterion has averaged, from the autograd graph of its loss."""

from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

_CROSS_ENTROPY = ("NllLossBackward0", "NllLoss2DBackward0")
"""The autograd nodes of `cross_entropy` and `nll_loss`, if the targets are class indices."""

_SIGN_OR_TYPE = ("NegBackward0", "ToCopyBackward0")
"""The nodes that change a sum only in its sign or its type."""

_AROUND = ("AddBackward0", "MulBackward0", "MulBackward1", "DivBackward0", *_SIGN_OR_TYPE)
"""The nodes that can come after a mean in the computation of a loss, as with `label_smoothing`."""

_TERMS = ("AddBackward0", "SubBackward0", *_SIGN_OR_TYPE)
"""The nodes that add terms, or that leave a sum a sum."""

_SCALED = ("Mean", "Mul", "Div", "Stack")
"""How the names of some nodes begin. A sum of such a node's result need not be a sum over samples.

Examples are a mean over samples that is summed over features, and weights whose sum is 1.
"""

_MOST_TERMS = 20
_MOST_AROUND = 6

_INDEXED = ("IndexBackward0", "MaskedSelectBackward0")
"""The nodes of losses that a mask has chosen, as in `losses[mask]`."""

_SUM = 2
"""The number by which an autograd node means `reduction="sum"`."""


class Counted(NamedTuple):
    """The targets over which a criterion has averaged, in one micro-batch.

    If the loss is a sum, only `is_sum` has a meaning.

    Attributes:
        total: The number by which the mean divides, as a scalar tensor. For a cross entropy, it is
            the sum of the class weights of all targets that are not ignored. Without class weights,
            this is the number of these targets.
        number: The number of all targets, or 0 if it is not known.
        ignored: The class index that is ignored, or 0 if it is not known.
        class_weights: Whether the cross entropy has class weights.
        is_sum: Whether the loss is a sum, and not a mean.
        by_hand: Whether the criterion has computed the mean itself, as in `losses.sum() / n` or
            `losses[mask].mean()`. Then `number` and `ignored` are not known.
    """

    total: Tensor
    number: int
    ignored: int
    class_weights: bool
    is_sum: bool
    by_hand: bool = False


def counted(loss: Tensor) -> Counted | None:
    """Look for a mean in the autograd graph of a loss; return over which targets it was computed.

    The mean is that of a cross entropy, or the criterion has computed it by hand, for example with
    a mask. If the loss is a sum, only the field `is_sum` of the result has a meaning. The result is
    `None` if the loss has no graph, or is neither such a mean nor a sum. It is also `None` for a
    mean on device `meta`, which has no values. A cross entropy that sums and is then multiplied
    gives `None`, too, because it can be a mean, and so does a sum of cross entropies over
    different numbers of targets.

    This can cost time: a GPU may still be computing the tensors that a node has saved, and the
    host has to wait. If the loss was computed within `torch.utils.checkpoint`, it is computed
    again.
    """
    node: Any = loss.grad_fn
    if _is_sum(node):
        return Counted(loss.detach(), 0, 0, class_weights=False, is_sum=True)
    if loss.is_meta:
        return None
    further: list[Any] = []  # the nodes of further terms of the loss
    for _ in range(_MOST_AROUND):
        if node is None:
            return None
        divisor = _divisor(node)
        if divisor is not None:
            return Counted(divisor, 0, 0, class_weights=False, is_sum=False, by_hand=True)
        if node.name() not in _AROUND:
            break
        (node, _), *others = node.next_functions
        further += [_cross_entropy_of(other) for other, _ in others]
    found = _of_cross_entropy(node)
    # If a loss is the sum of several cross entropies, as of a loop over the samples, no single
    # number of targets is the weight of the loss, unless all are means over equally many targets.
    for other in filter(None, map(_of_cross_entropy, further)):
        if found is None or not torch.equal(found.total, other.total):
            return None
    return found


def _cross_entropy_of(node: Any) -> Any:
    """Return the node of a cross entropy that a term of a loss multiplies or divides.

    If the term has no cross entropy, return another node, or `None`.
    """
    for _ in range(_MOST_AROUND):
        if node is None or node.name() not in _AROUND:
            break
        node = node.next_functions[0][0]
    return node


def _of_cross_entropy(node: Any) -> Counted | None:
    """Return the targets over which a node has averaged, if it is the node of a cross entropy."""
    if node is None or node.name() not in _CROSS_ENTROPY:
        return None
    if node._saved_reduction == _SUM:
        return None  # a sum that is multiplied can be a mean
    ignored = node._saved_ignore_index
    if ignored >= 2**63:  # the node keeps a negative number without its sign
        ignored -= 2**64
    has_weights = node._saved_weight is not None
    total = node._saved_total_weight.detach()
    return Counted(total, node._saved_target.numel(), ignored, has_weights, is_sum=False)


def _divisor(node: Any) -> Tensor | None:
    """Return the number by which a node divides to compute a mean, as a scalar tensor.

    The node divides a sum by this number. Or it computes the mean of losses that a mask has chosen.
    Then the number is how many losses these are. The result is `None` if the node does something
    else, if it divides by a tensor that is not a scalar, or if the divisor requires grad.
    """
    first, _ = node.next_functions[0] if node.next_functions else (None, 0)
    if node.name() == "MeanBackward0" and first is not None and first.name() in _INDEXED:
        return torch.tensor(int(node._saved_self_sym_numel), device="cpu")
    if node.name() != "DivBackward0":
        return None
    while first is not None and first.name() in _SIGN_OR_TYPE:
        first, _ = first.next_functions[0]
    if not _is_full_sum(first):
        return None
    _, (of_divisor, _) = node.next_functions  # None if the divisor does not require grad
    divisor: Tensor = node._saved_other.detach()
    return divisor if of_divisor is None and divisor.dim() == 0 else None


def _is_full_sum(node: Any) -> bool:
    """Return whether an autograd node sums all entries of a tensor, or all losses."""
    if node is None:
        return False
    return (
        node.name() in ("SumBackward0", "NansumBackward0")
        or getattr(node, "_saved_reduction", None) == _SUM
    )


def _is_sum(node: Any) -> bool:
    """Return whether a loss is surely a sum over samples, or consists of such sums.

    A sum that is divided or multiplied by something can be a mean, so it does not count as a sum. A
    sum of a single number is a mean, too.

    Args:
        node: The autograd node of the loss, or `None`.
    """
    nodes = [node]
    for _ in range(_MOST_TERMS):
        if not nodes:
            return True
        node = nodes.pop()
        if node is None:
            return False
        if node.name() in _TERMS:
            nodes += [term for term, _ in node.next_functions if term is not None]
        elif node.name() == "SumBackward0":
            summed, _ = node.next_functions[0]
            single = prod(node._saved_self_sym_sizes) == 1
            if single or summed is None or summed.name().startswith(_SCALED):
                return False
        elif getattr(node, "_saved_reduction", None) != _SUM:
            return False
    return False
