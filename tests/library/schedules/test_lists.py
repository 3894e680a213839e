"""Lists of every named schedule, for many numbers of devices, micro-batches and stages: bubbles, memory, buffers."""

from pathlib import Path

import pytest

from torchgpipe.schedules import Action, make
from torchgpipe.schedules.named import NAMED

from .pictures import pictured

SIZES = [
    (1, 4),
    (2, 12),
    (3, 16),
    (4, 12),
    *(pytest.param(n, 64, marks=pytest.mark.slow) for n in range(2, 17)),
]


@pytest.mark.parametrize(("n", "most"), SIZES)
def test_one_stage_on_each_device(n: int, most: int) -> None:
    for m in range(1, most + 1):
        made = {name: make(name, n, m) for name in ("GPipe", "1F1B", "ZBH1", "ZBH2")}
        gpipe, one, h1, h2 = (schedule.replay() for schedule in made.values())
        kept = {name: schedule.in_flight for name, schedule in made.items()}
        bubbles = [gpipe.bubble_of_longest, gpipe.bubble, one.bubble_of_longest, one.bubble]
        assert bubbles == pytest.approx([(n - 1) / (m + n - 1)] * 4, abs=1e-9)
        assert kept["GPipe"] == [m] * n and kept["1F1B"] == [min(m, n - d) for d in range(n)]
        assert kept["ZBH1"] == [min(m, n)] * n and kept["ZBH2"] == [min(m, 2 * n - 1)] * n
        assert h2.seconds <= h1.seconds <= one.seconds
        assert m < n or h1.bubble_of_longest == pytest.approx((n - 1) / (3 * m + n - 1), abs=1e-9)
        assert (
            m > n or h1.seconds == h2.seconds == 2 * (m + n - 1) + 1
        )  # as published: (m + n - 1) (F + B) + W
        assert m < 2 * n - 1 or h2.bubble_of_longest == 0


@pytest.mark.parametrize(("n", "most"), SIZES)
def test_several_stages_on_each_device(n: int, most: int) -> None:
    for m, v in ((m, v) for m in range(1, most + 1) for v in range(1, 5)):
        schedule = make("Interleaved1F1B", n, m, v)
        played, form = schedule.replay(), (n - 1) / (v * m + n - 1)
        ahead = [(v - 1) * n + 2 * (n - 1 - d) if v > 1 else n - 1 - d for d in range(n)]
        assert m % n or [played.bubble_of_longest, played.bubble] == pytest.approx(
            [form, form], abs=1e-9
        )
        assert m % n or schedule.in_flight == [min(v * m, 1 + each) for each in ahead]
        assert m > n or played.seconds == 3 * (
            v * n + m - 1
        )  # the way of one micro-batch, and the others behind it
        assert played.seconds <= v * 3 * (m + n - 1), "longer than 1F1B with the same layers"


@pytest.mark.parametrize(("n", "most"), SIZES)
def test_down_the_devices_and_up_again(n: int, most: int) -> None:
    for m in range(1, most + 1):
        schedule, h1, h2 = (make(name, n, m) for name in ("ZBVZeroBubble", "ZBH1", "ZBH2"))
        played = schedule.replay()
        assert played.seconds <= 2 * h1.replay().seconds, (
            "longer than ZB-H1 with the same layers, in stages of half"
        )
        assert played.bubble_of_longest <= h2.replay().bubble_of_longest + 1e-9
        assert max(schedule.in_flight) <= 2 * min(m, n), "more than 1F1B"
        assert m < 2 * n - 1 or (played.bubble_of_longest, played.seconds) == (0, 6 * m + n - 1)


@pytest.mark.parametrize(
    "n", [2, 3, 4, *(pytest.param(n, marks=pytest.mark.slow) for n in range(5, 9))]
)
@pytest.mark.parametrize("name", NAMED)
def test_one_item_on_each_boundary_is_enough(name: str, n: int) -> None:
    for m in range(n, 4 * n + 1):
        for v in (2, 3, 4) if name == "Interleaved1F1B" else (None,):
            schedule = make(name, n, m, v)
            assert schedule.replay(buffered=1).seconds == schedule.replay().seconds
            again = make(schedule, n, m, checkpoint="always")
            assert again.replay(buffered=1).seconds <= 1.1 * again.replay().seconds


def test_what_finds_no_room_waits() -> None:
    """The second device takes 3 for a forward. Where it is sent the next one before, the first device stops."""
    schedule, slow = make("GPipe", 2, 4), {Action("forward", i, 1): 3 for i in range(4)}
    played = [
        schedule.replay(lambda action: slow.get(action, 1), buffered=k).devices[0]
        for k in (1, 2, None)
    ]
    assert [[span.start for span in first[:4]] for first in played] == [
        [0, 1, 2, 4],
        [0, 1, 2, 3],
        [0, 1, 2, 3],
    ]
    first, second = schedule.replay(lambda action: slow.get(action, 1), [(0, 1, 0.5)]).devices
    assert [span.start for span in first] == [0, 1, 2, 3, 15, 16, 17, 18]
    assert [span.start for span in second] == [1.5, 4.5, 7.5, 10.5, 13.5, 14.5, 15.5, 16.5]
    crossed = pictured("0 1 B0 B1\n1 0 B0 B1")
    assert crossed.replay(buffered=2).seconds == crossed.replay().seconds
    with pytest.raises(ValueError, match=r"^device 0 waits for ever: "):
        crossed.replay(buffered=1)


@pytest.mark.parametrize(
    "line", Path(__file__).with_name("zero_bubble.txt").read_text().splitlines()[1:]
)
def test_published_bubbles(line: str) -> None:
    """From table 9 of the Zero Bubble paper (arXiv:2401.10241) come all cells of three columns of its table 5."""
    n, m, *numbers = line.split()[1:]
    forward, inputs, weights, copy = map(float, numbers[:4])
    whole = {
        "forward": forward,
        "backward": inputs + weights,
        "backward_inputs": inputs,
        "backward_weights": weights,
    }
    made = [make(name, int(n), int(m)) for name in ("1F1B", "ZBH1", "ZBH2")]
    copies = [(s, s + 1, copy) for s in range(int(n) - 1)]
    played = [schedule.replay(lambda action: whole[action.kind], copies) for schedule in made]
    assert [f"{each.bubble_of_longest:.4f}" for each in played] == numbers[4:]


@pytest.mark.parametrize("name", NAMED)
def test_any_number_of_micro_batches_is_part_of_a_longer_list(name: str) -> None:
    for n in (1, 2, 3, 5):
        longer = make(name, n, 13)
        for m, without in ((m, without) for m in range(1, 14) for without in (0, 1, 13)):
            checkpoint = {0: "always", 1: "except_last", 13: "never"}[without]
            fewer = make(longer, n, m, checkpoint=checkpoint)
            assert {a.micro_batch for a in fewer.actions} == {*range(m)}
            assert {a.micro_batch for a in fewer.actions if a.kind == "recompute"} == {
                *range(m - without)
            }
            assert name.startswith("ZB") or fewer == make(
                name, n, m, checkpoint=checkpoint
            )  # which depend on m
