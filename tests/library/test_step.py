"""Test how `step` combines the losses of micro-batches into the loss of the mini-batch.

tests/behaviours checks that `step` trains as plain layers do. test_step_refusals.py checks which
arguments raise errors.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Identity, Linear, Module, Parameter, Sequential
from torch.testing import assert_close

from torchgpipe import GPipe
from torchgpipe.schedules import Action, Kind, Schedule, make
from torchgpipe.step import shares
from torchgpipe.step.targets import parted

from ..parts import Fails
from ..start import forking
from .layers import linears

X = torch.rand(7, 2)
CLASSES = torch.tensor([0, 0, 1, 0, 1, 0, 0])
# The last micro-batch has only ignored targets.
T = torch.tensor([0, -100, 1, -100, 1, 0, -100])
SCHEDULES: list[Any] = ["GPipe", "1F1B", make("1F1B", 2, 9), "ZBH1"]
NAMES = ["GPipe", "1F1B", "a longer one", "ZBH1"]


def pipeline(*between: Module, engine: Any = "workers", devices: int = 2, **options: Any) -> GPipe:
    torch.manual_seed(0)
    layers = Sequential(Linear(2, 2), *between, Linear(2, 2))
    options = {"chunks": 3, "engine": engine, **options}
    return GPipe(layers, [len(layers) - 1, 1], devices=["cpu"] * devices, **options)


def grads(model: Module) -> list[Tensor | None]:
    return [p.grad for p in model.parameters()]


def copies_of_grads(model: Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_equal(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    """Assert that no gradient is missing, and that each equals the expected gradient."""
    for grad, expected_grad in zip(found, expected, strict=True):
        assert grad is not None
        assert expected_grad is not None
        assert torch.equal(grad, expected_grad)


def crossed(y: Tensor, t: Tensor) -> Tensor:
    return nn.functional.cross_entropy(y, t)


class Learning(Module):
    def __init__(self, shared: Module) -> None:
        super().__init__()
        self.shared = shared
        self.scale = Parameter(torch.ones(()))

    def forward(self, y: Tensor, t: Tensor) -> Tensor:
        return (self.shared(y) * self.scale).square().sum()


@pytest.mark.parametrize("schedule", SCHEDULES, ids=NAMES)
def test_a_weight_makes_a_mean_and_a_criterion_that_learns_gets_its_gradients_once(
    schedule: Any,
) -> None:
    model = pipeline(schedule=schedule)
    loss = model.step(crossed, X, T, weight=lambda t: (t != -100).sum())
    found = copies_of_grads(model)
    evaluated = model.evaluate(crossed, X, T, weight=lambda t: int((t != -100).sum()))
    assert_close(evaluated, loss)
    model.zero_grad()
    plain = Sequential(*model)
    expected = crossed(plain(X), T)
    expected.backward()
    assert_close(loss, expected.detach())
    assert_close(found, grads(model))

    criterion = Learning(Identity())
    times: list[Tensor] = []
    criterion.scale.register_hook(times.append)
    model.step(criterion, X, X, reduction="sum")
    expected_grad = 2 * plain(X).square().sum().detach()
    assert_close(criterion.scale.grad, expected_grad)
    assert len(times) == 1


def masked(y: Tensor, mask: Tensor) -> Tensor:
    """Return the mean loss of the samples with mask 1, or NaN if there is no such sample."""
    return counted(y, mask) / mask.sum()


def counted(y: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of losses over samples. The mask is 1 for a sample that counts, else 0."""
    of_samples = y.square().mean(1)
    return (of_samples * mask).sum()


def number_of(mask: Tensor) -> int:
    return int(mask.sum())


@pytest.fixture(params=["tensors of a GPU", "tensors of the CPU", "numbers"])
def count(request: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[Tensor], Any]:
    """A function that counts the samples of a mask, for the argument `weight`."""
    if request.param == "tensors of a GPU":
        # Weights on the CPU become numbers. Treat them as weights on a GPU, which stay tensors.
        monkeypatch.setattr(shares, "_number", Tensor.double)
    return number_of if request.param == "numbers" else Tensor.sum


