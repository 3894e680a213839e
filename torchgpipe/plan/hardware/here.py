"""Describe the present device: what links and memory are measured to do, for a node of devices like it."""

import math
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import torch
from torch import nn

from torchgpipe.balance.profile import seconds_of, undisturbed
from torchgpipe.gpipe import GPipe
from torchgpipe.plan.hardware.hardware import Hardware
from torchgpipe.plan.hardware.operators import CLASSES

MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""A container's limit of memory, in bytes."""
RUNS = 5
"""Timed runs of whatever is measured here, after a warm-up; their median counts."""
HAND_OVERS = 64
"""Micro-batches of next to nothing, which tell what a hand-over takes."""
MOST_AT_WORK = 4
"""CPU devices that are let work at the same time, to find out how much they slow each other down."""


def describe_here(device: torch.device, devices: int | None, memory: float | None) -> Hardware:
    """Describe what is here: memory and links, which are measured. How fast it computes is left to profiled layers.

    On a CPU a device is as many cores as PyTorch has threads, and has its share of the memory. CPU devices share
    memory, so nothing is copied between them; threads hand tensors over. With a single GPU, links are taken as fast as
    copies to the host.

    Raises:
        ValueError: `memory` is not given, and the system does not tell.
    """
    cuda = device.type == "cuda"
    if devices is None:
        cores = (
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1
        )
        devices = torch.cuda.device_count() if cuda else max(1, cores // torch.get_num_threads())
    if memory is None:
        memory = (
            torch.cuda.get_device_properties(device).total_memory
            if cuda
            else _main_memory() / devices
        )
    source = torch.ones(2**26 if cuda else 2**22, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / _seconds(lambda: target.copy_(source), device)
    link, how = _measure_link(source)
    return Hardware(
        name="here",
        title=device_name(device),
        devices=devices,
        memory=float(memory),
        memory_bandwidth=bandwidth,
        link_bandwidth=link,
        link_latency=hand_over() if device.type == "cpu" and devices > 1 else 0.0,
        memory_efficiency=dict.fromkeys(CLASSES, 1.0),
        launch_overlaps=cuda,
        sources={"link_bandwidth": how, "memory_bandwidth": "a copy on the device"},
    )


def _measure_link(source: torch.Tensor) -> tuple[float, str]:
    """Copy a tensor from its device to another: return bytes per second, and which copy it was.

    With a single GPU, the copy is to the host; CPU devices share memory, so nothing is copied and that is infinite.
    """
    device = source.device
    if device.type != "cuda":
        return math.inf, "nothing is copied between devices, which share memory"
    if torch.cuda.device_count() > 1:
        other = torch.device("cuda", 0 if device.index else 1)
        seconds = _seconds(lambda: source.to(other), device)
        return source.nbytes / seconds, f"links as fast as a copy from {device} to {other}"
    host = torch.empty_like(source, device="cpu").pin_memory()
    return source.nbytes / _seconds(
        lambda: host.copy_(source), device
    ), "links as fast as a copy to the host"


def hand_over() -> float:
    """Return the seconds that a CPU partition takes to hand a tensor to the next, from tasks of next to nothing."""
    layers = nn.Sequential(nn.Identity(), nn.Identity())
    model = GPipe(layers, [1, 1], devices=["cpu", "cpu"], chunks=HAND_OVERS, checkpoint="never")
    x, cpu = torch.zeros(HAND_OVERS, 8, requires_grad=True), torch.device("cpu")
    with undisturbed(cpu):
        return _seconds(lambda: model(x).sum().backward(), cpu) / (2 * (HAND_OVERS + 1))


def sharing(works: Sequence[Callable[[], object]]) -> float:
    """Return by which share of its time the first work takes longer for each of the others that is done beside it.

    Each is done over and over, in a thread of its own.
    """
    (first, *others), over, threads = works, threading.Event(), torch.get_num_threads()

    def work(other: Callable[[], object]) -> None:
        while not over.is_set():
            other()

    alone = _seconds(first, torch.device("cpu"))
    with ThreadPoolExecutor(
        len(others), initializer=torch.set_num_threads, initargs=(threads,)
    ) as pool:
        for other in others:
            pool.submit(work, other)
        try:
            beside = _seconds(first, torch.device("cpu"))
        finally:
            over.set()
    return max(0.0, beside / alone - 1) / len(others)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    return median([seconds_of(work, device) for _ in range(1 + RUNS)][1:])


def _main_memory(limit: Path = MEMORY_LIMIT) -> float:
    """Return the machine's bytes, or what a container allows if that is less."""
    try:
        machine = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):
        raise ValueError(
            "this system does not tell its memory: say memory='16GiB' or so, for each device"
        ) from None
    try:
        return min(machine, float(limit.read_text()))
    except (OSError, ValueError):  # no container, or "max"
        return machine


def device_name(device: torch.device) -> str:
    """Name a device for people."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"this machine's CPU, {threads} thread{'' if threads == 1 else 's'} for each device"
