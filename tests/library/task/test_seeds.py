"""Seeds: which tasks draw random numbers of their own, and what becomes of the default generator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from torchgpipe.task.randomness import PrivateGenerator, Randomness
from torchgpipe.task.seeds import Seeds
from torchgpipe.task.stage import Stage

M = 3


class MiniBatch:
    """Run the tasks of a mini-batch; `draws` says which partition draws in which micro-batch."""

    def __init__(
        self, draws: list[list[bool]], meanwhile: Callable[[], object] = lambda: None, *, alone: bool = False
    ) -> None:
        self.draws = draws
        self.drawn: dict[tuple[int, int], list[float]] = {}
        self.private: set[tuple[int, int]] = set()
        self.sources: dict[tuple[int, int], Randomness] = {}
        self.stages = [Stage(j, nn.Identity(), torch.device("cpu")) for j in range(len(draws))]
        for stage in self.stages:
            stage.look()
        seeds = Seeds(len(draws), recomputed=True, grad=True, alone=alone)
        with seeds:
            for i in range(len(draws[0])):
                for j in range(len(draws)):
                    randomness = self.sources[i, j] = seeds.of(i, self.stages[j], True)
                    with randomness.first():
                        self.private |= {(i, j)} if PrivateGenerator.in_use() else set()
                        if draws[j][i]:
                            self.drawn[i, j] = torch.rand(4).tolist()
            meanwhile()

    def recompute(self) -> dict[tuple[int, int], list[float]]:
        found = {}
        for (i, j), randomness in reversed(self.sources.items()):
            with randomness.again():
                if self.draws[j][i]:
                    found[i, j] = torch.rand(4).tolist()
        return found


ALWAYS, NEVER = [True] * M, [False] * M


# Which partitions draw, in each micro-batch, and which tasks are private.
CASES: dict[str, tuple[list[list[bool]], set[tuple[int, int]]]] = {
    "no partition": ([NEVER, NEVER], {(0, 0), (0, 1)}),
    "the second": ([NEVER, ALWAYS], {(0, 0), (0, 1), (1, 1), (2, 1)}),
    "both": ([ALWAYS, ALWAYS], {(i, j) for i in range(M) for j in range(2)}),
    "in the first micro-batch only": ([[True, False, False]], {(0, 0), (1, 0), (2, 0)}),
}


@pytest.mark.parametrize("alone", [False, True], ids=["workers", "a rank"])
@pytest.mark.parametrize("draws, private", CASES.values(), ids=CASES)
def test_tasks(draws: list[list[bool]], private: set[tuple[int, int]], *, alone: bool) -> None:
    before = torch.get_rng_state()
    batch = MiniBatch(draws, alone=alone)
    assert batch.private == (set() if alone else private)
    assert len({tuple(numbers) for numbers in batch.drawn.values()}) == len(batch.drawn), "two tasks drew the same"
    # Where a task draws, the default generator goes on by one number; where none does, it stays.
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    if batch.drawn:
        torch.randint(2**62, ())
    assert torch.equal(torch.get_rng_state(), after)
    assert batch.recompute() == batch.drawn
    assert torch.equal(torch.get_rng_state(), after)


def test_ranks_draw_what_workers_draw() -> None:
    state = torch.get_rng_state()
    workers = MiniBatch([ALWAYS, NEVER])
    torch.set_rng_state(state)
    assert MiniBatch([ALWAYS, NEVER], alone=True).drawn == workers.drawn


def test_mini_batches_under_way_at_once_draw_different_numbers() -> None:
    inner: list[MiniBatch] = []
    outer = MiniBatch([ALWAYS], lambda: inner.append(MiniBatch([ALWAYS])))
    assert inner[0].drawn != outer.drawn


def test_within_an_outer_pipelines_task() -> None:
    """The seed of an inner mini-batch is one of the outer task's numbers, so that its second pass has the same."""
    found, before = [], torch.get_rng_state()
    for _ in range(2):
        drew: list[None] = []
        with PrivateGenerator(7, lambda drew=drew: drew.append(None)):  # type: ignore[misc]
            found.append([MiniBatch([ALWAYS]).drawn for _ in range(2)])
        assert len(drew) == 2
    assert torch.equal(torch.get_rng_state(), before)
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]
