"""Align the clocks of ranks, by messages between them.

In each round all ranks send a message to all others. Each notes its own clock before that, and when it has heard all.
Nothing is heard before it is sent. So for rank j, whose clock is ahead of rank 0's by d,

    sent by j - heard by 0  <=  d  <=  heard by j - sent by 0

The round in which messages took least time has the narrowest bounds. The middle between them is taken for d, which is
wrong by at most half of their distance.
"""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

ROUNDS = 50


def clocks_ahead(exchange: Callable[[Tensor], list[Tensor]]) -> tuple[list[float], float]:
    """Return by how many seconds each rank's `time.perf_counter` is ahead of rank 0's, and the largest error of that.

    All ranks call this at once. `exchange` gives all ranks a tensor, and returns what each of them gave.
    """
    stamps = []
    for _ in range(ROUNDS):
        sent = time.perf_counter()
        exchange(torch.zeros(0, device="cpu"))
        stamps.append((sent, time.perf_counter()))
    return ahead_of_first(exchange(torch.tensor(stamps, dtype=torch.float64, device="cpu")))


def ahead_of_first(stamps: Sequence[Tensor]) -> tuple[list[float], float]:
    """Return what `clocks_ahead` does, by each rank's times of sending and of having heard, (rounds, 2)."""
    sent, heard = stamps[0].unbind(1)
    ahead, errors = [0.0], [0.0]
    for own in stamps[1:]:
        least, most = (own[:, 0] - heard).max(), (own[:, 1] - sent).min()
        ahead.append(float(least + most) / 2)
        errors.append(float(most - least) / 2)
    return ahead, max(errors)
