"""Clocks: what one rank's is ahead of another's is found from messages, with an error that it does not exceed."""

from __future__ import annotations

import pytest
import torch

from torchgpipe.timeline.clocks import ahead_of_first


# How far rank 1's clock is ahead; of each round when ranks 0 and 1 send, and the seconds that either message takes.
@pytest.mark.parametrize(
    ("ahead", "rounds", "error"),
    [
        (0.0, [((1.0, 1.0), (0.5, 0.5))], 0.5),
        (100.0, [((1.0, 1.0), (0.5, 0.5))], 0.5),
        (-3.0, [((1.0, 1.0), (0.0, 0.5))], 0.25),
        (100.0, [((1.0, 1.0), (9.0, 9.0)), ((20.0, 20.0), (0.125, 0.25))], 0.1875),
        (100.0, [((1.0, 1.0), (0.125, 9.0)), ((20.0, 20.0), (9.0, 0.25))], 0.1875),
        (100.0, [((1.0, 2.0), (0.5, 0.5))], 0.75),
    ],
)
def test_two_clocks(ahead: float, rounds: list[tuple[tuple[float, float], tuple[float, float]]], error: float) -> None:
    stamps: list[list[tuple[float, float]]] = [[], []]
    for (first, second), (there, back) in rounds:
        stamps[0].append((first, max(first, second + back)))
        stamps[1].append((second + ahead, max(second, first + there) + ahead))
    (zero, found), most = ahead_of_first([torch.tensor(each, dtype=torch.float64) for each in stamps])
    assert zero == 0 and abs(found - ahead) <= most == error


def test_the_largest_error_counts() -> None:
    stamps = [[(0.0, 2.0)], [(10.0, 12.0)], [(0.0, 8.0)]]
    assert ahead_of_first([torch.tensor(each, dtype=torch.float64) for each in stamps]) == ([0.0, 10.0, 3.0], 5.0)
