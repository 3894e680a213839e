"""Session: whatever becomes of a row, measured or emulated, it ends in a result, and the others go on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from reproduce.experiments import PUBLISHED_BALANCE, Experiment
from torchgpipe.plan.replay import Event, Timeline

from .fakes import OUT_OF_MEMORY, Fake, Run, kept


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


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (ValueError("no"), "failed", "ValueError: no (fakes.py, line "),
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
    monkeypatch.setattr("reproduce.run.timed.record_step", lambda training, devices: timeline)
    monkeypatch.setattr("reproduce.run.peak.measure_peak", peak)
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
