"""Convert an exception that ended the training of a row (configuration) to a status and a reason.

Both are written into the record of the run.
"""

import traceback
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from reproduce.error import Error

# If memory runs out, the CPU allocator, the CUDA driver and CUDA libraries raise a plain
# RuntimeError. Its message contains one of these texts.
NO_MEMORY = ("can't allocate memory", "CUDA error: out of memory", "STATUS_ALLOC_FAILED")


class Failure(NamedTuple):
    """Why the training of a row (configuration) failed: a status and a reason for the record.

    A `Failure` does not refer to the exception, because the exception's traceback would keep the
    tensors of its frames alive.
    """

    status: Literal["out of memory", "failed"]
    reason: str


def explain(error: Exception) -> Failure:
    """Return the status and the reason of a failed row, whose training raised `error`."""
    if _is_out_of_memory(error):
        return Failure("out of memory", "out of memory")
    if isinstance(error, Error):
        return Failure("failed", str(error))
    reason = type(error).__name__
    lines = str(error).strip().splitlines()
    if lines:
        reason = f"{reason}: {lines[0]}"
    frames = traceback.extract_tb(error.__traceback__)
    if frames:
        place = frames[-1]
        reason = f"{reason} ({Path(place.filename).name}, line {place.lineno})"
    return Failure("failed", reason)


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in NO_MEMORY)
