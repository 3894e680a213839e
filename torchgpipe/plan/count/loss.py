"""Treat a criterion as one more layer, so that the planner can count or time it like a layer.

If a model's output is large, a prediction has to include the criterion. The cross entropy of a
language model, for example, can take as much time and memory as all other layers of the last stage.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Sequential

from torchgpipe.caught import shortened
from torchgpipe.layers.batches import samples
from torchgpipe.step.request import Criterion, about_class, options_of, scalar
from torchgpipe.step.targets import with_tensors
from torchgpipe.tensors.microbatch import UNCOUNTED, MicroBatches, TensorOrTensors
from torchgpipe.trace.layer import Layers
from torchgpipe.trace.parts import tensors_in

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
        """Return the loss, as a tensor with one entry.

        Raises:
            TypeError: If the criterion does not return a scalar tensor.
            ValueError: If the output is trained, but the loss has no graph.
        """
        result = self.criterion(self.shown(output), self.target)
        if isinstance(result, tuple) and len(result) == 2:
            result, _ = result  # the loss, and what is to be logged
        loss = scalar(result)
        trained = torch.is_grad_enabled() and any(x.requires_grad for x in tensors_in(output))
        if trained and not loss.requires_grad:
            raise ValueError(
                "its loss has no graph: it does not compute the loss from the output, or uses "
                "detach() or no_grad()"
            )
        return loss.reshape(1)

    def __deepcopy__(self, known: dict[int, Any]) -> "LossLayer":
        """Return a copy of this layer. The criterion is copied only if it is a module."""
        return LossLayer(_copied(self.criterion, known), self.target, self.shown)


def _copied(criterion: Criterion, known: dict[int, Any] | None = None) -> Criterion:
    return copy.deepcopy(criterion, known) if isinstance(criterion, Module) else criterion


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
        if isinstance(criterion, type):
            raise TypeError(about_class(criterion))
        if not callable(criterion):
            raise TypeError(
                "criterion must be a function of an output and its target, as for step(), but got "
                + shortened(criterion)
            )
        if target is None and options_of(criterion) is not None:
            name = getattr(criterion, "__name__", type(criterion).__name__)
            raise TypeError(f"{name} needs a target: give the sample's target, target=…")
        if isinstance(target, MicroBatches):
            raise TypeError("target must be the target of the sample, but got MicroBatches")
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
            return x.detach()[repeated].to(device)

        layers = OrderedDict(module._modules)
        target = with_tensors(rows, self._target)
        layers[CRITERION] = LossLayer(_copied(self._criterion), target, self._shown)
        longer = Sequential(layers)
        longer.training = module.training  # The layers keep their own modes.
        return longer


def _as_it_is(output: Any) -> Any:
    return output


@contextmanager
def gradients_kept(module: Module) -> Iterator[None]:
    """Within this context, parameters have no gradients; afterwards, they have their earlier ones.

    The planner runs copies of the layers. But a criterion can use parameters of the model itself,
    and then its backward gives gradients to these parameters.
    """
    before = [(p, p.grad) for p in module.parameters()]
    for p, _ in before:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in before:
            p.grad = grad


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
