"""How a step puts losses together, and what it refuses; that it trains as plain layers do is in tests/behaviours."""

import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from torchgpipe import GPipe
from torchgpipe.schedules import Action, Kind, Schedule, make
from torchgpipe.step.shares import Shares
from torchgpipe.step.targets import parted

from ..parts import Fails
from .layers import linears

X, T = (
    torch.rand(7, 2),
    torch.tensor([0, -100, 1, -100, 1, 0, -100]),
)  # in the last micro-batch, nothing counts
SCHEDULES: list[Any] = ["GPipe", "1F1B", make("1F1B", 2, 9), "ZBH1"]
NAMES = ["GPipe", "1F1B", "a longer one", "ZBH1"]


def pipeline(
    *between: nn.Module, engine: Any = "workers", devices: int = 2, **options: Any
) -> GPipe:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(2, 2), *between, nn.Linear(2, 2))
    options = {"chunks": 3, "engine": engine, **options}
    return GPipe(layers, [len(layers) - 1, 1], devices=["cpu"] * devices, **options)


def grads(model: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in model.parameters()]


def crossed(y: Tensor, t: Tensor) -> Tensor:
    return nn.functional.cross_entropy(y, t)  # means over those that are not ignored


class Learning(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared, self.scale = shared, nn.Parameter(torch.ones(()))

    def forward(self, y: Tensor, t: Tensor) -> Tensor:
        return (self.shared(y) * self.scale).square().sum()


@pytest.mark.parametrize("schedule", SCHEDULES, ids=NAMES)
def test_a_weight_makes_a_mean_and_a_criterion_that_learns_gets_its_gradients_once(
    schedule: Any,
) -> None:
    model, criterion, times = pipeline(schedule=schedule), Learning(nn.Identity()), list[Tensor]()
    loss = model.step(crossed, X, T, weight=lambda t: (t != -100).sum())
    found = [*map(torch.clone, grads(model))]  # type: ignore[arg-type]
    torch.testing.assert_close(
        model.evaluate(crossed, X, T, weight=lambda t: int((t != -100).sum())), loss
    )
    model.zero_grad()
    expected = crossed(nn.Sequential(*model)(X), T)
    expected.backward()
    torch.testing.assert_close([loss, *found], [expected.detach(), *grads(model)])
    criterion.scale.register_hook(times.append)
    model.step(criterion, X, X, reduction="sum")
    torch.testing.assert_close(
        criterion.scale.grad, 2 * nn.Sequential(*model)(X).square().sum().detach()
    )
    assert len(times) == 1


def masked(y: Tensor, mask: Tensor) -> Tensor:
    """Return a mean over what counts, which is NaN where nothing does."""
    return (y.square().mean(1) * mask).sum() / mask.sum()


@pytest.mark.parametrize(
    "count", [Tensor.sum, lambda mask: int(mask.sum())], ids=["tensors", "numbers"]
)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=NAMES)
def test_a_micro_batch_that_counts_nothing_adds_nothing(
    schedule: Any, count: Callable[[Tensor], Any]
) -> None:
    model, scale = pipeline(schedule=schedule), nn.Parameter(torch.ones(()))
    mask = torch.tensor([0.0, 0, 0, 1, 1, 0, 1])
    loss = model.step(lambda y, m: masked(y * scale, m), X, mask, weight=count)
    found = [loss, *[None if g is None else g.clone() for g in grads(model)], scale.grad]
    model.zero_grad()
    scale.grad = None
    expected = masked(nn.Sequential(*model)(X) * scale, mask)
    expected.backward()
    torch.testing.assert_close(found, [expected.detach(), *grads(model), scale.grad])


@pytest.mark.parametrize(
    "count", [Tensor.sum, lambda mask: int(mask.sum())], ids=["tensors", "numbers"]
)
def test_a_mean_over_nothing_is_nan(count: Callable[[Tensor], Any]) -> None:
    for criterion in (masked, lambda y, mask: (y.square().mean(1) * mask).sum()):
        assert pipeline().step(criterion, X, torch.zeros(7), weight=count).isnan()
        assert pipeline().evaluate(criterion, X, torch.zeros(7), weight=count).isnan()


def test_a_criterion_may_share_a_module_with_a_stage_in_another_thread() -> None:
    model = pipeline(schedule="1F1B")
    before, model.chunks = [*model.parameters()], 64
    for _ in range(10):
        model.step(Learning(model[0]), *torch.rand(2, 64, 2))
    assert all(p is q for p, q in zip(model.parameters(), before, strict=True))


