"""Describe a layer of a traced module without names and numbers, to compare it with other layers.

Two layers that do the same have equal descriptions, although their submodules have different names
in the traced module, and the tensors that they compute have different numbers.
"""

from typing import Any

from torch import Tensor

from torchgpipe.trace.code.call import Held, Value
from torchgpipe.trace.layer import Layer

NAMED = {
    "name",
    "_inputs",
    "_outputs",
    "_steps",
    "_sizes_read",
    "_text",
    "_calls",
    "_namespaces",
    "_stashed",
    "_popped",
    "_skips",
    "_modules",
    "_parameters",
    "_buffers",
    "_non_persistent_buffers_set",
}
"""The attributes of a layer that have names or numbers of the traced module in them."""


def unnamed(layer: Layer) -> object:
    """Return a description of what a layer does: its calls and further attributes, without names.

    If a call runs a submodule of the layer, the call has the submodule's name. In the description,
    the submodule itself stands in place of this name. In the arguments of calls, the placeholders
    of tensors (`Value` and `Held`) stay as they are.
    """
    steps: list[Any] = []
    for call in layer._steps:
        made: Any = call.target
        if isinstance(made, str):
            made = _at(layer, made)
        outputs, spent = [*map(Value, call.outputs)], [*map(Value, call.spent)]
        steps.append((made, call.args, call.kwargs, call.grad, outputs, spent))
    popped = [number for _, number in layer._popped]
    in_order_of_names = [number for _, number in sorted(layer._popped, key=lambda pop: pop[0].name)]
    stashed = [number for _, number in layer._stashed]
    ends = [layer._inputs, popped, in_order_of_names, layer._outputs, stashed]
    numbers = [[*map(Value, end)] for end in ends]
    sizes = [(read._replace(value=0), Value(read.value)) for read in layer._sizes_read]
    other = {key: value for key, value in vars(layer).items() if key not in NAMED}
    return numbers, sizes, steps, [*layer.parameters()], [*layer.buffers()], other


def tensor_of(layer: Layer, held: Held) -> Tensor:
    """Return the parameter or buffer of a layer for which the placeholder `held` stands."""
    path, _, last = held.name.rpartition(".")
    holder = _at(layer, path)
    found: Any = {**holder._buffers, **holder._parameters}[last]
    assert isinstance(found, Tensor)
    return found


def _at(layer: Layer, path: str) -> Any:
    """Return a layer's submodule at a path such as "layer1.0"; the layer if the path is empty."""
    module: Any = layer
    for part in path.split(".") if path else ():
        module = module._modules[part]
    return module
