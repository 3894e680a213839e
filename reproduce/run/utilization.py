"""Ask the driver how busy each CUDA device is while steps run.

The driver (NVML) says in which share of a short time the GPU ran any kernel at all; it is sampled as often as the
published runs did, and averaged.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence

import torch

from reproduce.error import Error

SAMPLING_SECONDS = 0.05  # as published
LEAST_SECONDS = 2.0
MOST_STEPS = 50


def ask_driver(devices: Sequence[torch.device], step: Callable[[], object]) -> list[float]:
    """Run steps for some seconds, and return each CUDA device's mean utilization meanwhile, from 0 to 1.

    Raises:
        Error: the driver does not tell, or its Python bindings are not installed.
    """
    samples: list[list[int]] = [[] for _ in devices]
    try:
        for device in devices:
            torch.cuda.utilization(device)
    except Exception as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise Error(f"utilization is not available ({said}); try 'pip install nvidia-ml-py'") from error

    over = threading.Event()

    def sample() -> None:
        while not over.wait(SAMPLING_SECONDS):
            for device, taken in zip(devices, samples, strict=True):
                taken.append(torch.cuda.utilization(device))

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        started = time.monotonic()
        for _ in range(MOST_STEPS):
            step()
            if time.monotonic() - started > LEAST_SECONDS:
                break
    finally:
        over.set()
        sampler.join()
    if not all(samples):
        raise Error(f"utilization is not available (the steps took less than {SAMPLING_SECONDS} s)")
    return [statistics.mean(taken) / 100 for taken in samples]
