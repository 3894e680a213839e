"""Turns: each way once a round, none first more often, and what warms up is left out."""

from __future__ import annotations

import functools
import itertools

from reproduce.run.turns import turns


def test_orders_are_drawn_turned_round_and_drawn_again() -> None:
    order: list[str] = []

    def step(way: str) -> int:
        order.append(way)
        return len(order)

    *_, samples = turns({way: functools.partial(step, way) for way in "abc"}, 20, warm_up=2)
    rounds = [tuple(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert [each[::-1] for each in rounds[::2]] == rounds[1::2] and {"".join(sorted(each)) for each in rounds} == {
        "abc"
    }
    assert len(rounds) == 22 and len(set(rounds[::2])) > 1
    assert sorted(itertools.chain(*samples.values())) == list(range(7, 67))
