"""Test which arguments `step` refuses by errors, and about which criteria it warns."""

import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchgpipe import GPipe
from torchgpipe.schedules import make
from torchgpipe.step.shares import Shares

from .layers import linears
from .test_step import CLASSES, CROSSED, T, X, copies_of_grads, crossed, pipeline

SUM = 'returns a sum, .* give reduction="sum" to step'
WEIGHT = r"weight=lambda target: \(target != {}\).sum\(\)"
OTHER = torch.tensor([0, 1, 1, 1, 1, 0, 1])
CLASS_WEIGHT = r"lambda target: {}\[target\[target != {}\]\].sum\(\)"
WEIGHTS = torch.tensor([1.0, 3.0])
SAME_SHARES = torch.tensor([0, 1, 1, 0, 0, 1])
CE, ce = nn.CrossEntropyLoss, nn.functional.cross_entropy
# A criterion, a target, options of `step`, and the text of the warning, or "" for no warning.
MEANS: list[tuple[Any, Tensor, dict[str, Any], str]] = [
    (CE(reduction="sum"), CLASSES, {}, SUM),
    (partial(ce, reduction="sum"), CLASSES, {}, SUM),
    (CE(), T, {}, WEIGHT.format(-100)),
    (CE(ignore_index=1), OTHER, {}, WEIGHT.format(1)),
    (ce, T, {}, WEIGHT.format(-100)),
    (partial(ce, ignore_index=1), OTHER, {}, WEIGHT.format(1)),
    (CE(WEIGHTS), OTHER, {}, CLASS_WEIGHT.format("criterion.weight", -100)),
    (CE(WEIGHTS, ignore_index=0), OTHER, {}, CLASS_WEIGHT.format("criterion.weight", 0)),
    (
        partial(ce, weight=WEIGHTS),
        OTHER,
        {},
        CLASS_WEIGHT.format(r'criterion.keywords\["weight"\]', -100),
    ),
    (nn.MSELoss(reduction="sum"), X, {}, SUM),
    (CE(reduction="sum"), CLASSES, {"reduction": "sum"}, ""),
    (CE(), T, {"weight": lambda target: (target != -100).sum()}, ""),
    (CE(), CLASSES, {}, ""),
    (CE(ignore_index=0), SAME_SHARES, {}, ""),
    (CE(WEIGHTS), SAME_SHARES, {}, ""),
    (CE(WEIGHTS / 3), torch.ones(7, dtype=torch.long), {}, ""),
    (CE(WEIGHTS), OTHER, {"weight": lambda target: WEIGHTS[target].sum()}, ""),
    (CE(WEIGHTS), X.softmax(1), {}, ""),  # a mean over samples, because these are no indices
    (nn.MSELoss(), X, {}, ""),
]


