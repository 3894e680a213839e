"""Find the efficiencies of V100, A100 and H100: `python -m research.gpus` writes them into the descriptions."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from reproduce.records.record import write_atomically
from research.gpus.kernels import COMPUTE, MEMORY
from research.gpus.models import throughput
from research.gpus.timings import BERT, RESNET, Training
from torchgpipe.plan.hardware import FOLDER, Hardware, load_hardware
from torchgpipe.plan.operators import CLASSES

TWINS = {"h200x8": "h100x8"}
"""Descriptions whose chip is another's."""
SUSTAINED = "; times {}, the share of such rates that BERT's training steps reach (research/gpus)"
CONVOLUTIONS = (
    "fitted by research/gpus: with it ResNet-50 trains at {:.0f} images/s in batches of {}, as published (timings.py)"
)
NOT_FITTED = "assumed, not measured: the share of float32's peak that a V100 reaches"


def main() -> None:
    """Fit what is to be fitted, print it, and write the descriptions."""
    shares = {}
    for name in COMPUTE:
        node = by_kernels(load_hardware(name), 1.0)
        shares[name] = sustained = round(fitted(lambda x, n=node: by_kernels(n, x), of(BERT, name)), 3)  # type: ignore[misc]
        node, found = by_kernels(node, sustained), {}
        for training in of(RESNET, name):
            key = "" if training.dtype == "float16" else f".{training.dtype}"
            share = round(fitted(lambda x, n=node, k=key: with_convolutions(n, k, x), [training]), 3)  # type: ignore[misc]
            found[f"conv{key}"] = share, CONVOLUTIONS.format(training.throughput, training.batch)
        if name == "v100x8":
            float32 = found["conv.float32"][0]
        found.setdefault("conv.float32", (float32, NOT_FITTED))
        write(name, sustained, found)
        print(f"{name}: sustained {sustained}, " + ", ".join(f"{key} {share}" for key, (share, _) in found.items()))
    for name, twin in TWINS.items():
        copy(name, twin)


def of(trainings: Iterable[Training], hardware: str) -> list[Training]:
    """Return those on one GPU."""
    return [training for training in trainings if training.hardware == hardware]


def fitted(node: Callable[[float], Hardware], trainings: list[Training]) -> float:
    """Return the share with which the node is as fast as published, in the mean of logarithms, by bisection."""
    low, high = 0.01, 2.0
    while high / low > 1.0001:
        middle = math.sqrt(low * high)
        off = [math.log(throughput(node(middle), training) / training.throughput) for training in trainings]
        low, high = (middle, high) if sum(off) < 0 else (low, middle)
    return low


def by_kernels(node: Hardware, sustained: float) -> Hardware:
    """Return the node with the shares of single kernels, times one number; convolutions keep theirs."""
    compute = {key: share * sustained for key, (share, _) in COMPUTE[node.name].items()}
    memory = dict.fromkeys(CLASSES, MEMORY[node.name][0] * sustained)
    return replace(node, compute_efficiency={**node.compute_efficiency, **compute}, memory_efficiency=memory)


def with_convolutions(node: Hardware, key: str, share: float) -> Hardware:
    """Return the node with another share for convolutions of all sizes, in one type of numbers."""
    shares = {f"{kind}{key}": share for kind in ("conv", "conv3x3")}
    return replace(node, compute_efficiency={**node.compute_efficiency, **shares})


def write(name: str, sustained: float, convolutions: dict[str, tuple[float, str]]) -> None:
    """Write a description's shares, each with its source."""
    path = FOLDER / f"{name}.json"
    description = json.loads(path.read_text(encoding="utf-8"))
    compute = {}
    for key, (share, source) in COMPUTE[name].items():
        compute[key] = {"value": round(share * sustained, 3), "source": source + SUSTAINED.format(sustained)}
    for key, (share, source) in convolutions.items():
        compute[key] = {"value": share, "source": source}
        compute[key.replace("conv", "conv3x3")] = {"value": share, "source": f"as {key}, with which it shares one"}
    share, source = MEMORY[name]
    memory = {"elementwise": {"value": round(share * sustained, 3), "source": source + SUSTAINED.format(sustained)}}
    for kind in CLASSES:
        if kind not in ("elementwise", "winograd"):
            value = memory["elementwise"]["value"]
            memory[kind] = {"value": value, "source": "as elementwise, with which it shares one"}
    description |= {"compute_efficiency": compute, "memory_efficiency": memory}
    write_atomically(path, json.dumps(description, indent=2) + "\n")


def copy(name: str, twin: str) -> None:
    """Give a description another's shares."""
    path = FOLDER / f"{name}.json"
    description = json.loads(path.read_text(encoding="utf-8"))
    other = json.loads((FOLDER / f"{twin}.json").read_text(encoding="utf-8"))
    for table in ("compute_efficiency", "memory_efficiency"):
        shares = {key: figure["value"] for key, figure in other[table].items()}
        source = f"assumed, not measured: as {twin}"
        description[table] = {key: {"value": value, "source": source} for key, value in shares.items()}
    write_atomically(path, json.dumps(description, indent=2) + "\n")


if __name__ == "__main__":
    main()
