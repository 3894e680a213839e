"""Test every named schedule for many numbers of devices, micro-batches and stages.

The tests check each schedule's bubble (the share of time in which devices are idle), and how many
micro-batches it keeps in memory. The expected numbers come from papers, or from formulas in the
tests.
"""

from collections.abc import Iterable
from itertools import product
from pathlib import Path

import pytest

from torchgpipe.schedules import Action, make
from torchgpipe.schedules.named import NAMED
from torchgpipe.schedules.replay import Event

from .pictures import pictured

SLOW_DEVICES = [pytest.param(n, marks=pytest.mark.slow) for n in (5, 6, 7, 8, 11, 16)]
DEVICES = [1, 2, 3, 4, *SLOW_DEVICES]


def micro_batches(n: int) -> list[int]:
    """Return numbers of micro-batches for `n` devices: all small ones, and some large ones.

    A schedule changes its form at m = n and at m = 2 n - 1. From there on, only the middle of each
    device's list grows.
    """
    return [*range(1, 2 * n + 3), 4 * n, 64]


@pytest.mark.parametrize("n", DEVICES)
def test_one_stage_on_each_device(n: int) -> None:
    for m in micro_batches(n):
        gpipe = make("GPipe", n, m)
        one = make("1F1B", n, m)
        h1 = make("ZBH1", n, m)
        h2 = make("ZBH2", n, m)
        assert gpipe.in_flight == [m] * n
        assert one.in_flight == [min(m, n - d) for d in range(n)]
        assert h1.in_flight == [min(m, n)] * n
        assert h2.in_flight == [min(m, 2 * n - 1)] * n

        of_one, of_h1, of_h2 = one.replay(), h1.replay(), h2.replay()
        bubble = pytest.approx((n - 1) / (m + n - 1), abs=1e-9)
        for played in (gpipe.replay(), of_one):
            assert played.bubble_of_longest == bubble
            assert played.bubble == bubble
        assert of_h2.seconds <= of_h1.seconds <= of_one.seconds
        if m >= n:
            of_zero_bubble = (n - 1) / (3 * m + n - 1)
            assert of_h1.bubble_of_longest == pytest.approx(of_zero_bubble, abs=1e-9)
        if m <= n:
            published = 2 * (m + n - 1) + 1  # (m + n - 1) (F + B) + W, where F = B = W = 1
            assert of_h1.seconds == published
            assert of_h2.seconds == published
        if m >= 2 * n - 1:
            assert of_h2.bubble_of_longest == 0


@pytest.mark.parametrize("n", DEVICES)
def test_several_stages_on_each_device(n: int) -> None:
    for m, v in product(micro_batches(n), range(1, 5)):
        schedule = make("Interleaved1F1B", n, m, v)
        played = schedule.replay()
        if m % n == 0:
            bubble = pytest.approx((n - 1) / (v * m + n - 1), abs=1e-9)
            assert played.bubble_of_longest == bubble
            assert played.bubble == bubble
            for d, in_flight in enumerate(schedule.in_flight):
                ahead = n - 1 - d
                if v > 1:
                    ahead = (v - 1) * n + 2 * (n - 1 - d)
                assert in_flight == min(v * m, 1 + ahead)
        if m <= n:
            # The seconds of one micro-batch through all stages, and of the others behind it.
            assert played.seconds == 3 * (v * n + m - 1)
        of_1f1b = v * 3 * (m + n - 1)
        assert played.seconds <= of_1f1b, "longer than 1F1B with the same layers"


@pytest.mark.parametrize("n", DEVICES)
def test_down_the_devices_and_up_again(n: int) -> None:
    for m in micro_batches(n):
        schedule = make("ZBVZeroBubble", n, m)
        played = schedule.replay()
        of_h1 = make("ZBH1", n, m).replay()
        of_h2 = make("ZBH2", n, m).replay()
        # ZB-V has the same layers, but in stages of half the size.
        assert played.seconds <= 2 * of_h1.seconds, "longer than ZB-H1 with the same layers"
        assert played.bubble_of_longest <= of_h2.bubble_of_longest + 1e-9
        assert max(schedule.in_flight) <= 2 * min(m, n), "more than 1F1B"
        if m >= 2 * n - 1:
            assert played.bubble_of_longest == 0
            assert played.seconds == 6 * m + n - 1