@pytest.mark.parametrize("schedule", SCHEDULES, ids=NAMES)
def test_a_micro_batch_that_counts_nothing_adds_nothing(
    schedule: Any, count: Callable[[Tensor], Any]
) -> None:
    model = pipeline(schedule=schedule)
    scale = Parameter(torch.ones(()))
    mask = torch.tensor([0.0, 0, 0, 1, 1, 0, 1])
    loss = model.step(lambda y, m: masked(y * scale, m), X, mask, weight=count)
    found = copies_of_grads(model)
    found_scale = scale.grad

    model.zero_grad()
    scale.grad = None
    expected = masked(Sequential(*model)(X) * scale, mask)
    expected.backward()

    assert_close(loss, expected.detach())
    assert_close(found, grads(model))
    assert_close(found_scale, scale.grad)


def test_a_mean_over_nothing_is_nan(count: Callable[[Tensor], Any]) -> None:
    nothing = torch.zeros(7)
    for criterion in (masked, counted):
        assert pipeline().step(criterion, X, nothing, weight=count).isnan()
        assert pipeline().evaluate(criterion, X, nothing, weight=count).isnan()


def test_a_criterion_may_share_a_module_with_a_stage_in_another_thread() -> None:
    model = pipeline(schedule="1F1B")
    before = [*model.parameters()]
    model.chunks = 64
    for _ in range(10):
        x, target = torch.rand(2, 64, 2)
        model.step(Learning(model[0]), x, target, reduction="sum")
    for parameter, was in zip(model.parameters(), before, strict=True):
        assert parameter is was


def step_in_anomaly_mode() -> None:
    warnings.simplefilter("ignore")
    layers, x = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), torch.randn(8, 8)
    models = [
        GPipe(layers, [1, 1, 2], devices=["cpu"] * 3, chunks=4, schedule="1F1B"),
        GPipe(layers, [1] * 4, devices=["cpu"] * 2, chunks=8, schedule="ZBVZeroBubble"),
    ]
    with torch.autograd.detect_anomaly():
        for _ in range(30):
            for model in models:
                model.step(nn.functional.mse_loss, x, x)


def test_steps_in_anomaly_mode_end() -> None:
    """Check that steps in anomaly mode end. A child process runs them, and is killed if it hangs.

    In the test's own process, a deadlock of two threads would prevent the test from failing.
    """
    process = forking().Process(target=step_in_anomaly_mode)
    process.start()
    process.join(120)
    process.kill()
    process.join()
    assert process.exitcode == 0


def test_a_scaler_scales_what_goes_backward() -> None:
    model = pipeline()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    loss = model.step(crossed, X, CLASSES)
    scaled = [8 * grad for grad in grads(model) if grad is not None]
    model.zero_grad()
    assert torch.equal(model.step(crossed, X, CLASSES, scaler=scaler), loss)
    assert_equal(grads(model), scaled)


def test_an_evaluation_is_a_step_without_its_backward() -> None:
    model = pipeline(engine="graph")
    x = X.clone().requires_grad_()
    loss = model.evaluate(crossed, x, CLASSES)
    each = model.evaluate(crossed, x, CLASSES, reduction="none")
    sizes = torch.tensor([3, 3, 1])
    assert_close((each * sizes).sum() / 7, loss)
    assert not loss.requires_grad
    assert grads(model) == [None] * 4
    assert torch.equal(model.step(crossed, x, CLASSES, reduction="none"), each)
    assert x.grad is not None
    assert torch.equal(model.step(crossed, x, CLASSES), loss)


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=NAMES)
def test_a_step_that_fails_changes_no_gradient(schedule: Any, phase: str) -> None:
    fails = Fails()
    model = pipeline(fails, schedule=schedule)
    model.step(crossed, X, CLASSES)
    before = copies_of_grads(model)
    fails.fail(phase, ArithmeticError(), calls_before=2)
    with pytest.raises(ArithmeticError):
        model.step(crossed, X, CLASSES)
    assert_equal(grads(model), before)


FORWARDS = [Action("forward", 0, 0), Action("forward", 1, 0)]
BACKWARDS = [Action("backward", 1, 0), Action("backward", 0, 0)]
OF_SECOND_STAGE = [
    Action("forward", 1, 1),
    Action("forward", 0, 1),
    Action("backward", 0, 1),
    Action("backward", 1, 1),
]
CROSSED = Schedule("mine", [0, 1], [FORWARDS + BACKWARDS, OF_SECOND_STAGE])


