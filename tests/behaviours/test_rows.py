"""Run the test cases of rows/, on every engine and in every mode of checkpointing.

A pipeline must compute the results of its layers, or raise the error that the test case names.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.others.ours import Layers, Threads
from benchmarks.pipelines import evenly
from benchmarks.simulated import Streams
from torchgpipe.schedules import make
from torchgpipe.schedules.named import NAMED

from ..plain import TWICE, piped
from .compare import differences
from .guarded import GUARDS, OF_ITS_OWN, ROWS_OF_GUARDS
from .pipe import Pipe, Training
from .row import ENGINES, MODES, Case, Row, cases, tensors, unlike
from .rows import at_once, between, buffers, gradients, passed, random, tools, unusual
from .rows.random.norms import channels, given
from .rows.training import ROWS

GROUPS = (passed, gradients, between, buffers, random, unusual, at_once, tools)
NAMES: dict[Row, str] = {}
for group in GROUPS:
    _, _, module = group.__name__.rpartition(".")
    for each in group.ROWS:
        NAMES[each] = f"{module}: {each.name}"

FEW = [row for group in GROUPS for row in group.ROWS[:2]]
"""The rows that quick tests run with a default device and on several devices, too."""

# Rows that have other results if each partition has a device of its own, and why.
APART = {
    "passed: likewise without a gradient": "it is refused, as with workers",
    "between: a default type in forward": "it is refused, as with workers",
    "between: a default type in backward": "it is refused, as with workers",
    "between: the input changed": "the first device has a copy of the input",
    "gradients: a buffer that takes a gradient": "a buffer that is moved has no gradient",
    "buffers: attributes of a buffer": "a buffer that is moved has no attributes",
    "buffers: one memory in buffers of two partitions": "devices share no memory",
    "buffers: two that share memory": "devices share no memory",
    "buffers: statistics of an own norm of two partitions, m=1": "each device has its own norm",
    "buffers: an output whose memory is used again": "the next device has a copy of the output",
    "buffers: a parameter without a shape": "it cannot be moved",
    "at_once: a parameter of two partitions": "it would be on two devices",
}

EQUAL = [row for row in ROWS if not row.unlike]
"""The rows that do not have a reason `unlike` to differ from plain layers.