SLOW_NUMBERS = [pytest.param(n, marks=pytest.mark.slow) for n in range(5, 9)]


@pytest.mark.parametrize("n", [2, 3, 4, *SLOW_NUMBERS])
@pytest.mark.parametrize("name", NAMED)
def test_one_item_on_each_boundary_is_enough(name: str, n: int) -> None:
    for m in range(n, 4 * n + 1):
        for v in (2, 3, 4) if name == "Interleaved1F1B" else (None,):
            schedule = make(name, n, m, v)
            assert schedule.replay(buffered=1).seconds == schedule.replay().seconds
            again = make(schedule, n, m, checkpoint="always")
            assert again.replay(buffered=1).seconds <= 1.1 * again.replay().seconds


def starts(spans: Iterable[Event]) -> list[float]:
    return [span.start for span in spans]


def test_what_finds_no_room_waits() -> None:
    """Check that a device pauses when its outputs find no room at the next device.

    The test limits the number of outputs that may wait for the second device, which is slow.
    """
    schedule = make("GPipe", 2, 4)

    def seconds(action: Action) -> float:
        return 3 if action.kind == "forward" and action.stage == 1 else 1

    for buffered, expected in ((1, [0, 1, 2, 4]), (2, [0, 1, 2, 3]), (None, [0, 1, 2, 3])):
        first, _ = schedule.replay(seconds, buffered=buffered).devices
        assert starts(first[:4]) == expected
    copies = [(0, 1, 0.5)]
    first, second = schedule.replay(seconds, copies).devices
    assert starts(first) == [0, 1, 2, 3, 15, 16, 17, 18]
    assert starts(second) == [1.5, 4.5, 7.5, 10.5, 13.5, 14.5, 15.5, 16.5]

    crossed = pictured("0 1 B0 B1\n1 0 B0 B1")
    assert crossed.replay(buffered=2).seconds == crossed.replay().seconds
    with pytest.raises(ValueError, match=r"^there is no room between stage 0 and stage 1: "):
        crossed.replay(buffered=1)
    # The boundary of stages 0 and 1 is full, too, but only because stage 1 waits.
    behind = pictured("0 1 2 3 B0 B1 B2 B3\n0 1 2 3 B0 B1 B2 B3\n3 0 1 2 B0 B1 B2 B3")
    with pytest.raises(ValueError, match=r"^there is no room between stage 1 and stage 2: "):
        behind.replay(buffered=1)


PUBLISHED = Path(__file__).with_name("zero_bubble.txt").read_text().splitlines()[1:]


@pytest.mark.quick(5)
@pytest.mark.parametrize("line", PUBLISHED)
def test_published_bubbles(line: str) -> None:
    """Check that bubbles are those in table 5 of the Zero Bubble paper (arXiv:2401.10241).

    A bubble is the share of time in which devices are idle. The tasks take the times that are in
    table 9 of the paper.
    """
    _, n_text, m_text, *numbers = line.split()
    n, m = int(n_text), int(m_text)
    forward, inputs, weights, copy = map(float, numbers[:4])
    seconds = {
        "forward": forward,
        "backward": inputs + weights,
        "backward_inputs": inputs,
        "backward_weights": weights,
    }
    copies = [(s, s + 1, copy) for s in range(n - 1)]
    for name, published in zip(("1F1B", "ZBH1", "ZBH2"), numbers[4:], strict=True):
        played = make(name, n, m).replay(lambda action: seconds[action.kind], copies)
        assert f"{played.bubble_of_longest:.4f}" == published


@pytest.mark.parametrize("name", NAMED)
def test_any_number_of_micro_batches_is_part_of_a_longer_list(name: str) -> None:
    modes = {0: "always", 1: "except_last", 13: "never"}
    for n in (1, 2, 3, 5):
        longer = make(name, n, 13)
        for m, without in product(range(1, 14), modes):
            checkpoint = modes[without]
            fewer = make(longer, n, m, checkpoint=checkpoint)
            micro_batches, recomputed = set(), set()
            for action in fewer.actions:
                micro_batches.add(action.micro_batch)
                if action.kind == "recompute":
                    recomputed.add(action.micro_batch)
            assert micro_batches == {*range(m)}
            assert recomputed == {*range(m - without)}
            if not name.startswith("ZB"):  # these schedules depend on m
                assert fewer == make(name, n, m, checkpoint=checkpoint)
