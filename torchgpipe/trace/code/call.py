"""One call that was recorded in a module's forward, and the placeholders in its arguments."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class Value:
    """A placeholder in recorded arguments for an input of the module, or for a result of a call.

    Its `number` says which tensor this is. The inputs of the module have the first numbers, and the
    tensors that calls return have the next ones.
    """

    number: int


@dataclass(frozen=True)
class Held:
    """A placeholder in recorded arguments for a parameter, a buffer, or a constant tensor.

    Its `name` is the tensor's name in the module. A constant tensor has no name in the module, so
    it gets a new one.
    """

    name: str


@dataclass(frozen=True)
class Device:
    """A placeholder in recorded arguments for the device that the module is on."""


class Call(NamedTuple):
    """One call of a function or of a submodule that was recorded in a module's forward.

    The inputs of the module, and all tensors that its calls return, are numbered in order.

    Attributes:
        target: The function, or the submodule's name.
        args: The positional arguments. Placeholders (`Value`, `Held`, `Device`, `Size`, `ByMode`)
            replace tensors, the module's device, numbers that depend on the batch size or on
            lengths, and values that depend on the mode.
        kwargs: The keyword arguments, with the same placeholders.
        outputs: The numbers of the tensors that the call returns, in order.
        grad: Whether gradients are enabled during the call.
        result: The structure of what the call returns: a number for each tensor, a tuple of numbers
            for each tuple or list, and `None` for each value that is no tensor. If there are other
            structures, such as dictionaries, the whole `result` is `None`.
        spent: The numbers of the tensors that the layer frees after this call, because none of its
            later calls uses them.
        caller: The name of the module whose forward makes the call.
        since: The index of the first call that has to be in one layer with this call. If this call
            changes a tensor in place, it is the index of the call that made the tensor, or -1 if
            the tensor is an input. Otherwise, it is the index of this call itself.
        where: The file and line of the call.
    """

    target: Callable[..., Any] | str
    args: Any
    kwargs: Any
    outputs: tuple[int, ...]
    grad: bool
    result: Any = None
    spent: tuple[int, ...] = ()
    caller: str = ""
    since: int = -1
    where: tuple[str, int] = ("", 0)


def result_of(value: Any, outputs: Sequence[int]) -> Any:
    """Return the structure of a call's result, in which a number stands for each tensor.

    Args:
        value: The result of the call.
        outputs: The numbers of the tensors in the result, in order.

    Returns:
        The structure, as in `Call.result`. `None` if a tensor is in another structure than a tuple
        or a list, such as in a dictionary.
    """
    numbers = iter(outputs)
    found = _numbered(value, numbers)
    return found if next(numbers, None) is None else None


def _numbered(value: Any, numbers: Iterator[int]) -> Any:
    if isinstance(value, Tensor):
        return next(numbers)
    if isinstance(value, tuple | list):
        found = tuple([_numbered(x, numbers) for x in value])
        # How many other values there are may depend on the batch size.
        return found if any(part is not None for part in found) else None
    return None
