"""Session: each row, measured or emulated, gets a result even if it fails, and the others go on."""

import contextlib
import re
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from reproduce.experiments.row import Row
from reproduce.machine.load import Load
from reproduce.numbers.metrics import DISTURBED
from reproduce.run.training import FakeData
from torchgpipe.plan.replay import Event, Timeline

from ..tiny import TINY
from .conftest import SECONDS, Fake

ROWS = TINY["tiny-speed"].scale("small").rows
EVERY = [
    f"{row.name}{how}"
    for row in ROWS
    for how in ("", " emulated")
    if how or (row.devices <= 2 and "/pb" not in row.name)
]
PAPER, OWN, GIVEN = (
    "p40x8, in proportion to the tasks",
    "a100x8",
    "h100x8, in proportion to the tasks",
)
NONE = torch.OutOfMemoryError("CUDA out of memory")
LONG = {"warmup": 1, "steps": 1, "least_steps": 8, "seconds": 30.0}
ENDED = {"steps": 9, "least_steps": 4, "seconds": 1e-9}


@pytest.mark.parametrize(
    ("most", "own", "link", "links"),
    [
        (8, None, [], [PAPER, None]),
        (2, OWN, [], [OWN, OWN]),
        (2, OWN, ["--link=h100x8"], [GIVEN, GIVEN]),
        (0, OWN, [], []),
    ],
)
def test_every_row_ends_in_a_result(
    fake: type[Fake],
    run: Any,
    most: int,
    own: str | None,
    link: list[str],
    links: list[str | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows are measured if there are enough devices, and emulated up to --emulate; published balances only emulated."""
    monkeypatch.setattr("reproduce.run.session.own_links", lambda devices: own)
    found = run(
        "tiny-speed", *([f"--emulate={most}"] if most else ["--no-emulate"]), *link, "--steps=3"
    )
    emulated = {f"{row.name} emulated" for row in ROWS if row.devices <= most}
    assert {name for name, result in found.items() if result.status == "emulated"} == emulated
    measured = {name for name, result in found.items() if result.status == "measured"}
    assert measured == {row.name for row in ROWS if row.devices <= 2}
    assert {*found} - emulated == {row.name for row in ROWS if not (row.devices == 8 and most == 8)}
    for name, result in found.items():
        if not result.samples:
            assert (result.status, result.reason) == ("needs devices", "needs 8 devices")
            continue
        assert len(result.samples["step_time"]) == fake.order.count(name) == 3
        assert len(set(result.samples["round"])) == 3 and result.samples["loss"] == [1, 1, 1]
        assert result.config["balance"] == [1] * result.config["partitions"], (
            "the balance as used is recorded"
        )
    assert found["GPipe n2m4"].values["utilization_problem"].startswith("AttributeError"), (
        "it cannot be watched"
    )
    copies = [
        found[f"{name} emulated"].config.get("link") for name in ("n2m4", "GPipe n2m4") if most
    ]
    assert copies == links and not any("link" in found[name].config for name in {*found} - emulated)
    assert (found["n2m4"].over, found["n2m4"].published) == ("n2m1", "tg-amoebanetd-speed/n2m4")
    if most == 8:
        assert found["GPipe n8m4 emulated"].samples == {
            "step_time": [SECONDS] * 3,
            "here_time": [0.5] * 3,
            "work_time": [3.0] * 3,
            "loss": [1] * 3,
            "round": found["naive n8 emulated"].samples["round"],
        }
        assert found["GPipe n8m4 emulated"].values == {
            "executed": 4,
            "bubble": 7 / 8,
            "utilization": [0.5, *[0] * 7],
        }


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
@pytest.mark.parametrize("error", [ValueError("no"), NONE])
def test_a_row_that_fails_is_a_result(
    fake: type[Fake],
    run: Any,
    experiment: str,
    row: str,
    others: tuple[str, ...],
    at: int,
    error: Exception,
) -> None:
    fake.raises[row] = lambda step: error if step >= at else None
    found = run(experiment, "--steps=3", status=2 * (error is not NONE))
    reason = r"ValueError: no \(conftest.py, line \d+\)"
    if error is NONE:
        reason = "out of memory" + r": its 2 partition\(s\) take \d+ GiB on the one device .*" * (
            "emulated" in row
        )
    assert found[row].status == ("out of memory" if error is NONE else "failed")
    assert re.fullmatch(reason, found[row].reason)
    assert all(
        found[name].status == ("emulated" if "emulated" in name else "measured") for name in others
    )


@pytest.mark.parametrize("row", ["GPipe n2m4", "GPipe n8m4 emulated"])
@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("between", [False, True])
def test_an_interruption_keeps_every_step(
    fake: type[Fake], run: Any, at: int, row: str, between: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check() -> None:
        if fake.order.count(row) == at:
            raise KeyboardInterrupt

    if between:
        monkeypatch.setattr(
            "reproduce.cli.run.interruptible", lambda: contextlib.nullcontext(check)
        )
    else:
        fake.raises[row] = lambda _: check()
    found = run("tiny-speed", "--steps=5", status=130)
    kept = Counter(
        {name: len(result.samples.get("step_time", [])) for name, result in found.items()}
    )
    assert kept + Counter({row: int(not between)}) == Counter(fake.order)
    assert (found[row].status == "interrupted") == (kept[row] == 0)
    assert {name for name, each in found.items() if each.status == "interrupted"} == {
        x for x in EVERY if not kept[x]
    }

    fake.raises.clear()
    monkeypatch.setattr(
        "reproduce.cli.run.interruptible", lambda: contextlib.nullcontext(lambda: None)
    )
    run("tiny-speed", "--steps=4", "--resume", status=2)
    again = run("tiny-speed", "--steps=5", "--resume")
    assert run.record.run.state == "finished"
    steps = {
        name: len(result.samples["step_time"]) for name, result in again.items() if result.samples
    }
    assert {*steps} == {*EVERY} and {*steps.values()} <= {5, 6}, (
        "a round that was broken off is run again"
    )
    ran = Counter(fake.order) - Counter({row: int(not between)})
    anew = {name for name in steps if ran[name] != steps[name]}
    group = {
        name: next(each.group for each in ROWS if each.name == name.removesuffix(" emulated"))
        for name in EVERY
    }
    broken = {group[name] for name in EVERY if not kept[name]}
    assert anew == {name for name in EVERY if kept[name] and group[name] in broken}, (
        "others are kept"
    )
    assert {steps[name] for name in steps if kept[name] == 5} == {5}, "and is not run again"
    for name, result in again.items():
        assert len(set(result.samples.get("round", ()))) == steps.get(name, 0), (
            "each round has its own number"
        )


def test_rows_appear_before_all_is_done(
    fake: type[Fake], run: Any, monkeypatch: Any, capsys: Any
) -> None:
    """A speed table after the first round, and a line for each memory row. Neither is written to stdout."""
    monkeypatch.setattr("reproduce.run.speed.PREVIEW_AFTER", -1)
    run("tiny-speed", "--steps=2")
    early, late = (
        re.findall(r"(\d) steps?\s+per\s+row", text) for text in (capsys.readouterr().err, run.out)
    )
    assert (early, late, run.said.count("after 1 round; ")) == (["1", "1"], ["2", "2"], 3)
    run("tiny-speed", "--steps=1")
    assert "after 1 round; " not in run.said, "the table comes at once"
    run("tiny-memory")
    assert "pipeline-2: peaks of 0 MiB" in run.said


def test_memory_rows_run_alone_and_for_any_n(fake: type[Fake], run: Any) -> None:
    fake.raises["pipeline-1"] = lambda _: (
        None if fake.alive == {"pipeline-1"} else ValueError(str(fake.alive))
    )
    found = run("tiny-memory")
    rows = {name: result for name, result in found.items() if not name.endswith("paper")}
    assert [result.status for result in rows.values()] == ["measured"] * 5
    assert (
        rows["pipeline-8"].values["peak_allocated"] == [7] * 8
        and rows["pipeline-8"].config["balance"] == [1] * 8
    )
    assert Counter(fake.order) == dict.fromkeys(rows, 2)
    assert [found[f"{name} paper"].device for name in rows] == ["meta"] * 5 and len(found) == 10
    assert found["pipeline-8 paper"].values == {
        "parameters": 1844858344,
        "model_bytes": 12 * 1844858344,
    }


@pytest.mark.parametrize("partitions", [2, 4])
@pytest.mark.parametrize("error", [None, ValueError("no")])
@pytest.mark.usefixtures("fake")
def test_an_ablation_has_speed_utilization_and_memory(
    run: Any, monkeypatch: pytest.MonkeyPatch, error: Exception | None, partitions: int
) -> None:
    """Measured and emulated rows get the same peaks, which do not depend on time."""

    def peak(*arguments: Any, **options: Any) -> dict[str, list[int]]:
        if error is not None:
            raise error
        return {"peak_allocated": [5, 6]}

    timeline = Timeline([Event("forward", 0, 1, 0.0, 1.0)], 2.0, 2)
    monkeypatch.setattr("reproduce.run.timed.record_step", lambda training, devices: timeline)
    monkeypatch.setattr("reproduce.run.peak.measure_peak", peak)
    rows = tuple(
        replace(row, partitions=partitions) for row in TINY["tiny-ablation"].scale("small").rows
    )
    found = run("tiny-ablation", "--steps=3", rows=rows)
    timed = {name: result.values for name, result in found.items() if result.samples}
    assert {*timed} == {
        f"{row.name}{kind}" for row in rows for kind in ("", " emulated")[partitions == 4 :]
    }
    for name, values in timed.items():
        assert values["utilization"] == (
            [0.5, 0, 0, 0][:partitions] if "emulated" in name else [0.0, 0.5]
        )
        assert len(found[name].samples["step_time"]) == 3, "what was timed is kept in any case"
        if error is None:
            assert (
                values["peak_allocated"] == [5, 6]
                and values["model_bytes"] == 8 * values["parameters"]
            )
        else:
            assert values["memory_problem"].startswith("ValueError: no")


@pytest.mark.parametrize(
    ("steps", "changes", "timed", "said"),
    [
        (
            [],
            LONG,
            1,
            "not measured: a step would take about 2 s; --steps K measures it nevertheless",
        ),
        (["--steps=1"], LONG, 1, None),
        ([], {**LONG, "seconds": 190.0}, 1, None),  # extra rows take nothing of this time
        ([], {**ENDED, "warmup": 0}, 4, None),  # not before the least number of steps
        (["--steps=6"], ENDED, 6, None),
    ],
)
def test_a_time_limit_bounds_steps_that_nobody_asked_for(
    fake: type[Fake],
    run: Any,
    steps: list[str],
    changes: dict[str, Any],
    timed: int,
    said: str | None,
) -> None:
    """Rows that would take too long to measure are only emulated."""
    found = run("tiny-speed", *steps, **changes)
    assert {found[name].reason for name in ("n2m4", "naive n2")} == {said}
    assert len(found["n2m4 emulated"].samples["step_time"]) == timed
    assert fake.order.count("n2m4") == (timed + changes.get("warmup", 0) if said is None else 0)


@pytest.mark.parametrize(
    ("busy", "steps", "changes", "timed", "left_out"),
    [
        ([0, 0.2, 0, 0], ["--steps=3"], {}, 3, 1),  # run again
        ([0.2] * 9, ["--steps=3"], {}, 6, 0),  # again and again
        ([0, 0, 0, 0, 0.2], [], ENDED, 4, 0),
        ([0, 0, 0, 0.2, 0], [], ENDED, 4, 0),  # there is no time
        ([0, 0.2, 0, 0, 0], [], {**ENDED, "least_steps": 2, "seconds": 1e9, "steps": 4}, 4, 1),
    ],
)
def test_a_disturbed_round_is_run_again_while_there_is_time(
    fake: type[Fake],
    run: Any,
    busy: list[float],
    steps: list[str],
    changes: dict[str, Any],
    timed: int,
    left_out: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise its rows are marked."""
    monkeypatch.setattr(Load, "begin", lambda self: setattr(self, "left", iter(busy)))
    monkeypatch.setattr(Load, "round", lambda self: {"others": next(self.left, 0.0)})
    monkeypatch.setattr("reproduce.run.session.other_runs", lambda: {77: "reproduce run x"})
    found = run("tiny-speed", *steps, **changes)
    marked, out = 0.2 in busy[:timed] and not left_out, " ".join(run.out.split())
    for result in map(found.__getitem__, EVERY):
        assert len(result.samples["step_time"]) == len(result.samples["others"]) == timed
        assert (result.disturbed, result.values.get("disturbed_rounds", 0)) == (marked, left_out)
    assert Counter(fake.order) == dict.fromkeys(EVERY, timed + left_out)
    assert (DISTURBED in out) == marked and ("1 disturbed round left out" in out) == left_out
    assert run.said.count("process 77 runs here, too") == 1


def test_a_round_is_one_step_of_every_row_in_an_order_of_its_own(
    fake: type[Fake], run: Any
) -> None:
    """Measured and emulated rows run in turn."""
    rows = tuple(row for row in ROWS if row.equal)
    tasks = {
        *(row.name for row in rows if row.devices <= 2),
        *(f"{row.name} emulated" for row in rows),
    }
    orders = []
    for seed in (1, 1, 2):
        fake.order.clear()
        run("tiny-speed", "--steps=4", f"--seed={seed}", rows=rows)
        rounds = [
            tuple(fake.order[i : i + len(tasks)]) for i in range(0, 4 * len(tasks), len(tasks))
        ]
        assert all(set(each) == tasks for each in rounds) and rounds[0] != rounds[2]
        assert [each[::-1] for each in rounds[::2]] == rounds[1::2], (
            "in two rounds none is first more often"
        )
        orders.append(rounds)
    assert orders[0] == orders[1] != orders[2], "the seed gives the order"


@pytest.mark.parametrize("row", ["GPipe n2m4", "GPipe n8m4 emulated"])
def test_a_large_row_is_timed_alone(
    fake: type[Fake], run: Any, monkeypatch: pytest.MonkeyPatch, row: str
) -> None:
    """It does not fit together with others. It runs again when the others' trainings and data have been freed."""
    alive: weakref.WeakSet[FakeData] = weakref.WeakSet()
    most = []

    class Counted(FakeData):
        def __init__(self, rows: Sequence[Row], seed: int) -> None:
            super().__init__(rows, seed)
            alive.add(self)
            most.append(len(alive))

    monkeypatch.setattr("reproduce.run.speed.FakeData", Counted)
    # A new error each time: a reused one would keep its frames alive, and with them the data.
    fake.raises[row] = lambda _: torch.OutOfMemoryError("no") if len(fake.alive) > 1 else None
    found = run("tiny-speed", "--steps=3")
    assert len(found[row].samples["step_time"]) == 3
    assert "round" not in found[row].samples, "it shares no round with the others"
    assert "round" in found["naive n2"].samples
    assert max(most) <= 2, "a group has data for what it measures and for what it emulates"
    assert most[-1] == 1


def test_the_first_epoch_of_a_row_as_published_is_not_timed(fake: type[Fake], run: Any) -> None:
    rows = tuple(
        replace(row, steps_per_epoch=7, skip_epochs=int(row.name == "GPipe n2m4")) for row in ROWS
    )
    found = run("tiny-speed", "--steps=3", rows=rows)
    assert all(len(found[name].samples["step_time"]) == 3 for name in ("GPipe n2m4", "naive n2"))
    assert fake.order.count("GPipe n2m4") == 7 + 3 and fake.order.count("GPipe n2m4 emulated") == 3
    assert (
        found["GPipe n2m4"].config["skip_epochs"] == 1
        and "skip_epochs" not in found["naive n2"].config
    )
