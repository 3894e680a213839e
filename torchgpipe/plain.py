"""Plain values as text, in which processes tell each other what they have: nothing of it is run when it is read.

The text is JSON. What that has no word for is an object with one entry, such as `{"tuple": [1,
2]}`.
"""

import json
from typing import Any

import torch
from torch import Tensor

_TAGGED: dict[type, Any] = {
    tuple: (list, tuple),
    set: (list, set),
    dict: (lambda x: [*x.items()], dict),
    bytes: (bytes.hex, bytes.fromhex),
    complex: (lambda x: [x.real, x.imag], lambda parts: complex(*parts)),
}
"""What JSON lacks: how it becomes what JSON has, and how that becomes it again."""

_BACK = {kind.__name__: back for kind, (_, back) in _TAGGED.items()}


def packed(value: Any) -> Tensor:
    """Return a plain value as bytes of text, in few lengths: ranks remember the shapes that they have sent."""
    try:
        text = json.dumps(_tagged(value)).encode()
    except (ValueError, RecursionError) as error:
        raise TypeError(f"a value cannot be told to other ranks: {error}") from None
    return torch.frombuffer(bytearray(text.ljust(1 << len(text).bit_length())), dtype=torch.uint8)


def unpacked(packed: Tensor | None) -> Any:
    """Return the value that was packed."""
    assert packed is not None
    text = bytes(packed.cpu().numpy())
    return json.loads(
        text, object_hook=lambda tagged: next(_BACK[kind](x) for kind, x in tagged.items())
    )


def _tagged(x: Any) -> Any:
    if type(x) is list:
        return [*map(_tagged, x)]
    if type(x) in _TAGGED:
        return {type(x).__name__: _tagged(_TAGGED[type(x)][0](x))}
    if x is None or type(x) in (bool, int, float, str):
        return x
    raise TypeError(
        "ranks tell each other only None, numbers, text, bytes, and tuples, lists, sets and "
        f"dictionaries of these, not a {type(x).__name__}"
    )
