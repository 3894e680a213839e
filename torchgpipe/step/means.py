"""Warn if a criterion's loss is not the mean over the samples of a micro-batch.

The loss of a mini-batch is the mean of the micro-batches' losses, weighted by their numbers of
samples. This is wrong if a criterion sums, ignores some targets, weights classes, or divides by the
number of targets that a mask has chosen.
"""

import warnings
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchgpipe.step.request import Criterion, StepRequest, options_of
from torchgpipe.tensors.microbatch import MicroBatches

_CROSS_ENTROPY = ("NllLossBackward0", "NllLoss2DBackward0")
"""The autograd nodes of `cross_entropy` and `nll_loss`, if the targets are class indices."""

_SIGN_OR_TYPE = ("NegBackward0", "ToCopyBackward0")
"""The nodes that change a sum only in its sign or its type."""

_AROUND = ("AddBackward0", "MulBackward0", "MulBackward1", "DivBackward0", *_SIGN_OR_TYPE)
"""The nodes that can come after a mean in the computation of a loss, as with `label_smoothing`."""

_TERMS = ("AddBackward0", "SubBackward0", "NegBackward0", "ToCopyBackward0")
"""The nodes that add terms, or that leave a sum a sum."""

_SCALED = ("Mean", "Mul", "Div", "Stack")
"""How the names of nodes begin whose sum need not be a sum over samples.

Examples are a mean over samples that is summed over features, and weights whose sum is 1.
"""

