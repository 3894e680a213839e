"""Session: whatever becomes of a row, it ends in a result, and the others go on."""

from __future__ import annotations

import io
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from reproduce.experiments import Experiment, Row
from reproduce.machine.devices import Devices
from reproduce.records.record import Result, load
from reproduce.run.experiment import plan, run_experiment
from reproduce.run.peak import Peak
from reproduce.run.progress import Progress
from reproduce.run.recorder import Recorder, new_recorder
from reproduce.run.session import UNITS, Session
from reproduce.run.training import Balancer, FakeData
from torchgpipe.plan.replay import Event, Timeline

Tiny = Mapping[str, Experiment]
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
        self.act("built")

    def __del__(self) -> None:
        self.alive.discard(self.row.name)

    def act(self, what: str) -> None:
        step = self.steps.get(self.row.name, 0)
        error = self.raises.get(self.row.name, lambda _: None)(step)
        if error is not None:
            raise error

    def step(self) -> torch.Tensor:
        self.steps[self.row.name] = self.steps.get(self.row.name, 0) + 1
        self.order.append(self.row.name)
        self.act("step")
        return torch.tensor(1.0)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    monkeypatch.setattr("reproduce.run.session.Training", Fake)
    monkeypatch.setattr(Fake, "raises", {})
    monkeypatch.setattr(Fake, "alive", set())
    monkeypatch.setattr(Fake, "steps", {})
    monkeypatch.setattr(Fake, "order", [])
    return Fake


def run(
    experiment: Experiment,
    tmp_path: Path,
    steps: int | None = 3,
    seed: int = 0,
    check: Callable[[], None] = lambda: None,
) -> tuple[Recorder, str]:
    found = Devices("cpu", 2, threads=1)
    recorder = new_recorder(
        tmp_path, [experiment.name], title="t", scale="small", unit=UNITS, devices=found, seed=0, command=["c"]
    )
    stream = io.StringIO()
    session = Session(
        experiment=experiment, scale=experiment.scale("small"), devices=found, recorder=recorder,
        progress=Progress(stream), balancer=Balancer(found), seed=seed, steps=steps, check=check,
    )  # fmt: skip
    plan(session)
    try:
        run_experiment(session)
    finally:
        recorder.end("finished")
    return recorder, stream.getvalue()


def results(recorder: Recorder) -> dict[str, Result]:
    """Read the rows that were run back from the file."""
    return {result.row: result for result in load(recorder.path).results if result.scale == "small"}


def test_every_row_ends_in_a_result(fake: type[Fake], tiny: Tiny, tmp_path: Path) -> None:
    found = results(run(tiny["tiny-speed"], tmp_path)[0])
    assert [row for row in found] == [row.name for row in tiny["tiny-speed"].scale("small").rows]
    for name, result in found.items():
        if "n4" in name or "n8" in name:
            assert (result.status, result.reason) == ("needs devices", f"needs {result.config['partitions']} devices")
            assert not result.samples
        else:
            assert result.status == "measured"
            assert len(result.samples["step_time"]) == 3
            assert result.samples["round"] == [0, 1, 2]
            assert result.config["balance"] == [1] * result.config["partitions"], "the balance as used is recorded"
            assert fake.steps[name] == 3
    assert found["GPipe n2m4"].over == "naive n2"
    assert found["GPipe n2m4"].published == "tg-amoebanetd-speed/n2m4"


