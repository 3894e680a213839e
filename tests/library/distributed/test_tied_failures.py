"""Test how ranks with tied weights go on after a failure, and what they say of NaN."""

import time
from math import nan
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from torchgpipe.distributed import DistributedGPipe, RankFailed

from .test_tied import WORLD, gpt, words

pytestmark = pytest.mark.ranks(WORLD)


def test_copies_whose_values_are_all_nan_are_alike() -> None:
    """Check that a training that has failed is not told that its copies differ."""
    model = DistributedGPipe(gpt(), [1, 2, 1], chunks=2)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(nan)
    assert model.step(cross_entropy, *words()).isnan()


def test_a_training_goes_on_after_a_failed_backward() -> None:
    """Check that all ranks compare copies in the same mini-batches after `close`.

    When rank 0 fails, rank 2 has already finished its actions, and has counted the mini-batch.
    """
    model = DistributedGPipe(gpt(), [1, 2, 1], chunks=4, schedule="1F1B")
    model.step(cross_entropy, *words())
    handles = []
    backwards: list[Tensor] = []
    if model.rank == 0:

        def fail(grad: Tensor) -> None:
            backwards.append(grad)
            if len(backwards) == 4:  # the last backward of rank 0, which comes after all of rank 2
                time.sleep(0.5)
                raise ValueError("no gradient")

        def add_hook(_: Any, __: Any, output: Tensor) -> None:
            if output.requires_grad:  # not in the first pass of a checkpointed task
                output.register_hook(fail)

        handles.append(model.partition[0].register_forward_hook(add_hook))
    with pytest.raises((ValueError, RankFailed), match="no gradient"):
        for _ in range(2):  # rank 1 has no copy, and hears of the failure in the next mini-batch
            model.step(cross_entropy, *words())
    model.close()
    for handle in handles:
        handle.remove()
    for seed in range(8):
        model.step(cross_entropy, *words(seed))