benchmarks/conformance.py lists all rows.
"""


def id_of(case: Case) -> str:
    how = [word for word in case[1:] if word]
    return "-".join([NAMES[case.row], *how])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    every = metafunc.config.getoption("all")
    slow = metafunc.config.getoption("slow")
    if "case" in metafunc.fixturenames:
        chosen = cases([*NAMES], pairs=every)
        if not slow:
            third = {*[*NAMES][::3]}
            chosen = [case for case in chosen if case.engine != "ranks" or case.row in third]
        metafunc.parametrize("case", chosen, ids=id_of)
    rows = [*NAMES] if slow else FEW
    if "with_default" in metafunc.fixturenames:
        chosen = always(rows, "workers")
        if every:
            chosen += always(rows, "graph")
        metafunc.parametrize("with_default", chosen, ids=id_of)
    if "on_several" in metafunc.fixturenames:
        chosen = [case for case in always(rows, "graph") if NAMES[case.row] not in APART]
        metafunc.parametrize("on_several", chosen, ids=id_of)


def always(rows: Sequence[Row], engine: str) -> list[Case]:
    """Return the given test cases with one engine and the checkpointing mode "always".

    Test cases that must not run with this engine or in this mode are left out.
    """
    found = [Case(row, "", engine, "always") for row in rows]
    return [case for case in found if not case.row.left_out(*case[1:])]


WARNINGS = (
    # A reentrant checkpoint gives this warning in a first forward pass, which runs without a graph.
    "ignore:None of the inputs have requires_grad",
    # This warning comes from PyTorch before 2.13. If a layer raises an error within
    # `torch.utils.checkpoint`, a Python generator stays open, and warns when it is closed later.
    "ignore:.*_checkpoint_without_reentrant:pytest.PytestUnraisableExceptionWarning",
    "ignore:Using backward\\(\\) with create_graph=True",
    "ignore:The .grad attribute of a Tensor that is not a leaf",
    # The first of the next three warnings comes from `torch.compile` (also without a pipeline), the
    # second from `torch.distributed.checkpoint`, and the third from forking a process.
    "ignore:`torch.jit.(script|trace|trace_method|freeze)` is deprecated",
    "ignore:torch.distributed is disabled",
    "ignore:This process .* is multi-threaded:DeprecationWarning",
)


def with_warnings(test: Any) -> Any:
    """Mark a test so that warnings which PyTorch gives in some test cases are ignored."""
    for each in WARNINGS:
        test = pytest.mark.filterwarnings(each)(test)
    return test


@with_warnings
def test_rows(case: Case) -> None:
    assert unlike(*case) == []


@with_warnings
def test_rows_with_a_default_device(with_default: Case) -> None:
    """Check test cases with a default device, as `torch.set_default_device` sets it.

    PyTorch sets it for the calling thread only, so a pipeline must set it in its worker threads.
    """
    torch.set_default_device("cpu")
    try:
        assert unlike(*with_default) == []
    finally:
        torch.set_default_device(None)


@with_warnings
def test_rows_on_simulated_devices(on_several: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    Streams(monkeypatch)
    assert unlike(*on_several, ["cpu:0", "cpu:1", "cpu:2"]) == []


def test_each_guard_has_rows_that_need_it() -> None:
    named: set[str] = set().union(*ROWS_OF_GUARDS.values())
    assert {*ROWS_OF_GUARDS, *OF_ITS_OWN} == GUARDS
    assert named <= set(NAMES.values())


@pytest.mark.parametrize("guard", ROWS_OF_GUARDS)
def test_rows_of_guards(guard: str) -> None:
    """Run the test cases that need a guard, which keeps a recomputation equal to its forward.

    For each guard in torchgpipe/task/guards, tests/planted/rows.json has a planted fault that
    leaves it out. This test must fail with each of these faults.
    """
    rows = {name: row for row, name in NAMES.items()}
    count = 0
    for name in ROWS_OF_GUARDS[guard]:
        for engine in ("graph", "workers"):
            if not rows[name].left_out("", engine, "always"):
                count += 1
                assert unlike(rows[name], "", engine, "always") == [], f"{name} ({engine})"
    assert count


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ENGINES[:2])
@pytest.mark.parametrize("row", tools.REPLICAS, ids=lambda row: row.name)
def test_replicas(row: Row, kind: str, mode: str) -> None:
    assert unlike(row, "", kind, mode) == []


@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_shapes_on_meta(checkpoint: str, training: bool, deferred: bool) -> None:
    layers = channels(lambda: nn.Sequential(nn.BatchNorm2d(4), nn.Dropout()))

    def in_mode() -> nn.Sequential:
        return layers().train(training)

    options = {"deferred_batch_norm": True} if deferred else {}
    row = Row("", in_mode, given, chunks=4, options=options)
    assert unlike(row, "", "graph", checkpoint, ["meta"]) == []


def left(row: Training, pipe: type[Pipe], folder: Path) -> Any:
    """Run a test case of training with a pipeline, and return its losses, gradients and so on.

    Args:
        row: The test case.
        pipe: The class of the pipeline.
        folder: A new folder for the files that the test case saves.
    """
    folder.mkdir()
    found = row.action(pipe(row, folder))
    return found.found() if isinstance(found, Pipe) else found


def mode_of(row_mode: str, checkpoint: str) -> str:
    """Return the mode of checkpointing with which to run a test case.

    This is the given `checkpoint`, unless the test case needs the mode "always".
    """
    return "always" if row_mode == "always" else checkpoint


@pytest.mark.quick(80)
@pytest.mark.parametrize("row", EQUAL, ids=lambda row: row.name)
def test_training(row: Training, engine: str, checkpoint: str, tmp_path: Path) -> None:
    class Piped(Threads):
        def piped(self, layers: nn.Sequential, balance: list[int], **options: Any) -> nn.Module:
            options["engine"] = engine
            options["checkpoint"] = mode_of(options["checkpoint"], checkpoint)
            return piped(layers, balance, **options)

    assert_as_plain(row, engine, Piped, Layers, tmp_path)


def assert_as_plain(
    row: Training, engine: str, pipe: type[Pipe], layers: type[Pipe], folder: Path
) -> None:
    if refusal := row.refused.get(engine):
        with pytest.raises((RuntimeError, ValueError), match=refusal):
            left(row, pipe, folder / "ours")
        return
    ours = left(row, pipe, folder / "ours")
    if engine == "ranks" and not ours:
        return  # only another rank has the result
    plain = left(row, layers, folder / "plain")
    assert not any(x is False for x in plain.values()), "the plain layers do not do it either"
    assert differences(ours, plain, row.tolerance) == []


class Stepping(Threads):
    """A pipeline under test that trains by `model.step` with a schedule.

    For schedules that put two stages on a device, it has twice as many partitions as devices.
    """

    schedule = "GPipe"

    def piped(self, layers: nn.Sequential, balance: list[int], **options: Any) -> nn.Module:
        v = 1
        if self.schedule in TWICE:
            v = 2
            balance = evenly(layers, 4 if len(layers) > 3 else 2)
        options |= {"v": v, "engine": self.engine, "schedule": self.schedule}
        model: nn.Module = piped(layers, balance, **options)
        return model

    def step(self, *given: Any) -> Pipe:
        x, target = given or self.row.given()
        model: Any = self.module.train()
        reduction = "mean" if self.row.mean else "sum"
        loss = model.step(self.row.criterion, x, target, reduction=reduction)
        self.losses.append(loss)
        return self


class InOrder(Layers):
    """Layers without a pipeline that add up gradients in the order in which a schedule does.

    Rounding depends on this order. First, the forwards of all micro-batches run. Then the backwards
    run in the order that the schedule has for a single device.
    """

    schedule = "GPipe"

    def step(self, *given: Any) -> Pipe:
        x, target = given or self.row.given()
        self.module.train()
        outputs: list[Any] = []
        with self.module.register_forward_hook(lambda module, x, y: outputs.append(y)):
            self.plain(x)
        sizes = [len(tensors(part)[0]) for part in self.plain.split(x)]
        losses: list[Any] = []
        total: Any = 0
        for y, part, size in zip(outputs, target.split(sizes), sizes, strict=True):
            share = size / sum(sizes) if self.row.mean else 1
            loss = self.row.criterion(y, part) * share
            losses.append(loss)
            total = total + loss.detach()
        for action in make(self.schedule, 1, len(sizes)).lists[0]:
            if action.kind in ("backward", "backward_weights") and action.stage == 0:
                losses[action.micro_batch].backward()
        self.losses.append(total)
        return self


def with_schedule(base: type[Pipe], schedule: str, engine: str) -> type[Pipe]:
    return type(base.__name__, (base,), {"schedule": schedule, "engine": engine})


@pytest.mark.quick(80)
@pytest.mark.apart("row", "schedule")
@pytest.mark.parametrize("schedule", NAMED)
@pytest.mark.parametrize("row", EQUAL, ids=lambda row: row.name)
def test_steps(row: Training, schedule: str, engine: str, checkpoint: str, tmp_path: Path) -> None:
    mode: Any = mode_of(row.checkpoint, checkpoint)
    row = replace(row, checkpoint=mode)
    ours = with_schedule(Stepping, schedule, engine)
    plain = with_schedule(InOrder, schedule, engine)
    assert_as_plain(row, engine, ours, plain, tmp_path)