def test_a_round_is_one_step_of_every_row_in_an_order_of_its_own(fake: type[Fake], tiny: Tiny, tmp_path: Path) -> None:
    orders = []
    for seed in (1, 1, 2):
        fake.order.clear()
        run(tiny["tiny-speed"], tmp_path, steps=4, seed=seed)
        rows = len(fake.steps)
        rounds = [tuple(fake.order[i : i + rows]) for i in range(0, 4 * rows, rows)]
        assert all(set(each) == set(fake.steps) for each in rounds) and len(set(rounds)) > 1
        orders.append(rounds)
    assert orders[0] == orders[1] != orders[2], "the seed gives the order"


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (ValueError("no"), "failed", "ValueError: no (test_session.py, line "),
        (OUT_OF_MEMORY, "out of memory", "out of"),
    ],
)
@pytest.mark.parametrize("at", [0, 2])
def test_a_row_that_fails_is_a_result(
    fake: type[Fake], tiny: Tiny, tmp_path: Path, error: Exception, status: str, reason: str, at: int
) -> None:
    fake.raises["naive n2"] = lambda step: error if step >= at else None
    found = results(run(tiny["tiny-speed"], tmp_path)[0])
    assert found["naive n2"].status == status
    assert (found["naive n2"].reason or "").startswith(reason)
    assert len(found["GPipe n2m4"].samples["step_time"]) == 3


