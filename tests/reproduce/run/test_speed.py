"""Speed: rounds of all rows in turn, and what is kept of each of their steps."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from reproduce.experiments import Experiment, Row
from reproduce.run.training import FakeData
from torchgpipe.plan.hardware.hardware import load_hardware

from .fakes import SECONDS, Fake, Run, kept


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
