"""Test that `step` warns of means over different numbers of targets, and the weight to give."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ..test_step import pipeline

ce = nn.functional.cross_entropy


def step_without_warnings(chunks: int, criterion: Any, x: Tensor, target: Any) -> None:
    """Run a step of a new pipeline, and check that it does not warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipeline(engine="graph", chunks=chunks).step(criterion, x, target)


def of_chosen(y: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of the losses of labels that are not -100, without `ignore_index`."""
    chosen = labels != -100
    return ce(y[chosen], labels[chosen])


def test_a_mean_over_masked_outputs_warns_of_different_numbers_of_targets() -> None:
    model = pipeline(engine="graph", chunks=3)
    x, labels = torch.randn(6, 4, 2), torch.randint(2, (6, 4))
    labels[0] = -100
    with pytest.warns(UserWarning, match="different numbers of targets for each") as warned:
        model.step(of_chosen, x, labels)
    model.zero_grad()
    _, advised = str(warned[0].message).split("weight=")
    loss = model.step(of_chosen, x, labels, weight=eval(advised))
    torch.testing.assert_close(loss, of_chosen(nn.Sequential(*model)(x), labels).detach())
    labels[:] = labels[3]
    step_without_warnings(3, of_chosen, x, labels)


def each_loss(y: Tensor, labels: Tensor) -> Tensor:
    return ce(y.transpose(1, 2), labels.clamp(min=0), reduction="none")


def divided(y: Tensor, labels: Tensor) -> Tensor:
    mask = (labels != -100).float()
    return -(-each_loss(y, labels) * mask).sum() / mask.sum()


def divided_by_a_number(y: Tensor, labels: Tensor) -> Tensor:
    loss = ce(y.flatten(0, 1), labels.flatten(), reduction="sum")
    return loss / int((labels != -100).sum()) + 0.1


def chosen_losses(y: Tensor, labels: Tensor) -> Tensor:
    return 2 * each_loss(y, labels)[labels != -100].mean()


def squares(y: Tensor, labels: Tensor) -> Tensor:
    mask = (labels != -100)[..., None]
    errors = nn.functional.mse_loss(y * mask, torch.ones_like(y) * mask, reduction="sum")
    return errors / mask.sum()


def masked(y: Tensor, target: dict[str, Tensor]) -> Tensor:
    return (each_loss(y, target["labels"]) * target["mask"]).sum() / target["mask"].sum()


def mean_of_the_rest(y: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of all losses but the ignored ones, which are replaced by NaN."""
    return torch.where(labels == -100, torch.nan, each_loss(y, labels)).nanmean()


BY_HAND = [divided, divided_by_a_number, chosen_losses, squares, masked, mean_of_the_rest]


@pytest.mark.parametrize("criterion", BY_HAND)
def test_a_mean_that_a_criterion_computes_by_hand_warns(criterion: Any) -> None:
    """Check that `step` finds means over different numbers of targets that are computed by hand.

    The weight that the warning advises must give the loss of the whole mini-batch.
    """
    model = pipeline(engine="graph", chunks=3)
    x, labels = torch.randn(6, 4, 2), torch.randint(2, (6, 4))
    labels[0] = -100
    target: Any = labels
    if criterion is masked:
        target = {"labels": labels, "mask": (labels != -100).float()}
    with pytest.warns(UserWarning, match="divides .* by different numbers") as warned:
        model.step(criterion, x, target)
    model.zero_grad()
    _, advised = str(warned[0].message).split("weight=")
    loss = model.step(criterion, x, target, weight=eval(advised))
    torch.testing.assert_close(loss, criterion(nn.Sequential(*model)(x), target).detach())

    labels[:] = labels[3]
    if criterion is masked:
        target["mask"][:] = 1
    step_without_warnings(3, criterion, x, target)  # all divide by the same number
    step_without_warnings(4, criterion, x[:5], first_targets(target, 5))  # in proportion to samples


def first_targets(target: Any, samples: int) -> Any:
    """Return the targets of the first samples of a mini-batch."""
    if isinstance(target, dict):
        return {name: x[:samples] for name, x in target.items()}
    return target[:samples]


def by_another_number(y: Tensor, labels: Tensor) -> Tensor:
    return each_loss(y, labels).sum() / 24


def by_minus_its_samples(y: Tensor, labels: Tensor) -> Tensor:
    return -each_loss(y, labels).sum() / -len(y)


def over_learned(y: Tensor, labels: Tensor) -> Tensor:
    losses = each_loss(y, labels)
    return losses.sum() / losses.exp().sum()


def of_every_second(y: Tensor, labels: Tensor) -> Tensor:
    return each_loss(y, labels)[:, [0, 2]].mean()


def sample_by_sample(y: Tensor, labels: Tensor) -> Any:
    """Return the mean of the means of all samples, of which each counts equally."""
    padded = labels.clone()
    padded[0, 0] = -100
    return sum(ce(a, b) for a, b in zip(y, padded, strict=True)) / len(y)


WITHOUT_WARNING = [
    by_another_number,
    by_minus_its_samples,
    over_learned,
    of_every_second,
    sample_by_sample,
]


@pytest.mark.parametrize("criterion", WITHOUT_WARNING)
def test_a_division_without_a_warning(criterion: Any) -> None:
    """Check that `step` does not warn of divisors in proportion to samples, or with a gradient."""
    step_without_warnings(4, criterion, torch.randn(7, 4, 2), torch.randint(2, (7, 4)))
