"""Failures: one line, and a status that tells memory from all else."""

from __future__ import annotations

import pytest
import torch

from reproduce.error import Error
from reproduce.run.failure import Failure, explain

CPU_ALLOCATOR = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."),
            Failure("out of memory", "out of memory"),
        ),
        (MemoryError(), Failure("out of memory", "out of memory")),
        (RuntimeError(CPU_ALLOCATOR), Failure("out of memory", "out of memory")),
        (RuntimeError("CUDA error: out of memory"), Failure("out of memory", "out of memory")),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), Failure("out of memory", "out of memory")),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), Failure("out of memory", "out of memory")),
        (ValueError("first\nsecond"), Failure("failed", "ValueError: first")),
        (ValueError(), Failure("failed", "ValueError")),
        (Error("a.JPEG cannot be read"), Failure("failed", "a.JPEG cannot be read")),
    ],
)
def test_explain(error: Exception, failure: Failure) -> None:
    assert explain(error) == failure


def test_explain_tells_where() -> None:
    try:
        torch.zeros(2) @ torch.zeros(3)
    except RuntimeError as error:
        failure = explain(error)
    assert failure.reason.startswith("RuntimeError: inconsistent tensor size")
    assert "(test_failure.py, line " in failure.reason


def test_real_allocations_that_are_too_large_are_out_of_memory() -> None:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        torch.empty(2**60, dtype=torch.int8)
    assert explain(caught.value).status == "out of memory"
