"""Count the models that were trained, and predict how fast they train on one GPU."""

from __future__ import annotations

import functools

import torch
import torchvision
from torch import nn

from research.gpus.timings import Training
from research.league.models import Sizes, counted
from torchgpipe.plan.count import Counts, count
from torchgpipe.plan.hardware import Hardware
from torchgpipe.plan.optimizer import optimizer_named
from torchgpipe.plan.predict import Predictor, Setup

__all__ = ["throughput"]

SIZES = {"bert_base_squad": (12, 768, 12), "bert_large_squad": (24, 1024, 16)}
"""Layers, width and heads."""


def throughput(node: Hardware, training: Training) -> float:
    """Return the samples per second that are predicted."""
    counts = _counts(training.model, training.dtype)
    bert = training.model in SIZES
    optimizer = optimizer_named(
        "adam" if bert else "momentum", foreach=True, master_weights=bert and training.dtype == "float16"
    )
    step = Predictor(counts, node).step(Setup(training.batch, (len(counts),), 1, "never", optimizer))
    return training.batch / step.seconds


@functools.cache
def _counts(model: str, dtype: str) -> Counts:
    """Count BERT in that type; and ResNet-50, in mixed precision for float16."""
    if model in SIZES:
        layers, width, heads = SIZES[model]
        sizes = Sizes(layers, width, heads, 384, 30522, causal=False, fused=False, dropout=0.1, head=False)
        return counted(sizes, dtype)
    with torch.device("meta"):
        module, images = nn.Sequential(torchvision.models.resnet50()), torch.empty(2, 3, 224, 224)
    return count(module, images, memory=False, autocast=torch.float16 if dtype == "float16" else None)
