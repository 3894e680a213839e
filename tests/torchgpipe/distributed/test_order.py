"""No order of events leaves ranks waiting for each other.

What each partition's program asks of its links is written down from a run of the real programs. Then ranks are played
through with messages that take any time: a search over all states that they can get into. From each, some event has to
be possible until all programs have ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from torchgpipe import GPipe
from torchgpipe.relay import Queues, Relay
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

    monkeypatch.setattr("torchgpipe.workers.Relay", Recorded)

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


def stuck(acts: Sequence[Sequence[Act]], *, nccl: bool = False) -> list[int] | None:
    """Return how far programs got in a state from which nothing can happen, or `None` if there is no such state.

    A wire holds the messages that were given and not yet received; at most one item was received and not yet taken, of
    skips any number. There is room for the next item once one was received; by NCCL, once it was taken.
    """
    wires = sorted({wire for program in acts for _, wire in program})
    at = {wire: k for k, wire in enumerate(wires)}
    end = tuple(map(len, acts))
    # Of each wire: admissions left, given as a string of kinds, received likewise.
    start = ((0,) * len(acts), tuple((1, "", "") for _ in wires))
    seen, todo = {start}, [start]
    while todo:
        places, state = todo.pop()
        following: list[tuple[int | None, int, tuple[int, str, str]]] = []
        for j, program in enumerate(acts):
            if places[j] < end[j]:
                name, wire = program[places[j]]
                if (changed := _acted(name, *state[at[wire]], nccl=nccl)) is not None:
                    following.append((j, at[wire], changed))
        for k, wire in enumerate(wires):
            room, given, received = state[k]
            if given and (not received or wire[2] != "item"):
                following.append((None, k, (room + (given[0] == "i" and not nccl), given[1:], received + given[0])))
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


def _acted(name: str, room: int, given: str, received: str, *, nccl: bool) -> tuple[int, str, str] | None:
    """Return a wire's state after a program's act, or `None` if the program has to wait."""
    if name == "admit":
        return (room - 1, given, received) if room else None
    if name in ("announce", "give", "leave"):
        return room, given + {"announce": "a", "give": "i", "leave": "s"}[name], received
    return (room + (nccl and received[0] == "i"), given, received[1:]) if received else None


LAYOUTS: dict[str, tuple[int, int, list[tuple[int, int]]]] = {
    "two ranks": (2, 4, []),
    "three ranks": (3, 3, []),
    "four ranks": (4, 2, []),
    "a long skip": (3, 3, [(0, 2)]),
    "skips that cross": (4, 2, [(0, 2), (1, 3)]),
    "skips within each other": (4, 2, [(0, 3), (1, 2)]),
    "two skips between the same ranks": (3, 2, [(0, 2), (0, 2)]),
}


@pytest.mark.parametrize("n, m, skips", LAYOUTS.values(), ids=LAYOUTS)
def test_ranks_never_wait_for_each_other(
    n: int, m: int, skips: list[tuple[int, int]], checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for acts in programs(n, m, skips, checkpoint, monkeypatch):
        assert stuck(acts) is None
        assert stuck(late(acts), nccl=True) is None


def test_the_search_finds_a_skip_that_leaves_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    for acts in programs(3, 7, [(0, 2)], "never", monkeypatch):
        assert stuck(late(acts, more=1), nccl=True) is None
        assert stuck(late(acts, more=5), nccl=True) is not None


def test_the_search_finds_a_deadlock() -> None:
    """Two programs that take before they give."""
    there, back = (0, 1, "item"), (1, 0, "item")
    assert stuck([[("take", back), ("give", there)], [("take", there), ("give", back)]]) == [0, 0]
