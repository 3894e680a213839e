"""Session: whatever becomes of a row, it ends in a result, and the others go on."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from reproduce.experiments import Experiment, Row
from reproduce.machine.devices import Devices
from reproduce.records.record import Result
from reproduce.run.training import FakeData
from torchgpipe.plan.replay import Event, Timeline

Run = Callable[..., "dict[str, Result]"]
OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory")


class Fake:
    """Stand in for a training: each row is told what to raise, and in which of all its steps."""

    raises: ClassVar[dict[str, Callable[[int], Exception | None]]] = {}
    alive: ClassVar[set[str]] = set()
    steps: ClassVar[dict[str, int]] = {}
    order: ClassVar[list[str]] = []

    def __init__(self, row: Row, devices: Devices, data: FakeData, balancer: object, seed: int) -> None:
        self.row = replace(row, balance=(1,) * (row.partitions or 1))
        self.alive.add(row.name)
        self.act()

    def __del__(self) -> None:
        self.alive.discard(self.row.name)

    def act(self) -> None:
        error = self.raises.get(self.row.name, lambda _: None)(self.steps.get(self.row.name, 0))
        if error is not None:
            raise error

    def step(self) -> torch.Tensor:
        self.steps[self.row.name] = self.steps.get(self.row.name, 0) + 1
        self.order.append(self.row.name)
        self.act()
        return torch.tensor(1.0)


def fake_peak(training: Any, devices: Devices, *, steps: int, before: Callable[[int], None]) -> dict[str, list[int]]:
    for step in range(steps):
        before(step)
        training.step()
    return {"peak_allocated": [7] * training.row.devices}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    monkeypatch.setattr("reproduce.run.session.Training", Fake)
    monkeypatch.setattr("reproduce.run.memory.measure_peak", fake_peak)
    for name in ("raises", "alive", "steps", "order"):
        monkeypatch.setattr(Fake, name, type(getattr(Fake, name))())
    return Fake


@pytest.fixture
def runs(runner: Any, tmp_path: Path) -> Any:
    return runner(tmp_path)


@pytest.fixture
def run(fake: type[Fake], runs: Any, tiny: Mapping[str, Experiment]) -> Run:
    """Run an experiment, its small scale changed, for so many steps as are asked for."""

    def run(name: str, asked: int | None = 3, seed: int = 0, check: Any = lambda: None, **changes: Any) -> Any:
        scale = replace(tiny[name].scale("small"), **changes)
        return runs(tiny[name], scale, seed, steps=asked, check=check)

    return run


def test_every_row_ends_in_a_result(fake: type[Fake], run: Run, runs: Any, tiny: Mapping[str, Experiment]) -> None:
    found = run("tiny-speed")
    assert runs.said.startswith("tiny-speed: building naive n2")
    assert list(found) == [row.name for row in tiny["tiny-speed"].scale("small").rows]
    for name, result in found.items():
        if "n4" in name or "n8" in name:
            assert (result.status, result.reason) == ("needs devices", f"needs {result.config['partitions']} devices")
            assert not result.samples
        else:
            assert result.status == "measured"
            assert len(result.samples["step_time"]) == fake.steps[name] == 3
            assert result.samples["round"] == [0, 1, 2] and result.samples["loss"] == [1, 1, 1]
            assert result.config["balance"] == [1] * result.config["partitions"], "the balance as used is recorded"
            assert result.values["utilization_problem"].startswith("AttributeError"), "a Fake cannot be watched"
    assert found["GPipe n2m4"].over == "naive n2"
    assert found["GPipe n2m4"].published == "tg-amoebanetd-speed/n2m4"


def test_a_round_is_one_step_of_every_row_in_an_order_of_its_own(fake: type[Fake], run: Run) -> None:
    orders = []
    for seed in (1, 1, 2):
        fake.order.clear()
        run("tiny-speed", asked=4, seed=seed)
        rows = len(fake.steps)
        rounds = [tuple(fake.order[i : i + rows]) for i in range(0, 4 * rows, rows)]
        assert all(set(each) == set(fake.steps) for each in rounds) and len(set(rounds)) > 1
        orders.append(rounds)
    assert orders[0] == orders[1] != orders[2], "the seed gives the order"


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (ValueError("no"), "failed", "ValueError: no (test_session.py, line "),
        (OUT_OF_MEMORY, "out of memory", "out of memory"),
    ],
)
@pytest.mark.parametrize(
    ("experiment", "row", "other", "at"),
    [
        ("tiny-speed", "naive n2", "GPipe n2m4", 0),
        ("tiny-speed", "naive n2", "GPipe n2m4", 2),
        ("tiny-memory", "baseline", "pipeline-2", 0),
    ],
)
def test_a_row_that_fails_is_a_result(
    fake: type[Fake], run: Run, experiment: str, row: str, other: str, at: int,
    error: Exception, status: str, reason: str,
) -> None:  # fmt: skip
    fake.raises[row] = lambda step: error if step >= at else None
    found = run(experiment)
    assert found[row].status == status and str(found[row].reason).startswith(reason)
    assert found[other].status == "measured"


def test_a_row_that_does_not_fit_beside_others_is_timed_alone(
    fake: type[Fake], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainings and data of the others are gone by then."""
    alive: weakref.WeakSet[FakeData] = weakref.WeakSet()
    most = []

    class Counted(FakeData):
        def __init__(self, rows: Sequence[Row], seed: int) -> None:
            super().__init__(rows, seed)
            alive.add(self)
            most.append(len(alive))

    monkeypatch.setattr("reproduce.run.speed.FakeData", Counted)
    # A new error each time: one that is kept would keep the frames that it went through, and with them the data.
    fake.raises["GPipe n2m4"] = lambda _: torch.OutOfMemoryError("no") if len(fake.alive) > 1 else None
    found = run("tiny-speed")
    assert found["GPipe n2m4"].status == "measured" and len(found["GPipe n2m4"].samples["step_time"]) == 3
    assert "round" not in found["GPipe n2m4"].samples, "it shares no round with the others"
    assert "round" in found["naive n2"].samples
    assert most == [1, 1]


