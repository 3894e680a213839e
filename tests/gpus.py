"""Devices for tests on CUDA, and the pytest marks that skip a test if there are too few GPUs."""

from typing import Any

import pytest
import torch

DEVICES = torch.cuda.device_count()


def needs(count: int) -> pytest.MarkDecorator:
    reason = f"needs {count} CUDA devices, but there are {DEVICES}"
    return pytest.mark.skipif(count > DEVICES, reason=reason)


def on(*devices: str) -> Any:
    """Make a pytest parameter from a list of devices; skip its tests if there are too few GPUs."""
    numbers = [int(device.removeprefix("cuda:")) for device in devices if device != "cpu"]
    count = max(numbers, default=-1) + 1
    return pytest.param(list(devices), id=" ".join(devices), marks=needs(count))


def first(count: int) -> Any:
    """Make a pytest parameter from the first `count` GPUs; skip its tests if there are fewer."""
    return on(*[f"cuda:{k}" for k in range(count)])


ON_GPUS = [
    first(1),
    on("cuda:0", "cuda:0"),
    on("cuda:0", "cuda:0", "cuda:0", "cuda:0"),
    first(2),
    on("cuda:0", "cuda:1", "cuda:0", "cuda:1"),
    first(4),
    first(8),
]
# The CPU is a second device, so that tensors are copied and streams wait even with one GPU.
WITH_HOST = [on("cpu", "cuda:0"), on("cuda:0", "cpu"), on("cuda:0", "cpu", "cuda:0", "cpu")]
# Ranks that share a GPU send tensors through pinned memory. Ranks with one GPU each use NCCL.
RANKS = [on("cuda:0", "cuda:0", "cuda:0", "cuda:0"), first(2), first(4), first(8)]


def ways(*places: Any) -> pytest.MarkDecorator:
    """Return a pytest mark that runs a test in two ways: in one process, and over ranks.

    The mark sets the parameters `engine` and `devices` of the test.

    Args:
        places: The lists of devices to use in one process, as made by `on` and `first`.
    """
    # A test that is marked with `ranks` starts processes. Do not mark it if it is skipped.
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
