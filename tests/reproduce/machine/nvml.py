"""A stand-in for NVML, the C library that reads the states of NVIDIA GPUs."""

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

NOT_SUPPORTED = 3
"""The number that NVML returns if a GPU cannot tell something."""


class Nvml:
    """A fake C library. As in NVML, a function writes its answer to where its last argument points.

    Args:
        tell: Maps the name of each C function to a Python function. The Python function takes all
            arguments but the last, and returns the answer. If it raises `LookupError`, the C
            function returns an error code.
    """

    def __init__(self, tell: Mapping[str, Callable[..., Any]]) -> None:
        for name, function in tell.items():
            setattr(self, name, _in_c(function))

    def nvmlSystemGetDriverVersion(self, text: Any, length: int) -> int:
        text.value = b"575.57.08"
        return 0


def _as_int(x: Any) -> Any:
    """Cut a Python `int` to the 32 bits of a C `int`. Return any other value unchanged."""
    return ctypes.c_int(x).value if isinstance(x, int) else x


def _in_c(tell: Callable[..., Any]) -> Callable[..., int]:
    def function(*arguments: Any) -> int:
        *given, place = arguments
        plain = [x.value if isinstance(x, ctypes.c_void_p) else _as_int(x) for x in given]
        try:
            _write(place._obj, tell(*plain))
        except LookupError:
            return NOT_SUPPORTED
        return 0

    return function


def _write(place: Any, told: Any) -> None:
    if isinstance(place, ctypes.Structure):
        for field, value in zip(place._fields_, told, strict=True):
            setattr(place, field[0], value)
    else:
        place.value = told
