"""Measure what this machine's devices can do, and write it down as a hardware description like those that are shipped.

A few microbenchmarks, each repeated and the median taken. Tensors are larger than caches where memory is what counts:
in a training step an operator finds little in them. What the operators reach is both the peak and the efficiency 1,
except that classes differ: the peak in float32 is the fastest class's rate. Of other types products are timed, and
classes are taken to differ alike. TF32 is no type of its own: float32 is measured as PyTorch is set to compute it.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_input, conv2d_weight

from reproduce.machine.devices import Devices
from torchgpipe.plan.as_on import as_on
from torchgpipe.plan.counter import Counter
from torchgpipe.plan.hardware import Hardware, load_hardware
from torchgpipe.plan.here import MOST_AT_WORK, hand_over, measure_link, sharing
from torchgpipe.plan.operators import Operator
from torchgpipe.plan.planner import HERE

__all__ = ["calibrate", "calibrated", "written"]

SOURCE = "measured: python -m reproduce calibrate, {}"

AT_ONCE = 1e18
"""Bytes per second, where nothing is copied: figures have to be numbers above 0."""

TOUCHING: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x + x,
    torch.bernoulli,
    F.relu,
    F.gelu,
    F.silu,
    torch.sigmoid,
    torch.tanh,
    lambda x: F.batch_norm(x, None, None, training=True),
    lambda x: F.group_norm(x, 8),
    lambda x: F.layer_norm(x, x.shape[2:]),
    lambda x: F.softmax(x, -1),
    lambda x: F.log_softmax(x, -1),
    lambda x: F.max_pool2d(x, 3, 1, 1),
    lambda x: F.avg_pool2d(x, 3, 1, 1),
    lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
)
"""What is bound by memory, on images; forward and backward are timed apart where each is one operator."""
NARROW = (4, 16, 64)
WIDE = 256
"""The channels of convolutions that are timed."""
SETTLED = 10
"""Rounds after which rates that are worked out from each other hardly change."""


class Timed(NamedTuple):
    """What some work does, and its seconds."""

    flops: float
    bytes: float
    seconds: float


class Clock:
    """Time work on a device: each for about so many seconds."""

    def __init__(self, devices: Devices, seconds: float) -> None:
        self.devices, self.seconds = devices, seconds

    def time(self, work: Callable[[], object]) -> float:
        """Return the median seconds of its runs, after one that is not timed."""
        work()
        self.devices.synchronize()
        runs: list[float] = []
        end = perf_counter() + self.seconds
        while not runs or perf_counter() < end:
            start = perf_counter()
            work()
            self.devices.synchronize()
            runs.append(perf_counter() - start)
        return median(runs)

    def both(self, function: Callable[..., Tensor], *inputs: Tensor) -> tuple[float, float]:
        """Return the seconds of a function's forward, and of its backward to all inputs."""
        given = [x.detach().requires_grad_() for x in inputs]
        with torch.no_grad():
            forward = self.time(lambda: function(*given))
        output = function(*given)
        if not output.requires_grad:
            return forward, math.nan
        gradient = torch.ones_like(output)
        return forward, self.time(lambda: torch.autograd.grad(output, given, gradient, retain_graph=True))


