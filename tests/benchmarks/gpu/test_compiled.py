"""Test the GPU benchmark of compiled layers and CUDA graphs. Graphs are simulated on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.gpu import compiled
from torchgpipe import GPipe


class Graph(TorchDispatchMode):
    """A simulated CUDA graph, which records the operators that run in its `with` block.

    Attributes:
        replays: The number of calls of `replay`, which runs the recorded operators again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and note it."""
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        """Run the recorded operators again, and overwrite the outputs of their first run."""
        self.replays += 1
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if old is not new and not func.is_view:
                    old.copy_(new)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """Simulate CUDA's streams and graphs. Return a list to which each new graph is added."""
    made: list[Graph] = []

    class Stream:
        def wait_stream(self, stream: "Stream") -> None:
            pass

    @contextmanager
    def capture(graph: Graph) -> Iterator[None]:
        made.append(graph)
        with graph:
            yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    return made


def test_a_partition_with_a_cuda_graph_does_the_same(graphs: list[Graph]) -> None:
    """Check that a partition whose forward is a CUDA graph has the results of its layers.

    Forwards replay the graph, and recomputations run the layers, which autograd has to see.
    """
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    first, second = torch.rand(2, 8, 3, dtype=torch.double)
    partition = compiled.Graphed(layers, first.chunk(4)[0])
    (graph,) = graphs
    model = GPipe(
        nn.Sequential(partition),
        [1],
        devices=["cpu"],
        chunks=4,
        checkpoint="always",
        engine="graph",
    )
    # In the very first pass, the pipeline learns which outputs take a gradient, by the layers.
    for x, replays in ((first, 3), (second, 4)):
        model.zero_grad()
        graph.replays = 0

        y = model(x)
        y.sum().backward()

        assert graph.replays == replays
        gradients = [parameter.grad for parameter in layers.parameters()]
        layers.zero_grad()
        expected = layers(x)
        expected.sum().backward()
        assert torch.allclose(y, expected)
        for gradient, parameter in zip(gradients, layers.parameters(), strict=True):
            assert gradient is not None and parameter.grad is not None
            assert torch.allclose(gradient, parameter.grad)


class Pair(nn.Linear):
    """A layer that takes and returns two tensors, as the cells of AmoebaNet-D do."""

    def forward(self, value: Any) -> Any:
        x, y = value if isinstance(value, tuple) else (value, value)
        return super().forward(x) + y, x


class Joined(nn.Module):
    def forward(self, value: Any) -> Any:
        x, y = value
        return x + y


def test_cuda_graphs_are_measured_beside_the_layers(
    graphs: list[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    def build() -> Any:
        layers = nn.Sequential(Pair(4, 4), Pair(4, 4), Pair(4, 4), Joined())
        return layers, torch.rand(compiled.CHUNKS, 4)

    monkeypatch.setattr(compiled, "_amoebanet", build)

    found = compiled._with_graphs(torch.device("cpu"))

    assert found["done"] == found["of"] == len(graphs) == compiled.PARTITIONS
    for side in ("off", "on"):
        assert found[side]["step"] > 0
        assert found[side]["host"] > 0
    assert min(graph.replays for graph in graphs) > compiled.CHUNKS
