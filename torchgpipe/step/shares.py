"""Weigh the losses of micro-batches, so that their sum is the loss of the mini-batch."""

import warnings
from collections.abc import Callable, Sequence
from math import nan
from typing import Any, SupportsFloat

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, nll_loss

from torchgpipe.step.request import Criterion, StepRequest
from torchgpipe.tensors.microbatch import UNCOUNTED


class Shares:
    """Scale each micro-batch's loss, so that the scaled losses add up to the mini-batch's loss.

    Args:
        reduction: `"mean"` scales each loss by the micro-batch's number of samples, or by `weight`.
            `"sum"` and `"none"` leave the losses as they are.
        weight: A function that returns the weight of a micro-batch, given its target.
        sizes: The number of samples of each micro-batch.
        targets: The target of each micro-batch.

    Raises:
        TypeError: The weight is not a function, or does not return a number.
        ValueError: The reduction is unknown, or a weight is given for `"sum"` or `"none"`; or
            samples cannot be counted, and there is no weight.
    """

    def __init__(
        self,
        reduction: str,
        weight: Callable[[Any], Any] | None,
        sizes: Sequence[int],
        targets: Sequence[Any],
    ) -> None:
        self._counts: Sequence[Any] | None = None
        if reduction in ("sum", "none") and weight is None:
            return
        if reduction != "mean":
            given = repr(reduction) if weight is None else f"{reduction!r} with a weight"
            raise ValueError(
                "reduction must be 'mean', 'sum' or 'none', or only 'mean' if there is a weight, "
                "but got " + given
            )
        if weight is not None and not callable(weight):
            raise TypeError(
                "weight must be a function that returns the weight of a micro-batch's loss, given "
                f"its target, but got {weight!r}"
            )
        if weight is None and UNCOUNTED in sizes:
            raise ValueError(
                "the samples of a micro-batch cannot be counted, because its tensors differ in "
                "dimension 0; give weight=, a function that returns the weight of a micro-batch's "
                "loss, given its target, or reduction='sum'"
            )
        self._counts = sizes if weight is None else [_number(weight(target)) for target in targets]
        self._total: Any = sum(self._counts)

    def of(self, loss: Tensor, i: int) -> Tensor:
        """Return micro-batch i's loss, scaled by its weight divided by the sum of all weights.

        If the weight of micro-batch i is zero, return zero: its loss can be NaN, the mean of no
        values, and would make the gradients NaN. But if all weights are zero, return NaN.
        """
        if self._counts is None:
            return loss
        if isinstance(self._total, Tensor):
            part = (self._counts[i] / self._total).to(loss)
            return torch.where(part == 0, 0.0, loss * part)
        if not self._total:
            return loss * nan
        if not self._counts[i]:
            return torch.zeros_like(loss)
        share: float = self._counts[i] / self._total
        return loss * share

    def masked(self, grad: Tensor | None, i: int) -> Tensor | None:
        """Return a gradient of micro-batch i's loss, or zeros if the weight of i is zero.

        This is for weights that are tensors. The host does not wait for their values, so it cannot
        skip the backward if a weight is zero. Instead, the gradients are made zero on the device.
        """
        if grad is None or self._counts is None or not isinstance(self._total, Tensor):
            return grad
        empty = ((self._counts[i] == 0) & (self._total != 0)).to(grad.device)
        if grad.is_sparse:
            values = torch.where(empty, 0.0, grad._values())
            return torch.sparse_coo_tensor(grad._indices(), values, grad.shape)
        return torch.where(empty, 0.0, grad)


def _number(weight: Any) -> Any:
    """Return a micro-batch's weight. A tensor becomes double: small types overflow in a sum."""
    if isinstance(weight, Tensor):
        if not weight.dim():
            return weight.double()
        given = f"a tensor of shape {tuple(weight.shape)}"
    elif isinstance(weight, SupportsFloat):
        return weight
    else:
        given = type(weight).__name__
    raise TypeError(
        "weight must return a number for each micro-batch, the weight of its loss, but it returned "
        + given
    )


def warn_of_other_means(request: StepRequest, targets: Sequence[Any]) -> None:
    """Warn if options of the criterion do not fit a mean over all samples.

    The options are `reduction`, `ignore_index` and class weights. They fit only if the criterion's
    loss is the mean over the samples of a micro-batch.
    """
    if request.reduction != "mean" or len(targets) < 2:
        return
    options = options_of(request.criterion)
    if options.get("reduction") == "sum":
        warnings.warn(
            'the criterion has reduction="sum", but micro-batches are put together as means; give '
            'reduction="sum" to step() and evaluate(), too',
            stacklevel=2,
        )
        return
    index, classes = options.get("ignore_index"), options.get("weight")
    if index is None or request.weight is not None:
        return
    means = _mean_weights(targets, index, classes)
    # The same weights in another order can have a slightly different mean.
    if not means or max(means) - min(means) <= 1e-6 * max(means):
        return
    if classes is None:
        warnings.warn(
            "micro-batches have different shares of targets that the criterion ignores, but each "
            "counts by its samples; for the mean over what is not ignored, give step() and "
            f"evaluate() weight=lambda target: (target != {index}).sum()",
            stacklevel=2,
        )
        return
    is_module = isinstance(request.criterion, nn.Module)
    given = "criterion.weight" if is_module else 'criterion.keywords["weight"]'
    warnings.warn(
        "micro-batches have targets of different class weights, but each counts by its samples; "
        "for the weighted mean over all targets, give step() and evaluate() "
        f"weight=lambda target: {given}[target[target != {index}]].sum()",
        stacklevel=2,
    )


def _mean_weights(targets: Sequence[Any], ignored: int, classes: Tensor | None) -> list[float]:
    """Return the mean weight of each target's class indices.

    Args:
        targets: The target of each micro-batch.
        ignored: The index that the criterion ignores; its weight is 0.
        classes: The weight of each class, or `None` if all weights are 1.

    Returns:
        The means, or an empty list if the targets are not indices on the CPU.
    """
    means = []
    for target in targets:
        # Do not read a tensor on a GPU: the host would wait for the GPU.
        if not isinstance(target, Tensor) or target.device.type != "cpu":
            return []
        # Targets that are not indices are probabilities. The criterion ignores none of them.
        if target.is_floating_point():
            return []
        if not target.numel():
            continue
        weights = (target != ignored).double()
        if classes is not None:
            # The criterion itself refuses an index that is out of range.
            known = target.long().clamp(0, len(classes) - 1)
            weights = weights * classes.detach().cpu()[known]
        means.append(float(weights.mean()))
    return means


def options_of(criterion: Criterion) -> dict[str, Any]:
    """Return the options of a PyTorch criterion, such as `ignore_index`, by their names.

    The criterion can be a loss module, a function of `torch.nn.functional`, or a `partial` of such
    a function. For any other criterion, return an empty dictionary.
    """
    if isinstance(criterion, nn.Module) and type(criterion).__module__ == "torch.nn.modules.loss":
        return {**vars(criterion), **criterion._buffers}
    function = getattr(criterion, "func", criterion)
    if getattr(function, "__module__", None) != "torch.nn.functional":
        return {}
    default = {"ignore_index": -100} if function in (cross_entropy, nll_loss) else {}
    return {**default, **getattr(criterion, "keywords", {})}
