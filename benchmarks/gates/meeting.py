"""Check that the tasks of a pipeline overlap, without measuring time.

    python -m benchmarks.gates.meeting    # exit with 1 if tasks that should overlap do not
    python -m benchmarks.gates.meeting --base main    # ... only for faults that `main` lacks

1. A simulation of the schedule tells, for each task, which other tasks have to begin while it runs.
2. In the real pipeline, each task waits, while its layers run, until the layers of these other
   tasks run, too. If the pipeline runs tasks one after another, some of them cannot begin during
   the wait, and the wait fails.
3. After a failed wait, the program prints the waiting task and a task that did not begin.

A waiting task looks again and again into a shared store, where each task notes that it has begun.
The waiting task gives up after a number of looks, not after a number of seconds. Then the training
step is run again with many more looks. So a busy machine makes this program slower, but does not
change its result.

On simulated devices, no task waits, because the clocks of simulated streams say when tasks begin
and end.

`benchmarks.gates.scenes` has the training steps, and `benchmarks.gates.overlap` runs them.
"""

from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from benchmarks.gates.answer import answer, called
from benchmarks.gates.base import Base, add_base, numbers_of
from benchmarks.gates.failures import in_one_line
from benchmarks.harness import command
from reproduce.error import Error
from reproduce.tables.output import Number

if TYPE_CHECKING:
    from benchmarks.gates.overlap import Met


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all training steps on every engine, to find steps whose tasks do not overlap.

    Print a line for each such step. With the option --base, a line that the base has, too, does not
    count as worse.

    Raises:
        Worse: Tasks do not overlap.
        Error: The pipeline does not run.
    """
    parser = command("gates.meeting", __doc__, record=False)
    add_base(parser, "faults that this version of torchgpipe has, too, are no loss")
    options = parser.parse_args(arguments)
    with in_one_line("meeting"):
        found, said = meet()
    lost: list[str] = []
    for met in found:
        lost += met.lost
    known: set[str] = set()
    if options.base is not None and lost:
        known = _faults_of(options.base)
    told = [f"the base has the same fault: {line}" for line in lost if line in known]
    new = [line for line in lost if line not in known]
    numbers: list[Number] = []
    for met in found:
        about: Number = {"experiment": "meeting", "row": met.engine, "kind": "measured"}
        cases: Number = {"metric": "cases", "unit": "count", "value": met.cases}
        verdict = called(any(line in new for line in met.lost))
        reason = "\n".join(met.lost) or None
        numbers.append({**about, **cases, "verdict": verdict, "reason": reason})
    answer(options.format, numbers, told or [said], new)


def _faults_of(base: Base) -> set[str]:
    """Return the faults that this gate finds in the base, another version of the library.

    If the gate cannot judge the base, return an empty set. Then every fault counts as new.
    """
    try:
        numbers = numbers_of(base, "benchmarks.gates.meeting")
    except Error:
        return set()
    faults: set[str] = set()
    for number in numbers:
        faults.update(str(number["reason"] or "").splitlines())
    return faults


def meet() -> "tuple[list[Met], str]":
    """Run all scenes (training steps) on every engine.

    Return a list that says for each engine whether tasks overlapped, and a line for the user that
    says how many scenes were run.
    """
    from benchmarks.gates import overlap, scenes
    from reproduce.run.engines.ranks import Ranks

    with closing(Ranks(scenes.N)) as ranks:
        found = overlap.every(ranks)
    usual, steps, on_ranks = map(len, (scenes.SCENES, scenes.STEPS, scenes.ON_RANKS))
    cases = f"{usual} cases on each engine, and {steps} of step() by workers, {on_ranks} by ranks"
    return found, f"all tasks meet, in {cases}"


if __name__ == "__main__":
    main()
