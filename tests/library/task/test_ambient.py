"""Ambient: what a first pass must not leave behind. What reaches threads and passes is in tests/behaviours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torchgpipe.task.ambient import Ambient
from torchgpipe.tensors.checkpoint import checkpointing, is_checkpointing, is_recomputing, recomputing

DEVICES = [torch.device("cpu"), torch.device("meta"), torch.device("cuda")]  # looked at, not used


@pytest.mark.parametrize("outer", [checkpointing, recomputing])
def test_a_pipeline_among_the_layers_of_another_knows_its_pass(outer: Callable[[], Any]) -> None:
    with outer():
        ambient, expected = Ambient(DEVICES), (is_checkpointing(), is_recomputing())
    with ambient.entered():
        assert (is_checkpointing(), is_recomputing()) == expected != (False, False)
    assert not is_checkpointing() and not is_recomputing()


def test_a_weight_cast_without_a_graph_does_not_serve_one_with_a_graph() -> None:
    linear, x = nn.Linear(3, 3), torch.randn(2, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ambient = Ambient(DEVICES)
        with torch.no_grad(), ambient.for_first_pass():
            linear(x)
        linear(x).sum().backward()
        assert linear.weight.grad is not None
        for context in (ambient.for_first_pass, ambient.again, ambient.entered):
            with context():
                assert not torch.is_autocast_cache_enabled()
            assert torch.is_autocast_cache_enabled()