def test_the_first_epoch_of_a_row_as_published_is_not_timed(
    fake: type[Fake], run: Run, tiny: Mapping[str, Experiment]
) -> None:
    small = tiny["tiny-speed"].scale("small")
    rows = tuple(replace(row, steps_per_epoch=7, skip_epochs=int(row.name == "GPipe n2m4")) for row in small.rows)
    found = run("tiny-speed", rows=rows)
    assert all(len(found[name].samples["step_time"]) == 3 for name in ("GPipe n2m4", "naive n2"))
    assert fake.steps["GPipe n2m4"] - fake.steps["naive n2"] == 7 - small.warmup
    assert found["GPipe n2m4"].config["skip_epochs"] == 1 and "skip_epochs" not in found["naive n2"].config


@pytest.mark.parametrize(("asked", "done"), [(None, 4), (6, 6)], ids=["not before the least", "not what was asked"])
def test_a_time_limit_ends_a_run(run: Run, asked: int | None, done: int) -> None:
    found = run("tiny-speed", asked=asked, steps=9, least_steps=4, seconds=0.0)
    assert len(found["naive n2"].samples["step_time"]) == done


@pytest.mark.parametrize("at", [1, 3])
def test_an_interruption_keeps_every_step(fake: type[Fake], run: Run, runs: Any, at: int) -> None:
    def interrupt(step: int) -> None:
        if step == at:
            raise KeyboardInterrupt

    fake.raises["GPipe n2m4"] = interrupt
    with pytest.raises(KeyboardInterrupt):
        run("tiny-speed", asked=5)
    interrupted = runs.results["GPipe n2m4"]
    assert interrupted.status == ("measured" if at > 1 else "not run")
    kept = {name: len(result.samples.get("step_time", [])) for name, result in runs.results.items()}
    assert {name: count for name, count in kept.items() if count} == {
        name: count for name, steps in fake.steps.items() if (count := steps - (name == "GPipe n2m4"))
    }


def test_a_run_that_is_to_end_ends_between_steps(fake: type[Fake], run: Run) -> None:
    def check() -> None:
        if fake.steps.get("naive n2") == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run("tiny-speed", asked=5, check=check)
    assert fake.steps["naive n2"] == 2


def test_memory_rows_run_alone(fake: type[Fake], run: Run, runs: Any) -> None:
    fake.raises["pipeline-1"] = lambda _: None if fake.alive == {"pipeline-1"} else ValueError(str(fake.alive))
    found = run("tiny-memory")
    assert [result.status for result in found.values()] == ["measured"] * 3 + ["needs devices"] * 2
    assert found["pipeline-2"].values["peak_allocated"] == [7, 7] and found["pipeline-2"].config["balance"] == [1, 1]
    assert fake.steps == {"baseline": 2, "pipeline-1": 2, "pipeline-2": 2}
    assert [result.device for result in runs.counted.values()] == ["meta"] * 5
    assert runs.counted["pipeline-8"].values == {"parameters": 1844858344, "model_bytes": 12 * 1844858344}


@pytest.mark.parametrize("error", [None, ValueError("no")])
def test_an_ablation_has_speed_utilization_and_memory(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    def peak(*arguments: Any, **options: Any) -> dict[str, list[int]]:
        if error is not None:
            raise error
        return {"peak_allocated": [5, 6]}

    timeline = Timeline([Event("forward", 0, 1, 0.0, 1.0)], 2.0, 2)
    monkeypatch.setattr("reproduce.run.speed.watch_step", lambda training, devices: timeline)
    monkeypatch.setattr("reproduce.run.memory.measure_peak", peak)
    found = run("tiny-ablation")
    assert [result.status for result in found.values()] == ["needs devices"] * 4 + ["measured"] * 4
    assert [bool(result.values) for result in found.values()] == [False] * 4 + [True] * 4
    values = found["dep-str-x n2"].values
    assert (values["utilization"], values["bubble"]) == ([0.0, 0.5], 0.5)
    assert len(found["dep-str-x n2"].samples["step_time"]) == 3, "what was timed is kept in any case"
    if error is None:
        assert values["peak_allocated"] == [5, 6] and values["model_bytes"] == 8 * values["parameters"]
    else:
        assert values["memory_problem"].startswith("ValueError: no")
