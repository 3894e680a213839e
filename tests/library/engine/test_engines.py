"""Which engine runs a pipeline: the devices decide. What `engine=` refuses is in test_gpipe.py."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

from torchgpipe import GPipe
from torchgpipe.engine.engines import EngineName
from torchgpipe.tensors.checkpoint import Mode

# The engine asked for, the devices, and the engine that it is.
CASES: list[tuple[EngineName, list[str], str]] = [
    ("auto", ["cpu"], "GraphEngine"),
    ("auto", ["cpu", "cpu"], "WorkersEngine"),
    ("auto", ["meta", "meta"], "GraphEngine"),
    ("auto", ["cpu", "meta"], "GraphEngine"),
    ("graph", ["cpu", "cpu"], "GraphEngine"),
    ("workers", ["cpu"], "WorkersEngine"),
]


@pytest.mark.parametrize("engine, devices, expected", CASES)
def test_the_engine_is_chosen_once(engine: EngineName, devices: list[str], expected: str) -> None:
    n = len(devices)
    model = GPipe(nn.Sequential(*(nn.Linear(2, 2) for _ in range(n))), [1] * n, devices=devices, engine=engine)
    chosen = model._engine
    assert type(chosen).__name__ == expected
    runs: list[tuple[int, int, Mode]] = [(1, 1, "never"), (8, 4, "always"), (3, 8, "except_last")]
    for size, model.chunks, model.checkpoint in runs:
        model(torch.ones(size, 2))
        model.train(not model.training)
    assert model._engine is chosen
    assert type(pickle.loads(pickle.dumps(model))._engine).__name__ == expected
