"""Tests that `step` takes and returns the same values on every engine and with every schedule.

The values are, for example, targets and inputs that are dictionaries. To save time, each test makes
one pipeline, and uses it for all cases of a table. An error names the case.
"""

import copy
from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from torchgpipe import MicroBatches
from torchgpipe.schedules.named import NAMED

from ..plain import TWICE, piped
from .compare import REORDERED, differences, named
from .rows.tools.traced import language_model, texts
from .test_micro_batches import CLASSES, Embedded, Pooled, packed

CHUNKS = 4
X = torch.linspace(-1, 1, 32).view(8, 4).sin()
TARGET = torch.linspace(-2, 2, 24).view(8, 3).cos()

every_schedule = pytest.mark.parametrize("schedule", NAMED)


def hidden(first: nn.Module) -> list[nn.Module]:
    return [first, nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3)]


def pipeline(layers: nn.Sequential, schedule: str, **options: Any) -> Any:
    balance, v = ([1, 1, 1, 1], 2) if schedule in TWICE else ([2, 2], 1)
    options |= {"schedule": schedule, "devices": ("cpu", "cpu"), "v": v}
    return piped(layers, balance, CHUNKS, **options)


# Targets: a function that makes a structure of a tensor, and one that gets the tensor back.


class Scaled(NamedTuple):
    values: Tensor
    factor: float


@dataclass
class Boxes:
    corners: Tensor
    unit: str = "pixels"


Structure = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


def entries(t: Tensor) -> list[dict[str, Tensor]]:
    return [{"row": row} for row in t]


def rows_of(target: list[dict[str, Tensor]]) -> Tensor:
    return torch.stack([entry["row"] for entry in target])


STRUCTURES: dict[str, Structure] = {
    "a mapping that is no dict": (
        lambda t: UserDict({"boxes": t, "names": "all"}),
        lambda target: target["boxes"],
    ),
    "a tuple with a number": (lambda t: (t, 2.0), lambda target: target[0]),
    "a named tuple": (lambda t: Scaled(t, 2.0), lambda target: target.values),
    "a dataclass": (Boxes, lambda target: target.corners),
    "a list with an entry for each sample": (entries, rows_of),
    "an array": (lambda t: t.numpy(), torch.as_tensor),
    "a dictionary of a dataclass and a list": (
        lambda t: {"boxes": Boxes(t), "entries": entries(t)},
        lambda target: (target["boxes"].corners + rows_of(target["entries"])) / 2,
    ),
}


# Criteria, and targets that are no structures.


