"""Failures: one line, and a status that tells memory from all else."""

from __future__ import annotations

import pytest
import torch

from reproduce.error import Error
from reproduce.run.failure import Failure, explain

CPU_ALLOCATOR = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."),
        MemoryError(),
        RuntimeError(CPU_ALLOCATOR),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    ],
)
def test_out_of_memory(error: Exception) -> None:
    assert explain(error) == Failure("out of memory", "out of memory")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("first\nsecond"), "ValueError: first"),
        (ValueError(), "ValueError"),
        (Error("a.JPEG cannot be read"), "a.JPEG cannot be read"),
    ],
)
def test_all_else_is_a_failure(error: Exception, reason: str) -> None:
    assert explain(error) == Failure("failed", reason)


def test_what_pytorch_raises() -> None:
    def multiply() -> None:
        torch.zeros(2) @ torch.zeros(3)

    with pytest.raises(RuntimeError) as caught:
        multiply()
    reason = explain(caught.value).reason
    assert reason.startswith("RuntimeError: inconsistent tensor size")
    assert reason.endswith(f" (test_failure.py, line {multiply.__code__.co_firstlineno + 1})")
    with pytest.raises((RuntimeError, MemoryError)) as too_large:
        torch.empty(2**60, dtype=torch.int8)
    assert explain(too_large.value).status == "out of memory"
