"""What goes wrong where, on which engine; what others see, and what the process itself sees."""

from collections.abc import Callable
from dataclasses import dataclass

from . import faults
from .faults import FOR_EVER, Keyboard


@dataclass
class Row:
    """Something goes wrong at a place, in step 2.

    Attributes:
        does: what; `None` leaves out the backward.
        place: forward, recompute or backward, of the second partition's first task; criterion, saving, or outside.
        others: what other ranks raise within the timeout and 2 s, a pattern; nothing if they go on.
        own: what the rank itself raises, if it can.
        engine: ranks are three processes, others one.
        rank: where it happens.
        schedule: that of `step`, by which these train; nothing if by `loss` and its `backward`.
    """

    does: Callable[..., object] | None
    place: str = "outside"
    others: str = ""
    own: str = ""
    engine: str = "ranks"
    rank: int = 1
    schedule: str = ""


SILENT = (
    r"rank 1 has given no sign of life for 2 s: is its process stopped, or is the network cut\? "
    "When last heard of, rank 1 was "
)
ALONE = r"RankFailed: ranks 0, 2 have given no sign of life for 2 s: are their processes stopped, or is the network cut"
WOKEN = r"RankFailed: rank 1 did not run for \d+\.\d s \(was its process stopped\?\), so others have ended"
DIED = r"rank 1 has closed its connections and given no reason: has its process ended\? \d.\d s before, it was "
FIRST = "in forward of micro-batch 0"
IN_FORWARD = f"{FIRST} of mini-batch 2"
IN_BACKWARD = "in backward of micro-batch 1 of mini-batch 2"
EARLY = "in backward of micro-batch 0"
OUTSIDE = "outside of the pipeline, after mini-batch 1"
CIRCLE = (
    "all ranks wait for each other, and none has got any further for 2 s: rank 0 was waiting for other ranks in "
    "backward of micro-batch 1 of mini-batch 2; rank 1 was waiting for other ranks in the call of mini-batch 3; rank 2 "
    r"was .*\. Has a rank left out a call of the pipeline, or a backward\(\)\?"
)
CROSSED = (
    r"(rank \d failed outside of the pipeline(, after mini-batch 1)?: RankFailed: )?"  # by the other one
    "all ranks wait for each other, and none has got any further for 2 s: (?=.* of another pipeline).*rank 1 was "
    "waiting for other ranks in the call of mini-batch 1[ ;]"
)
ENDED = (
    r"rank 1 has ended, or called close\(\), but rank \d needs more from it: every rank has to call"
)
NO_SPACE = r"OSError: \[Errno 28\] step 2 cannot be saved in .*: No space left on device; what was saved before stays"
NO_MEMORY = "RuntimeError: .*can't allocate memory"
RAISED = "ValueError: on purpose"
INTERRUPTED = "KeyboardInterrupt: "


def hanging(task: str, rank: int = 1) -> str:
    """Return the error of the others."""
    why = "for 2 s it has neither ended nor used the CPU, in hangs, .*, in reach of Fails, "
    return f"rank {rank} hangs in {task} of mini-batch 2: {why}"


ROWS = {
    "stopped in forward": Row(faults.stops, "forward", SILENT + IN_FORWARD, WOKEN),
    "stopped in backward": Row(faults.stops, "backward", SILENT + IN_BACKWARD, WOKEN),
    "stopped outside": Row(
        faults.stops, "outside", SILENT + "outside", WOKEN
    ),  # perhaps before it has told the number
    "cut off in forward": Row(faults.cuts_links, "forward", SILENT + IN_FORWARD, ALONE),
    "killed in backward": Row(faults.dies, "backward", DIED + IN_BACKWARD),
    "killed outside": Row(faults.dies, "outside", DIED + OUTSIDE),
    "killed, and its children are not": Row(
        faults.dies_before_its_child, "outside", DIED + OUTSIDE
    ),
    "killed, and its ports are used by others": Row(
        faults.dies_and_its_ports_are_used, "outside", DIED + OUTSIDE
    ),
    "told to end by SIGTERM": Row(faults.is_told_to_end, "outside", DIED + OUTSIDE),
    "killed while it saves": Row(faults.dies, "saving", f"{DIED}in save of mini-batch 2"),
    "raises outside": Row(faults.raises, "outside", f"rank 1 failed {OUTSIDE}: {RAISED}", RAISED),
    "a full disk": Row(
        faults.fills_the_disk, "saving", f"rank 1 failed in save: {NO_SPACE}", NO_SPACE
    ),
    "a full disk of one process": Row(
        faults.fills_the_disk, "saving", own=NO_SPACE, engine="graph"
    ),
    "full memory": Row(
        faults.fills_memory, "forward", f"rank 1 failed {FIRST}: {NO_MEMORY}", NO_MEMORY
    ),
    "ends early": Row(faults.ends, "outside", ENDED, "SystemExit: "),
    "ends early, and a fork does not": Row(faults.forks_and_ends, "outside", ENDED, "SystemExit: "),
    "hangs in forward": Row(faults.hangs, "forward", hanging("forward of micro-batch 0")),
    "hangs while the clock is set back": Row(
        faults.hangs_while_the_clock_is_set_back, "forward", hanging("forward of micro-batch 0")
    ),
    "hangs in recomputation": Row(
        faults.hangs, "recompute", hanging("recomputation of micro-batch 1")
    ),
    "hangs in backward": Row(faults.hangs, "backward", hanging("backward of micro-batch 1")),
    "hangs in the criterion": Row(faults.hangs, "criterion", hanging("the criterion", 2), rank=2),
    "leaves out a backward": Row(None, others=CIRCLE, own=f"RankFailed: {CIRCLE}"),
    "takes another pipeline": Row(
        faults.takes_another_pipeline, others=CROSSED, own=f"RankFailed: {CROSSED}"
    ),
    "raises in a step": Row(
        faults.raises, "backward", f"rank 1 failed {EARLY}: {RAISED}", RAISED, schedule="1F1B"
    ),
    "killed in a step": Row(faults.dies, "backward", DIED + EARLY, schedule="1F1B"),
    "overflows on one rank, in steps": Row(faults.overflows, "outside", schedule="1F1B"),
    "strangers write to its ports": Row(faults.strangers_write, "outside"),
    "overflows on one rank": Row(faults.overflows, "outside"),
    "sleeps outside": Row(faults.sleeps, "outside"),
    "computes in forward": Row(faults.computes, "forward"),
    "stopped together, outside": Row(faults.all_stop, "outside"),
    "stopped together, in forward": Row(faults.all_stop, "forward"),
    "Ctrl-C in forward": Row(
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
