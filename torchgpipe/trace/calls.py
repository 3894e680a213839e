"""What a recording consists of: calls, and what stands for tensors in their arguments."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torchgpipe.trace.parts import Slots

CONSTANTS = "traced constants"
"""The part of a name that tensors get which are neither parameters nor buffers; no module has such a name."""


@dataclass(frozen=True)
class Value:
    """A tensor that is an input, or that a call returned, by its number."""

    number: int


@dataclass(frozen=True)
class Held:
    """A parameter, a buffer, or another tensor that the module holds, by its name."""

    name: str


@dataclass(frozen=True)
class Device:
    """The device of the module, wherever that is."""


@dataclass
class Call:
    """One call: of a function, or of the submodule of that name.

    Attributes:
        args, kwargs: with `Value`, `Held` and `Device` in them.
        outputs: the numbers of the tensors that it returns, in their order.
        caller: the name of the module whose forward calls.
        since: the earliest call that must run on the same device, as this one changes in place what that one made; -1
            for an input.
        grad: whether gradients are recorded.
        where: file and line.
    """

    target: Callable[..., Any] | str
    args: Any
    kwargs: Any
    outputs: tuple[int, ...]
    caller: str
    since: int
    grad: bool
    where: tuple[str, int]


@dataclass
class Recording:
    """What a module did with inputs of one batch size."""

    size: int
    calls: list[Call]
    shapes: list[tuple[int, ...]]
    """Of all values, by number; the inputs come first."""
    result: tuple[Any, Slots]
    """What it returned, and the slots in it."""
    outputs: tuple[int, ...]
    """The values in `result`."""
    extra: dict[str, Tensor]
    """Tensors by name that are neither parameters nor buffers."""
    state: str = ""
    """In what it was unlike the first recordings, such as the mode."""
