"""Tests of the rounds of a run. In each round, every row (configuration) runs one step.

The number of rounds depends on time limits, and on the load by other programs.
"""

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

from ..made import one_line
from .conftest import EVERY, ROWS, Fake

# Settings of two runs with a time limit, `seconds`. With `LONG`, measurements would exceed the time
# limit. With `ENDED`, the limit ends the run as soon as each row (configuration) has run
# `least_steps` steps.
LONG = {"warmup": 1, "steps": 1, "least_steps": 8, "seconds": 30.0}
ENDED = {"steps": 9, "least_steps": 4, "seconds": 1e-9}
TOO_LONG = (
    "not measured: 9 steps, with the warm-up, would take about 18 s; "
    "--no-emulate measures it nevertheless"
)


@pytest.mark.parametrize(
    ("steps", "changes", "timed", "said"),
    [
        ([], LONG, 1, TOO_LONG),
        (["--steps=2"], LONG, 2, TOO_LONG),
        ([], {**LONG, "seconds": 190.0}, 1, None),  # optional rows take none of the 190 seconds
        ([], {**ENDED, "warmup": 0}, 4, None),
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
    """Check how many steps run before a time limit, with and without the option `--steps`.

    If measurements would take longer than the limit, the rows (configurations) are only emulated.
    """
    measured = timed + changes.get("warmup", 0) if said is None else 0

    found = run("tiny-speed", *steps, **changes)

    assert found["n2m4"].reason == said
    assert found["naive n2"].reason == said
    assert len(found["n2m4 emulated"].samples["step_time"]) == timed
    assert fake.order.count("n2m4") == measured


@pytest.mark.parametrize(
    ("busy", "steps", "changes", "timed", "left_out"),
    [
        # One round is disturbed, and run again.
        ([0, 0.2, 0, 0], ["--steps=3"], {}, 3, 1),
        # All rounds are disturbed.
        ([0.2] * 9, ["--steps=3"], {}, 6, 0),
        # Two undisturbed rounds are too few, so the disturbed rounds are kept, too.
        ([0.2] * 4, ["--steps=3"], {}, 6, 0),
        ([0, 0, 0, 0, 0.2], [], ENDED, 4, 0),
        ([0, 0, 0, 0.2, 0], [], ENDED, 4, 0),  # there is no time to run the round again
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
    """Check that a round that other programs disturbed is run again, as long as there is time.

    If no time is left, the results of all rows (configurations) are marked as disturbed.
    """
    marked = 0.2 in busy[:timed] and not left_out
    monkeypatch.setattr(Load, "begin", lambda self: setattr(self, "left", iter(busy)))
    monkeypatch.setattr(Load, "round", lambda self: {"others": next(self.left, 0.0)})
    monkeypatch.setattr("reproduce.run.session.other_runs", lambda: {77: "reproduce run x"})

    found = run("tiny-speed", *steps, **changes)

    for name in EVERY:
        result = found[name]
        assert len(result.samples["step_time"]) == timed
        assert len(result.samples["others"]) == timed
        assert result.disturbed == marked
        assert result.values.get("disturbed_rounds", 0) == left_out
    assert Counter(fake.order) == dict.fromkeys(EVERY, timed + left_out)
    out = one_line(run.out)
    assert (DISTURBED in out) == marked
    assert ("1 disturbed round left out" in out) == bool(left_out)
    assert run.said.count("process 77 runs here, too") == 1


def test_clock_rates_are_recorded_with_each_step(
    fake: type[Fake], run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = {"clock": 1755.0, "slowed": 4.0}
    monkeypatch.setattr(Load, "round", lambda self: {"others": 0.0})
    monkeypatch.setattr("reproduce.run.speed.clocks", lambda devices: now)
    found = run("tiny-speed", "--steps=2")
    for name in EVERY:
        assert found[name].samples["clock"] == [1755.0] * 2
        assert found[name].samples["slowed"] == [4.0] * 2
        assert found[name].samples["others"] == [0.0] * 2


def test_a_round_is_one_step_of_every_row_in_an_order_of_its_own(
    fake: type[Fake], run: Any
) -> None:
    """Check that all measured and emulated rows (configurations) run one step in each round.

    The order of the rows is drawn at random, and reversed in every second round.
    """
    rows = tuple(row for row in ROWS if row.equal)
    names = {f"{row.name} emulated" for row in rows}
    names |= {row.name for row in rows if row.devices <= 2}
    count = len(names)
    orders = []
    for seed in (1, 1, 2):
        fake.order.clear()
        run("tiny-speed", "--steps=4", f"--seed={seed}", rows=rows)
        assert len(fake.order) >= 4 * count
        rounds = [fake.order[i * count :][:count] for i in range(4)]
        first, second, third, fourth = rounds
        for each in rounds:
            assert set(each) == names
        assert second == first[::-1], "in two rounds, no row is first more often than another"
        assert fourth == third[::-1]
        assert first != third
        orders.append(rounds)
    one, same, other = orders
    assert one == same, "the seed gives the order"
    assert one != other


@pytest.mark.parametrize("row", ["GPipe n2m4", "GPipe n8m4 emulated"])
def test_a_large_row_is_timed_alone(
    fake: type[Fake], run: Any, monkeypatch: pytest.MonkeyPatch, row: str
) -> None:
    """Check that a row (configuration) is timed alone if all rows together do not fit in memory.

    Before it is timed, the models and data of all other rows must be freed.
    """
    alive: weakref.WeakSet[FakeData] = weakref.WeakSet()
    most = []

    class Counted(FakeData):
        def __init__(self, rows: Sequence[Row], seed: int) -> None:
            super().__init__(rows, seed)
            alive.add(self)
            most.append(len(alive))

    monkeypatch.setattr("reproduce.run.speed.FakeData", Counted)
    # Raise a new error each time. An error that is reused keeps its frames, and so the data, alive.
    fake.raises[row] = lambda _: torch.OutOfMemoryError("no") if len(fake.alive) > 1 else None

    found = run("tiny-speed", "--steps=3")

    large, small = found[row].samples, found["naive n2"].samples
    assert len(large["step_time"]) == 3
    assert "round" not in large, "it shares no round with the others"
    assert "round" in small
    assert max(most) <= 2, "a group has data for its measured rows, and for its emulated rows"
    assert most[-1] == 1


def test_the_first_epoch_of_a_row_as_published_is_not_timed(fake: type[Fake], run: Any) -> None:
    rows = []
    for row in ROWS:
        skipped = 1 if row.name == "GPipe n2m4" else 0
        rows.append(replace(row, steps_per_epoch=7, skip_epochs=skipped))

    found = run("tiny-speed", "--steps=3", rows=tuple(rows))

    gpipe, naive = found["GPipe n2m4"], found["naive n2"]
    assert len(gpipe.samples["step_time"]) == 3
    assert len(naive.samples["step_time"]) == 3
    assert fake.order.count("GPipe n2m4") == 7 + 3
    assert fake.order.count("GPipe n2m4 emulated") == 3
    assert gpipe.config["skip_epochs"] == 1
    assert "skip_epochs" not in naive.config
