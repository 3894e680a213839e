"""Put an exception that ended a row into a status and one line: out of memory is a result, all else a failure."""

import traceback
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from reproduce.error import Error


class Failure(NamedTuple):
    """Say how a row ended that did not succeed. It keeps no exception, and so no frame and no tensor, alive."""

    status: Literal["out of memory", "failed"]
    reason: str


# How the CPU's allocator, the CUDA driver, and CUDA's libraries say it, in errors of no type of their own.
NO_MEMORY = ("can't allocate memory", "CUDA error: out of memory", "STATUS_ALLOC_FAILED")


def explain(error: Exception) -> Failure:
    """Return what to write into a record about `error`."""
    unnamed = isinstance(error, RuntimeError) and any(text in str(error) for text in NO_MEMORY)
    if unnamed or isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return Failure("out of memory", "out of memory")
    if isinstance(error, Error):
        return Failure("failed", str(error))
    said = str(error).strip().splitlines()
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return Failure("failed", f"{type(error).__name__}{': ' + said[0] if said else ''}{place}")
