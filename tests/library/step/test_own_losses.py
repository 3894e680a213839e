"""Tests of the table in docs/schedules.md on how to use `step` with one's own loss functions.

Each loss, and its gradients, must be those of the whole mini-batch without a pipeline.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from torchgpipe import GPipe

WORDS = torch.arange(40).view(8, 5) % 7
PADDED = WORDS.where(torch.arange(5) <= torch.arange(8)[:, None], -100)
"""Texts of one to five words. The rest is padding."""


def sum_of_squares(y: Tensor, t: Tensor) -> Tensor:
    return (y.mean(2) - t).square().sum()


def of_labels(y: Tensor, t: Tensor) -> Tensor:
    return cross_entropy(y.flatten(0, 1), t.flatten())


def masked_mean(y: Tensor, t: dict[str, Tensor]) -> Tensor:
    return ((y.mean(2) - t["values"]).square() * t["mask"]).sum() / t["mask"].sum()


def rmse(y: Tensor, t: Tensor) -> Tensor:
    return mse_loss(y.mean(2), t.float()).sqrt()


def dice(y: Tensor, t: Tensor) -> Tensor:
    p, t = y.mean(2).sigmoid(), t % 2
    return 1 - 2 * (p * t).sum() / (p.sum() + t.sum())


def contrastive(y: Tensor, t: Tensor) -> Tensor:
    first, second = y.mean(1), y.mean(1).roll(1, 1)
    return cross_entropy(first @ second.T, torch.arange(len(y)))


def count(t: Tensor) -> Tensor:
    return (t >= 0).sum()


MASKED = {"values": WORDS, "mask": PADDED >= 0}
ROWS: dict[str, tuple[Callable[[Tensor, Any], Tensor], Any, dict[str, Any] | None]] = {
    "a mean over samples": (of_labels, WORDS, {}),
    "a sum": (sum_of_squares, WORDS, {"reduction": "sum"}),
    "a mean over labels that are not ignored": (of_labels, PADDED, {"weight": count}),
    "a masked mean": (masked_mean, MASKED, {"weight": lambda t: t["mask"].sum()}),
    "the root of a mean": (rmse, PADDED, None),
    "a ratio of sums": (dice, WORDS, None),
    "samples compared with each other": (contrastive, WORDS, None),
}
"""The criterion, the target, and the options of `step`; `None` if it needs `loss`."""


@pytest.mark.parametrize("name", ROWS)
def test_the_loss_is_that_of_the_whole_mini_batch(name: str) -> None:
    criterion, target, options = ROWS[name]
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Embedding(7, 6), nn.Tanh(), nn.Linear(6, 7))
    plain = copy.deepcopy(layers)
    model = GPipe(layers, [2, 1], devices=["cpu", "cpu"], chunks=3)
    if options is None:
        loss = model.loss(criterion, WORDS, target)
        loss.backward()
    else:
        loss = model.step(criterion, WORDS, target, **options)
    expected = criterion(plain(WORDS), target)
    expected.backward()
    torch.testing.assert_close(loss, expected, check_stride=False)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name, (_, _, options) in ROWS.items() if options != {}])
def test_step_alone_gives_another_loss(name: str) -> None:
    """Check that `step` without options gives another loss than that of the whole mini-batch.

    The test uses the losses for which docs/schedules.md advises an option of `step`, or the method
    `loss` in place of `step`. The other loss shows that this advice is needed.
    """
    criterion, target, _ = ROWS[name]
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Embedding(7, 6), nn.Tanh(), nn.Linear(6, 7))
    expected = criterion(layers(WORDS), target)
    model = GPipe(layers, [2, 1], devices=["cpu", "cpu"], chunks=3)
    assert not torch.allclose(model.step(criterion, WORDS, target), expected)
