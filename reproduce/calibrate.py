"""Measure what this machine's devices can do, and write it down as a hardware description like those that are shipped.

A few microbenchmarks, each repeated and its fastest taken: products and convolutions, streams through memory, the
shortest operator, and a copy. What they reach is both the peak and the efficiency 1, except that classes differ: the
peak is the fastest class's rate.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F

from reproduce.devices import Devices

__all__ = ["calibrate", "written"]

SOURCE = "measured: python -m reproduce calibrate, {}"
Measure = Callable[[], object]


def calibrate(devices: Devices, name: str, *, seconds: float = 0.5) -> dict[str, Any]:
    """Return a description of the devices; each microbenchmark takes about `seconds`."""
    device = devices.first(1)[0]

    def time(work: Measure) -> float:
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

    batch, channels, size = (64, 256, 56) if large else (4, 64, 28)
    image = torch.rand(batch, channels, size, size, device=device)
    for kind, k in (("conv", 1), ("conv3x3", 3)):
        weight = torch.rand(channels, channels, k, k, device=device)
        flops = 2 * image.numel() * channels * k * k
        rates[kind] = flops / time(lambda w=weight, k=k: F.conv2d(image, w, padding=k // 2))  # type: ignore[misc]

    stream = torch.rand((1 << 28) if large else (1 << 23), device=device)
    target = torch.empty_like(stream)
    bandwidth = 2 * stream.nbytes / time(lambda: target.copy_(stream))
    flow = {
        "elementwise": 2 * stream.nbytes / time(lambda: torch.clamp(stream, min=0.5, out=target)),
        "norm": 3 * image.nbytes / time(lambda: F.batch_norm(image, None, None, training=True)),
        "pool": 2 * image.nbytes / time(lambda: F.avg_pool2d(image, 3, 1, 1, count_include_pad=False)),
    }
    tiny = torch.rand(1, device=device)
    count = 1000
    launch = time(lambda: [tiny.add_(1) for _ in range(count)]) / count
    peak = max(rates.values())
    shares = {kind: min(1.0, rate / bandwidth) for kind, rate in flow.items()}
    if device.type == "cuda" and devices.count > 1:
        other = devices.first(2)[1]
        link = stream.nbytes / time(lambda: stream.to(other))
        how = "a copy from the first device to the second"
    else:
        link, how = bandwidth, "a copy in memory; devices share it, so nothing is copied between them"
    workspace = _workspace(device, a, image)
    memory = devices.memory or 1
    return {
        "title": f"this machine: {devices}",
        "devices": {"value": devices.count, "source": SOURCE.format("as found")},
        "memory": figure(memory / (1 if large else devices.count), "as the system tells; devices share a CPU's"),
        "memory_bandwidth": figure(bandwidth, "copying a tensor, bytes read and written"),
        "link_bandwidth": figure(link, how),
        "link_latency": figure(launch, "as the shortest operator"),
        "launch": figure(launch, f"{count} additions of one number"),
        "launch_overlaps": large,
        "workspace": workspace,
        "peak": {"float32": figure(peak, "the fastest class of operators")},
        "compute_efficiency": {
            kind: figure(rate / peak, f"{kind} in float32, over the peak") for kind, rate in rates.items()
        },
        "memory_efficiency": {
            kind: figure(shares.get(kind, 1.0), f"{kind if kind in shares else 'as the copy'}, over the bandwidth")
            for kind in ("matmul", "conv", "conv3x3", "norm", "pool", "elementwise")
        },
    }


def _workspace(device: torch.device, a: torch.Tensor, image: torch.Tensor) -> dict[str, Any]:
    """Return the bytes that libraries keep on a device once a product and a convolution have run."""
    if device.type != "cuda":
        return {"value": 0, "source": "none: the libraries of a CPU allocate beside PyTorch"}
    before = torch.cuda.memory_allocated(device)
    result = (a @ a, F.conv2d(image, torch.rand(8, image.shape[1], 3, 3, device=device)))
    torch.cuda.synchronize(device)
    kept = torch.cuda.memory_allocated(device) - before - sum(x.nbytes for x in result)
    return {"value": max(0, kept), "source": SOURCE.format("allocated after a product and a convolution")}


def written(description: dict[str, Any]) -> str:
    """Return the description as its file's text."""
    return json.dumps(description, indent=2) + "\n"
