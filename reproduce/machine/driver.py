"""Ask NVML about CUDA devices.

NVML is a C library that comes with NVIDIA's driver. A call takes less than a millisecond, and does
not initialize any CUDA device.
"""

import ctypes
import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

LIBRARY = "libnvidia-ml.so.1"
CLOCK_SM, CLOCK_MEMORY = 1, 2  # the constants for these two types of clock in nvml.h
LONGEST_TEXT = 80
"""The length that nvml.h names for the text of the driver's version."""


class Utilization(ctypes.Structure):
    """How busy a GPU was in its last period of 1/6 s to 1 s, as NVML reports it.

    Attributes:
        gpu: The percentage of the period in which any kernel ran.
        memory: The percentage of the period in which the memory was read or written.
    """

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


@functools.cache
def _nvml() -> Any:
    """Return the initialized NVML library, or None if there is no NVIDIA driver."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None


def ask(function: str, *arguments: object, kind: type[Any] = ctypes.c_uint) -> Any:
    """Call a function of NVML that tells one value, and return this value.

    If the value is a C structure, return the structure. If the call fails, or if there is no
    driver, return None.

    Args:
        function: The name of the function in nvml.h.
        arguments: The function's arguments before the last one, which points to the value.
        kind: The C type of the value.
    """
    call = getattr(_nvml(), function, None)  # an older driver lacks newer functions
    if call is None:
        return None
    value = kind()
    failed = call(*arguments, ctypes.byref(value))
    if failed:
        return None
    return value if isinstance(value, ctypes.Structure) else value.value


def driver_version() -> str | None:
    """Return the version of NVIDIA's driver, such as "580.65.06"; None if there is no driver."""
    library = _nvml()
    if library is None:
        return None
    text = ctypes.create_string_buffer(LONGEST_TEXT)
    failed = library.nvmlSystemGetDriverVersion(text, LONGEST_TEXT)
    return None if failed else text.value.decode()


def numbered(index: int) -> ctypes.c_void_p | None:
    """Return NVML's handle of the GPU to which the driver gave the number `index`, or None."""
    found = ask("nvmlDeviceGetHandleByIndex_v2", index, kind=ctypes.c_void_p)
    return None if found is None else ctypes.c_void_p(found)


def handle(device: "torch.device | int") -> ctypes.c_void_p | None:
    """Return NVML's handle of a CUDA device of this process; None if NVML does not find the device.

    The driver can number the devices differently from CUDA, so the device is looked up by its UUID.
    """
    import torch

    properties = torch.cuda.get_device_properties(device)
    name = f"GPU-{properties.uuid}".encode()
    found = ask("nvmlDeviceGetHandleByUUID", name, kind=ctypes.c_void_p)
    return None if found is None else ctypes.c_void_p(found)


def utilization(device: "torch.device") -> float | None:
    """Return in what share of the last short period a CUDA device ran any kernel, from 0 to 1.

    If the driver does not tell this share, return None.
    """
    known = handle(device)
    if known is None:
        return None
    told = ask("nvmlDeviceGetUtilizationRates", known, kind=Utilization)
    return None if told is None else told.gpu / 100
