"""Note in which round each training step ran, and which rounds other programs disturbed.

Rows (configurations) that are compared with each other form a group. In a round, every row of a
group runs one step.
"""

import math
from collections.abc import Mapping, Sequence

from reproduce.machine.load import Shares, too_busy
from reproduce.run.emulation import Emulation
from reproduce.run.groups import PlannedTask
from reproduce.run.timed import MeasuredSteps, Samples

Steps = MeasuredSteps | Emulation


class Rounds:
    """The rounds of a group of rows. In a round, every row of the group runs one step.

    Attributes:
        of_steps: For each row, a list with the number of the round in which each of its steps ran.
        shares: Maps the number of each round to the shares of the machine that other programs used.
        left_out: How many rounds were removed because other programs disturbed them.
    """

    def __init__(self) -> None:
        self.of_steps: dict[PlannedTask, list[int]] = {}
        self.shares: dict[int, Shares] = {}
        self.left_out = 0

    def end(self, number: int, shares: Shares, running: Mapping[PlannedTask, Steps]) -> None:
        """Note which steps ran in a round that has ended, and how busy other programs were.

        The first rounds can be too short to measure how busy other programs were. These rounds get
        the shares of the next round that was long enough. A round without steps is ignored.

        Args:
            number: The number of the round.
            shares: Which shares of the machine other programs used. The key "others", for example,
                has their share of the CPU cores. If nothing is known, the dictionary is empty.
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
        """Return the numbers of the rounds that other programs did not disturb."""
        return {number for number, shares in self.shares.items() if not too_busy(shares)}

    def keep_only(self, kept: set[int], running: Mapping[PlannedTask, Steps]) -> None:
        """Remove all rounds whose numbers are not in `kept`, and the steps that ran in them."""
        for task, steps in running.items():
            _remove_steps(steps, self.of_steps[task], kept)
        for number in list(self.shares):
            if number not in kept:
                del self.shares[number]
                self.left_out += 1

    def samples(self, task: PlannedTask, steps: Steps, *, numbered: bool) -> Samples:
        """Return the samples of a row for the record: the times and losses of its steps, and more.

        If an interrupted run is continued, the samples of that run come first. If a loss is NaN or
        infinite, the losses are left out, because JSON has no such numbers.

        Args:
            task: The row, and how it runs.
            steps: The steps of the row that have run.
            numbered: Whether the samples include the number of the round in which each step ran.
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
        """Return which share of the machine other programs used during each step of a row.

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
    """Remove the steps of a row that did not run in one of the rounds `kept`.

    Args:
        steps: The steps of the row. They are changed.
        numbers: The number of the round in which each step ran. The list is changed, too.
        kept: The numbers of the rounds to keep.
    """
    last_first = reversed(range(len(numbers)))  # so that a removal does not move later items
    for i in last_first:
        if numbers[i] not in kept:
            del steps.runs[i]
            del numbers[i]


def _appended(before: Mapping[str, Sequence[float]], samples: Samples) -> Samples:
    """Append this run's lists of samples, such as step times, to the lists of an interrupted run.

    A list of samples that only one of the two runs has is left out.
    """
    together: Samples = {}
    for name, values in samples.items():
        if name in before:
            together[name] = [*before[name], *values]
    return together
