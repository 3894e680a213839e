"""Fit the rate of convolutions: `python -m research.gpus` writes it into the hardware descriptions."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import NamedTuple

import torch
import torchvision
from torch import nn

from reproduce.records.record import write_atomically
from torchgpipe.plan.count import Counts, count
from torchgpipe.plan.hardware import FOLDER, Hardware, load_hardware
from torchgpipe.plan.optimizer import optimizer_named
from torchgpipe.plan.predict import Predictor, Setup

SOURCE = (
    "fitted by research/gpus (README.md there): with it ResNet-50 trains at {} images/s in batches of {} on one GPU, as "
    "published in lambdal/deeplearning-benchmark, pytorch/pytorch-train-throughput-{}.csv"
)


class Training(NamedTuple):
    """ResNet-50 as it was trained on one GPU."""

    hardware: str
    key: str
    """Of the share in the description."""
    batch: int
    throughput: float
    """Images per second."""

    @property
    def half(self) -> bool:
        """Whether it was mixed precision."""
        return self.key == "conv"

    @property
    def source(self) -> str:
        """What the description says of the share."""
        return SOURCE.format(f"{self.throughput:.0f}", self.batch, "fp16" if self.half else "fp32")


TRAININGS = (
    Training("v100x8", "conv", 256, 833),
    Training("v100x8", "conv.float32", 128, 369),
    Training("a100x8", "conv", 1280, 1582),
    Training("a100x8", "conv.tf32", 640, 1066),
    Training("h100x8", "conv", 1280, 2616),
    Training("h100x8", "conv.tf32", 640, 1753),
)
"""Rows "LambdaCloud V100 16GB", "A100 80GB SXM4" and "H100 80GB SXM5" (batch sizes: pytorch-train-bs-*.csv there; of the
H100 SXM5 it has none, and those of the H100 PCIe are taken, with as much memory)."""


def main() -> None:
    """Fit every share, print what it comes to, and write it into the description."""
    with torch.device("meta"):
        model, images = nn.Sequential(torchvision.models.resnet50()), torch.empty(2, 3, 224, 224)
        plain = count(model, images, memory=False)
        mixed = count(model, images, memory=False, autocast=torch.float16)
    for training in TRAININGS:
        share = round(fitted(training, mixed if training.half else plain), 3)
        print(f"{training.hardware} {training.key}: {share}")
        path = FOLDER / f"{training.hardware}.json"
        description = json.loads(path.read_text(encoding="utf-8"))
        shares = description["compute_efficiency"]
        shares[training.key] = {"value": share, "source": training.source}
        shares[training.key.replace("conv", "conv3x3")]["value"] = share
        write_atomically(path, json.dumps(description, indent=2) + "\n")


def fitted(training: Training, counts: Counts) -> float:
    """Return the share of their peak at which convolutions make the step as long as it was, by bisection."""
    node = load_hardware(training.hardware)
    low, high = 0.01, 2.0
    while high / low > 1.0001:
        middle = math.sqrt(low * high)
        slower = throughput(with_share(node, training.key, middle), counts, training.batch) < training.throughput
        low, high = (middle, high) if slower else (low, middle)
    return low


def with_share(node: Hardware, key: str, share: float) -> Hardware:
    """Return the node with another share for convolutions of all sizes, in one type of numbers."""
    shares = {key: share, key.replace("conv", "conv3x3"): share}
    return replace(node, compute_efficiency={**node.compute_efficiency, **shares})


def throughput(node: Hardware, counts: Counts, batch: int) -> float:
    """Return the images per second of steps on one device."""
    setup = Setup(batch, (1,), 1, "never", optimizer_named("momentum", foreach=True))
    return batch / Predictor(counts, node).step(setup).seconds


if __name__ == "__main__":
    main()
