"""No order of events leaves ranks waiting for each other.

What each partition's program asks of its links is written down from a run of the real programs. Then ranks are played
through with messages that take any time: a search over all states that they can get into. From each, some event has to
be possible until all programs have ended.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from torchgpipe import GPipe
from torchgpipe.engine.relay import Queues, Relay
from torchgpipe.skip import Namespace

from ...parts import Pop, Stash

Wire = tuple[int, int, str]  # from, to, what
Act = tuple[str, Wire]


def programs(
    n: int, m: int, skips: Sequence[tuple[int, int]], checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> list[list[list[Act]]]:
    """Return what the programs of a forward, and those of a backward, do at their links, in order."""
    runs: list[list[list[Act]]] = []

    class Recorded(Relay):
        def __init__(self, length: int) -> None:
            super().__init__(length)
            backward = bool(runs)
            runs.append([[] for _ in range(length)])
            places = range(length)[:: -1 if backward else 1]  # which partition is at which position
            for position, link in enumerate(self.links):
                _record(link, runs[-1][places[position]], places[position], -1 if backward else 1)

    monkeypatch.setattr("torchgpipe.engine.workers.Relay", Recorded)

    def part(kind: Any, name: Namespace) -> nn.Module:
        module: nn.Module = kind().isolate(name)
        return module

    names = [Namespace() for _ in skips]
    layers = [
        [
            nn.Linear(2, 2),
            *(part(Stash, name) for name, (source, _) in zip(names, skips, strict=True) if source == j),
            *(part(Pop, name) for name, (_, target) in zip(names, skips, strict=True) if target == j),
        ]
        for j in range(n)
    ]
    flat = nn.Sequential(*(layer for each in layers for layer in each))
    model = GPipe(flat, [*map(len, layers)], devices=["cpu"] * n, chunks=m, checkpoint=checkpoint)
    model(torch.rand(m, 2)).sum().backward()
    return runs


def _record(link: Queues, acts: list[Act], own: int, step: int) -> None:
    def noted(name: str, wire: Wire) -> None:
        real = getattr(link, name)

        def act(*given: Any) -> Any:
            to = wire
            if name in ("leave", "fetch"):
                crossing = given[1]
                other = crossing.target if crossing.source == own else crossing.source
                to = (own, other, str(crossing.key)) if name == "leave" else (other, own, str(crossing.key))
            acts.append((name, to))
            return real(*given)

        setattr(link, name, act)

    for name in ("admit", "announce", "give", "leave"):
        noted(name, (own, own + step, "item"))
    for name in ("expect", "take", "fetch"):
        noted(name, (own - step, own, "item"))


def late(acts: Sequence[Sequence[Act]], more: int = 0) -> list[list[Act]]:
    """Let skips leave as they do by NCCL: with that of a later task, and the last ones when the program has ended."""
    found = []
    for program in acts:
        found.append([*program])
        for wire in {wire for name, wire in program if name == "leave"}:
            places = [k for k, act in enumerate(found[-1]) if act == ("leave", wire)]
            first = places[: abs(wire[0] - wire[1]) - 1 + more]
            found[-1] = [act for k, act in enumerate(found[-1]) if k not in first] + [("leave", wire)] * len(first)
    return found


def merged(acts: Sequence[Sequence[Act]]) -> list[list[Act]]:
    """Let a micro-batch's skips between two ranks be one message: the last that is left, the first that is fetched."""
    skips = {wire for program in acts for name, wire in program if name == "leave"}
    between = Counter(wire[:2] for wire in skips)
    found: list[list[Act]] = []
    for program in acts:
        found.append([])
        seen: Counter[Any] = Counter()
        for name, wire in program:
            if name in ("leave", "fetch"):
                source, target, _ = wire
                wire = source, target, "skips"
                seen[name, wire] += 1
                if seen[name, wire] % between[source, target] != (name == "fetch") % between[source, target]:
                    continue
            found[-1].append((name, wire))
    return found