# For criteria that are functions of the user's own, the graph of the loss tells what they count.
ROWS = T.repeat(3, 1).T
STEP_MEANS: list[tuple[Any, Any, dict[str, Any], str]] = [
    (crossed, T, {}, WEIGHT.format(-100)),
    (lambda y, t: ce(y, t) / 4, T, {}, WEIGHT.format(-100)),
    (lambda y, t: ce(y, t, ignore_index=1), OTHER, {}, WEIGHT.format(1)),
    (lambda y, t: ce(y, t, label_smoothing=0.1), T, {}, WEIGHT.format(-100)),
    (lambda y, t: ce(y, t["labels"]), {"labels": T}, {}, r"\(target\['labels'\] != -100\).sum"),
    (lambda y, t: ce(y, t[1]), (X, T), {}, r"\(target\[1\] != -100\).sum"),
    (
        lambda y, t: ce(y, t[:, 1:].amax(1)),
        ROWS,
        {},
        "count, where count\\(target\\) is the number",
    ),
    (lambda y, t: ce(y, t, WEIGHTS), OTHER, {}, CLASS_WEIGHT.format("class_weights", -100)),
    (lambda y, t: ce(y, t, reduction="sum"), CLASSES, {}, SUM),
    (lambda y, t: nn.functional.mse_loss(y, t, reduction="sum"), X, {}, SUM),
    (
        lambda y, t: ce(y, t, reduction="sum") / (t != -100).sum().clamp(1),
        T,
        {},
        "divides the losses of micro-batches by different numbers",
    ),
    (lambda y, t: ce(y, t, reduction="sum") * 0.1, T, {}, ""),
    (lambda y, t: ce(y, t, reduction="sum"), CLASSES, {"reduction": "sum"}, ""),
    (lambda y, t: (y - t).square().sum(), X, {}, SUM),
    (lambda y, t: -y.log_softmax(1).gather(1, t[:, None]).sum(), CLASSES, {}, SUM),
    (lambda y, t: ce(y, t, reduction="none").sum(), CLASSES, {}, SUM),
    (lambda y, t: ce(y, t, reduction="sum") + y.exp().sum() - y.sum(), CLASSES, {}, SUM),
    (lambda y, t: (y - t).square().sum(), X, {"reduction": "sum"}, ""),
    (lambda y, t: (y - t).square().sum() / len(y), X, {}, ""),
    (lambda y, t: (y - t).square().sum() + ce(y, CLASSES[: len(y)]), X, {}, ""),
    (lambda y, t: (y - t).square().mean(0).sum(), X, {}, ""),
    (lambda y, t: (y - t).square().sum(1).mean(), X, {}, ""),
    (lambda y, t: ((y - t).square().sum(1) * t.new_full((len(t),), 1 / len(t))).sum(), X, {}, ""),
    (lambda y, t: y[:1, :1].sum(), X, {}, ""),
    (lambda y, t: torch.stack([y.mean(), (y - t).square().mean()]).sum(), X, {}, ""),
    (crossed, CLASSES, {}, ""),
    (crossed, T, {"weight": lambda target: (target != -100).sum()}, ""),
    (crossed, T, {"reduction": "sum"}, ""),
]


@pytest.mark.parametrize(("criterion", "target", "options", "said"), STEP_MEANS)
def test_a_step_sees_what_any_criterion_counts(
    criterion: Any, target: Any, options: Any, said: str
) -> None:
    test_a_criterion_that_is_no_mean_over_samples_warns(criterion, target, options, said, "step")


@pytest.mark.parametrize("weighted", [False, True])
def test_a_checkpointed_criterion_is_looked_at_in_few_steps(weighted: bool) -> None:
    """Check that `step` examines a checkpointed criterion only in the calls 1, 2, 4, 8, ...

    To find out which samples such a criterion counts, `step` has to compute the loss again. If
    the caller gives a weight, there is nothing to find out.
    """
    calls: list[int] = []

    def criterion(y: Tensor, t: Tensor) -> Tensor:
        calls.append(len(y))
        return crossed(y, t)

    def checkpointed(y: Tensor, t: Tensor) -> Any:
        return checkpoint(criterion, y, t, use_reentrant=False)

    weight = (lambda target: (target != -100).sum()) if weighted else None
    model = pipeline()
    counts = []
    for _ in range(5):
        calls.clear()
        model.step(checkpointed, X, CLASSES, weight=weight)
        counts.append(len(calls))
    plain = 6  # a forward and a recomputation of each of three micro-batches
    looked_at = [1, 2, 4]
    for number, count in enumerate(counts, 1):
        assert (count > plain) == (number in looked_at and not weighted)


def test_padding_that_begins_later_warns() -> None:
    model = pipeline()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.step(crossed, X, CLASSES)
    with pytest.warns(UserWarning, match=WEIGHT.format(-100)):
        model.step(crossed, X, T)


