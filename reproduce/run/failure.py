"""Turn an exception that ended a row into a status, "out of memory" or "failed", and a line for the record."""

import traceback
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from reproduce.error import Error

# Messages of the CPU allocator, the CUDA driver and CUDA libraries: they raise a plain RuntimeError.
NO_MEMORY = ("can't allocate memory", "CUDA error: out of memory", "STATUS_ALLOC_FAILED")


class Failure(NamedTuple):
    """Hold why a row failed. It does not refer to the exception, which would keep frames and their tensors alive."""

    status: Literal["out of memory", "failed"]
    reason: str


def explain(error: Exception) -> Failure:
    """Return the status and the reason for the record."""
    unnamed = isinstance(error, RuntimeError) and any(text in str(error) for text in NO_MEMORY)
    if unnamed or isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return Failure("out of memory", "out of memory")
    if isinstance(error, Error):
        return Failure("failed", str(error))
    said = str(error).strip().splitlines()
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return Failure("failed", f"{type(error).__name__}{': ' + said[0] if said else ''}{place}")