class Beside(nn.Module):
    """A module that is not in the pipeline, but is trained by the pipeline's loss.

    Targets and criteria use its parameters, so that the loss has gradients for them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.weights = nn.Linear(4, 3), nn.Parameter(torch.ones(3))


Criterion = Callable[[Any, Any], Any]


def of_input_or_plain(beside: Beside, x: Tensor, t: Tensor) -> Any:
    return t


def by_mse(beside: Beside) -> Criterion:
    return mse_loss


@dataclass
class Use:
    """The target, the criterion (loss function) and the options for a call of `step`.

    Attributes:
        target: A function that makes the target from three arguments: a `Beside` (a module outside
            of the pipeline that is trained, too), the pipeline's input, and an ordinary target.
        criterion: A function that makes the criterion. Its argument is a `Beside`, whose parameters
            the criterion may use. It is called before each step.
        options: Further arguments of `step`, such as `reduction`.
    """

    target: Callable[[Beside, Tensor, Tensor], Any] = of_input_or_plain
    criterion: Callable[[Beside], Criterion] = by_mse
    options: dict[str, str] = field(default_factory=dict)


def in_structure(make: Callable[[Tensor], Any], read: Callable[[Any], Tensor]) -> Use:
    return Use(
        target=lambda beside, x, t: make(t),
        criterion=lambda beside: lambda y, target: mse_loss(y, read(target)),
    )


def learned_weights(beside: Beside) -> Criterion:
    weights = beside.weights.softmax(0)
    return lambda y, t: mse_loss(y * weights, t)


def changes_output(y: Tensor, t: Tensor) -> Tensor:
    y /= 0.7
    return mse_loss(y, t)


def sometimes_no_graph(y: Tensor, t: Tensor) -> Tensor:
    return mse_loss(y, t) if t[0, 0] > 0 else torch.zeros(())


def logs(y: Tensor, t: Tensor) -> tuple[Tensor, dict[str, Any]]:
    loss = mse_loss(y, t)
    return loss, {"loss": loss.item(), "samples": len(t)}


USES: dict[str, Use] = {name: in_structure(*pair) for name, pair in STRUCTURES.items()}
USES |= {
    "a target of another tower": Use(target=lambda beside, x, t: beside.tower(x)),
    "learned weights that it closes over": Use(criterion=learned_weights),
    "it changes its output in place": Use(criterion=lambda beside: changes_output),
    "it is scripted": Use(criterion=lambda beside: torch.jit.script(nn.MSELoss())),
    "no graph for some micro-batches": Use(criterion=lambda beside: sometimes_no_graph),
    "it logs": Use(criterion=lambda beside: logs),
    "the sum of losses": Use(options={"reduction": "sum"}),
    "a loss for each micro-batch": Use(options={"reduction": "none"}),
}


def plain_step(plain: nn.Module, beside: Beside, use: Use) -> tuple[Tensor, list[Any]]:
    """Do what `step` does, without a pipeline.

    Returns:
        The loss, and a list of the logs that the criterion has returned beside its losses.
    """
    criterion = use.criterion(beside)
    losses, logged = [], []
    for x, t in zip(X.chunk(CHUNKS), TARGET.chunk(CHUNKS), strict=True):
        found = criterion(plain(x), use.target(beside, x, t))
        if isinstance(found, tuple):
            found, log = found
            logged.append(log)
        losses.append(found)
    every = torch.stack(losses)
    reduction = use.options.get("reduction", "mean")
    loss = every.mean() if reduction == "mean" else every.sum()
    loss.backward()
    return every.detach() if reduction == "none" else loss.detach(), logged


def piped_and_plain(*layers: nn.Module, **options: Any) -> tuple[Any, nn.Sequential]:
    """Return a pipeline of the layers, and a copy of the layers to compare with."""
    sequence = nn.Sequential(*layers)
    plain = copy.deepcopy(sequence)
    return pipeline(sequence, **options), plain


def has_criterion(model: Any) -> bool:
    """Return whether this process calls the criterion (loss function).

    In a pipeline over ranks, only the rank of the last stage does.
    """
    return bool(getattr(model, "is_last", True))


@every_schedule
@pytest.mark.quick(4)
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_targets_and_criteria(way: dict[str, str], schedule: str) -> None:
    torch.manual_seed(0)
    beside = Beside()
    plain_beside = copy.deepcopy(beside)
    model, plain = piped_and_plain(*hidden(nn.Linear(4, 6)), schedule=schedule, **way)
    for name, use in USES.items():
        with named(name):
            target = use.target(beside, X, TARGET)
            loss = model.step(use.criterion(beside), X, target, **use.options)
            expected, logged = plain_step(plain, plain_beside, use)
            assert differences((loss, model), (expected, plain), REORDERED) == []
            if has_criterion(model):
                assert differences(beside, plain_beside, REORDERED) == []
                assert differences(model.logs, logged, REORDERED) == []
        for module in (model, beside, plain, plain_beside):
            module.zero_grad()
    assert_accumulates(model, plain)
    assert_runs_forwards(model, plain)


@every_schedule
@pytest.mark.quick(4)
def test_texts_of_other_lengths(way: dict[str, str], schedule: str) -> None:
    layers = language_model()
    plain = copy.deepcopy(layers)
    count, v = (4, 2) if schedule in TWICE else (2, 1)
    rest = len(layers) - (count - 1)
    options: dict[str, Any] = {"schedule": schedule, **way}
    model = piped(layers, [*[1] * (count - 1), rest], 3, ("cpu", "cpu"), v, **options)
    for x, target in texts():
        loss = model.step(mse_loss, x, target)
        expected = mse_loss(plain(x), target)
        expected.backward()
        assert differences((loss, model), (expected.detach(), plain), REORDERED) == []


def squares(y: Tensor, t: Tensor) -> Tensor:
    return mse_loss(y, t, reduction="sum")


def assert_accumulates(model: Any, plain: nn.Sequential) -> None:
    """Check that gradients accumulated over two steps are those of one large batch.

    The steps have different numbers of samples. So each step sums its losses, and the sums of
    gradients are divided by the size of the large batch.
    """
    model.step(squares, X[:3], TARGET[:3], reduction="sum")
    model.step(squares, X[3:], TARGET[3:], reduction="sum")
    for p in model.parameters():
        p.grad /= TARGET.numel()
    mse_loss(plain(X), TARGET).backward()
    assert differences(model, plain, REORDERED) == []


def assert_runs_forwards(model: Any, plain: nn.Sequential) -> None:
    """Check `evaluate`, its loss and logs, and the output of `predict`. Both run forward only."""
    output = plain(X).detach()
    loss = model.evaluate(logs, X, TARGET)
    assert differences(loss, mse_loss(output, TARGET), REORDERED) == []
    if has_criterion(model):
        assert [log["samples"] for log in model.logs] == [2] * CHUNKS
    assert differences(model.predict(X), output, REORDERED) == []
    assert differences(model, plain, REORDERED) == []


# Inputs and outputs that are structures.


class Pair(NamedTuple):
    x: Tensor
    scale: Tensor


@dataclass
class Sample:
    x: Tensor
    scale: Tensor
    name: str = "a sample"


INPUTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a dictionary": lambda x, scale: {"x": x, "scale": scale, "name": "a sample"},
    "a mapping that is no dict": lambda x, scale: UserDict({"x": x, "scale": scale}),
    "a tuple": lambda x, scale: (x, scale),
    "a named tuple": Pair,
    "a dataclass": Sample,
}


class First(nn.Module):
    """A layer whose input is a structure."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)

    def forward(self, given: Any) -> Tensor:
        if isinstance(given, tuple):
            x, scale = given
        elif isinstance(given, Mapping):
            x, scale = given["x"], given["scale"]
        else:
            x, scale = given.x, given.scale
        return self.linear(x) * scale[:, None]


