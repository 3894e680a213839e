"""Failures: one line, and a status that distinguishes out of memory from other errors."""

import re

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


def test_what_pytorch_raises() -> None:
    with pytest.raises(RuntimeError) as wrong:
        torch.zeros(2) @ torch.zeros(3)
    with pytest.raises(RuntimeError) as large:
        torch.empty(2**60, dtype=torch.int8)
    assert explain(large.value).reason == NONE
    place = rf"RuntimeError: inconsistent tensor size.* \(test_failure.py, line {wrong.traceback[0].lineno + 1}\)"
    assert re.fullmatch(place, explain(wrong.value).reason)