STEPS_IN_ANOMALY_MODE = """
import torch
from torch import nn
from torchgpipe import GPipe
layers, x = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), torch.randn(8, 8)
models = [
    GPipe(layers, [1, 1, 2], devices=["cpu"] * 3, chunks=4, schedule="1F1B"),
    GPipe(layers, [1] * 4, devices=["cpu"] * 2, chunks=8, schedule="ZBVZeroBubble"),
]
with torch.autograd.detect_anomaly():
    for _ in range(60):
        for model in models:
            model.step(nn.functional.mse_loss, x, x)
print("done")
"""


def test_steps_in_anomaly_mode_end() -> None:
    """In another process: once two threads wait for each other there, no Python code runs any more."""
    command = [sys.executable, "-W", "ignore", "-c", STEPS_IN_ANOMALY_MODE]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    assert ended.stdout == "done\n"


SUM = 'give reduction="sum" to step'
WEIGHT = r"weight=lambda target: \(target != {}\).sum\(\)"
SOME, OTHER = T.abs() % 2, torch.tensor([0, 1, 1, 1, 1, 0, 1])
CE, ce = nn.CrossEntropyLoss, nn.functional.cross_entropy
MEANS: list[tuple[Any, Tensor, dict[str, Any], str]] = [
    (CE(reduction="sum"), SOME, {}, SUM),
    (partial(ce, reduction="sum"), SOME, {}, SUM),
    (CE(), T, {}, WEIGHT.format(-100)),
    (CE(ignore_index=1), OTHER, {}, WEIGHT.format(1)),
    (ce, T, {}, WEIGHT.format(-100)),
    (partial(ce, ignore_index=1), OTHER, {}, WEIGHT.format(1)),
    (nn.MSELoss(reduction="sum"), X, {}, SUM),
    (CE(reduction="sum"), SOME, {"reduction": "sum"}, ""),
    (CE(), T, {"weight": lambda target: (target != -100).sum()}, ""),
    (CE(), SOME, {}, ""),
    (CE(ignore_index=0), torch.tensor([0, 1, 1, 0, 0, 1]), {}, ""),  # the same share of each
    (nn.MSELoss(), X, {}, ""),
    (crossed, T, {}, ""),  # what a function of one's own ignores cannot be seen
]


@pytest.mark.parametrize("run", ["step", "evaluate"])
@pytest.mark.parametrize(("criterion", "target", "options", "said"), MEANS)
def test_a_criterion_that_is_no_mean_over_samples_warns(
    criterion: Any, target: Tensor, options: Any, said: str, run: str
) -> None:
    act = getattr(pipeline(engine="graph"), run)
    alone = getattr(pipeline(chunks=1), run)
    x = X[: len(target)]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        act(criterion, x, target, **options)
        alone(criterion, x, target, **options)  # one micro-batch is the mini-batch
    assert len(warned) == bool(said)
    assert not said or re.search(said, str(warned[0].message))


def test_a_scaler_scales_what_goes_backward() -> None:
    model, scaler = pipeline(), torch.amp.GradScaler("cpu", init_scale=8.0)
    loss = model.step(crossed, X, T.abs() % 2)
    before = [8 * g for g in grads(model) if g is not None]
    model.zero_grad()
    assert torch.equal(model.step(crossed, X, T.abs() % 2, scaler=scaler), loss)
    assert all(map(torch.equal, before, [g for g in grads(model) if g is not None]))


def test_an_evaluation_is_a_step_without_its_backward() -> None:
    model, x = pipeline(engine="graph"), X.clone().requires_grad_()
    loss = model.evaluate(crossed, x, T.abs() % 2)
    each = model.evaluate(crossed, x, T.abs() % 2, reduction="none")
    torch.testing.assert_close((each * torch.tensor([3, 3, 1])).sum() / 7, loss)
    assert not loss.requires_grad and grads(model) == [None] * 4
    assert torch.equal(model.step(crossed, x, T.abs() % 2, reduction="none"), each)
    assert x.grad is not None and torch.equal(model.step(crossed, x, T.abs() % 2), loss)


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=NAMES)
def test_a_step_that_fails_changes_no_gradient(schedule: Any, phase: str) -> None:
    fails = Fails()
    model = pipeline(fails, schedule=schedule)
    model.step(crossed, X, T.abs() % 2)
    before = [None if g is None else g.clone() for g in grads(model)]
    fails.fail(phase, ArithmeticError(), calls_before=2)
    with pytest.raises(ArithmeticError):
        model.step(crossed, X, T.abs() % 2)
    assert all(map(torch.equal, before, grads(model)))  # type: ignore[arg-type]