def test_a_row_that_does_not_fit_beside_others_is_timed_alone(
    fake: type[Fake], tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    found = results(run(tiny["tiny-speed"], tmp_path)[0])
    assert found["GPipe n2m4"].status == "measured"
    assert len(found["GPipe n2m4"].samples["step_time"]) == 3
    assert "round" not in found["GPipe n2m4"].samples, "it shares no round with the others"
    assert "round" in found["naive n2"].samples
    assert most == [1, 1]


def test_the_first_epoch_of_a_row_as_published_is_not_timed(fake: type[Fake], tiny: Tiny, tmp_path: Path) -> None:
    experiment = tiny["tiny-speed"]
    small = experiment.scale("small")
    rows = tuple(replace(row, steps_per_epoch=7, skip_epochs=int(row.name == "GPipe n2m4")) for row in small.rows)
    scales = tuple(replace(scale, rows=rows) if scale is small else scale for scale in experiment.scales)
    found = results(run(replace(experiment, scales=scales), tmp_path, steps=3)[0])
    assert all(len(found[name].samples["step_time"]) == 3 for name in ("GPipe n2m4", "naive n2"))
    # As many besides: those that warm up, and one that is watched afterwards.
    assert fake.steps["GPipe n2m4"] - fake.steps["naive n2"] == 7 - small.warmup
    assert found["GPipe n2m4"].config["skip_epochs"] == 1 and "skip_epochs" not in found["naive n2"].config


def test_time_limit_ends_a_run_after_the_least_steps(
    fake: type[Fake], tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale = replace(tiny["tiny-speed"].scale("small"), steps=9, least_steps=4, seconds=0.0)
    found = results(run(replace(tiny["tiny-speed"], scales=(scale,)), tmp_path, steps=None)[0])
    assert len(found["naive n2"].samples["step_time"]) == 4
    found = results(run(replace(tiny["tiny-speed"], scales=(scale,)), tmp_path, steps=6)[0])
    assert len(found["naive n2"].samples["step_time"]) == 6, "steps that were asked for are done"


@pytest.mark.parametrize("at", [1, 3])
def test_an_interruption_keeps_every_step(fake: type[Fake], tiny: Tiny, tmp_path: Path, at: int) -> None:
    def interrupt(step: int) -> None:
        if step == at:
            raise KeyboardInterrupt

    fake.raises["GPipe n2m4"] = interrupt
    with pytest.raises(KeyboardInterrupt):
        run(tiny["tiny-speed"], tmp_path, steps=5)
    (path,) = tmp_path.glob("*.json")
    found = {result.row: result for result in load(path).results}
    interrupted = found["GPipe n2m4"]
    assert len(interrupted.samples.get("step_time", [])) == at - 1
    assert interrupted.status == ("measured" if at > 1 else "not run")
    others = [len(result.samples["step_time"]) for result in found.values() if result.status == "measured"]
    assert all(at - 1 <= count <= at for count in others)


def test_a_run_that_is_to_end_ends_between_steps(fake: type[Fake], tiny: Tiny, tmp_path: Path) -> None:
    def check() -> None:
        if fake.steps.get("naive n2") == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tiny["tiny-speed"], tmp_path, steps=5, check=check)
    assert fake.steps["naive n2"] == 2


@pytest.fixture
def fake_peak(fake: type[Fake], monkeypatch: pytest.MonkeyPatch) -> None:
    def peak(training: Any, devices: Devices, *, steps: int, before: Callable[[int], None]) -> Peak:
        for step in range(steps):
            before(step)
            training.step()
        return Peak([7] * training.row.devices, None)

    monkeypatch.setattr("reproduce.run.memory.measure_peak", peak)


@pytest.mark.usefixtures("fake_peak")
def test_memory_rows_run_alone(fake: type[Fake], tiny: Tiny, tmp_path: Path) -> None:
    fake.raises["pipeline-1"] = lambda _: None if fake.alive == {"pipeline-1"} else ValueError(str(fake.alive))
    recorder, _ = run(tiny["tiny-memory"], tmp_path)
    found = results(recorder)
    assert [result.status for result in found.values()] == ["measured"] * 3 + ["needs devices"] * 2
    assert found["pipeline-2"].values["peak_allocated"] == [7, 7]
    assert fake.steps == {"baseline": 2, "pipeline-1": 2, "pipeline-2": 2}
    counted = {result.row: result for result in load(recorder.path).results if result.device == "meta"}
    assert [result.scale for result in counted.values()] == ["paper"] * 5
    assert counted["pipeline-8"].values == {"parameters": 1844858344, "model_bytes": 12 * 1844858344}


@pytest.mark.usefixtures("fake_peak")
@pytest.mark.parametrize(("error", "status"), [(ValueError("no"), "failed"), (OUT_OF_MEMORY, "out of memory")])
def test_a_memory_row_that_fails_is_a_result(
    fake: type[Fake], tiny: Tiny, tmp_path: Path, error: Exception, status: str
) -> None:
    fake.raises["baseline"] = lambda _: error
    found = results(run(tiny["tiny-memory"], tmp_path)[0])
    assert found["baseline"].status == status
    assert found["pipeline-2"].status == "measured"


@pytest.mark.usefixtures("fake_peak")
@pytest.mark.parametrize("error", [None, ValueError("no")])
def test_an_ablation_has_speed_utilization_and_memory(
    fake: type[Fake], tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    def watch(training: Any, devices: Devices) -> Timeline:
        return Timeline([Event("forward", 0, 1, 0.0, 1.0)], 2.0, 2)

    def peak(training: Any, devices: Devices, *, steps: int, before: Callable[[int], None]) -> Peak:
        if error is not None:
            raise error
        return Peak([5, 6], None)

    monkeypatch.setattr("reproduce.run.speed.watch_step", watch)
    monkeypatch.setattr("reproduce.run.memory.measure_peak", peak)
    found = results(run(tiny["tiny-ablation"], tmp_path)[0])
    assert [result.status for result in found.values()] == ["needs devices"] * 4 + ["measured"] * 4
    values = found["dep-str-x n2"].values
    assert (values["utilization"], values["bubble"]) == ([0.0, 0.5], 0.5)
    assert len(found["dep-str-x n2"].samples["step_time"]) == 3, "what was timed is kept in any case"
    if error is None:
        assert values["peak_allocated"] == [5, 6] and values["model_bytes"] == 8 * values["parameters"]
    else:
        assert values["memory_problem"].startswith("ValueError: no")


def test_a_row_that_cannot_be_watched_keeps_its_times(fake: type[Fake], tiny: Tiny, tmp_path: Path) -> None:
    found = results(run(tiny["tiny-speed"], tmp_path)[0])["naive n2"]  # a Fake has nothing to watch
    assert found.status == "measured" and len(found.samples["step_time"]) == 3
    assert found.values["utilization_problem"].startswith("AttributeError")


def test_progress_names_the_step_and_the_time_left(fake: type[Fake], tiny: Tiny, tmp_path: Path) -> None:
    _, said = run(tiny["tiny-speed"], tmp_path)
    assert said.startswith("tiny-speed: building naive n2")