def test_stages_of_one_device_may_take_micro_batches_in_another_order() -> None:
    schedule = Schedule("mine", [0, 0], [FORWARDS + OF_SECOND_STAGE + BACKWARDS])
    model = pipeline(devices=1, schedule=schedule)
    x, target = X[:2], X[1:3]
    loss = model.step(nn.functional.mse_loss, x, target)
    plain = Sequential(*model)
    expected = nn.functional.mse_loss(plain(x), target)
    assert_close(loss, expected.detach())


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("first, second", ["BB", "WB", "BW", "WW"])
def test_backwards_may_be_in_halves_on_some_stages(first: str, second: str, retain: bool) -> None:
    kinds: dict[str, list[Kind]] = {"B": ["backward"], "W": ["backward_inputs", "backward_weights"]}
    lists = []
    for stage, each in enumerate([first, second]):
        actions = [Action("forward", 0, stage)]
        actions += [Action(kind, 0, stage) for kind in kinds[each]]
        lists.append(actions)
    model = pipeline(schedule=Schedule("mine", [0, 1], lists))
    x = X[:1]
    loss = model(x).square().sum()
    plain_loss = Sequential(*model)(x).square().sum()
    expected = torch.autograd.grad(plain_loss, [*model.parameters()])
    loss.backward(retain_graph=retain)
    assert_equal(grads(model), expected)
    if retain:
        loss.backward()
        assert_equal(grads(model), [2 * grad for grad in expected])


class Draws(Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(()) if (x == 9).any() else x


def test_a_draw_that_the_first_micro_batch_does_not_make_is_refused_before_forwards_end() -> None:
    layers = Sequential(Draws(), *linears(2))
    options: dict[str, Any] = {"chunks": 3, "schedule": "1F1B", "checkpoint": "always"}
    model = GPipe(layers, [2, 1], devices=["cpu"] * 2, **options)
    x = torch.arange(2.0, 16.0).view(7, 2)
    with pytest.raises(RuntimeError, match="draw in every micro-batch"):
        model.step(crossed, x, CLASSES)


class Pair(NamedTuple):
    one: Any
    other: Any


def test_targets_are_parted_as_deep_as_they_go() -> None:
    x = torch.arange(3)
    y = 2 * x
    target = {"a": [x, "all"], "b": Pair(y, ()), "c": None}

    first, last = parted(target, [2, 1])

    first_x, first_text = first["a"]
    assert first_x.tolist() == [0, 1]
    assert first_text == "all"
    last_x, last_text = last["a"]
    assert last_x.tolist() == [2]
    assert last_text == "all"
    pair = last["b"]
    assert type(pair) is Pair
    assert pair.one.tolist() == [4]
    assert pair.other == ()
    assert last["c"] is None


@pytest.mark.parametrize(
    "norm, deferred, advice",
    [
        (nn.BatchNorm1d(2), False, "use deferred_batch_norm=True"),
        (nn.BatchNorm1d(2), True, None),
        (nn.BatchNorm1d(2).eval(), False, None),
        (nn.InstanceNorm1d(2, track_running_stats=True), False, "let the schedule run"),
        (nn.InstanceNorm1d(2), False, None),
    ],
)
def test_forwards_out_of_order_are_told_where_a_norm_keeps_statistics(
    norm: nn.Module, deferred: bool, advice: str | None
) -> None:
    layers = Sequential(Linear(2, 2), norm)
    schedule = Schedule("mine", [0, 0], [FORWARDS + OF_SECOND_STAGE + BACKWARDS])
    options: dict[str, Any] = {"schedule": schedule, "deferred_batch_norm": deferred}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        GPipe(layers, [1, 1], devices=["cpu"], chunks=2, **options)
    told = [str(warning.message) for warning in caught]
    if advice is None:
        assert not told
    else:
        (line,) = told
        assert f"{type(norm).__name__}, but mine does not run the forwards" in line
        assert advice in line
    assert all(warning.filename == __file__ for warning in caught)


@pytest.mark.parametrize("call", ["step", "evaluate"])
def test_the_criterion_runs_on_the_last_device(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that device "cuda" means the last stage's GPU in a criterion, as in its layers."""
    current: list[torch.device] = []
    seen = []

    @contextmanager
    def made_current(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    def criterion(y: Tensor, _: Any) -> Tensor:
        seen.append(current[-1])
        return y.mean()

    monkeypatch.setattr("torchgpipe.tensors.accelerator.current", made_current)
    devices = ["cpu:0", "cpu:1"]
    model = GPipe(linears(2), [1, 1], devices=devices, chunks=2, engine="graph")
    getattr(model, call)(criterion, X[:, :2])
    assert seen == [torch.device("cpu:1")] * 2
