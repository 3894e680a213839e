"""Schedules as pictures, as files of PyTorch's, and as what devices cannot do."""

import csv
import graphlib
import importlib
import pickle
import re
from itertools import chain, pairwise, product
from pathlib import Path
from typing import Any

import pytest

from torchgpipe.engine.arrangement import arranged, orders
from torchgpipe.schedule import clock_cycles
from torchgpipe.schedules import Action, Schedule, draw, make
from torchgpipe.schedules.action import needs
from torchgpipe.schedules.named import NAMED

from .pictures import pictured

HERE = Path(__file__).parent
PLAIN = pictured("0 B0", name="plain")
torchs: Any = importlib.import_module(
    "torch.distributed.pipelining.schedules"
)  # much of it is private


@pytest.mark.parametrize("text", (HERE / "pictures.txt").read_text().strip().split("\n\n"))
def test_pictures(text: str) -> None:
    heading, _, picture = text.partition("\n")
    name, *given = heading.split()
    options: dict[str, Any] = dict(option.split("=") for option in given)
    options |= {key: int(value) for key, value in options.items() if value.isdigit()}
    schedule = make(name, **options)
    assert draw(name, **options) == picture
    assert {
        pictured(picture, schedule.placement, schedule.name),
        pickle.loads(pickle.dumps(schedule)),
    } == {schedule}


@pytest.mark.parametrize("text", (HERE / "bad_pictures.txt").read_text().strip().split("\n\n"))
def test_what_devices_cannot_do(text: str) -> None:
    message, _, picture = text.partition("\n")
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        pictured(picture)


REFUSED = [
    (lambda: Schedule("", (), []), "stages are on devices [], but lists are for 0 devices"),
    (lambda: pictured("0 B0", (0, 1)), "stages are on devices [0, 1], but lists are for 1 devices"),
    (
        lambda: Schedule("", (0,), [[Action("copy", 0, 0)]]),
        "device 0 does copy of micro-batch 0 on stage 0, but kinds",
    ),
    (
        lambda: Schedule("", (0,), [[Action("forward", 0, 1)]]),
        "device 0 has stages [0], and cannot do forward of",
    ),
    (lambda: make(PLAIN, 1, 2), "plain is for 1 to 1 micro-batches, not 2"),
    (lambda: make(PLAIN, 1, 0), "plain is for 1 to 1 micro-batches, not 0"),
    (lambda: make(PLAIN, 2, 1), "plain has 1 stages on 1 devices, which does not fit 2 devices"),
    (
        lambda: make(PLAIN, 1, 1, 2),
        "plain has 1 stages on 1 devices, which does not fit 1 devices with 2",
    ),
    (
        lambda: make(PLAIN, 1, 1, 1, "last"),
        "checkpoint is one of 'always', 'except_last', 'never', not 'last'",
    ),
    (
        lambda: make("LoopedBFS", 2, 4),
        "no schedule is called 'LoopedBFS'; there are GPipe, 1F1B, Inter",
    ),
    (
        lambda: make("1F1B", 2, 4, 2),
        "1F1B is for n >= 1 devices, m >= 1 and v = 1 stages on each, not 2, 4 and 2",
    ),
    (
        lambda: make("ZBH1", 2, 0),
        "ZBH1 is for n >= 1 devices, m >= 1 and v = 1 stages on each, not 2, 0 and 1",
    ),
]


@pytest.mark.parametrize(("bad", "message"), REFUSED)
def test_what_is_refused(bad: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        bad()


@pytest.mark.parametrize("name", NAMED)
def test_order(name: str) -> None:
    """Neighbours that change places are refused just where that makes a circle. One thread can do what is replayed."""
    schedule = make(name, 3, 4)
    verdicts = set()
    for d, k in (
        (d, k) for d, actions in enumerate(schedule.lists) for k in range(len(actions) - 1)
    ):
        lists = [[*own] for own in schedule.lists]
        lists[d][k : k + 2] = lists[d][k + 1], lists[d][k]
        waits = {action: {*needs(action, schedule.actions)} for action in schedule.actions}
        for action, after in (pair for own in lists for pair in pairwise(own)):
            waits[after].add(action)
        try:
            graphlib.TopologicalSorter(waits).prepare()
        except graphlib.CycleError:
            with pytest.raises(ValueError, match=r"^device \d "):
                Schedule(name, schedule.placement, lists)
            verdicts.add("refused")
        else:
            at = [*Schedule(name, schedule.placement, lists).replay(lambda _: 0).order].index
            assert all(
                at(other) < at(action) for action, others in waits.items() for other in others
            )
            verdicts.add("accepted")
    assert verdicts == {"refused", "accepted"}


def rows(schedule: Schedule, file: Path) -> list[list[str]]:
    schedule.save(file)
    return [[*filter(None, row)] for row in csv.reader(file.read_text().splitlines())]


@pytest.mark.parametrize("name", NAMED)
def test_files_are_pytorchs(name: str, tmp_path: Path) -> None:
    schedule, file = make(name, 4, 6, checkpoint="always"), tmp_path / f"{name}.csv"
    read = {d: [*map(torchs._Action.from_str, row)] for d, row in enumerate(rows(schedule, file))}
    assert torchs._validate_schedule(read, 4, len(schedule.placement), 6) == dict(
        enumerate(schedule.placement)
    )
    assert Schedule.load(file) == make(schedule, 4, 6)


def test_what_pytorch_writes_beside_actions_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "plain.csv"
    file.write_text(
        "0UNSHARD,0F0, 0SEND_F0,,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD\n"
    )
    assert Schedule.load(file) == pictured("0 B0\n0 B0", name="plain")
    file.write_text("0F0,(0F1;0B0)OVERLAP_F_B")
    with pytest.raises(
        ValueError,
        match=r"plain.csv, device 0: '\(0F1;0B0\)OVERLAP_F_B' is not stage, F, I, W or B",
    ):
        Schedule.load(file)


def test_forwards_alone_are_clock_cycles() -> None:
    for n, m in product((1, 3, 4), (1, 4, 5)):
        (order,) = orders(arranged("GPipe", n, n), m, "never", False).forwards
        assert [(i, j) for _, i, j in order] == [*chain(*clock_cycles(m, n))]
    (looped,) = orders(arranged("Interleaved1F1B", 4, 2), 2, "never", False).forwards
    assert [(i, j) for _, i, j in looped] == [
        (0, 0),
        (1, 0),
        (0, 1),
        (1, 1),
        (0, 2),
        (1, 2),
        (0, 3),
        (1, 3),
    ]
