"""Measure what this machine's devices can do, and write it down as a hardware description like those that are shipped.

A few microbenchmarks, each repeated and its fastest taken: products and convolutions, streams through memory, the
shortest operator, and a copy. What they reach is both the peak and the efficiency 1, except that classes differ: the
peak in float32 is the fastest class's rate. Of other types products are timed, and classes are taken to differ alike.
TF32 is no type of its own: float32 is measured as PyTorch is set to compute it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.grad import conv2d_input, conv2d_weight

from reproduce.machine.devices import Devices
from torchgpipe.plan.here import measure_link

__all__ = ["calibrate", "written"]

SOURCE = "measured: python -m reproduce calibrate, {}"

AT_ONCE = 1e18
"""Bytes per second, and its inverse seconds, where nothing is copied: figures have to be numbers above 0."""


def calibrate(devices: Devices, name: str, *, seconds: float = 0.5) -> dict[str, Any]:
    """Return a description of the devices; each microbenchmark takes about `seconds`."""
    device = devices.first(1)[0]
    workspace = _workspace(device)  # before anything else, or the libraries have theirs already

    def time(work: Callable[[], object]) -> float:
        """Return the seconds of the fastest run."""
        for _ in range(2):
            work()
        devices.synchronize()
        best, end = float("inf"), perf_counter() + seconds
        while perf_counter() < end:
            start = perf_counter()
            work()
            devices.synchronize()
            best = min(best, perf_counter() - start)
        return best

    def figure(value: float, how: str) -> dict[str, Any]:
        return {"value": float(f"{value:.4g}"), "source": SOURCE.format(how)}

    large = device.type == "cuda"
    n = 8192 if large else 768
    a, b = torch.rand(n, n, device=device), torch.rand(n, n, device=device)
    rates = {"matmul": 2 * n**3 / time(lambda: a @ b)}
    others = {
        str(dtype).removeprefix("torch."): 2 * n**3 / time(partial(torch.matmul, a.to(dtype), b.to(dtype)))
        for dtype in (torch.bfloat16, torch.float16)
    }

    batch, channels, size = (64, 256, 56) if large else (4, 64, 28)
    image = torch.rand(batch, channels, size, size, device=device)
    for kind, k in (("conv", 1), ("conv3x3", 3)):
        weight = torch.rand(channels, channels, k, k, device=device)
        flops = 2 * image.numel() * channels * k * k
        rates[kind] = flops / time(partial(F.conv2d, image, weight, padding=k // 2))

    stream = torch.rand((1 << 28) if large else (1 << 23), device=device)
    target = torch.empty_like(stream)
    bandwidth = 2 * stream.nbytes / time(lambda: target.copy_(stream))
    images = stream.view(-1, channels, 128, 128)  # as large: what fits a CPU's cache says nothing of its memory
    flow = {
        "elementwise": 2 * stream.nbytes / time(lambda: torch.clamp(stream, min=0.5, out=target)),
        "norm": 3 * images.nbytes / time(lambda: F.batch_norm(images, None, None, training=True)),
        "pool": 2 * images.nbytes / time(lambda: F.avg_pool2d(images, 3, 1, 1, count_include_pad=False)),
    }
    tiny = torch.rand(1, device=device)
    count = 1000
    launch = time(lambda: [tiny.add_(1) for _ in range(count)]) / count
    peak = max(rates.values())
    shares = {kind: rate / bandwidth for kind, rate in flow.items()}
    link, how = measure_link(stream)
    if math.isinf(link):
        values = {"link_bandwidth": AT_ONCE, "link_latency": 1 / AT_ONCE}
        links = {key: {"value": value, "source": f"none: {how}"} for key, value in values.items()}
    else:
        links = {"link_bandwidth": figure(link, how), "link_latency": figure(launch, "as the shortest operator")}
    memory = devices.memory or 1
    return {
        "title": f"this machine: {devices}",
        "devices": {"value": devices.count, "source": SOURCE.format("as found")},
        "memory": figure(memory / (1 if large else devices.count), "as the system says; devices share a CPU's"),
        "memory_bandwidth": figure(bandwidth, "copying a tensor, bytes read and written"),
        **links,
        "launch": figure(launch, f"{count} additions of one number"),
        "launch_overlaps": large,
        "workspace": workspace,
        "peak": {
            "float32": figure(peak, "the fastest class of operators"),
            **{
                name: figure(rate * peak / rates["matmul"], f"products in {name}, over the efficiency of matmul")
                for name, rate in others.items()
            },
        },
        "compute_efficiency": {
            kind: figure(rate / peak, f"{kind} in float32, over the peak") for kind, rate in rates.items()
        },
        "memory_efficiency": {
            kind: figure(shares.get(kind, 1.0), f"{kind if kind in shares else 'as the copy'}, over the bandwidth")
            for kind in ("matmul", "conv", "conv3x3", "norm", "pool", "elementwise")
        },
    }


def _workspace(device: torch.device) -> dict[str, Any]:
    """Return the bytes that libraries keep on a device after a product, and the most that a convolution takes as well.

    What a process has had from them before is not seen.
    """
    if device.type != "cuda":
        return {"value": 0, "source": "none: the libraries of a CPU allocate beside PyTorch"}
    a = torch.rand(4096, 4096, device=device)
    kept = _extra_bytes(device, lambda: a @ a)[0]
    x = torch.rand(64, 256, 56, 56, device=device)
    weight = torch.rand(256, 256, 3, 3, device=device)
    y = torch.empty_like(x)
    passing = max(
        _extra_bytes(device, convolution)[1]
        for convolution in (
            lambda: F.conv2d(x, weight, padding=1),
            lambda: conv2d_input(x.shape, weight, y, padding=1),
            lambda: conv2d_weight(x, weight.shape, y, padding=1),
        )
    )
    how = "allocated after a product, and at most in a convolution and its gradients, beside tensors"
    return {"value": max(0, kept) + max(0, passing), "source": SOURCE.format(how)}


def _extra_bytes(device: torch.device, work: Callable[[], torch.Tensor]) -> tuple[int, int]:
    """Return how many bytes more than its result work leaves allocated, and how many more it had at most."""
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = work()
    torch.cuda.synchronize(device)
    taken = before + result.nbytes
    return torch.cuda.memory_allocated(device) - taken, torch.cuda.max_memory_allocated(device) - taken


def written(description: dict[str, Any]) -> str:
    """Return the description as its file's text."""
    return json.dumps(description, indent=2) + "\n"
