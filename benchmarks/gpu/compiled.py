"""Measure how much faster a step becomes with compiled layers, and with CUDA graphs.

The time of these steps is limited by how fast Python launches kernels one by one. With compiled
layers or CUDA graphs, Python launches fewer kernels.
"""

import time
import traceback
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from benchmarks.gpu.part import Context, Fields
from benchmarks.pipelines import evenly
from reproduce.machine.issuing import host_seconds
from reproduce.models.amoebanet import amoebanetd
from torchgpipe import GPipe
from torchgpipe.balance.profile import synchronize

PURPOSE = "what torch.compile of layers and CUDA graphs of forwards gain where launches take time"
SHARE = 1.5
NEEDS: tuple[str, ...] = ()

PARTITIONS = 2
CHUNKS = 8
STEPS = 3
"""How often a step is timed after a warm-up. The median counts."""
RESERVE = 8.0
"""The seconds that are kept for the steps after layers were compiled.

No layer is compiled if the slowest one so far would not fit into the time before."""
WARM_UPS = 3
"""How often a forward runs before it is captured, as PyTorch advises."""

Value = Any
"""What one layer passes to the next: a tensor, or a tuple of tensors."""
Build = Callable[[], tuple[nn.Sequential, Tensor]]
"""A function that builds the layers of a model and a mini-batch."""


class Graphed(nn.Module):
    """A partition whose forward without gradients replays a CUDA graph.

    With checkpointing, a forward runs first without gradients, and later again with gradients. Only
    the forward without gradients replays the graph. The forward with gradients calls the layers. A
    pipeline's very first forward also calls the layers, because it runs with gradients to find out
    which outputs need them.

    Args:
        layers: The layers of the partition.
        value: An input of the partition. All later inputs must have the same shapes.
    """

    def __init__(self, layers: nn.Sequential, value: Value) -> None:
        super().__init__()
        self.layers = layers
        self.inputs, _ = tree_flatten(tree_map(torch.clone, value))
        _, structure = tree_flatten(value)
        given = tree_unflatten(self.inputs, structure)
        self.graph = torch.cuda.CUDAGraph()
        with torch.no_grad():
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    layers(given)
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.graph(self.graph):
                self.output = layers(given)

    def forward(self, value: Value) -> Value:
        if torch.is_grad_enabled():
            return self.layers(value)
        tensors, _ = tree_flatten(value)
        for x, given in zip(self.inputs, tensors, strict=True):
            x.copy_(given)
        self.graph.replay()
        return tree_map(torch.clone, self.output)  # the next replay overwrites the output


def run(context: Context) -> Fields:
    """Measure one row (a model, compiled or with CUDA graphs) after another while time is left."""
    device = context.devices[0]
    result: Fields = {"rows": {}, "left out": []}
    rows: dict[str, Callable[[], Fields]] = {}
    if device.type == "cuda":
        rows["CUDA graphs of forwards, AmoebaNet-D (18, 256)"] = partial(_with_graphs, device)
        models = {"MLP": _mlp, "transformer": _blocks, "AmoebaNet-D (18, 256)": _amoebanet}
        backend = "inductor"
    else:
        result["left out"].append("CUDA graphs, and code that is made for a device")
        models = {"MLP": _mlp}
        backend = "eager"  # it traces layers, but generates no code, which takes long
    for name, build in models.items():
        compiled = partial(_with_compiled, build, device, backend, context)
        rows[f"torch.compile of {name}"] = compiled
    for name, measure in rows.items():
        if context.seconds_left() < 2 * RESERVE:
            result["left out"].append(f"{name}, for lack of time")
            continue
        try:
            result["rows"][name] = measure()
        except Exception as error:
            traceback.print_exc()
            result["rows"][name] = {"reason": f"{type(error).__name__}: {error}".splitlines()[0]}
        context.write(result)
    return result


def _mlp() -> tuple[nn.Sequential, Tensor]:
    layers = [nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()]
    return nn.Sequential(*layers), torch.rand(CHUNKS, 64)


def _blocks() -> tuple[nn.Sequential, Tensor]:
    blocks = []
    for _ in range(12):
        block = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        blocks.append(block)
    return nn.Sequential(*blocks), torch.rand(4 * CHUNKS, 128, 256)


def _amoebanet() -> tuple[nn.Sequential, Tensor]:
    return amoebanetd(18, 256), torch.rand(4 * CHUNKS, 3, 224, 224)


