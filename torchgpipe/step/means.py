"""Warn if a criterion's loss is not the mean over the samples of a micro-batch.

The loss of a mini-batch is the mean of the micro-batches' losses, weighted by their numbers of
samples. This is wrong if a criterion sums, ignores some targets, weights classes, or divides by the
number of targets that a mask has chosen.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.step.counted import Counted
from torchgpipe.step.request import Criterion, StepRequest, options_of
from torchgpipe.tensors.microbatch import MicroBatches


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
    elif known or "ignore_index" in options:
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
    class_weights = options.get("weight")
    weighted = class_weights is not None
    rounding = 1e-6  # the same weights in another order can have a slightly different sum
    totals: list[float] = []
    numbers: list[int] = []
    if len(known) == len(targets):
        index, weighted = known[0].ignored, known[0].class_weights
        rounding = _rounding(known[0].total)
        totals = [float(each.total) for each in known]
        numbers = [each.number for each in known]
        if not isinstance(request.target, MicroBatches):  # whose lengths may differ on purpose
            numbers = [*sizes]
    elif "ignore_index" in options:
        totals = _totals(targets, index, class_weights)
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


def _totals(targets: Sequence[Any], ignored: int, class_weights: Tensor | None) -> list[float]:
    """Return for each micro-batch the sum of the class weights of its targets.

    Args:
        targets: The target of each micro-batch.
        ignored: The index that the criterion ignores; its weight is 0.
        class_weights: The weight of each class, or `None` if all weights are 1.

    Returns:
        The sums, or an empty list if the targets are not indices on the CPU.
    """
    totals = []
    for target in targets:
        # Do not read a tensor on a GPU: the host would wait for the GPU.
        if not _is_index(target) or target.device.type != "cpu":
            return []
        weights = (target != ignored).double()
        if class_weights is not None:
            # The criterion itself refuses an index that is out of range.
            known = target.long().clamp(0, len(class_weights) - 1)
            weights = weights * class_weights.detach().cpu()[known]
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
