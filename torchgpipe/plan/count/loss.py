"""Treat a criterion as one more layer, so that the planner can count or time it like a layer.

If a model's output is large, a prediction has to include the criterion. The cross entropy of a
language model, for example, can take as much time and memory as all other layers of the last stage.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Sequential

from torchgpipe.caught import shortened
from torchgpipe.layers.batches import samples
from torchgpipe.step.request import Criterion, options_of, scalar
from torchgpipe.step.targets import with_tensors
from torchgpipe.tensors.microbatch import UNCOUNTED, TensorOrTensors
from torchgpipe.trace.layer import Layers

CRITERION = "the criterion"
"""The name of the layer that calls the criterion."""


class LossLayer(Module):
    """A layer that calls a criterion on the output of a model's last layer.

    Args:
        criterion: The criterion, as for `GPipe.step`.
        target: The target of a micro-batch.
        shown: A function that converts an output to the first argument of the criterion.
    """

    def __init__(self, criterion: Criterion, target: Any, shown: Callable[[Any], Any]) -> None:
        super().__init__()
        self.criterion = criterion
        self.target = target
        self.shown = shown

    def forward(self, output: Any) -> Tensor:
        """Return the loss, as a tensor with one entry."""
        result = self.criterion(self.shown(output), self.target)
        if isinstance(result, tuple) and len(result) == 2:
            result, _ = result  # the loss, and what is to be logged
        return scalar(result).reshape(1)

    def __deepcopy__(self, known: dict[int, Any]) -> "LossLayer":
        """Return a copy of this layer. The criterion is copied only if it is a module."""
        criterion = self.criterion
        if isinstance(criterion, Module):
            criterion = copy.deepcopy(criterion, known)
        return LossLayer(criterion, self.target, self.shown)


class Loss:
    """A criterion and a target. `behind` adds them to a model as a layer, for any batch size.

    Args:
        criterion: The criterion, as for `GPipe.step`.
        target: The target of the sample.
        module: The model.
        sample: An input of the first layer.

    Raises:
        TypeError: If the criterion is not a function, or needs a target and has none.
        ValueError: If a tensor of the target does not have one entry for each sample.
    """

    def __init__(
        self, criterion: Criterion, target: Any, module: Sequential, sample: TensorOrTensors
    ) -> None:
        if isinstance(criterion, type) or not callable(criterion):
            raise TypeError(
                "criterion must be a function of an output and its target, as for step(), but got "
                + shortened(criterion)
            )
        if target is None and options_of(criterion) is not None:
            raise TypeError(
                f"{shortened(criterion)} needs a target: give the sample's target, target=…"
            )
        signature = module.signature if isinstance(module, Layers) else None
        self._criterion = criterion
        self._target = target
        self._shown = _as_it_is if signature is None else signature.structured
        self._samples = samples(sample, signature)
        if self._samples == UNCOUNTED:
            raise ValueError(
                "the sample's tensors differ in dimension 0, so the target cannot be split: plan "
                "without a criterion"
            )
        with_tensors(self._check, target)

    def _check(self, x: Tensor) -> Tensor:
        if not x.dim() or len(x) != self._samples:
            raise ValueError(
                f"every tensor of the target must have the sample's batch size, {self._samples}, "
                f"as its dimension 0, but one has the shape {tuple(x.shape)}"
            )
        return x

    def behind(self, module: Sequential, size: int, device: torch.device) -> Sequential:
        """Return the model with the criterion as one more layer.

        Args:
            module: The model's layers, which are not copied.
            size: The number of samples in a micro-batch.
            device: The device of the target.
        """

        def rows(x: Tensor) -> Tensor:
            if device.type == "meta":
                return x.new_empty((size, *x.shape[1:]), device=device)
            repeated = torch.arange(size, device=x.device) % len(x)
            return x[repeated].to(device)

        layers = OrderedDict(module._modules)
        layers[CRITERION] = LossLayer(
            self._criterion, with_tensors(rows, self._target), self._shown
        )
        longer = Sequential(layers)
        longer.training = module.training  # The layers keep their own modes.
        return longer


def _as_it_is(output: Any) -> Any:
    return output


def loss_of(
    criterion: Criterion | None, target: Any, module: Sequential, sample: TensorOrTensors
) -> Loss | None:
    """Return the `Loss` that a plan includes, or `None` if no criterion was given.

    Args:
        criterion: The criterion, as for `GPipe.step`, or `None`.
        target: The target of the sample.
        module: The model.
        sample: An input of the first layer.

    Raises:
        TypeError: If there is a target without a criterion, or `Loss` refuses the type of an
            argument.
        ValueError: If `Loss` refuses the target.
    """
    if criterion is not None:
        return Loss(criterion, target, module, sample)
    if target is not None:
        raise TypeError(
            "a target is only for a criterion: give criterion=, too, or leave out target="
        )
    return None