def test_stages_of_one_device_may_take_micro_batches_in_another_order() -> None:
    model = pipeline(
        devices=1,
        schedule=Schedule(
            "mine", [0, 0], [[*CROSSED.lists[0][:2], *CROSSED.lists[1], *ACTIONS[2:]]]
        ),
    )
    loss = model.step(nn.functional.mse_loss, X[:2], X[1:3])
    torch.testing.assert_close(
        loss, nn.functional.mse_loss(nn.Sequential(*model)(X[:2]), X[1:3]).detach()
    )


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("first, second", ["BB", "WB", "BW", "WW"])
def test_backwards_may_be_in_halves_on_some_stages(first: str, second: str, retain: bool) -> None:
    kinds: dict[str, list[Kind]] = {"B": ["backward"], "W": ["backward_inputs", "backward_weights"]}
    lists = [
        [Action(kind, 0, s) for kind in ("forward", *kinds[each])]
        for s, each in enumerate([first, second])
    ]
    model = pipeline(schedule=Schedule("mine", [0, 1], lists))
    loss = model(X[:1]).square().sum()
    expected = torch.autograd.grad(
        nn.Sequential(*model)(X[:1]).square().sum(), [*model.parameters()]
    )
    for times in range(1, 2 + retain):
        loss.backward(retain_graph=retain)
        assert all(map(torch.equal, [g * times for g in expected], grads(model)))  # type: ignore[arg-type]


class Draws(nn.Module):
    """Draws where it sees a nine."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(()) if (x == 9).any() else x


def test_a_draw_that_the_first_micro_batch_does_not_make_is_refused_before_forwards_have_ended() -> (
    None
):
    layers, x = nn.Sequential(Draws(), *linears(2)), torch.arange(2.0, 16.0).view(7, 2)
    model = GPipe(
        layers, [2, 1], devices=["cpu"] * 2, chunks=3, schedule="1F1B", checkpoint="always"
    )
    with pytest.raises(RuntimeError, match="draw in every micro-batch"):
        model.step(crossed, x, T.abs() % 2)


class Pair(NamedTuple):
    """A target of two."""

    one: Any
    other: Any


def test_targets_are_parted_as_deep_as_they_go() -> None:
    x, y = torch.arange(3), torch.arange(3) * 2
    first, last = parted({"a": [x, "all"], "b": Pair(y, ()), "c": None}, [2, 1])
    assert (
        first["a"][0].tolist() == [0, 1]
        and last["a"][0].tolist() == [2]
        and first["a"][1] == last["a"][1] == "all"
    )
    assert (
        type(last["b"]) is Pair
        and last["b"].one.tolist() == [4]
        and last["b"].other == ()
        and last["c"] is None
    )


ACTIONS = [
    Action("forward", 0, 0),
    Action("forward", 1, 0),
    Action("backward", 1, 0),
    Action("backward", 0, 0),
]
CROSSED = Schedule("mine", [0, 1], [ACTIONS, [ACTIONS[k]._replace(stage=1) for k in (1, 0, 3, 2)]])

REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "a reduction": (
        lambda: Shares("max", None, [1], [X]),
        ValueError,
        "'mean', or 'sum' or 'none' .* but got 'max'",
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
    "no layers": (
        lambda: GPipe(nn.Sequential(), []).step(crossed, X, T),
        ValueError,
        "no layers to train",
    ),
    "no gradients": (
        lambda: torch.no_grad()(pipeline().step)(crossed, X, T),
        RuntimeError,
        "gradients are off",
    ),
    "no such schedule": (
        lambda: pipeline(schedule="DualPipeV"),
        ValueError,
        "no schedule is called 'DualPipeV'",
    ),
    "items that wait for each other": (
        lambda: pipeline(schedule=CROSSED).step(crossed, X[:2], T[:2]),
        ValueError,
        "device 0 waits for ever",
    ),
    "other stages": (
        lambda: pipeline(schedule=make("1F1B", 3, 3)),
        ValueError,
        "1F1B has 3 stages, but .* 2 part",
    ),
    "too few micro-batches": (
        lambda: pipeline(schedule=make("1F1B", 2, 2)).step(crossed, X, T),
        ValueError,
        "for 1 to 2 micro-batches, not 3",
    ),
    "stages not shared alike": (
        lambda: GPipe(linears(3), [1] * 3, devices=["cpu"] * 2, schedule="Interleaved1F1B"),
        ValueError,
        "there are 3 partitions for 2 devices; give a balance of 4 partitions",
    ),
    "one stage a device": (
        lambda: pipeline(schedule="Interleaved1F1B"),
        ValueError,
        "needs .* at least 2, .* 2 partitions for 2 devices; give a balance of 4",
    ),
    "one stage": (
        lambda: GPipe(linears(1), [1], devices=["cpu"], schedule="ZBVZeroBubble"),
        ValueError,
        "ZBVZeroBubble needs .* 2, .* 1 partitions for 1 devices; give a balance of 2",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    make_it, error, line = REFUSED[name]
    with pytest.raises(error, match=line):
        make_it()