def calibrate(devices: Devices, name: str, *, seconds: float = 0.3) -> dict[str, Any]:
    """Return a description of the devices; each microbenchmark takes about `seconds`, or one run if that is longer."""
    device = devices.first(1)[0]
    workspace = _workspace(device)  # before anything else, or the libraries have theirs already
    clock = Clock(devices, seconds)

    def figure(value: float, how: str) -> dict[str, Any]:
        return {"value": float(f"{value:.4g}"), "source": SOURCE.format(how)}

    large = device.type == "cuda"
    stream = torch.rand((1 << 28) if large else (1 << 23), device=device)
    bandwidth = 2 * stream.nbytes / clock.time(partial(torch.empty_like(stream).copy_, stream))
    rates, traffic, narrow = _convolutions(clock, stream, large)
    n = 8192 if large else 1536
    much = _product(clock, n, n, n, torch.float32, device)
    few = _product(clock, 8, 8192, stream.numel() // 8192, torch.float32, device)
    rates["matmul"], traffic["matmul"] = _parted(much, few, overlap=large)
    n = n if large else 256  # a CPU without units for them takes seconds for more
    types = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    products = {kind: _product(clock, n, n, n, dtype, device).seconds for kind, dtype in types.items()}
    peak = max(rates.values())
    peaks = {kind: peak * products["float32"] / took for kind, took in products.items()}
    # There are flash kernels for 16 bits only.
    heads = torch.rand(*((8, 16, 2048, 64) if large else (4, 8, 256, 64)), device=device)
    heads = heads.to(torch.bfloat16 if large else torch.float32)
    shares = {kind: rate / peak for kind, rate in rates.items()}
    shares |= {
        operator.kind: operator.flops / took / peaks[operator.dtype]
        for operator, took in _alone(clock, lambda x: F.scaled_dot_product_attention(x, x, x), heads)
    }

    traffic |= _touching(clock, stream)
    busy = {1: "conv", 3: "conv3x3"}
    launches = _launches(
        clock,
        device,
        lambda size, image: (
            2 * image.numel() * 16 * size**2 / rates[busy[size]] / narrow["16"] + 2 * image.nbytes / traffic["conv"]
        ),
    )
    launch = launches.pop("")
    link, how = measure_link(stream)
    if math.isinf(link):
        links = {
            "link_bandwidth": {"value": AT_ONCE, "source": f"none: {how}"},
            "link_latency": figure(hand_over(), "handing a tensor from one thread to another"),
            "sharing": figure(_sharing(min(devices.count, MOST_AT_WORK)), "steps of a small network beside others"),
        }
    else:
        links = {"link_bandwidth": figure(link, how), "link_latency": figure(launch, "as the shortest operator")}
    memory = devices.memory or 1
    return {
        "title": f"this machine: {devices}",
        "devices": {"value": devices.count, "source": SOURCE.format("as found")},
        "memory": figure(memory / (1 if large else devices.count), "as the system says; devices share a CPU's"),
        "memory_bandwidth": figure(bandwidth, "copying a tensor, bytes read and written"),
        **links,
        "launch": figure(launch, "steps of layers that do next to nothing, for each operator"),
        "launches": {kind: figure(took, f"{kind}, as `launch`") for kind, took in launches.items()},
        "launch_overlaps": large,
        "workspace": workspace,
        "peak": {
            "float32": figure(peak, "the fastest class of operators"),
            **{
                kind: figure(value, f"products in {kind}, over the efficiency of matmul")
                for kind, value in peaks.items()
                if kind != "float32"
            },
        },
        "compute_efficiency": {kind: figure(share, f"{kind}, over the peak") for kind, share in shares.items()},
        "narrow": {
            key: figure(share, f"3 x 3 convolutions of {key} channels, over {WIDE}") for key, share in narrow.items()
        },
        "memory_efficiency": {
            kind: figure(rate / bandwidth, f"{kind}, over the bandwidth") for kind, rate in sorted(traffic.items())
        },
    }


def _convolutions(
    clock: Clock, stream: Tensor, overlap: bool
) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Return the operations and the bytes per second of convolutions, by class, and what narrow ones reach."""
    values = stream.numel() // (1 if overlap else 4)

    def timed(channels: int, size: int) -> Timed:
        side = 14 if channels == WIDE else 28
        image = stream[:values][: values // (channels * side**2) * channels * side**2].view(-1, channels, side, side)
        weight = torch.rand(channels, channels, size, size, device=stream.device)
        took = sum(clock.both(partial(F.conv2d, padding=size // 2), image, weight))
        # Forward reads the image and writes another; each of the two gradients moves as much.
        return Timed(3.0 * 2 * image.numel() * channels * size**2, 3.0 * 2 * image.nbytes, took)

    kernels = {"conv": timed(WIDE, 1), "conv3x3": timed(WIDE, 3)}
    thin = {channels: timed(channels, 3) for channels in NARROW}
    few = timed(NARROW[1], 1)
    shares, traffic = dict.fromkeys(NARROW, 1.0), math.inf
    for _ in range(1 if overlap else SETTLED):
        rates = {kind: each.flops / (each.seconds - each.bytes / traffic) for kind, each in kernels.items()}
        shares = {
            channels: each.flops / (each.seconds - each.bytes / traffic) / rates["conv3x3"]
            for channels, each in thin.items()
        }
        computing = 0.0 if overlap else few.flops / rates["conv"] / shares[NARROW[1]]
        traffic = few.bytes / (few.seconds - computing)
    return rates, dict.fromkeys(kernels, traffic), {str(channels): share for channels, share in shares.items()}


def _product(clock: Clock, rows: int, columns: int, inner: int, dtype: torch.dtype, device: torch.device) -> Timed:
    a, b = (torch.rand(*shape, device=device).to(dtype) for shape in ((rows, inner), (inner, columns)))
    nbytes = a.nbytes + b.nbytes + rows * columns * a.element_size()
    return Timed(2.0 * rows * columns * inner, nbytes, clock.time(lambda: a @ b))


def _parted(much: Timed, few: Timed, *, overlap: bool) -> tuple[float, float]:
    """Return operations and bytes per second, of work that does `much` for its bytes, and of work that does little.

    Where the two overlap, each takes all of the seconds; else they take them together.
    """
    rate, traffic = much.flops / much.seconds, few.bytes / few.seconds
    for _ in range(0 if overlap else SETTLED):
        traffic = few.bytes / (few.seconds - few.flops / rate)
        rate = much.flops / (much.seconds - much.bytes / traffic)
    return rate, traffic


def _touching(clock: Clock, stream: Tensor) -> dict[str, float]:
    """Return the bytes per second of classes and single operators that are bound by memory."""
    images = stream.view(-1, 16, 32, 32)
    rates: dict[str, float] = {}
    classes: dict[str, list[float]] = {"elementwise": [], "norm": [], "pool": []}
    for function in TOUCHING:
        for operator, took in _alone(clock, function, images):
            rates[operator.name] = operator.bytes / took
            classes[operator.kind].append(rates[operator.name])
    rates |= {kind: geometric_mean(each) for kind, each in classes.items()}
    rates["elementwise"] = rates["add"]  # what most operators without a name here are like
    return rates


def _alone(clock: Clock, function: Callable[[Tensor], Tensor], x: Tensor) -> list[tuple[Operator, float]]:
    """Return a function's forward and backward as operators, each with its seconds, where each is a single one."""
    took = clock.both(function, x)
    with as_on(x.device.type):
        given = torch.empty_like(x, device="meta", requires_grad=True)
        with Counter() as forward:
            output = function(given)
        backward = Counter()
        if output.requires_grad:
            with backward:
                torch.autograd.grad(output, given, torch.empty_like(output))
    counted = (forward.operators, backward.operators)
    return [(each[0], seconds) for each, seconds in zip(counted, took, strict=True) if len(each) == 1]


def _launches(clock: Clock, device: torch.device, convolution: Callable[[int, Tensor], float]) -> dict[str, float]:
    """Return the seconds of the shortest operators in a training step, with what Python and autograd do for them.

    Of a convolution it is what small ones take, beyond the seconds that `convolution` says of its size and an image.
    """
    count = 30

    def step(x: Tensor, *layers: Callable[[], nn.Module]) -> tuple[float, int]:
        model = nn.Sequential(*(layer() for _ in range(count) for layer in layers)).to(device)
        with Counter() as counter:
            model(x).sum().backward()
        return clock.time(lambda: model(x).sum().backward()), len(counter.operators)

    took, operators = step(torch.rand(4, 4, device=device), lambda: nn.Linear(4, 4), nn.ReLU)
    image = torch.rand(8, 16, 16, 16, device=device)
    norms = (lambda: nn.BatchNorm2d(16), nn.ReLU)
    without, _ = step(image, *norms)
    found = {"": took / operators}
    for kind, size in (("conv", 1), ("conv3x3", 3)):
        more = step(image, partial(nn.Conv2d, 16, 16, size, padding=size // 2, bias=False), *norms)[0] - without
        found[kind] = max(found[""], more / count / 3 - convolution(size, image))
    return found


def _sharing(at_work: int) -> float:
    """Return by which share of its time a training step takes longer for each other device that takes one, too."""
    works = []
    for _ in range(at_work):
        convolutions = [
            layer
            for _ in range(4)
            for layer in (nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 1))
        ]
        layers = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(2**12, 256), nn.ReLU())
        works.append(partial(_step, layers, torch.rand(32, 16, 16, 16)))
    return sharing(works) if at_work > 1 else 0.0


def _step(layers: nn.Sequential, x: Tensor) -> None:
    layers(x).sum().backward()


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


def calibrated(devices: Devices) -> Hardware:
    """Calibrate the devices, and return the description as it is read from a file."""
    with devices.in_use(), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{HERE}.json"
        path.write_text(written(calibrate(devices, HERE)))
        return load_hardware(path)


def written(description: dict[str, Any]) -> str:
    """Return the description as its file's text."""
    return json.dumps(description, indent=2) + "\n"
