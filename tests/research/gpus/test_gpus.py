"""Descriptions hold what kernels and the fit say, and with it the models train as fast as published."""

from __future__ import annotations

import math

import pytest

from research.gpus.kernels import COMPUTE, MEMORY
from research.gpus.models import throughput
from research.gpus.timings import BERT, RESNET
from torchgpipe.plan.hardware import load_hardware


@pytest.mark.parametrize("name", sorted(COMPUTE))
def test_one_number_is_between_kernels_and_the_description(name: str) -> None:
    node = load_hardware(name)
    share = node.memory_efficiency["elementwise"] / MEMORY[name][0]
    assert 0.5 < share < 1
    for key, (kernel, _) in COMPUTE[name].items():
        assert node.compute_efficiency[key] == pytest.approx(kernel * share, rel=2e-3)


@pytest.mark.parametrize("name", sorted(COMPUTE))
def test_models_train_as_fast_as_published(name: str) -> None:
    node = load_hardware(name)
    for training in RESNET:
        if training.hardware == name:
            assert throughput(node, training) == pytest.approx(training.throughput, rel=0.005)
    off = [math.log(throughput(node, x) / x.throughput) for x in BERT if x.hardware == name]
    assert sum(off) / len(off) == pytest.approx(0, abs=0.005)
