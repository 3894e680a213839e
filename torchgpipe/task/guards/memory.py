"""Memory that tasks share: a change in place that a recomputation, or another partition, would not see is refused.

What goes wrong without it: the first layer of a partition is `nn.ReLU(inplace=True)`. Its first pass changes the task's
input, and the recomputation would start from the changed one.
"""

from torch import Tensor, nn

from torchgpipe.tensors.item import versions
from torchgpipe.tensors.microbatch import Flat, Form, carrying


class KeptInputs:
    """The inputs of a checkpointed task on partition `index`, which its recomputation will start from."""

    __slots__ = ("_index", "_versions", "form", "inputs")

    def __init__(self, index: int, inputs: Flat, form: Form) -> None:
        self._index = index
        self.inputs = inputs
        self.form = form
        self._versions = versions(inputs)

    def after_first_pass(self) -> None:
        """Raise `RuntimeError` if the first pass has changed an input in place."""
        if versions(self.inputs) != self._versions:
            raise RuntimeError(
                f"partition {self._index} changed its input in place, so recomputing it from that input would "
                "give something else; make its first layer out-of-place (inplace=False) or use checkpoint='never'"
            )

    def before_recomputation(self) -> None:
        """Raise `RuntimeError` if an input has been changed in place since the first pass."""
        if versions(self.inputs) != self._versions:
            raise RuntimeError(
                f"an input of partition {self._index} was changed in place after its forward, so a recomputation "
                "would start from other values; do not change inputs before backward(), and make a layer that does "
                "so out-of-place (inplace=False), or use checkpoint='never'"
            )


def spared(inputs: Flat, form: Form) -> Flat:
    """Return the inputs, with a copy of the micro-batch where that is a tensor."""
    x = inputs[0] if form is Tensor else None
    return inputs if x is None else (carrying(x.detach().clone(), x), *inputs[1:])


def begins_in_place(partition: nn.Module) -> bool:
    """Return whether the first layer says, by its attribute `inplace`, that it changes its input in place."""
    layers = [partition]
    while layers and isinstance(layers[0], (nn.Sequential, nn.Identity, nn.Flatten)):
        layers = [*layers[0].children(), *layers[1:]]
    return bool(layers) and getattr(layers[0], "inplace", False) is True


def check_attributes(index: int, outputs: Flat) -> None:
    """Raise `RuntimeError` if an attribute of an output has a graph, which ends between partitions."""
    for y in outputs:
        for name, value in y.__dict__.items() if y is not None and y.__dict__ else ():
            if isinstance(value, Tensor) and value.requires_grad:
                raise RuntimeError(
                    f"attribute {name!r} of an output of partition {index} is a tensor that takes a "
                    "gradient, which is lost between partitions; return it as an output of its own, or detach() it"
                )
