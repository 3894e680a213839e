"""Convert plain Python values to JSON text and back, to send them to other processes.

JSON is safer than `pickle`, because reading the text runs no code. A value of a type that JSON does
not have is written as an object with one entry: for example, `(1, 2)` as `{"tuple": [1, 2]}`.
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
    """Convert a plain Python value to JSON text, and return the text as a tensor of bytes.

    The text is padded with spaces to a length that is a power of two. Ranks remember the shapes of
    all tensors that they have sent. Thanks to the padding, there are only a few shapes.

    Raises:
        TypeError: If the value has a type that cannot be converted, or cannot be written as JSON.
    """
    try:
        text = json.dumps(_tagged(value)).encode()
    except (ValueError, RecursionError) as error:
        raise TypeError(f"a value cannot be told to other ranks: {error}") from None
    length = 1 << len(text).bit_length()
    return torch.frombuffer(bytearray(text.ljust(length)), dtype=torch.uint8)


def unpacked(packed: Tensor | None) -> Any:
    """Convert a tensor of bytes, which `packed` has made, back to the Python value."""
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
