"""Which engine runs a pipeline, and what a backward of the graph engine leaves.

What `engine=` refuses is in test_gpipe.py, the graph engine on CUDA in test_simulated.py.
"""

import pickle

import pytest
import torch
from torch import nn

from torchgpipe.gpipe import EngineName

from ...behaviours.parts.layers import Do
from ...parts import Fails
from ...plain import piped

# The argument `engine`, the devices, the engine that is used.
CASES: list[tuple[EngineName, list[str], str]] = [
    ("auto", ["cpu"], "GraphEngine"),
    ("auto", ["cpu", "cpu"], "WorkersEngine"),
    ("auto", ["cpu", "meta"], "GraphEngine"),
    ("graph", ["cpu", "cpu"], "GraphEngine"),
    ("workers", ["cpu"], "WorkersEngine"),
]


@pytest.mark.parametrize("engine, devices, expected", CASES)
def test_the_engine_is_chosen_once(engine: EngineName, devices: list[str], expected: str) -> None:
    n = len(devices)
    model = piped(nn.Sequential(*(nn.Linear(2, 2) for _ in range(n))), [1] * n, devices=devices, engine=engine)
    chosen = model._engine
    for size, model.chunks, model.checkpoint in ((1, 1, "never"), (8, 4, "always"), (3, 8, "except_last")):
        model(torch.ones(size, 2))
        model.train(not model.training)
    assert model._engine is chosen
    for each in (model, pickle.loads(pickle.dumps(model))):
        assert type(each._engine).__name__ == expected


def test_what_a_backward_that_failed_has_left_is_not_handed_to_the_next() -> None:
    fails = Fails()
    apart = Do(lambda self, x: (x, self.weight * 2), weight=nn.Parameter(torch.ones(2, 2)))
    model = piped(nn.Sequential(nn.Linear(2, 2), fails, apart), [2, 1], 2, engine="graph")
    one, other = model(torch.ones(2, 2))
    fails.fail("backward", ArithmeticError(), calls_before=1)
    with pytest.raises(ArithmeticError):
        one.sum().backward(retain_graph=True)
    other.sum().backward()
    assert [p.grad is not None for p in model.parameters()] == [False, False, True]
