"""Scale the losses of micro-batches, so that their sum is the loss of the mini-batch."""

from collections.abc import Callable, Sequence
from math import nan
from typing import Any, SupportsFloat

import torch
from torch import Tensor

from torchgpipe.caught import shortened
from torchgpipe.task.where import note
from torchgpipe.tensors.microbatch import UNCOUNTED


class Shares:
    """Scale each micro-batch's loss, so that the scaled losses add up to the mini-batch's loss.

    Args:
        reduction: With `"mean"`, each loss is scaled by the micro-batch's share of all samples, or
            of all weights. With `"sum"` and `"none"`, the losses stay as they are.
        weight: A function that takes the target of a micro-batch and returns the weight of its
            loss, such as the number of tokens. With `None`, the weight is the number of samples.
        sizes: The number of samples of each micro-batch.
        targets: The target of each micro-batch.

    Raises:
        TypeError: If `weight` is not a function, or does not return a number.
        ValueError: If the reduction is unknown, if a weight is given for `"sum"` or `"none"`, or if
            samples cannot be counted and there is no weight.
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
            given = shortened(reduction) if weight is None else f"{reduction!r} with a weight"
            raise ValueError(
                "reduction must be 'mean', 'sum' or 'none', and with weight= only 'mean', but got "
                + given
            )
        if weight is not None and not callable(weight):
            raise TypeError(
                "weight must be a function that takes the target of a micro-batch and returns the "
                f"weight of its loss, but got {shortened(weight)}"
            )
        if weight is None and UNCOUNTED in sizes:
            raise ValueError(
                "the samples of a micro-batch cannot be counted, because its tensors differ in "
                "dimension 0, or its target has another length; give weight=, a function that "
                "takes the target of a micro-batch and returns the weight of its loss, or give "
                "reduction='sum'"
            )
        self._counts = sizes if weight is None else _weights(weight, targets)
        self._total: Any = sum(self._counts)

    def of(self, loss: Tensor, i: int) -> Tensor:
        """Return micro-batch i's loss, scaled by its share of the sum of all weights.

        If the weight of micro-batch i is zero, return zero. The reason is that its loss can be the
        mean of no values, which is NaN, and would make all gradients NaN. But if all weights are
        zero, return NaN.
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
        """Return a gradient of micro-batch i's loss, or zeros if the weight of the loss is zero.

        This matters only for weights that are tensors. The host does not wait for their values, so
        it cannot skip the backward if a weight is zero. Instead, the gradients are set to zero on
        the device.
        """
        if grad is None or self._counts is None or not isinstance(self._total, Tensor):
            return grad
        empty = ((self._counts[i] == 0) & (self._total != 0)).to(grad.device)
        if grad.is_sparse:
            values = torch.where(empty, 0.0, grad._values())
            return torch.sparse_coo_tensor(grad._indices(), values, grad.shape)
        return torch.where(empty, 0.0, grad)


def _weights(weight: Callable[[Any], Any], targets: Sequence[Any]) -> list[Any]:
    """Return the weight of each micro-batch's loss."""
    weights = []
    for target in targets:
        try:
            weights.append(_number(weight(target)))
        except Exception as error:  # noqa: PERF203 - the note says what is missing
            if target is None:
                note(error, "weight, whose target is None: give step(criterion, input, target)")
            raise
    return weights


def _number(weight: Any) -> Any:
    """Check that a micro-batch's weight is a number or a scalar tensor, and return it.

    A tensor is converted to float64, because a sum of weights could overflow a smaller dtype. A
    tensor on the CPU becomes a number: if it had to be copied to a GPU, the host would wait.
    """
    if isinstance(weight, Tensor):
        if not weight.dim():
            return weight.item() if weight.device.type == "cpu" else weight.double()
        given = f"a tensor of shape {tuple(weight.shape)}"
    elif isinstance(weight, SupportsFloat):
        return float(weight)
    else:
        given = type(weight).__name__
    raise TypeError(
        "weight must return the weight of a micro-batch's loss, which is a number, but it returned "
        + given
    )
