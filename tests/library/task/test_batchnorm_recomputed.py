"""Test deferred batch norms that a plain checkpoint of PyTorch runs again in the backward."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import BatchNorm1d
from torch.utils.checkpoint import checkpoint

from torchgpipe import GPipe
from torchgpipe.task.batchnorm import DeferredBatchNorm

from .test_batchnorm import assert_same_statistics


class Checkpointed(nn.Module):
    """A batch norm within a plain checkpoint of PyTorch, which runs it again in the backward."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.norm = BatchNorm1d(4)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Any:
        return checkpoint(lambda x: self.norm(x).tanh(), x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_plain_checkpoint_does_not_track_a_micro_batch_twice(use_reentrant: bool) -> None:
    """Check that statistics change only in training, and only once for each micro-batch."""
    x = torch.randn(8, 4, requires_grad=True)
    plain = BatchNorm1d(4)
    plain(x)
    layers = nn.Sequential(Checkpointed(use_reentrant=use_reentrant))
    options: dict[str, Any] = {"checkpoint": "never", "deferred_batch_norm": True}
    model = GPipe(layers, [1], devices=["cpu"], chunks=2, **options)
    (norm,) = [each for each in model.modules() if isinstance(each, DeferredBatchNorm)]
    model(x).sum().backward()
    model.eval()
    model(x)
    assert_same_statistics(norm, plain)
    model.train()
    model.step(lambda output, _: output.mean(), x)
    plain(x)
    assert_same_statistics(norm, plain)
