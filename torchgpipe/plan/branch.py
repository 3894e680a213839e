"""Raise a bound by branching: balances are made cut by cut, those that may be the fastest first.

At each step the first partitions of a balance are chosen, and the others are open. For the open ones, the least
possible values are added: of V (see `bound`), of its two parts, and of copies. That is a bound for all balances that
begin so. If it is no faster than the target, or a chosen partition has no room in memory, all of them are dropped.
Complete balances are replayed. In the end the lowest bound of those that are left is what no balance can beat; if none
is left, that is the target.
"""

from __future__ import annotations

import heapq
from itertools import count
from math import inf

import torch
from torch import Tensor

from torchgpipe.plan.bound import SAFE
from torchgpipe.plan.cuts import Path
from torchgpipe.plan.trial import Trial

__all__ = ["raised"]

MOST_LEFT = 100_000
"""Beginnings of balances that are kept at a time, for memory."""


def raised(n: int, trial: Trial, lower: float, target: float) -> float:
    """Return the seconds that no balance with `n` partitions can beat, from `lower` to `target`.

    As far as the effort allows. Complete balances on the way are tried.
    """
    balances = trial.balances
    chains = [_Chain(tables, bound.copies, bound.last, balances.needs.cuts, n)
              for bound in balances.bounds for tables in [balances.tables(bound)]]  # fmt: skip
    effort, order, end = balances.effort, count(), len(balances.needs.cuts) - 1
    tasks = 3 * len(balances.setup.sizes) * n
    left: list[tuple[float, int, Path, list[Tensor]]] = [(lower, 0, [0], [torch.zeros(4)] * len(chains))]
    while left:
        value, _, path, states = heapq.heappop(left)
        if value >= target:
            return target
        if len(path) > 1 and not balances.has_room(path[-2], path[-1]):
            continue
        if len(path) == n:
            if not effort.spend(2e-4 + 1.5e-6 * tasks):
                return value
            trial.take(balances.balance([*path, end]))
            continue
        if len(left) > MOST_LEFT or not effort.spend(1e-4 * len(chains)):
            return value
        found = [chain.after(path, state) for chain, state in zip(chains, states, strict=True)]
        values = torch.stack([value for value, _ in found]).amax(0).mul_(SAFE)
        for cut in torch.nonzero(values < target).flatten().tolist():
            state = [parts[:, cut] for _, parts in found]
            heapq.heappush(left, (max(value, float(values[cut])), next(order), [*path, cut], state))
    return target


class _Chain:
    """The bound of one chain of tasks, for balances of which the first partitions are given."""

    def __init__(
        self, tables: tuple[Tensor, Tensor, Tensor], copies: list[float], last: list[float], cuts: list[int], n: int
    ) -> None:
        self.tables, self.n = torch.stack(tables), n
        """Seconds from one cut to another: of forward, of the rest, and of both."""
        self.at = torch.tensor([copies[cut] for cut in cuts])
        none = self.tables[2] == inf
        least, beside = self.tables[:, :, -1], torch.tensor([last[cut] for cut in cuts])
        self.least, self.beside = [least], [beside]
        """From each cut on, with 1, 2, … partitions: the least of the tables' largest, and of copies."""
        for _ in range(n - 1):
            least = torch.maximum(self.tables, least[:, None, :]).amin(2)
            beside = (self.at + beside).expand_as(none).masked_fill(none, inf).amin(1)
            self.least.append(least)
            self.beside.append(beside)

    def after(self, path: Path, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the bound and the state with a further partition up to each cut.

        A state is the largest of forward, of the rest and of both, and the sum of copies.
        """
        most = torch.maximum(self.tables[:, path[-1]], state[:3, None])
        copies = state[3] + self.at
        left = self.n - len(path) - 1
        forward, rest, both = torch.maximum(most, self.least[left])
        return torch.maximum(forward + rest, both) + copies + self.beside[left], torch.cat([most, copies[None]])
