"""Time of scatter and gather, under pytest-benchmark: a mini-batch into m micro-batches, and their outputs into one.

Scatter makes views, so its time should not depend on the samples' size; gather copies, and its time should.
"""

from typing import Any

import pytest
import torch

from torchgpipe.tensors.microbatch import TensorOrTensors, gather, scatter

VALUES: dict[str, TensorOrTensors] = {
    "a tensor of 64 x 8": torch.rand(64, 8),
    "a tensor of 64 x 3 x 64 x 64": torch.rand(64, 3, 64, 64),
    "a tuple of three": (torch.rand(64, 8), torch.rand(64, 16, 16), torch.rand(64)),
}


@pytest.mark.parametrize("m", [1, 8, 64])
@pytest.mark.parametrize("name", VALUES)
def test_scatter(benchmark: Any, name: str, m: int) -> None:
    """Split along the batch dimension."""
    parts = benchmark.pedantic(scatter, args=(VALUES[name], m), rounds=100, iterations=10, warmup_rounds=5)
    assert len(parts) == m


@pytest.mark.parametrize("m", [1, 8, 64])
@pytest.mark.parametrize("name", VALUES)
def test_gather(benchmark: Any, name: str, m: int) -> None:
    """Concatenate along the batch dimension."""
    parts = scatter(VALUES[name], m)
    whole = benchmark.pedantic(gather, args=(parts,), rounds=100, iterations=10, warmup_rounds=5)
    assert len(whole[0] if isinstance(whole, tuple) else whole) == 64


@pytest.mark.parametrize("m", [8, 64])
def test_gather_backward(benchmark: Any, m: int) -> None:
    """Run the backward of gather."""
    parts = [torch.rand(64 // m, 3, 64, 64, requires_grad=True) for _ in range(m)]
    whole: Any = gather(list(parts))
    args, more = (whole, parts, torch.ones_like(whole)), {"retain_graph": True}
    found = benchmark.pedantic(torch.autograd.grad, args=args, kwargs=more, rounds=50, warmup_rounds=5)
    assert len(found) == m