def of_next(y: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of a language model that predicts the next label at each position."""
    return ce(y[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.parametrize("engine", ["workers", "graph"])
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "ZBH1"])
def test_the_weight_of_labels_that_a_warning_advises(engine: str, schedule: str) -> None:
    """Check that the argument `weight=` which a warning advises gives the right loss.

    Without this argument, the loss is NaN, because two of the micro-batches have only ignored
    labels.
    """
    model = pipeline(engine=engine, schedule=schedule, chunks=7)
    x, labels = torch.randn(7, 4, 2), torch.randint(2, (7, 4))
    labels[:2] = -100
    labels[4, 2:] = -100
    with pytest.warns(UserWarning, match="different shares of targets") as warned:
        assert model.step(of_next, x, labels).isnan()
    model.zero_grad()
    _, advised = str(warned[0].message).split("weight=")
    loss = model.step(of_next, x, labels, weight=eval(advised))
    found = copies_of_grads(model)
    model.zero_grad()
    expected = of_next(nn.Sequential(*model)(x), labels)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(found, copies_of_grads(model))


@pytest.mark.parametrize("run", ["step", "evaluate"])
@pytest.mark.parametrize(("criterion", "target", "options", "said"), MEANS)
def test_a_criterion_that_is_no_mean_over_samples_warns(
    criterion: Any, target: Tensor, options: Any, said: str, run: str
) -> None:
    act = getattr(pipeline(engine="graph"), run)
    alone = getattr(pipeline(chunks=1), run)
    x = X[: len(target)] if isinstance(target, Tensor) else X

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        act(criterion, x, target, **options)
        alone(criterion, x, target, **options)  # no warning with a single micro-batch

    if not said:
        assert len(warned) == 0
        return
    (warning,) = warned
    assert re.search(said, str(warning.message))


def test_the_weight_that_a_warning_advises_gives_the_loss_without_a_pipeline() -> None:
    criterion, model = CE(WEIGHTS), pipeline()
    expected = criterion(model[:](X), T)
    given = {"criterion": criterion}
    with pytest.warns(UserWarning, match="different class weights") as warned:
        model.evaluate(criterion, X, T)
    _, advised = str(warned[0].message).split("weight=")
    loss = model.evaluate(criterion, X, T, weight=eval(advised, given))
    torch.testing.assert_close(loss, expected.detach())


@torch.no_grad()
def step_without_gradients() -> None:
    pipeline().step(crossed, X, T)


def step_without_layers() -> None:
    GPipe(nn.Sequential(), []).step(crossed, X, T)


def step_with_a_schedule_for_two() -> None:
    model = pipeline(schedule=make("1F1B", 2, 2))
    model.step(crossed, X, T)


def three_partitions_on_two_devices() -> None:
    GPipe(linears(3), [1] * 3, devices=["cpu"] * 2, schedule="Interleaved1F1B")


def a_single_stage() -> None:
    GPipe(linears(1), [1], devices=["cpu"], schedule="ZBVZeroBubble")


ONE_STAGE = "ZBVZeroBubble needs .* 2, .* has 1 for 1 device; give a balance of 2"
ONE_EACH = "needs .* at least 2, .* has 2 for 2 devices; give a balance of 4"
NOT_ALIKE = "the balance has 3 for 2 devices; give a balance of 4 partitions"
REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "a reduction": (
        lambda: Shares("max", None, [1], [X]),
        ValueError,
        "'mean', 'sum' or 'none'.* but got 'max'",
    ),
    "a weight of a sum": (
        lambda: Shares("sum", len, [1], [X]),
        ValueError,
        "but got 'sum' with a weight",
    ),
    "a target of another size": (
        lambda: pipeline().step(crossed, X, T[1:]),
        ValueError,
        r"size, 7, .* shape \(6,\)",
    ),
    "no scalar": (
        lambda: pipeline().step(lambda y, t: y, X, T),
        TypeError,
        r"scalar tensor, .* shape \(3, 2\)",
    ),
    "no layers": (step_without_layers, ValueError, "no layers to train"),
    "no gradients": (step_without_gradients, RuntimeError, "gradients are disabled"),
    "no such schedule": (
        lambda: pipeline(schedule="DualPipeV"),
        ValueError,
        "no schedule is called 'DualPipeV'",
    ),
    "items that wait for each other": (
        lambda: pipeline(schedule=CROSSED).step(crossed, X[:2], T[:2]),
        ValueError,
        "there is no room between stage 0 and stage 1: .*; let stage 1 take each result of stage 0",
    ),
    "other stages": (
        lambda: pipeline(schedule=make("1F1B", 3, 3)),
        ValueError,
        "1F1B has 3 stages, but .* 2 part",
    ),
    "too few micro-batches": (
        step_with_a_schedule_for_two,
        ValueError,
        "for 1 to 2 micro-batches, not 3",
    ),
    "stages not shared alike": (three_partitions_on_two_devices, ValueError, NOT_ALIKE),
    "one stage a device": (lambda: pipeline(schedule="Interleaved1F1B"), ValueError, ONE_EACH),
    "one stage": (a_single_stage, ValueError, ONE_STAGE),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    act, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        act()
