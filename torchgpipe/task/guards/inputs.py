"""Raise an error if a task's input is changed in place, because its recomputation needs the input.

What goes wrong without this guard: a layer changes the task's input in place, as
`nn.ReLU(inplace=True)` does. The recomputation would start from the changed input.

PyTorch counts in-place changes of a tensor in its version counter. The guard reads the counters of
the inputs before the forward, after the forward, and before the recomputation. If a counter has
changed, an error is raised. There is one exception: if the first layer of a partition has
`inplace=True`, it gets a copy of the input.

What it costs: the version counter of each input is read three times in each task. If the first
layer works in place, its input is copied in the first pass and in the recomputation.
"""

from __future__ import annotations

from torch import Tensor, nn

from torchgpipe.task.guards.guard import Guard, GuardedTask
from torchgpipe.tensors.item import versions
from torchgpipe.tensors.microbatch import Flat, Form, carrying


class KeptInputs(Guard):
    """The guard that raises an error if a task's input is changed in place.

    A recomputation starts from the inputs of the task's forward. If one of them was changed in
    place since then, the recomputation would compute other outputs than the forward.

    Args:
        index: The index of the partition.
        partition: The layers.
    """

    def __init__(self, index: int, partition: nn.Module) -> None:
        self._index = index
        self.begins_in_place = begins_in_place(partition)

    def for_layers(self, inputs: Flat, form: Form) -> Flat:
        """Return the tensors that the layers get as inputs in a forward or a recomputation.

        These are the task's inputs. But if the first layer changes its input in place, the layers
        get a copy of this input, because a later recomputation needs the unchanged input.

        Args:
            inputs: The inputs of the task.
            form: The form of the micro-batch.
        """
        x = inputs[0] if form is Tensor else None
        if x is None or not self.begins_in_place:
            return inputs
        return (carrying(x.detach().clone(), x), *inputs[1:])

    def before_first_pass(self, task: GuardedTask) -> None:
        """Record the version counter of each input."""
        task.noted[self] = versions(task.inputs or ())

    def after_first_pass(self, task: GuardedTask, outputs: Flat) -> None:
        """Raise `RuntimeError` if the task's forward has changed an input in place.

        The recomputation needs the inputs as they were before the forward.
        """
        if versions(task.inputs or ()) != task.noted[self]:
            raise RuntimeError(
                f"partition {self._index} changed its input in place, so a recomputation from that "
                "input would compute another output; make its first layer out-of-place "
                "(inplace=False) or use checkpoint='never'"
            )

    def before_recomputation(self, task: GuardedTask) -> None:
        """Raise `RuntimeError` if an input has been changed in place since the task's forward."""
        if versions(task.inputs or ()) != task.noted[self]:
            raise RuntimeError(
                f"an input of partition {self._index} was changed in place after its forward, so a "
                "recomputation would start from other values; do not change inputs before "
                "backward(), make the layer that changes its input out-of-place (inplace=False), "
                "or use checkpoint='never'"
            )


def begins_in_place(partition: nn.Module) -> bool:
    """Return whether the first layer of a partition has `inplace=True`."""
    layers = [partition]
    while layers and isinstance(layers[0], (nn.Sequential, nn.Identity, nn.Flatten)):
        layers = [*layers[0].children(), *layers[1:]]
    return bool(layers) and getattr(layers[0], "inplace", False) is True


def check_attributes(index: int, outputs: Flat) -> None:
    """Raise `RuntimeError` if an output has a Python attribute that is a tensor requiring grad.

    The pipeline hands such an attribute on to the next partition, but does not send its gradient
    back.

    Args:
        index: The index of the partition.
        outputs: The outputs of the partition.
    """
    for y in outputs:
        attributes = {} if y is None else y.__dict__
        for name, value in attributes.items():
            if isinstance(value, Tensor) and value.requires_grad:
                if y is not None and y.is_nested:
                    raise RuntimeError(
                        f"partition {index} returns a nested tensor that it has made from another "
                        "tensor, whose gradient would be lost; return a padded tensor, and make "
                        "the nested tensor where it is used, such as in the criterion"
                    )
                raise RuntimeError(
                    f"attribute {name!r} of an output of partition {index} is a tensor that "
                    "requires grad, but gradients of attributes are lost between partitions; "
                    "return the tensor as a separate output, or detach() it"
                )
