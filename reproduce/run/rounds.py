"""Record in which round each step ran, and which rounds other programs disturbed.

In a round, every row of a group runs one step.
"""

import math
from collections.abc import Mapping, Sequence

from reproduce.machine.load import Shares, too_busy
from reproduce.run.emulation import Emulation
from reproduce.run.groups import PlannedTask
from reproduce.run.timed import MeasuredSteps, Samples

Steps = MeasuredSteps | Emulation


class Rounds:
    """The rounds of a group of rows: which steps ran, and how busy other programs were."""

    def __init__(self) -> None:
        self.of_steps: dict[PlannedTask, list[int]] = {}  # the round of each step of a row
        self.shares: dict[int, Shares] = {}  # how much other programs used in each round
        self.left_out = 0  # how many disturbed rounds were removed

    def end(self, number: int, shares: Shares, running: Mapping[PlannedTask, Steps]) -> None:
        """Note which steps ran in a round, and how much other programs used the machine.

        The first rounds can be too short to measure how much other programs used. They get the
        shares of the next round whose shares are known. A round in which no step ran is ignored.

        Args:
            number: The number of the round.
            shares: Which shares of the machine other programs used; empty if not known.
            running: The rows and their steps so far, including the steps of this round.
        """
        for task, steps in running.items():
            numbers = self.of_steps[task]
            new = len(steps.runs) - len(numbers)
            if new > 0:
                numbers += [number] * new
                self.shares[number] = {}
        for earlier, known in self.shares.items():
            if not known:
                self.shares[earlier] = shares

    def undisturbed(self) -> set[int]:
        """Return the numbers of the rounds in which other programs used little of the machine."""
        return {number for number, shares in self.shares.items() if not too_busy(shares)}

    def keep_only(self, kept: set[int], running: Mapping[PlannedTask, Steps]) -> None:
        """Remove all rounds that are not in `kept`, and their steps. Count the removed rounds."""
        for task, steps in running.items():
            _remove_steps(steps, self.of_steps[task], kept)
        for number in list(self.shares):
            if number not in kept:
                del self.shares[number]
                self.left_out += 1

    def samples(self, task: PlannedTask, steps: Steps, *, numbered: bool) -> Samples:
        """Return the samples of a row for the record: its times, its losses, and more.

        If an interrupted run is continued, the samples of that run come first. If `numbered` is
        true, the samples include the number of each step's round. If a loss is NaN or infinite, the
        losses are left out, because JSON has no such numbers.
        """
        samples = steps.samples()
        if numbered:
            samples["round"] = list(self.of_steps[task])
        samples |= self._shares_of_steps(task)
        if task.before:
            samples = _appended(task.before, samples)
        losses = samples.get("loss", ())
        if not all(map(math.isfinite, losses)):
            del samples["loss"]
        return samples

    def _shares_of_steps(self, task: PlannedTask) -> Samples:
        """Return, for each step of a row, what share of the machine other programs used.

        The keys are the kinds of shares, such as "others" (the share of the CPU cores). A kind that
        is not known for every round is left out.
        """
        shares = [self.shares[number] for number in self.of_steps[task]]
        samples = {}
        for name in shares[0]:
            if all(name in each for each in shares):
                samples[name] = [each[name] for each in shares]
        return samples


def _remove_steps(steps: Steps, numbers: list[int], kept: set[int]) -> None:
    """Remove the steps of a row whose round is not in `kept`. `numbers` has each step's round."""
    last_first = reversed(range(len(numbers)))  # so that a removal does not move later items
    for i in last_first:
        if numbers[i] not in kept:
            del steps.runs[i]
            del numbers[i]


def _appended(before: Mapping[str, Sequence[float]], samples: Samples) -> Samples:
    """Append samples, such as step times, to those of an earlier run.

    A name of samples that one of the runs lacks is left out.
    """
    together: Samples = {}
    for name, values in samples.items():
        if name in before:
            together[name] = [*before[name], *values]
    return together
