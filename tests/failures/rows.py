"""List the faults in a table: what goes wrong and where, and which errors ranks must raise."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from .faults import (
    FOR_EVER,
    ROOM,
    SILENCE,
    Keyboard,
    all_stop,
    computes,
    cuts_links,
    dies,
    dies_and_its_ports_are_used,
    dies_before_its_child,
    ends,
    fills_memory,
    fills_the_disk,
    forks_and_ends,
    hangs,
    hangs_while_the_clock_is_set_back,
    is_told_to_end,
    overflows,
    raises,
    sleeps,
    stops,
    strangers_write,
    takes_another_pipeline,
)


@dataclass
class Row:
    """A fault in the second step of a training, and the errors that the ranks must raise.

    Attributes:
        does: The function that causes the fault. `None` means that the rank leaves out its
            backward.
        place: Where the fault happens: in the first task of the second partition ("forward",
            "recompute" or "backward"), in the criterion ("criterion"), in a save ("saving"), or
            outside of the pipeline ("outside").
        others: A pattern that the error of the other ranks must match. If it is empty, these ranks
            must raise no error. Ranks have 10 s for the error (2 s on a machine that is not busy),
            counted from the fault, or from the end of the timeout if the other ranks wait for it.
        own: A pattern that the error of the rank with the fault must match. It is empty if that
            rank raises no error.
        engine: The engine of the pipeline. "ranks" uses three processes, other engines use one.
        rank: The rank on which the fault happens.
        schedule: The schedule, if the ranks train by `model.step`. If it is empty, they train by
            `model.loss` and `backward`.
        timeout: The timeout of the ranks in seconds.
    """

    does: Callable[..., object] | None
    place: str = "outside"
    others: str = ""
    own: str = ""
    engine: str = "ranks"
    rank: int = 1
    schedule: str = ""
    timeout: float = SILENCE


SILENT = (
    r"rank 1 has given no sign of life for \d s: is its process stopped, or is the network cut\? "
    "When last heard of, rank 1 was "
)
ALONE = (
    r"RankFailed: ranks 0, 2 have given no sign of life for \d s: "
    r"are their processes stopped, or is the network cut"
)
WOKEN = (
    r"RankFailed: rank 1 did not run for \d+\.\d s \(was its process stopped\?\), "
    r"so others have ended"
)
DIED = (
    r"rank 1 has closed its connections and given no reason: "
    r"has its process ended\? \d.\d s before, it was "
)
FIRST = "in forward of micro-batch 0"
IN_FORWARD = f"{FIRST} of mini-batch 2"
IN_BACKWARD = "in backward of micro-batch 1 of mini-batch 2"
EARLY = "in backward of micro-batch 0"
OUTSIDE = "outside of the pipeline, after mini-batch 1"
CIRCLE = (
    r"all ranks wait for each other, and none has got any further for \d s: "
    "rank 0 was waiting for other ranks in backward of micro-batch 1 of mini-batch 2; "
    "rank 1 was waiting for other ranks in the call of mini-batch 3; "
    r"rank 2 was .*\. Has a rank left out a call of the pipeline, or a backward\(\)\?"
)
CROSSED = (
    # The other rank can have raised this error before.
    r"(rank \d failed outside of the pipeline(, after mini-batch 1)?: RankFailed: )?"
    r"all ranks wait for each other, and none has got any further for \d s: "
    "(?=.* of another pipeline)"
    ".*rank 1 was waiting for other ranks in the call of mini-batch 1[ ;]"
)
ENDED = (
    r"rank 1 has ended, or called close\(\), but rank \d needs more from it: every rank has to call"
)
NO_SPACE = (
    r"OSError: \[Errno 28\] step 2 cannot be saved in .*: "
    r"No space left on device; what was saved before stays"
)
NO_MEMORY = "RuntimeError: .*can't allocate memory"
RAISED = "ValueError: on purpose"
INTERRUPTED = "KeyboardInterrupt: "


def hanging(task: str, rank: int = 1) -> str:
    """Return the pattern of the error that the other ranks raise when `rank` hangs in a task."""
    why = r"for \d s it has neither ended nor used the CPU, in hangs, .*, in reach of Fails, "
    return f"rank {rank} hangs in {task} of mini-batch 2: {why}"


promptly = partial(Row, timeout=ROOM)
"""Make a row whose ranks raise their errors at once, and do not wait for the timeout."""

ROWS = {
    "stopped in forward": Row(stops, "forward", SILENT + IN_FORWARD, WOKEN),
    "stopped in backward": Row(stops, "backward", SILENT + IN_BACKWARD, WOKEN),
    # The rank can be stopped before it has sent other ranks the number of the mini-batch.
    "stopped outside": Row(stops, "outside", SILENT + "outside", WOKEN),
    "cut off in forward": Row(cuts_links, "forward", SILENT + IN_FORWARD, ALONE),
    "killed in backward": promptly(dies, "backward", DIED + IN_BACKWARD),
    "killed outside": promptly(dies, "outside", DIED + OUTSIDE),
    "killed, and its children are not": Row(dies_before_its_child, "outside", DIED + OUTSIDE),
    "killed, and its ports are used by others": Row(
        dies_and_its_ports_are_used, "outside", DIED + OUTSIDE
    ),
    "told to end by SIGTERM": promptly(is_told_to_end, "outside", DIED + OUTSIDE),
    "killed while it saves": promptly(dies, "saving", f"{DIED}in save of mini-batch 2"),
    "raises outside": promptly(raises, "outside", f"rank 1 failed {OUTSIDE}: {RAISED}", RAISED),
    "a full disk": promptly(
        fills_the_disk, "saving", f"rank 1 failed in save: {NO_SPACE}", NO_SPACE
    ),
    "a full disk of one process": Row(fills_the_disk, "saving", own=NO_SPACE, engine="graph"),
    "full memory": promptly(
        fills_memory, "forward", f"rank 1 failed {FIRST}: {NO_MEMORY}", NO_MEMORY
    ),
    "ends early": promptly(ends, "outside", ENDED, "SystemExit: "),
    "ends early, and a fork does not": Row(forks_and_ends, "outside", ENDED, "SystemExit: "),
    "hangs in forward": Row(hangs, "forward", hanging("forward of micro-batch 0")),
    "hangs while the clock is set back": Row(
        hangs_while_the_clock_is_set_back, "forward", hanging("forward of micro-batch 0")
    ),
    "hangs in recomputation": Row(hangs, "recompute", hanging("recomputation of micro-batch 1")),
    "hangs in backward": Row(hangs, "backward", hanging("backward of micro-batch 1")),
    "hangs in the criterion": Row(hangs, "criterion", hanging("the criterion", 2), rank=2),
    "leaves out a backward": Row(None, others=CIRCLE, own=f"RankFailed: {CIRCLE}"),
    "takes another pipeline": Row(
        takes_another_pipeline, others=CROSSED, own=f"RankFailed: {CROSSED}"
    ),
    "raises in a step": promptly(
        raises, "backward", f"rank 1 failed {EARLY}: {RAISED}", RAISED, schedule="1F1B"
    ),
    "killed in a step": promptly(dies, "backward", DIED + EARLY, schedule="1F1B"),
    "overflows on one rank, in steps": promptly(overflows, "outside", schedule="1F1B"),
    "strangers write to its ports": promptly(strangers_write, "outside"),
    "overflows on one rank": promptly(overflows, "outside"),
    "sleeps outside": Row(sleeps, "outside"),
    # The other ranks must raise no error, so this row has twice the time for a busy machine.
    "computes in forward": Row(computes, "forward", timeout=2 * SILENCE),
    "stopped together, outside": Row(all_stop, "outside"),
    "stopped together, in forward": Row(all_stop, "forward"),
    "Ctrl-C in forward": promptly(
        Keyboard(), "forward", f"rank 1 failed {FIRST}: KeyboardInterrupt", INTERRUPTED
    ),
    "Ctrl-C in forward of a worker": Row(Keyboard(), "forward", own=INTERRUPTED, engine="workers"),
    "Ctrl-C in recomputation of a worker": Row(
        Keyboard(), "recompute", own=INTERRUPTED, engine="workers"
    ),
    "Ctrl-C in backward of a worker": Row(
        Keyboard(), "backward", own=INTERRUPTED, engine="workers"
    ),
    "Ctrl-C where a worker hangs": Row(
        Keyboard(2, FOR_EVER), "forward", own=INTERRUPTED, engine="workers"
    ),
    "Ctrl-C where one graph hangs": Row(
        Keyboard(1, FOR_EVER), "forward", own=INTERRUPTED, engine="graph"
    ),
}
