"""Test schedules: their pictures, their files, and the errors for orders that are impossible.

The files have the format of PyTorch's pipeline schedules.
"""

import csv
import graphlib
import importlib
import pickle
import re
from collections.abc import Iterator
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
torchs: Any = importlib.import_module("torch.distributed.pipelining.schedules")
"""PyTorch's schedules. Much of this module is private."""


@pytest.mark.parametrize("text", (HERE / "pictures.txt").read_text().strip().split("\n\n"))
def test_pictures(text: str) -> None:
    heading, _, picture = text.partition("\n")
    name, *given = heading.split()
    options: dict[str, Any] = {}
    for option in given:
        key, value = option.split("=")
        options[key] = int(value) if value.isdigit() else value

    schedule = make(name, **options)

    assert draw(name, **options) == picture
    assert pictured(picture, schedule.placement, schedule.name) == schedule
    pickled = pickle.loads(pickle.dumps(schedule))
    assert pickled == schedule
    assert hash(pickled) == hash(schedule)


@pytest.mark.parametrize("text", (HERE / "bad_pictures.txt").read_text().strip().split("\n\n"))
def test_what_devices_cannot_do(text: str) -> None:
    message, _, picture = text.partition("\n")
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        pictured(picture)


COPY = Action("copy", 0, 0)
ANOTHER_STAGE = Action("forward", 0, 1)
WRONG_N = "plain has 1 stages on 1 devices, which does not fit 2 devices"
WRONG_V = "plain has 1 stages on 1 devices, which does not fit 1 devices with 2"
NO_MODE = "checkpoint is one of 'always', 'except_last', 'never', not 'last'"
NO_NAME = "no schedule is called 'LoopedBFS': use one of GPipe, 1F1B, Inter"
SIZES = "needs n >= 1 devices, m >= 1 micro-batches and v = 1 stages on each device, but got"
NO_V = f"the schedule 1F1B {SIZES} n = 2, m = 4 and v = 2"
NO_M = f"the schedule ZBH1 {SIZES} n = 2, m = 0 and v = 1"
REFUSED = [
    (lambda: Schedule("", (), []), "stages are on devices [], but lists are for 0 devices"),
    (lambda: pictured("0 B0", (0, 1)), "stages are on devices [0, 1], but lists are for 1 devices"),
    (
        lambda: Schedule("", (0,), [[COPY]]),
        "device 0 does copy of micro-batch 0 on stage 0, but kinds",
    ),
    (
        lambda: Schedule("", (0,), [[ANOTHER_STAGE]]),
        "device 0 has stages [0], and cannot do forward of",
    ),
    (lambda: make(PLAIN, 1, 2), "plain is for 1 to 1 micro-batches, not 2"),
    (lambda: make(PLAIN, 1, 0), "plain is for 1 to 1 micro-batches, not 0"),
    (lambda: make(PLAIN, 2, 1), WRONG_N),
    (lambda: make(PLAIN, 1, 1, 2), WRONG_V),
    (lambda: make(PLAIN, 1, 1, 1, "last"), NO_MODE),
    (lambda: make("LoopedBFS", 2, 4), NO_NAME),
    (lambda: make("1F1B", 2, 4, 2), NO_V),
    (lambda: make("ZBH1", 2, 0), NO_M),
]


@pytest.mark.parametrize(("bad", "message"), REFUSED)
def test_what_is_refused(bad: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        bad()


def swapped(schedule: Schedule) -> Iterator[list[list[Action]]]:
    """Yield copies of a schedule's lists, each with two neighbouring actions exchanged."""
    for d, actions in enumerate(schedule.lists):
        for k in range(len(actions) - 1):
            lists = [list(each) for each in schedule.lists]
            lists[d][k] = actions[k + 1]
            lists[d][k + 1] = actions[k]
            yield lists


@pytest.mark.parametrize("name", NAMED)
def test_order(name: str) -> None:
    """Check what happens if two neighbouring actions in a device's list are exchanged.

    If the new order would deadlock, it must raise an error. Otherwise the test replays it, and
    checks that each action comes after the actions whose results it needs.
    """
    schedule = make(name, 3, 4)
    verdicts = set()
    for lists in swapped(schedule):
        waits = {}
        for action in schedule.actions:
            waits[action] = set(needs(action, schedule.actions))
        for actions in lists:
            for action, after in pairwise(actions):
                waits[after].add(action)
        try:
            graphlib.TopologicalSorter(waits).prepare()
        except graphlib.CycleError:
            with pytest.raises(ValueError, match=r"^device \d "):
                Schedule(name, schedule.placement, lists)
            verdicts.add("refused")
            continue
        replayed = Schedule(name, schedule.placement, lists).replay(lambda _: 0)
        position = {action: k for k, action in enumerate(replayed.order)}
        for action, others in waits.items():
            for other in others:
                assert position[other] < position[action]
        verdicts.add("accepted")
    assert verdicts == {"refused", "accepted"}


@pytest.mark.parametrize("name", NAMED)
def test_files_are_pytorchs(name: str, tmp_path: Path) -> None:
    schedule = make(name, 4, 6, checkpoint="always")
    file = tmp_path / f"{name}.csv"

    schedule.save(file)

    by_device = {}
    for d, row in enumerate(csv.reader(file.read_text().splitlines())):
        by_device[d] = [torchs._Action.from_str(entry) for entry in row if entry]
    n_stages = len(schedule.placement)
    placement = torchs._validate_schedule(by_device, 4, n_stages, 6)
    assert placement == dict(enumerate(schedule.placement))
    assert Schedule.load(file) == make(schedule, 4, 6)


def test_what_pytorch_writes_beside_actions_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "plain.csv"
    first = "0UNSHARD,0F0, 0SEND_F0,,0RECV_B0,0B0"
    second = "1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD"
    file.write_text(f"{first}\n{second}\n")
    assert Schedule.load(file) == pictured("0 B0\n0 B0", name="plain")

    file.write_text("0F0,(0F1;0B0)OVERLAP_F_B")
    refusal = r"plain.csv, device 0: '\(0F1;0B0\)OVERLAP_F_B' is not an entry such as 0F1"
    with pytest.raises(ValueError, match=refusal):
        Schedule.load(file)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no entry such as 0F1"),
        (b"\n\n", "has no entry such as 0F1"),
        (b"\xff\xfe0F0,0B0", "is not a CSV file in UTF-8"),
        (b"0F0,0B0,0F99999999999,0B99999999999", "lacks forward of micro-batch 1 on stage 0"),
        (b"0F0,0B0,99999999999F0,99999999999B0", "has entries of stage 99999999999, but none of 1"),
        (b"0F0,0B0,0F" + b"1" * 5000, r"device 0: '0F1{98}' is not an entry such as 0F1"),
        (b"0F0,0B0," + b"x" * 200000, "is not a CSV file in UTF-8: field larger than"),
    ],
)
def test_files_that_are_no_schedule(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "schedule.csv"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        Schedule.load(file)


def test_forwards_alone_are_clock_cycles() -> None:
    for n, m in product((1, 3, 4), (1, 4, 5)):
        (order,) = orders(arranged("GPipe", n, n), m, "never", False).forwards
        cycles = chain.from_iterable(clock_cycles(m, n))
        for (_, i, j), task in zip(order, cycles, strict=True):
            assert (i, j) == task
    (looped,) = orders(arranged("Interleaved1F1B", 4, 2), 2, "never", False).forwards
    by_stages = [(i, j) for j, i in product(range(4), range(2))]
    assert [(i, j) for _, i, j in looped] == by_stages
