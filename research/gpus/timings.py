"""Whole models that others trained on one of the GPUs: what kernels alone do not tell comes from them.

All are one publisher's, lambdal/deeplearning-benchmark, pytorch/pytorch-train-throughput-fp16.csv and -fp32.csv, in the
rows "LambdaCloud V100 16GB", "A100 80GB SXM4" and "H100 80GB SXM5". Batch sizes are in pytorch/pytorch-train-bs-*.csv
there; of the H100 SXM5 it has none, and those of the H100 PCIe are taken, with as much memory.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["BERT", "RESNET", "Training"]


class Training(NamedTuple):
    """A model as it was trained on one GPU: on which, in which type of numbers, its batch size, and samples/s."""

    hardware: str
    dtype: str
    model: str
    batch: int
    throughput: float


RESNET = [
    Training("v100x8", "float16", "resnet50", 256, 833),
    Training("v100x8", "float32", "resnet50", 128, 369),
    Training("a100x8", "float16", "resnet50", 1280, 1582),
    Training("a100x8", "tf32", "resnet50", 640, 1066),
    Training("h100x8", "float16", "resnet50", 1280, 2616),
    Training("h100x8", "tf32", "resnet50", 640, 1753),
]
BERT = [
    Training("v100x8", "float16", "bert_base_squad", 48, 189),
    Training("v100x8", "float16", "bert_large_squad", 16, 57),
    Training("v100x8", "float32", "bert_base_squad", 24, 42),
    Training("v100x8", "float32", "bert_large_squad", 8, 12),
    Training("a100x8", "float16", "bert_base_squad", 320, 443),
    Training("a100x8", "float16", "bert_large_squad", 112, 152),
    Training("a100x8", "tf32", "bert_base_squad", 172, 239),
    Training("a100x8", "tf32", "bert_large_squad", 64, 75),
    Training("h100x8", "float16", "bert_base_squad", 320, 812),
    Training("h100x8", "float16", "bert_large_squad", 112, 301),
    Training("h100x8", "tf32", "bert_base_squad", 172, 408),
    Training("h100x8", "tf32", "bert_large_squad", 64, 141),
]
"""Fine-tuned for SQuAD: sequences of 384 tokens, attention in single steps, as in NVIDIA's DeepLearningExamples."""
