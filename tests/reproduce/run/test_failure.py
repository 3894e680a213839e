"""Failures: one line, and a status that distinguishes out of memory from other errors."""

from typing import Any

import pytest
import torch

from reproduce.error import Error
from reproduce.run.failure import explain

CPU_ALLOCATOR = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"
NONE = "out of memory"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."), NONE),
        (MemoryError(), NONE),
        (RuntimeError(CPU_ALLOCATOR), NONE),
        (RuntimeError("CUDA error: out of memory"), NONE),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), NONE),
        (ValueError("first\nsecond"), "ValueError: first"),
        (ValueError(), "ValueError"),
        (Error("a.JPEG cannot be read"), "a.JPEG cannot be read"),
    ],
)
def test_of_any_kind(error: Exception, reason: str) -> None:
    assert explain(error) == ("out of memory" if reason is NONE else "failed", reason)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: torch.zeros(2) @ torch.zeros(3), "RuntimeError: inconsistent tensor size"),
        (lambda: torch.empty(2**60, dtype=torch.int8), NONE),
    ],
)
def test_what_pytorch_raises(call: Any, reason: str) -> None:
    try:
        call()
    except Exception as error:
        found = explain(error).reason
    assert found.startswith(reason)
    assert reason is NONE or found.endswith(f" (test_failure.py, line {call.__code__.co_firstlineno})")