def stuck(acts: Sequence[Sequence[Act]], *, ahead: bool = True, nccl: bool = False) -> list[int] | None:
    """Return how far programs got in a state from which nothing can happen, or `None` if there is no such state.

    A wire holds the messages that were given and not yet received. One may be received before its program asks for it;
    if not `ahead`, because it is another than was expected, none. There is room for the next item once all were
    received; by NCCL, once they were taken. In the end, everything that was given has to be received.
    """
    flush = [[("admit", wire) for wire in {wire for name, wire in program if name in GIVES}] for program in acts]
    acts = [[*program, *last] for program, last in zip(acts, flush, strict=True)]
    wires = sorted({wire for program in acts for _, wire in program})
    at = {wire: k for k, wire in enumerate(wires)}
    end = tuple(map(len, acts))
    start = ((0,) * len(acts), ((0, 0),) * len(wires))  # of each wire: how many messages were given, and received
    seen, todo = {start}, [start]
    while todo:
        places, state = todo.pop()
        following: list[tuple[int | None, int, tuple[int, int]]] = []
        asked = set()
        for j, program in enumerate(acts):
            if places[j] < end[j]:
                name, wire = program[places[j]]
                asked.add(wire if name in ("expect", "take", "fetch") else None)
                if (changed := _acted(name, wire, *state[at[wire]], nccl=nccl)) is not None:
                    following.append((j, at[wire], changed))
        for k, wire in enumerate(wires):
            given, received = state[k]
            if given and not received and (ahead or wire in asked):
                following.append((None, k, (given - 1, 1)))
        if not following and places != end:
            return [*places]
        for moved, k, changed in following:
            new = (
                tuple(p + (q == moved) for q, p in enumerate(places)),
                (*state[:k], changed, *state[k + 1 :]),
            )
            if new not in seen:
                seen.add(new)
                todo.append(new)
    return None


GIVES = ("announce", "give", "leave")


def _acted(name: str, wire: Wire, given: int, received: int, *, nccl: bool) -> tuple[int, int] | None:
    """Return a wire's state after a program's act, or `None` if the program has to wait."""
    if name == "admit":
        return None if given or (nccl and received) else (given, received)
    if name == "leave" and given > abs(wire[0] - wire[1]):
        return None
    if name in GIVES:
        return given + 1, received
    return (given, received - 1) if received else None


LAYOUTS: dict[str, tuple[int, int, list[tuple[int, int]]]] = {
    "two ranks": (2, 4, []),
    "three ranks": (3, 3, []),
    "four ranks": (4, 2, []),
    "a long skip": (3, 3, [(0, 2)]),
    "skips that cross": (4, 2, [(0, 2), (1, 3)]),
    "skips within each other": (4, 2, [(0, 3), (1, 2)]),
    "two skips between the same ranks": (3, 2, [(0, 2), (0, 2)]),
}


def _drawn(seed: int) -> tuple[int, int, list[tuple[int, int]]]:
    draw = random.Random(seed)
    n, m = draw.randint(2, 4), draw.randint(2, 3)
    pairs = [(draw.randrange(n - 1), draw.randrange(1, n)) for _ in range(draw.randint(1, 4))]
    return n, m, [(source, target) for source, target in pairs if source < target]


LAYOUTS |= {f"drawn with seed {seed}": _drawn(seed) for seed in range(8)}


@pytest.mark.parametrize("n, m, skips", LAYOUTS.values(), ids=LAYOUTS)
def test_ranks_never_wait_for_each_other(
    n: int, m: int, skips: list[tuple[int, int]], checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for acts in map(merged, programs(n, m, skips, checkpoint, monkeypatch)):
        for ahead in (True, False):
            assert stuck(acts, ahead=ahead) is None
        assert stuck(late(acts), nccl=True) is None


def test_the_search_finds_a_skip_that_leaves_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    for acts in map(merged, programs(3, 7, [(0, 2)], "never", monkeypatch)):
        assert stuck(late(acts, more=1), nccl=True) is None
        assert stuck(late(acts, more=5), nccl=True) is not None


def test_the_search_finds_a_deadlock() -> None:
    """Two programs that take before they give."""
    there, back = (0, 1, "item"), (1, 0, "item")
    assert stuck([[("take", back), ("give", there)], [("take", there), ("give", back)]]) == [0, 0]
