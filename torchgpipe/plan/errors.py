"""Say which layer failed when it was counted, on what, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torchgpipe.microbatch import TensorOrTensors, tensors_of

__all__ = ["naming_layer"]

NO_VALUES = ("meta tensor", "on meta", "data-dependent", "data dependent", "_local_scalar_dense", "nonzero")
"""What errors say, in small letters, where a layer asked for values on device 'meta'."""


@contextmanager
def naming_layer(which: str, value: TensorOrTensors) -> Iterator[None]:
    """Turn whatever a layer raises on this input into one line that names it.

    Raises:
        ValueError: in place of any exception.
    """
    try:
        yield
    except Exception as error:
        first, *_ = str(error).strip().splitlines() or [type(error).__name__]
        given = ", ".join(f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}" for x in tensors_of(value))
        raise ValueError(f"{which} fails on {given}: {first.rstrip('.')}; {_advice(error)}") from error


def _advice(error: Exception) -> str:
    text = str(error).lower()
    if isinstance(error, NotImplementedError) or any(words in text for words in NO_VALUES):
        return (
            "layers are counted on device 'meta', where tensors have shapes and no values: let it ask for shapes only, "
            "or find the balance with torchgpipe.balance, which runs the layers"
        )
    return "check the sample's shape and type, and whether the layer takes what the one before it puts out"