_MOST_TERMS = 20

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
        classes: Whether the cross entropy has class weights.
        is_sum: Whether the loss is a sum, and not a mean.
        by_hand: Whether the criterion has computed the mean itself, as in `losses.sum() / n` or
            `losses[mask].mean()`. Then `number` and `ignored` are not known.
    """

    total: Tensor
    number: int
    ignored: int
    classes: bool
    is_sum: bool
    by_hand: bool = False


def counted(loss: Tensor) -> Counted | None:
    """Look for a mean in the autograd graph of a loss; return over which targets it was computed.

    The mean is that of a cross entropy, or the criterion has computed it by hand, for example with
    a mask. If the loss is a sum, only the field `is_sum` of the result has a meaning. The result is
    `None` if the loss has no graph, or is neither such a mean nor a sum. It is also `None` for a
    mean on device `meta`, which has no values. A cross entropy that sums and is then multiplied
    gives `None`, too, because it can be a mean.

    This can cost time: the tensors that a node has saved may still be computed on a GPU, and the
    host has to wait. If the loss was computed within `torch.utils.checkpoint`, it is computed
    again.
    """
    node: Any = loss.grad_fn
    if _is_sum(node):
        return Counted(loss.detach(), 0, 0, classes=False, is_sum=True)
    if loss.is_meta:
        return None
    for _ in _AROUND:  # a limit, because a sum can have many terms
        if node is None:
            return None
        divisor = _divisor(node)
        if divisor is not None:
            return Counted(divisor, 0, 0, classes=False, is_sum=False, by_hand=True)
        if node.name() not in _AROUND:
            break
        node = node.next_functions[0][0]
    return _of_cross_entropy(node)


def _of_cross_entropy(node: Any) -> Counted | None:
    """Return the targets over which a node has averaged, if it is the node of a cross entropy."""
    if node is None or node.name() not in _CROSS_ENTROPY:
        return None
    if node._saved_reduction == _SUM:
        return None  # a sum that is multiplied can be a mean
    ignored = node._saved_ignore_index
    if ignored >= 2**63:  # the node keeps a negative number without its sign
        ignored -= 2**64
    has_classes = node._saved_weight is not None
    total = node._saved_total_weight.detach()
    return Counted(total, node._saved_target.numel(), ignored, has_classes, is_sum=False)


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
    return node.name() == "SumBackward0" or getattr(node, "_saved_reduction", None) == _SUM


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


def warn_of_other_means(
    request: StepRequest,
    targets: Sequence[Any],
    sizes: Sequence[int],
    found: Sequence[Counted | None],
) -> None:
    """Warn if the criterion's loss is not the mean over the samples of a micro-batch.

    The loss can be a sum, a mean over fewer targets (`ignore_index`, or a mask), or a mean with
    class weights. In the steps 1, 2, 4, 8, ... of a pipeline, the graphs of the losses show the
    kind of the loss. In other steps and in `evaluate`, the options of a PyTorch criterion show it.

    Args:
        request: The arguments of `step` or `evaluate`.
        targets: The target of each micro-batch.
        sizes: The number of samples of each micro-batch.
        found: The targets over which the criterion has averaged, for each micro-batch. An entry is
            `None` if they are not known.
    """
    if request.reduction != "mean" or len(targets) < 2:
        return
    known = [each for each in found if each is not None]
    options = options_of(request.criterion) or {}
    if options.get("reduction") == "sum" or any(each.is_sum for each in known):
        warnings.warn(
            "the criterion returns a sum, but the losses of micro-batches are put together as "
            'means; give reduction="sum" to step() and evaluate()',
            stacklevel=2,
        )
        return
    if request.weight is not None:
        return
    if any(each.by_hand for each in known):
        _warn_of_divisors(request, targets, sizes, known)
    else:
        _warn_of_cross_entropies(request, targets, sizes, known)


def _warn_of_cross_entropies(
    request: StepRequest, targets: Sequence[Any], sizes: Sequence[int], known: Sequence[Counted]
) -> None:
    """Warn if cross entropies are means over different shares of targets or other class weights.

    Args:
        request: The arguments of `step` or `evaluate`.
        targets: The target of each micro-batch.
        sizes: The number of samples of each micro-batch.
        known: The targets over which each cross entropy has averaged, where they are known.
    """
    options = options_of(request.criterion) or {}
    index: int = options.get("ignore_index", 0)
    classes = options.get("weight")
    weighted = classes is not None
    rounding = 1e-6  # the same weights in another order can have a slightly different sum
    totals: list[float] = []
    numbers: list[int] = []
    if len(known) == len(targets):
        index, weighted = known[0].ignored, known[0].classes
        rounding = _rounding(known[0].total)
        totals = [float(each.total) for each in known]
        numbers = [each.number for each in known]
        if not isinstance(request.target, MicroBatches):  # whose lengths may differ on purpose
            numbers = [*sizes]
    elif "ignore_index" in options:
        totals = _totals(targets, index, classes)
        numbers = [target.numel() for target in targets if totals]
    means = [total / number for total, number in zip(totals, numbers, strict=True) if number]
    if not means or max(means) - min(means) <= rounding * max(means):
        return
    if weighted:
        warnings.warn(
            "micro-batches have targets of different class weights, but each counts by its "
            "samples; for the weighted mean over all targets, give step() and evaluate() "
            f"weight={_sum_of_weights(request.criterion, index)}",
            stacklevel=2,
        )
        return
    which = f"different shares of targets that the criterion ignores ({index})"
    if known and totals == [each.number for each in known]:  # nothing is ignored
        which = "different numbers of targets for each sample"
    warnings.warn(
        f"micro-batches have {which}, but each micro-batch counts by its samples, so the loss is "
        "not the mean over all targets that count; give step() and evaluate() "
        f"weight={_count(targets, totals, index)}",
        stacklevel=2,
    )


def _warn_of_divisors(
    request: StepRequest, targets: Sequence[Any], sizes: Sequence[int], known: Sequence[Counted]
) -> None:
    """Warn of means computed by hand whose divisors are not in proportion to the samples.

    Args:
        request: The arguments of `step`.
        targets: The target of each micro-batch.
        sizes: The number of samples of each micro-batch.
        known: The means that the criterion has computed, where they are known.
    """
    # In `MicroBatches`, the number of targets for each sample may differ on purpose.
    if isinstance(request.target, MicroBatches):
        return
    if len(known) < len(targets) or not all(each.by_hand for each in known):
        return
    divisors = [float(each.total) for each in known]
    for_each = [divisor / size for divisor, size in zip(divisors, sizes, strict=True)]
    rounding = max(_rounding(each.total) for each in known) * max(map(abs, for_each))
    if len(set(divisors)) == 1 or max(for_each) - min(for_each) <= rounding:
        return
    warnings.warn(
        "the criterion divides the losses of micro-batches by different numbers (such as their "
        "numbers of targets), but step() weights micro-batches by their numbers of samples, so the "
        "loss is not the mean over all targets; give step() and evaluate() "
        f"weight={_count(targets, divisors)}",
        stacklevel=2,
    )


def _rounding(total: Tensor) -> float:
    """Return the relative error that a sum of numbers can have in the type of `total`."""
    return 8 * torch.finfo(total.dtype).eps if total.is_floating_point() else 0.0


def _totals(targets: Sequence[Any], ignored: int, classes: Tensor | None) -> list[float]:
    """Return for each micro-batch the sum of the class weights of its targets.

    Args:
        targets: The target of each micro-batch.
        ignored: The index that the criterion ignores; its weight is 0.
        classes: The weight of each class, or `None` if all weights are 1.

    Returns:
        The sums, or an empty list if the targets are not indices on the CPU.
    """
    totals = []
    for target in targets:
        # Do not read a tensor on a GPU: the host would wait for the GPU.
        if not _is_index(target) or target.device.type != "cpu":
            return []
        weights = (target != ignored).double()
        if classes is not None:
            # The criterion itself refuses an index that is out of range.
            known = target.long().clamp(0, len(classes) - 1)
            weights = weights * classes.detach().cpu()[known]
        totals.append(float(weights.sum()))
    return totals


def _is_index(target: object) -> bool:
    """Return whether a target is a tensor of class indices, and not of class probabilities."""
    return isinstance(target, Tensor) and not target.is_floating_point()


def _count(targets: Sequence[Any], totals: Sequence[float], ignored: int | None = None) -> str:
    """Return code for the argument `weight`: a function that counts the targets of a micro-batch.

    The function must count only targets that the criterion does not ignore. The code is text for a
    warning, which a user can copy.

    A language model does not predict the first token of a sequence. So if the number of targets
    agrees with `totals` only without the first column, the code leaves this column out.

    Args:
        targets: The target of each micro-batch: all tensors, all tuples or all mappings.
        totals: How many targets the criterion has counted in each micro-batch.
        ignored: The class index that the criterion ignores. If it is not known (`None`), two values
            are tried: -100, which PyTorch's losses ignore by default, and 0, which a mask has for
            targets that do not count.
    """
    first = targets[0]
    columns: dict[str, list[Any]] = {"target": [*targets]}
    if isinstance(first, Mapping):
        for key in first:
            columns[f"target[{key!r}]"] = [target.get(key) for target in targets]
    elif isinstance(first, tuple):
        for k, parts in enumerate(zip(*targets, strict=False)):
            columns[f"target[{k}]"] = [*parts]
    for name, column in columns.items():
        for index in (-100, 0) if ignored is None else (ignored,):
            part = _counting(column, totals, index)
            if part is not None:
                return f"lambda target: ({name}{part} != {index}).sum()"
    if ignored is None:
        return "divisor, where divisor(target) is the number by which the criterion divides"
    return f"count, where count(target) is the number of targets that are not {ignored}"


def _counting(column: Sequence[Any], totals: Sequence[float], ignored: int) -> str | None:
    """Find the part of tensors in which `totals` entries are not `ignored`; return it as code.

    The result is "" for all of a tensor, and "[:, 1:]" for all but its first column. It is `None`
    if no part has these numbers of entries.

    Args:
        column: The tensor of each micro-batch.
        totals: For each micro-batch, the expected number of entries that are not `ignored`.
        ignored: The value that does not count.
    """
    if not all(isinstance(x, Tensor) for x in column):
        return None
    if totals == [float((x != ignored).sum()) for x in column]:
        return ""
    rows = all(x.dim() > 1 for x in column)
    if rows and totals == [float((x[:, 1:] != ignored).sum()) for x in column]:
        return "[:, 1:]"
    return None


def _sum_of_weights(criterion: Criterion, ignored: int) -> str:
    """Return code for the argument `weight`: a function that adds up class weights.

    The function adds up the class weights of all targets of a micro-batch that are not ignored. The
    code is text for a warning, which a user can copy.
    """
    if options_of(criterion) is None:
        classes = "class_weights"
    elif isinstance(criterion, nn.Module):
        classes = "criterion.weight"
    else:
        classes = 'criterion.keywords["weight"]'
    return f"lambda target: {classes}[target[target != {ignored}]].sum()"
