"""Session: whatever becomes of a row, measured or emulated, it ends in a result, and the others go on."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from reproduce.experiments import PUBLISHED_BALANCE, Experiment, Row
from reproduce.machine.devices import Devices
from reproduce.records.record import Result
from reproduce.run.emulation import EmulatedStep, Emulation, Executed
from reproduce.run.training import FakeData
from torchgpipe.plan.hardware import load_hardware
from torchgpipe.plan.replay import Costs, Event, Timeline

Run = Callable[..., "dict[str, Result]"]
OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory")
SECONDS = 2.0  # of an emulated step


class Fake:
    """Stand in for a training: each row is told what to raise, and in which of all its steps."""

    raises: ClassVar[dict[str, Callable[[int], Exception | None]]] = {}
    alive: ClassVar[set[str]] = set()
    steps: ClassVar[dict[str, int]] = {}
    order: ClassVar[list[str]] = []
    kind = ""

    def __init__(self, row: Row, devices: Devices, data: FakeData, balancer: object, seed: int) -> None:
        self.row = replace(row, balance=(1,) * (row.partitions or 1))
        self.name = row.name + self.kind
        self.alive.add(self.name)
        self.act()

    def __del__(self) -> None:
        self.alive.discard(self.name)

    def act(self) -> None:
        error = self.raises.get(self.name, lambda _: None)(self.steps.get(self.name, 0))
        if error is not None:
            raise error

    def train(self) -> torch.Tensor:
        self.steps[self.name] = self.steps.get(self.name, 0) + 1
        self.order.append(self.name)
        self.act()
        return torch.tensor(1.0)


class Measured(Fake):
    def step(self) -> torch.Tensor:
        return self.train()


class Emulated(Fake, Emulation):
    """Stand in for an emulation; its rows are told what to raise under names that end in ` emulated`."""

    kind = " emulated"

    def __init__(self, row: Row, devices: Devices, data: FakeData, balancer: object, seed: int, link: object) -> None:
        Fake.__init__(self, row, devices, data, balancer, seed)
        self.training = self  # type: ignore[assignment]
        self.executed, self.link = row.micro_batches or 1, link  # type: ignore[assignment]

    def run(self, *, wall: bool = False) -> Executed:
        return Executed({}, 0.0, [], work=3.0, wall=4.0, value=float(self.train()))

    def step(self, runs: Sequence[Executed]) -> EmulatedStep:
        timeline = Timeline([Event("forward", 0, 0, 0.0, 1.0)], SECONDS, self.row.devices)
        return EmulatedStep(SECONDS, 0.5, 0.0, 3.0, Costs([[1.0]], [[0.0]], [[0.0]]), timeline)


def fake_peak(training: Any, devices: Devices, *, steps: int, before: Callable[[int], None]) -> dict[str, list[int]]:
    for step in range(steps):
        before(step)
        training.step()
    return {"peak_allocated": [7] * training.row.devices}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    for module in ("session", "speed"):
        monkeypatch.setattr(f"reproduce.run.{module}.Training", Measured)
    monkeypatch.setattr("reproduce.run.speed.Emulation", Emulated)
    monkeypatch.setattr("reproduce.run.memory.measure_peak", fake_peak)
    for name in ("raises", "alive", "steps", "order"):
        monkeypatch.setattr(Fake, name, type(getattr(Fake, name))())
    return Fake


@pytest.fixture
def runs(runner: Any, tmp_path: Path) -> Any:
    return runner(tmp_path)


@pytest.fixture
def run(fake: type[Fake], runs: Any, tiny: Mapping[str, Experiment]) -> Run:
    """Run an experiment, its small scale changed, for so many steps as are asked for; return what was measured."""

    def run(name: str, asked: int | None = 3, seed: int = 0, options: Any = {}, **changes: Any) -> Any:  # noqa: B006
        scale = replace(tiny[name].scale("small"), **changes)
        return runs(tiny[name], scale, seed, steps=asked, **options)

    return run


def devices_of(row: str) -> int:
    return next((n for n in (8, 2) if f"n{n}" in row), 1)


@pytest.mark.parametrize("emulate", [8, 2, 0])
def test_every_row_ends_in_a_result(
    fake: type[Fake], run: Run, runs: Any, tiny: Mapping[str, Experiment], emulate: int
) -> None:
    """What there are devices for is measured, and what may be is emulated; a published balance is only emulated."""
    rows = tiny["tiny-speed"].scale("small").rows
    measured = run("tiny-speed", options={"emulate": emulate})
    assert runs.said.startswith("tiny-speed: building n2m1, emulated" if emulate else "tiny-speed: building n2m1, mea")
    assert set(measured) | set(runs.emulated) == {row.name for row in rows}
    assert set(runs.emulated) == {row.name for row in rows if row.devices <= emulate}
    for name, result in measured.items():
        if devices_of(name) == 8:
            assert (result.status, result.reason) == ("needs devices", "needs 8 devices")
            assert name not in runs.emulated and not result.samples
    for found, kind in ((measured, "measured"), (runs.emulated, "emulated")):
        for name, result in found.items():
            if result.status != kind:
                continue
            assert len(result.samples["step_time"]) == fake.steps[f"{name}{' emulated' * result.emulated}"] == 3
            assert len(set(result.samples["round"])) == 3 and result.samples["loss"] == [1, 1, 1]
            assert result.config["balance"] == [1] * result.config["partitions"], "the balance as used is recorded"
    finished = {name for name, result in measured.items() if result.status == "measured"}
    assert finished == {row.name for row in rows if row.devices <= 2}
    assert measured["GPipe n2m4"].values["utilization_problem"].startswith("AttributeError"), "it cannot be watched"
    assert (measured["n2m4"].over, measured["n2m4"].published) == ("n2m1", "tg-amoebanetd-speed/n2m4")
    assert runs.groups == ["like the published", PUBLISHED_BALANCE, "batch"], "a group without rows to run, too"


def test_what_is_kept_of_an_emulated_row(run: Run, runs: Any) -> None:
    run("tiny-speed", asked=2)
    result = runs.emulated["GPipe n8m4"]
    assert result.samples == {
        "step_time": [SECONDS] * 2, "here_time": [0.5] * 2, "work_time": [3.0] * 2, "wall_time": [4.0] * 2,
        "loss": [1, 1], "round": runs.emulated["naive n8"].samples["round"],
    }  # fmt: skip
    assert result.values["executed"] == 4 and result.values["bubble"] == 1 - 1 / 8
    assert result.values["utilization"] == [0.5, *[0] * 7]


@pytest.mark.parametrize(
    ("options", "own", "link", "ours"),
    [
        ({}, None, "p40x8, in proportion to the tasks", None),
        ({}, "a100x8", "a100x8", "a100x8"),
        ({"hardware": load_hardware("h100x8")}, "a100x8", *["h100x8, in proportion to the tasks"] * 2),
    ],
    ids=["as published", "as these GPUs", "as asked"],
)
def test_the_config_says_which_link_copies_were_on(
    run: Run, runs: Any, options: dict[str, Any], own: str | None, link: str, ours: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("reproduce.run.session.own_links", lambda devices: own)
    measured = run("tiny-speed", options=options)
    rows = {"n2m4": link, "n8m4/pb": link, "GPipe n8m4": ours, "checkpoint-only m4": None}
    assert {name: runs.emulated[name].config.get("link") for name in rows} == rows
    assert not any("link" in result.config for result in measured.values())


@pytest.mark.parametrize(
    ("asked", "seconds", "said"),
    [(None, 30.0, "not measured: a step takes about 0:02 min (--steps K does measure it)"), (1, 30.0, None),
     (None, 3000.0, None)],
)  # fmt: skip
def test_what_would_take_long_to_measure_is_emulated_only(
    fake: type[Fake], run: Run, runs: Any, asked: int | None, seconds: float, said: str | None
) -> None:
    found = run("tiny-speed", asked=asked, steps=1, warmup=1, least_steps=8, seconds=seconds)
    assert {found[name].reason for name in ("n2m4", "naive n2")} == {said}
    assert found["n2m4"].status == ("measured" if said is None else "not run")
    assert runs.emulated["n2m4"].status == "emulated" and ("n2m4" in fake.steps) == (said is None)


def test_a_round_is_one_step_of_every_row_in_an_order_of_its_own(
    fake: type[Fake], run: Run, tiny: Mapping[str, Experiment]
) -> None:
    """Measured and emulated ones take turns."""
    rows = tuple(row for row in tiny["tiny-speed"].scale("small").rows if row.equal)
    orders = []
    for seed in (1, 1, 2):
        fake.order.clear()
        run("tiny-speed", asked=4, seed=seed, rows=rows)
        tasks = {*(row.name for row in rows if row.devices <= 2), *(f"{row.name} emulated" for row in rows)}
        rounds = [tuple(fake.order[i : i + len(tasks)]) for i in range(0, 4 * len(tasks), len(tasks))]
        assert all(set(each) == tasks for each in rounds) and len(set(rounds)) > 1
        orders.append(rounds)
    assert orders[0] == orders[1] != orders[2], "the seed gives the order"


def kept(runs: Any) -> dict[str, Result]:
    """Return all that was run, the emulated rows under the names that they fail by."""
    return {**runs.results, **{f"{name} emulated": result for name, result in runs.emulated.items()}}


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (ValueError("no"), "failed", "ValueError: no (test_session.py, line "),
        (OUT_OF_MEMORY, "out of memory", "out of memory"),
    ],
)
@pytest.mark.parametrize(
    ("experiment", "row", "others", "at"),
    [
        ("tiny-speed", "naive n2", ("naive n2 emulated", "GPipe n2m4"), 0),
        ("tiny-speed", "naive n2", ("naive n2 emulated", "GPipe n2m4"), 2),
        ("tiny-speed", "naive n2 emulated", ("naive n2", "GPipe n2m4 emulated"), 0),
        ("tiny-speed", "naive n2 emulated", ("naive n2", "GPipe n2m4 emulated"), 2),
        ("tiny-memory", "baseline", ("pipeline-2",), 0),
    ],
)
def test_a_row_that_fails_is_a_result(
    fake: type[Fake], run: Run, runs: Any, experiment: str, row: str, others: tuple[str, ...], at: int,
    error: Exception, status: str, reason: str,
) -> None:  # fmt: skip
    fake.raises[row] = lambda step: error if step >= at else None
    run(experiment)
    found = kept(runs)
    assert found[row].status == status and str(found[row].reason).startswith(reason)
    for other in others:
        assert found[other].status == ("emulated" if found[other].emulated else "measured")
    if status == "out of memory" and found[row].emulated:
        assert str(found[row].reason).startswith("out of memory: its 2 partition(s) take ")


@pytest.mark.parametrize("row", ["GPipe n2m4", "GPipe n8m4 emulated"])
def test_a_row_that_does_not_fit_beside_others_is_timed_alone(
    fake: type[Fake], run: Run, runs: Any, monkeypatch: pytest.MonkeyPatch, row: str
) -> None:
    """Trainings and data of the others, and of other groups, are gone by then."""
    alive: weakref.WeakSet[FakeData] = weakref.WeakSet()
    most = []

    class Counted(FakeData):
        def __init__(self, rows: Sequence[Row], seed: int) -> None:
            super().__init__(rows, seed)
            alive.add(self)
            most.append(len(alive))

    monkeypatch.setattr("reproduce.run.speed.FakeData", Counted)
    # A new error each time: one that is kept would keep the frames that it went through, and with them the data.
    fake.raises[row] = lambda _: torch.OutOfMemoryError("no") if len(fake.alive) > 1 else None
    run("tiny-speed")
    found = kept(runs)
    assert len(found[row].samples["step_time"]) == 3
    assert "round" not in found[row].samples, "it shares no round with the others"
    assert "round" in found["naive n2"].samples
    assert max(most) <= 2, "a group has data for what it measures and for what it emulates"
    assert most[-1] == 1


def test_the_first_epoch_of_a_row_as_published_is_not_timed(
    fake: type[Fake], run: Run, tiny: Mapping[str, Experiment]
) -> None:
    small = tiny["tiny-speed"].scale("small")
    rows = tuple(replace(row, steps_per_epoch=7, skip_epochs=int(row.name == "GPipe n2m4")) for row in small.rows)
    found = run("tiny-speed", rows=rows)
    assert all(len(found[name].samples["step_time"]) == 3 for name in ("GPipe n2m4", "naive n2"))
    assert fake.steps["GPipe n2m4"] - fake.steps["naive n2"] == 7 - small.warmup
    assert fake.steps["GPipe n2m4 emulated"] == fake.steps["naive n2 emulated"], "one step is like the next"
    assert found["GPipe n2m4"].config["skip_epochs"] == 1 and "skip_epochs" not in found["naive n2"].config


@pytest.mark.parametrize(("asked", "done"), [(None, 4), (6, 6)], ids=["not before the least", "not what was asked"])
def test_a_time_limit_ends_a_run(run: Run, runs: Any, asked: int | None, done: int) -> None:
    run("tiny-speed", asked=asked, steps=9, least_steps=4, seconds=1e-9)
    assert len(runs.emulated["naive n2"].samples["step_time"]) == done


@pytest.mark.parametrize("row", ["GPipe n2m4", "GPipe n8m4 emulated"])
@pytest.mark.parametrize("at", [1, 3])
def test_an_interruption_keeps_every_step(fake: type[Fake], run: Run, runs: Any, at: int, row: str) -> None:
    def interrupt(step: int) -> None:
        if step == at:
            raise KeyboardInterrupt

    fake.raises[row] = interrupt
    with pytest.raises(KeyboardInterrupt):
        run("tiny-speed", asked=5)
    found = kept(runs)
    assert (found[row].status == "not run") == (at == 1)
    counts = {name: len(result.samples.get("step_time", [])) for name, result in found.items()}
    assert {name: count for name, count in counts.items() if count} == {
        name: count for name, steps in fake.steps.items() if (count := steps - (name == row))
    }


def test_a_run_that_is_to_end_ends_between_steps(fake: type[Fake], run: Run) -> None:
    def check() -> None:
        if fake.steps.get("naive n2") == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run("tiny-speed", asked=5, options={"check": check})
    assert fake.steps["naive n2"] == 2


def test_memory_rows_run_alone_and_for_any_n(fake: type[Fake], run: Run, runs: Any) -> None:
    fake.raises["pipeline-1"] = lambda _: None if fake.alive == {"pipeline-1"} else ValueError(str(fake.alive))
    found = run("tiny-memory")
    assert [result.status for result in found.values()] == ["measured"] * 5 and not runs.emulated
    assert found["pipeline-8"].values["peak_allocated"] == [7] * 8 and found["pipeline-8"].config["balance"] == [1] * 8
    assert fake.steps == dict.fromkeys(found, 2)
    assert [result.device for result in runs.counted.values()] == ["meta"] * 5
    assert runs.counted["pipeline-8"].values == {"parameters": 1844858344, "model_bytes": 12 * 1844858344}


@pytest.mark.parametrize("partitions", [2, 4])
@pytest.mark.parametrize("error", [None, ValueError("no")])
def test_an_ablation_has_speed_utilization_and_memory(
    run: Run, runs: Any, tiny: Mapping[str, Experiment], monkeypatch: pytest.MonkeyPatch, error: Exception | None,
    partitions: int,
) -> None:  # fmt: skip
    """Its peaks are those of either kind of row: they do not depend on the clock."""

    def peak(*arguments: Any, **options: Any) -> dict[str, list[int]]:
        if error is not None:
            raise error
        return {"peak_allocated": [5, 6]}

    timeline = Timeline([Event("forward", 0, 1, 0.0, 1.0)], 2.0, 2)
    monkeypatch.setattr("reproduce.run.timed.watch_step", lambda training, devices: timeline)
    monkeypatch.setattr("reproduce.run.memory.measure_peak", peak)
    rows = tiny["tiny-ablation"].scale("small").rows
    run("tiny-ablation", rows=tuple(replace(row, partitions=partitions) for row in rows))
    found = kept(runs)
    assert set(found) == {f"{row.name}{kind}" for row in rows for kind in ("", " emulated")[partitions == 4 :]}
    for name, result in found.items():
        values = result.values
        shares = [0.5, 0, 0, 0][:partitions] if result.emulated else [0.0, 0.5]
        assert values["utilization"] == shares, name
        assert len(result.samples["step_time"]) == 3, "what was timed is kept in any case"
        if error is None:
            assert values["peak_allocated"] == [5, 6] and values["model_bytes"] == 8 * values["parameters"]
        else:
            assert values["memory_problem"].startswith("ValueError: no")
