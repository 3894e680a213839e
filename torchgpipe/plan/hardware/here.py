"""Describe a node whose devices are like those of this machine, from measurements on it."""

import math
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

from torchgpipe.balance.profile import seconds_of, undisturbed
from torchgpipe.gpipe import GPipe
from torchgpipe.plan.hardware.hardware import Hardware
from torchgpipe.plan.hardware.operators import CLASSES
from torchgpipe.tensors import accelerator

CPU = torch.device("cpu")
MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""The file with a container's limit of memory, in bytes."""
RUNS = 5
"""How often each measurement is timed after a warm-up. The median of the times counts."""
HAND_OVERS = 64
"""The number of micro-batches with which the hand-over between CPU partitions is timed."""
MOST_AT_WORK = 4
"""The most CPU devices that work at the same time while their slow-down is measured."""


def describe_here(device: torch.device, devices: int | None, memory: float | None) -> Hardware:
    """Describe a node of devices like `device`, from measurements of its memory and links.

    The description does not say how fast the devices compute, because the layers of the model are
    timed on `device` instead.

    - If `device` is a CPU, each of the node's devices has as many cores as PyTorch has threads, and
      an equal part of the memory. Nothing is copied between them, because they share their memory.
      But it takes time until one thread has handed a tensor to another.
    - If this machine has only one GPU, links between GPUs are taken to be as fast as copies to the
      host.

    Args:
        device: A device of this machine.
        devices: How many devices the node has; by default as many as this machine has.
        memory: The bytes of memory of each device; by default as many as `device` has.

    Raises:
        ValueError: If `memory` is not given, and the system does not tell how much memory it has.
    """
    on_gpu = accelerator.has_streams(device)
    if devices is None:
        devices = len(accelerator.all_devices()) if on_gpu else _cpu_devices()
    if memory is None and on_gpu:
        memory = accelerator.properties(device).total_memory
    elif memory is None:
        memory = _main_memory() / devices
    source = torch.ones(2**26 if on_gpu else 2**22, device=device)
    target = torch.empty_like(source)
    seconds = _seconds(lambda: target.copy_(source), device)
    link_bandwidth, link = _measure_link(source)
    return Hardware(
        name="here",
        title=device_name(device),
        devices=devices,
        memory=float(memory),
        memory_bandwidth=2 * source.nbytes / seconds,
        link_bandwidth=link_bandwidth,
        link_latency=hand_over() if device.type == "cpu" and devices > 1 else 0.0,
        memory_efficiency=dict.fromkeys(CLASSES, 1.0),
        launch_overlaps=on_gpu,
        sources={"link_bandwidth": link, "memory_bandwidth": "a copy on the device"},
    )


def _cpu_devices() -> int:
    """Return how many CPU devices this process has: its cores, divided by PyTorch's threads.

    At least one device is returned. Each device has as many cores as PyTorch has threads.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, cores // torch.get_num_threads())


def _measure_link(source: Tensor) -> tuple[float, str]:
    """Measure the bandwidth of the link from a tensor's device to another device.

    With a single GPU, the link to the host is measured. Nothing is copied between CPU devices, so
    the links between them count as infinitely fast.

    Returns:
        The bandwidth in bytes per second, and text that says which copy was timed.
    """
    device = source.device
    if not accelerator.has_streams(device):
        return math.inf, "nothing is copied between devices, which share memory"
    others = [each for each in accelerator.all_devices() if each.index != (device.index or 0)]
    if others:
        other = others[0]
        seconds = _seconds(lambda: source.to(other), device)
        return source.nbytes / seconds, f"links as fast as a copy from {device} to {other}"
    host = torch.empty_like(source, device="cpu").pin_memory()
    seconds = _seconds(lambda: host.copy_(source), device)
    return source.nbytes / seconds, "links as fast as a copy to the host"


def hand_over() -> float:
    """Return the seconds until a CPU device has handed a tensor to the next CPU device.

    The seconds are measured with a pipeline whose tasks take almost no time.
    """
    layers = nn.Sequential(nn.Identity(), nn.Identity())
    model = GPipe(layers, [1, 1], devices=["cpu", "cpu"], chunks=HAND_OVERS, checkpoint="never")
    x = torch.zeros(HAND_OVERS, 8, device=CPU, requires_grad=True)
    with undisturbed(CPU):
        seconds = _seconds(lambda: model(x).sum().backward(), CPU)
    return seconds / (2 * (HAND_OVERS + 1))


def sharing(works: Sequence[Callable[[], object]]) -> float:
    """Measure how much CPU devices slow each other down when they work at the same time.

    Args:
        works: For each device, a function that does its work. The functions run in separate
            threads, each again and again.

    Returns:
        How much longer the first function takes for each other function that runs at the same time,
        as a share of its time alone. For example, 0.1 means 10 % longer for each other function.
    """
    first, *others = works
    over = threading.Event()
    threads = torch.get_num_threads()

    def repeat(work: Callable[[], object]) -> None:
        while not over.is_set():
            work()

    alone = _seconds(first, CPU)
    pool = ThreadPoolExecutor(len(others), initializer=torch.set_num_threads, initargs=(threads,))
    with pool:
        for work in others:
            pool.submit(repeat, work)
        try:
            beside = _seconds(first, CPU)
        finally:
            over.set()
    return max(0.0, beside / alone - 1) / len(others)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    return median([seconds_of(work, device) for _ in range(1 + RUNS)][1:])


def _main_memory(limit: Path = MEMORY_LIMIT) -> float:
    """Return this machine's bytes of memory, or the limit of its container if that is lower."""
    try:
        machine = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):
        raise ValueError(
            "this system does not tell how much memory it has: "
            "give the memory of each device as an argument, such as memory='16GiB'"
        ) from None
    try:
        return min(machine, float(limit.read_text()))
    except (OSError, ValueError):  # There is no container, or it has no limit ("max").
        return machine


def device_name(device: torch.device) -> str:
    """Return a device's name for messages: a GPU's model, or words for this machine's CPU."""
    if accelerator.has_streams(device):
        return str(accelerator.properties(device).name)
    threads = torch.get_num_threads()
    plural = "" if threads == 1 else "s"
    return f"this machine's CPU, {threads} thread{plural} for each device"
