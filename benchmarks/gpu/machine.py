"""Describe the machine, and time copies between devices and launches of kernels."""

import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import permutations
from statistics import median

import msgspec
import torch
from torch import Tensor

from benchmarks.gpu.part import Context, Fields
from reproduce.machine.description import machine, versions
from torchgpipe.balance.profile import seconds_of, synchronize

PURPOSE = "what this machine is, and how fast it copies and launches"
SHARE = 0.7
NEEDS: tuple[str, ...] = ()

RUNS = 5
"""How often a copy is timed after a warm-up. The median counts."""
LAUNCHES = 500
"""How many kernels are launched one after another. CUDA queues about a thousand."""
ASKED = {"topology.txt": ("topo", "-m"), "nvidia-smi.txt": ("-q",)}
"""The files with what nvidia-smi prints, and its arguments."""
Copy = tuple[str, Tensor, Tensor]
"""What is copied where, as text, and the source and the target of the copy."""


def run(context: Context) -> Fields:
    """Describe the machine and the software; time copies between devices and kernel launches."""
    device = context.devices[0]
    described = msgspec.to_builtins(machine())
    result: Fields = {"machine": described, "versions": versions(), "nvidia-smi": False}
    context.write(result)
    for file, arguments in ASKED.items():
        printed = _nvidia_smi(max(1.0, context.seconds_left() / 3), *arguments)
        if printed is not None:
            result["nvidia-smi"] = True
            (context.folder / file).write_text(printed)
    context.write(result)
    result["launch"] = _launch(device)
    result["copies"] = {}
    elements = 2**26 if context.size == "paper" else 2**18
    for name, source, target in _copies(context.devices, elements):
        if context.seconds_left() < 0:
            break
        copy = partial(target.copy_, source)
        waited = target.device if source.device.type == "cpu" else source.device
        timed = [seconds_of(copy, waited) for _ in range(1 + RUNS)]
        moved = source.nbytes * (2 if source.device == target.device else 1)
        result["copies"][name] = moved / median(timed[1:])
        context.write(result)
    return result


def _nvidia_smi(seconds: float, *arguments: str) -> str | None:
    """Run nvidia-smi, and return what it prints. If it fails or takes too long, return None.

    Args:
        seconds: How long it may take. If the driver is not loaded all the time, it starts slowly.
        arguments: The arguments of nvidia-smi.
    """
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=seconds
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


def _copies(devices: list[torch.device], elements: int) -> Iterator[Copy]:
    """Yield the copies whose speed is measured: within a GPU, with the host, and between GPUs.

    Args:
        devices: The devices. If the first one is a CPU, the only copy is within the CPU.
        elements: The number of float32 values to copy.

    Yields:
        The name of a copy, such as "cuda:0 to cuda:1", its source tensor and its target tensor.
    """
    first = devices[0]
    x = torch.ones(elements, device=first)
    yield f"within {first}", x, torch.empty_like(x)
    if first.type == "cpu":
        return
    for kind in ("pinned", "pageable"):
        host = torch.ones(elements, pin_memory=kind == "pinned")
        yield f"{kind} to {first}", host, x
        yield f"{first} to {kind}", x, host
    for here, there in permutations(devices, 2):
        source = torch.ones(elements, device=here)
        yield f"{here} to {there}", source, torch.empty_like(source, device=there)


def _launch(device: torch.device) -> Fields:
    """Time launches of an operator, and of an empty kernel.

    The operator goes through PyTorch's dispatcher. The empty kernel is launched as directly as
    PyTorch allows.

    Returns:
        A dictionary with the keys "an operator" and, on GPUs, "an empty kernel". Each value has two
        means for a launch: the host's seconds ("host"), and the seconds until the device is done
        ("until done").
    """
    x = torch.zeros(1, device=device)
    launched: dict[str, Callable[[], object]] = {"an operator": x.zero_}
    if device.type == "cuda":
        launched["an empty kernel"] = partial(torch.cuda._sleep, 0)
    found: Fields = {}
    for name, launch in launched.items():
        for _ in range(2):  # the first time is a warm-up
            synchronize(device)
            start = time.perf_counter()
            for _ in range(LAUNCHES):
                launch()
            issued = time.perf_counter()
            synchronize(device)
            done = time.perf_counter()
            found[name] = {
                "host": (issued - start) / LAUNCHES,
                "until done": (done - start) / LAUNCHES,
            }
    return found


def lines(result: Fields) -> list[str]:
    """Say what the machine is, and how fast it copies and launches kernels, in three lines."""
    host, versions_of = result["machine"], result["versions"]
    gpus: dict[str, int] = {}
    for gpu in host.get("gpus", []):
        gpus[gpu["name"]] = gpus.get(gpu["name"], 0) + 1
    named = [f"{count} x {name}" for name, count in gpus.items()] or ["no GPU"]
    first = [*named, f"{host['cpu']}, {host['cores']} cores"]
    software = {name: versions_of[name] for name in ("torch", "cuda", "driver", "python")}
    first += [f"{name} {found}" for name, found in software.items() if found is not None]
    smi = "topology.txt has the links" if result["nvidia-smi"] else "nvidia-smi is not there"
    first.append(smi)
    copies = [f"{name} {rate / 1e9:.1f}" for name, rate in result.get("copies", {}).items()]
    launches = []
    for name, seconds in result.get("launch", {}).items():
        issued, done = 1e6 * seconds["host"], 1e6 * seconds["until done"]
        launches.append(f"{name} {issued:.1f} us on the host, {done:.1f} us until done")
    return [
        "; ".join(first),
        f"copies in GB/s (read and written within a device): {', '.join(copies)}",
        f"to launch: {'; '.join(launches)}",
    ]
