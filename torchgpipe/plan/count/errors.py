"""Say which layer failed when it was counted, on what, and what to do."""

from collections.abc import Iterator
from contextlib import contextmanager

from torchgpipe.caught import caught
from torchgpipe.tensors.microbatch import TensorOrTensors, tensors_of

ADVICE = (
    "check the sample's shape and type; layers are counted on device 'meta', where tensors have no values, so one that "
    "needs values cannot be: find the balance with torchgpipe.balance, which runs the layers"
)


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
        raise ValueError(f"{which} fails on {given}: {first.rstrip('.')}; {ADVICE}") from caught(error)
