"""Devices of tests on CUDA, and the marks that skip a test where there are too few of them."""

from typing import Any

import pytest
import torch

DEVICES = torch.cuda.device_count()


def needs(count: int) -> pytest.MarkDecorator:
    reason = f"needs {count} CUDA devices, but there are {DEVICES}"
    return pytest.mark.skipif(count > DEVICES, reason=reason)


def on(*devices: str) -> Any:
    """Return the devices of a pipeline's partitions, as a parameter with its mark."""
    numbers = [int(device.removeprefix("cuda:")) for device in devices if device != "cpu"]
    count = max(numbers, default=-1) + 1
    return pytest.param(list(devices), id=" ".join(devices), marks=needs(count))


ON_GPUS = [
    on("cuda:0"),
    on("cuda:0", "cuda:0"),
    on("cuda:0", "cuda:0", "cuda:0", "cuda:0"),
    on("cuda:0", "cuda:1"),
    on("cuda:0", "cuda:1", "cuda:0", "cuda:1"),
]
# The host is a second device, so that tensors cross, and streams wait, also with one GPU.
WITH_HOST = [on("cpu", "cuda:0"), on("cuda:0", "cpu"), on("cuda:0", "cpu", "cuda:0", "cpu")]
# Ranks that share a GPU send through pinned memory. Ranks that have one GPU each send by NCCL.
RANKS = [on("cuda:0", "cuda:0", "cuda:0", "cuda:0"), on("cuda:0", "cuda:1", "cuda:2", "cuda:3")]


def ways(*places: Any) -> pytest.MarkDecorator:
    """Run a test on these devices in one process, and over ranks."""
    # Ranks start where a test needs them. They must not start where it is skipped.
    over = [pytest.mark.ranks] if DEVICES else []
    cases = []
    for place in places:
        name = f"graph {place.id}"
        case = pytest.param("graph", *place.values, id=name, marks=place.marks)
        cases.append(case)
    for place in RANKS:
        name = f"ranks {place.id}"
        case = pytest.param("ranks", *place.values, id=name, marks=[*place.marks, *over])
        cases.append(case)
    return pytest.mark.parametrize(("engine", "devices"), cases)