class Last(nn.Linear):
    """A layer that returns a dictionary."""

    def forward(self, x: Tensor) -> Any:
        return {"scores": super().forward(x), "name": "last"}


def of_scores(output: Any, t: Tensor) -> Tensor:
    assert output["name"] == "last"
    return mse_loss(output["scores"], t)


@every_schedule
@pytest.mark.quick(4)
def test_inputs_and_outputs(way: dict[str, str], schedule: str) -> None:
    torch.manual_seed(0)
    layers = [*hidden(First())[:-1], Last(6, 3)]
    model, plain = piped_and_plain(*layers, schedule=schedule, **way)
    scale = torch.linspace(1, 2, 8)
    for name, make in INPUTS.items():
        with named(name):
            loss = model.step(of_scores, make(X, scale), TARGET)
            expected = of_scores(plain(make(X, scale)), TARGET)
            expected.backward()
            assert differences((loss, model), (expected.detach(), plain), REORDERED) == []
        model.zero_grad()
        plain.zero_grad()
    assert differences(model(make(X, scale)), plain(make(X, scale)), REORDERED) == []


# Micro-batches that the caller makes.


@every_schedule
@pytest.mark.quick(4)
def test_packed_micro_batches(way: dict[str, str], schedule: str) -> None:
    """Check steps with `MicroBatches` of packed sequences, which have one tensor of all tokens.

    The library cannot count the sequences in a packed micro-batch. So the argument `weight` is a
    function that counts them in the target.
    """
    torch.manual_seed(0)
    layers = (Embedded(), Pooled(), nn.Linear(6, 6), nn.Linear(6, CLASSES))
    model, plain = piped_and_plain(*layers, schedule=schedule, **way)
    target = MicroBatches([torch.zeros(n, dtype=torch.long) for n in (2, 1, 3)])
    outputs = [plain(x) for x in packed()]
    losses = [cross_entropy(y, t) for y, t in zip(outputs, target, strict=True)]
    expected = cross_entropy(torch.cat(outputs), torch.cat([*target]))
    expected.backward()
    loss = model.step(cross_entropy, packed(), target, weight=len)
    assert differences((loss, model), (expected.detach(), plain), REORDERED) == []
    loss = model.evaluate(cross_entropy, packed(), target, weight=len)
    assert differences(loss, expected.detach(), REORDERED) == []
    found = model.evaluate(cross_entropy, packed(), target, reduction="none")
    assert differences(found, torch.stack(losses).detach(), REORDERED) == []
    assert differences(model.predict(packed()), torch.cat(outputs).detach(), REORDERED) == []
