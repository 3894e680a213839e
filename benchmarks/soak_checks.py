"""Checks of what ranks have reported in an episode of the soak."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from benchmarks.soak_plan import Episode, Fault
from benchmarks.soak_reports import Lines

OWN = {"raising": "a fault in", "out of memory": "allocate"}
"""What is in the error of the rank on which a fault of a kind springs."""

Told = Mapping[int, Lines]
"""What ranks report in an attempt."""


def sprung(fault: Fault | None, told: Told) -> float | None:
    """Return when an attempt's fault sprang, or `None`."""
    line = None if fault is None else told[fault.rank].last("fault")
    return None if line is None else line["at"]


def ended_otherwise(episode: Episode, attempts: Sequence[Told]) -> list[str]:
    """Return where a rank did not end as it should: as the last one does, or because of its attempt's fault."""
    wrong: list[str] = []
    for number, (told, (_, fault, _)) in enumerate(zip(attempts, episode.attempts, strict=False)):
        if fault is not None and fault.after is None and sprung(fault, told) is None:
            wrong.append(f"attempt {number}, rank {fault.rank}: the fault in {fault.place} did not spring")
        for rank, lines in told.items():
            ended = lines.last("ended")
            error = None if ended is None else ended["error"]
            said = None
            if fault is None or sprung(fault, told) is None:
                if error != "":
                    said = f"ended without a fault: {error}"
            elif rank == fault.rank:
                if fault.kind in OWN and OWN[fault.kind] not in (error or ""):
                    said = f"does not raise its own error, but {error}"
            elif error is None and episode.home != "torchrun":  # which ends all others itself
                said = "its process ended without an error"
            elif error and f"rank {fault.rank}" not in error:
                said = f"its error does not name rank {fault.rank}: {error}"
            if said is not None:
                wrong.append(f"attempt {number}, rank {rank}: {said}")
    return wrong


def wrong_numbers(reference: Lines, attempts: Sequence[Told]) -> tuple[list[str], int]:
    """Return the numbers that are not those of the undisturbed training, and how many were compared."""
    right = {line["step"]: line for line in reference.all if line["what"] == "step"}
    wrong, compared = [], 0
    for number, told in enumerate(attempts):
        ranks: dict[int, int] = defaultdict(int)  # that have reported a step
        names: dict[int, set[str]] = defaultdict(set)  # of tensors, on all of them
        for rank, line in ((rank, line) for rank, lines in told.items() for line in lines.all):
            if line["what"] not in ("step", "loaded") or line["step"] < 0:
                continue
            step, state = line["step"], line["state"]
            here, expected = f"attempt {number}, rank {rank}, {line['what']} {step}", right[step]
            values = {key: line[key] for key in ("losses", "norm", "output") if line.get(key) is not None}
            wrong += [f"{here}: {key} {x}, not {expected[key]}" for key, x in values.items() if x != expected[key]]
            wrong += [f"{here}: {name}" for name, x in state.items() if x != expected["state"].get(name)]
            compared += len(values) + len(state)
            if line["what"] == "step":
                ranks[step] += 1
                names[step] |= state.keys()
        for step in (step for step, n in ranks.items() if n == len(told)):
            missing = sorted(right[step]["state"].keys() - names[step])
            wrong += [f"attempt {number}, step {step}: no rank has {name}" for name in missing]
    return wrong, compared


def lost_steps(episode: Episode, attempts: Sequence[Told]) -> list[str]:
    """Return where ranks went on from an older state than the last that all had saved, or did not come to the end."""
    wrong: list[str] = []
    least = -1
    for number, told in enumerate(attempts):
        began = {line["step"] for lines in told.values() for line in lines.all if line["what"] == "loaded"}
        if len(began) > 1 or any(step < least for step in began):
            wrong.append(f"attempt {number}: went on from steps {sorted(began)}, but step {least} was saved")
        saved = [{line["step"] for line in lines.all if line["what"] == "saved"} for lines in told.values()]
        least = max([least, *set.intersection(*saved)])
    last = {max((line.get("step", -1) for line in lines.all), default=-1) for lines in attempts[-1].values()}
    if last != {len(episode.steps) - 1}:
        wrong.append(f"the last attempt came to steps {sorted(last)}, not {len(episode.steps) - 1}")
    return wrong