def _with_graphs(device: torch.device) -> Fields:
    """Measure AmoebaNet-D with checkpointing, with and without CUDA graphs of its forwards."""
    with torch.device(device):
        layers, x = _amoebanet()
    off = _measured(layers, x, evenly(layers, PARTITIONS), "always")
    value: Value = x.chunk(CHUNKS)[0]
    partitions = []
    begin = 0
    start = time.perf_counter()
    for count in evenly(layers, PARTITIONS):
        partition = Graphed(layers[begin : begin + count], value)
        partitions.append(partition)
        with torch.no_grad():
            value = partition(value)
        begin += count
    seconds = time.perf_counter() - start
    on = _measured(nn.Sequential(*partitions), x, [1] * PARTITIONS, "always")
    return {"off": off, "on": on, "of": PARTITIONS, "done": PARTITIONS, "seconds": seconds}


def _with_compiled(build: Build, device: torch.device, backend: Any, context: Context) -> Fields:
    """Measure a model without checkpointing, first with uncompiled and then with compiled layers.

    Layers are compiled one by one. If time runs out, the remaining layers stay uncompiled.
    """
    with torch.device(device):
        layers, x = build()
    # Forget what dynamo has compiled for earlier models. Then allow one compilation for each layer:
    # layers of one class share their code, which dynamo compiles once for each shape.
    torch._dynamo.reset()
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, len(layers))
    config.fail_on_recompile_limit_hit = True  # otherwise, further layers would not be compiled
    balance = evenly(layers, PARTITIONS)
    off = _measured(layers, x, balance, "never")
    compiled: list[nn.Module] = []
    value: Value = x.chunk(CHUNKS)[0]
    start = time.perf_counter()
    slowest = 0.0
    for layer in layers:
        if context.seconds_left() < RESERVE + slowest:
            break
        began = time.perf_counter()
        module: Any = torch.compile(layer, backend=backend, dynamic=False)
        value = module(value)
        tensors, _ = tree_flatten(value)
        torch.autograd.backward([y.sum() for y in tensors])
        value = tree_map(lambda y: y.detach().requires_grad_(), value)
        compiled.append(module)
        slowest = max(slowest, time.perf_counter() - began)
    seconds = time.perf_counter() - start
    done = len(compiled)
    on = _measured(nn.Sequential(*compiled, *layers[done:]), x, balance, "never")
    return {"off": off, "on": on, "of": len(layers), "done": done, "seconds": seconds}


def _measured(layers: nn.Sequential, x: Tensor, balance: list[int], checkpoint: str) -> Fields:
    """Return the seconds until the host has issued a step, and until the device has finished it.

    The host's time is measured twice: without pauses, and with pauses in which the host waits for
    the device. Without pauses, the host may have to wait because the queue of kernel launches is
    full. Pauses prevent this, but take some time themselves. So both times can be too high, and the
    smaller time is returned.
    """
    options: Any = {"checkpoint": checkpoint, "engine": "graph"}
    model = GPipe(layers, balance, devices=[x.device] * PARTITIONS, chunks=CHUNKS, **options)

    def issue() -> None:
        model(x).sum().backward()

    hosts, steps = [], []
    for _ in range(1 + STEPS):
        model.zero_grad()
        synchronize(x.device)
        start = time.perf_counter()
        issue()
        issued = time.perf_counter()
        synchronize(x.device)
        steps.append(time.perf_counter() - start)
        model.zero_grad()
        paused = host_seconds(issue, layers, partial(synchronize, x.device))
        hosts.append(min(issued - start, paused))
    return {"host": median(hosts[1:]), "step": median(steps[1:])}


def lines(result: Fields) -> list[str]:
    """Say for each row how much faster a step is with compiled layers or CUDA graphs."""
    said = []
    for name, row in result["rows"].items():
        if "reason" in row:
            said.append(f"{name}: failed ({row['reason']})")
            continue
        off, on = row["off"], row["on"]
        ratio = off["step"] / on["step"]
        host = f"{1e3 * off['host']:.1f} to {1e3 * on['host']:.1f} ms"
        said.append(
            f"{name}: a step is {ratio:.2f} times as fast, the host's time goes from {host}; "
            f"{row['done']} of {row['of']} made in {row['seconds']:.0f} s"
        )
    left_out = "; ".join(result["left out"])
    parts = [" / ".join(said[:2]), " / ".join(said[2:]), left_out and f"left out: {left_out}"]
    return [part for part in parts if part]
