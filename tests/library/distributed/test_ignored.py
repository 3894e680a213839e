"""Test what ranks do if a micro-batch has only labels that the criterion ignores.

The last stage's rank must warn, and advise to use the argument `weight=`.
"""

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from torchgpipe.distributed import DistributedGPipe

WORLD = 2
pytestmark = pytest.mark.ranks(WORLD)


def of_tokens(output: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(output.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_micro_batches_without_labels(schedule: str) -> None:
    """Check that the loss is NaN without `weight=`, and that one rank warns and says what to do.

    That rank is the one with the last stage, because it computes the loss.
    """
    torch.manual_seed(5)
    stages = 2 * WORLD if schedule == "ZBVZeroBubble" else WORLD
    layers = nn.Sequential(*[nn.Linear(3, 3) for _ in range(stages)])
    plain = copy.deepcopy(layers)
    x, labels = torch.randn(6, 4, 3), torch.randint(3, (6, 4))
    labels[:2] = -100
    labels[5, 1:] = -100
    model = DistributedGPipe(layers, [1] * stages, chunks=3, schedule=schedule)

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert model.step(of_tokens, x, labels).isnan()
    last = model.schedule.placement[-1]
    assert len(warned) == (1 if model.rank == last else 0)
    for warning in warned:
        assert str(warning.message).endswith("weight=lambda target: (target != -100).sum()")

    model.zero_grad()
    loss = model.step(of_tokens, x, labels, weight=lambda target: (target != -100).sum())
    expected = of_tokens(plain(x), labels)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    grads = {name: p.grad for name, p in plain.named_parameters()}
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, grads[name])
    model.close()
