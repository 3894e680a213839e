"""Convert plain Python values to JSON text and back, to send them to other processes.

Unlike `pickle`, reading the text runs no code. A type that JSON does not have is written as an
object with one entry: for example, `(1, 2)` is written as `{"tuple": [1, 2]}`.
"""

import json
from typing import Any

import torch
from torch import Tensor

_TO_JSON: dict[type, Any] = {
    tuple: list,
    set: list,
    dict: lambda x: list(x.items()),
    bytes: bytes.hex,
    complex: lambda x: [x.real, x.imag],
}
"""For each type that JSON does not have: a function that converts a value to a JSON type."""

_FROM_JSON: dict[str, Any] = {
    "tuple": tuple,
    "set": set,
    "dict": dict,
    "bytes": bytes.fromhex,
    "complex": lambda parts: complex(*parts),
}
"""For each name of such a type: a function that converts the JSON value back."""


def packed(value: Any) -> Tensor:
    """Return a plain value as JSON text, in a tensor of bytes.

    The text is padded with spaces to a length that is a power of two. Ranks remember every shape
    that they have sent, so there should be few different shapes.

    Raises:
        TypeError: If the value is no plain value, or cannot be written as JSON.
    """
    try:
        text = json.dumps(_tagged(value)).encode()
    except (ValueError, RecursionError) as error:
        raise TypeError(f"a value cannot be told to other ranks: {error}") from None
    length = 1 << len(text).bit_length()
    return torch.frombuffer(bytearray(text.ljust(length)), dtype=torch.uint8)


def unpacked(packed: Tensor | None) -> Any:
    """Return the value that `packed` has converted to a tensor."""
    assert packed is not None
    text = bytes(packed.cpu().numpy())
    return json.loads(text, object_hook=_untagged)


def _untagged(tagged: dict[str, Any]) -> Any:
    ((kind, x),) = tagged.items()
    return _FROM_JSON[kind](x)


def _tagged(x: Any) -> Any:
    if type(x) is list:
        return [_tagged(each) for each in x]
    if type(x) in _TO_JSON:
        return {type(x).__name__: _tagged(_TO_JSON[type(x)](x))}
    if x is None or type(x) in (bool, int, float, str):
        return x
    raise TypeError(
        "ranks tell each other only None, numbers, text, bytes, and tuples, lists, sets and "
        f"dictionaries of these, not a {type(x).__name__}"
    )
