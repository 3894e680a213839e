"""What has to be so in a case of `benchmarks.faults`, and what of it was not."""

from __future__ import annotations

import re

from benchmarks.faults_cases import RANKS, Cell
from benchmarks.faults_outside import AFTERWARDS, Seen

OWN = {
    "raising": "ValueError: the layer's own message",
    "out of memory": "can't allocate memory",
}
"""What the rank itself says, and others have to say too."""
TASKS = {
    "loading data": "outside of the pipeline",
    "first mini-batch": "forward of micro-batch 1",
    "forward": "forward of micro-batch 1",
    "recomputation": "recomputation of micro-batch 1",
    "backward": "backward of micro-batch 1",
    "loss": "the criterion",
    "optimizer": "outside of the pipeline",
    "saving": "save",
    "evaluation": "forward of micro-batch 1",
}
"""What the rank does in each phase, in the words of an error."""

_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
_TRACEBACK = "Traceback (most recent call last)"
_BEYOND = re.compile(r"^(Exception ignored|Exception in|terminate called|Fatal|Segmentation|\*\*\*).*$", re.MULTILINE)


def error_in(text: str) -> str:
    """Return the error that a rank printed, without its traceback and without folders."""
    lines = _PREFIX.sub("", text).partition(_TRACEBACK)[2].splitlines()[1:]
    said = [line for line in lines if line and not line.startswith((" ", "[W"))]
    return re.sub(r"(/[\w.+-]+)+/", "", " ".join(said))


def judged(cell: Cell, seen: Seen, limit: float) -> list[str]:
    """Return what is wrong in a case, and on which ranks; each may take as many seconds to end as `limit`."""
    if not seen.happened:
        return [f"it did not come to pass: {error_in(next(filter(None, seen.errors.values()), '')) or 'no error'}"]
    complaints: dict[str, list[str]] = {}
    for rank in range(RANKS):
        for complaint in _of_rank(cell, seen, rank, limit):
            complaints.setdefault(complaint, []).append(f"rank {rank}")
    left = [f"left: {', '.join(seen.left)}"] if seen.left else []
    return left + [f"{', '.join(ranks)}: {complaint}" for complaint, ranks in complaints.items()]


def _of_rank(cell: Cell, seen: Seen, rank: int, limit: float) -> list[str]:
    if (end := seen.ended.get(rank)) is None:
        return ["it did not end"]
    if cell.slow:
        return [f"it ended with {end.code}: {error_in(seen.errors[rank])}"] if end.code else []
    own = rank == cell.victim
    if own and cell.fault in ("killed", "hang"):
        return []  # it was ended, and could say nothing
    wrong = _said(cell, rank, seen.errors[rank])
    if end.code != 1:
        wrong.append(f"it ended with {end.code}")
    if end.seconds > limit and not (own and cell.fault in AFTERWARDS):
        wrong.append(f"it ended after {end.seconds:.1f} s")
    return wrong


def _said(cell: Cell, rank: int, text: str) -> list[str]:
    """Return what is wrong with what a rank printed."""
    fault, phase, victim = cell
    wrong = [f"also printed: {line[0]}" for line in _BEYOND.finditer(text)]
    said, errors = error_in(text)[:300], text.count(_TRACEBACK)
    if errors != 1:
        return [*wrong, f"{errors} errors"]
    own = OWN.get(fault)
    if rank == victim:
        return wrong if own is None or own in said else [*wrong, f"its own error is not said: {said}"]
    if f"rank {victim}" not in said:
        wrong.append(f"the rank is not named: {said}")
    waits = phase == "loss" and victim + 1 < RANKS
    if ("waiting for other ranks" if waits else TASKS[phase]) not in said:
        wrong.append(f"its task is not named: {said}")
    if own is not None and own not in said:
        wrong.append(f"its message is not said: {said}")
    return wrong
