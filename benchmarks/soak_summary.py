"""The summary of a soak: results made from its log, and tables made from them."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from benchmarks.harness import by_case, render
from benchmarks.soak_plan import Kind
from benchmarks.soak_reports import Line
from reproduce.records.record import Record, Result

USES = ("threads", "files", "sockets", "shared")

WARM_UP = 50
"""Episodes of a process after which its memory is looked at: allocators and caches fill at first."""

FLAT = 1.0
"""How many percent of its memory a process may gain in a hundred episodes."""

POINTS = 200
"""How many samples of a process's memory a record keeps."""


def bad(line: Line) -> list[str]:
    """Return what was not as it should be in an episode."""
    return [*line["wrong"], *line["hangs"], *line["alarms"]]


def summary(lines: Sequence[Line]) -> list[Result]:
    """Return the results that a log's lines make."""
    again = [line for line in lines if line["again"]]
    lines = [line for line in lines if not line["again"]]
    homes = Counter(line["home"] for line in lines)
    restarts = Counter({home: sum(len(line["ranks"]) - 1 for line in lines if line["home"] == home) for home in homes})
    changes = [(a, b) for line in lines for a, b in zip(line["ranks"], line["ranks"][1:], strict=False)]
    faults = [fault for line in lines for fault in line["faults"]]
    counted = {
        "minutes": round(sum(line["seconds"] for line in lines) / 60, 1),
        "episodes": len(lines),
        "steps": sum(line["steps"] for line in lines),
        "mini-batches": sum(line["mini_batches"] for line in lines),
        "evaluations": sum(line["evaluations"] for line in lines),
        "saves": sum(line["saves"] for line in lines),
        "faults": len(faults),
        "goings-on in the same processes": restarts["kept processes"],
        "restarts in new processes": restarts["new processes"],
        "restarts by torchrun": restarts["torchrun"],
        "goings-on with fewer ranks": sum(b < a for a, b in changes),
        "goings-on with more ranks": sum(b > a for a, b in changes),
        "pauses and computations longer than the silence": sum(bool(line["slow"]) for line in lines),
        "values compared": sum(line["numbers"] for line in lines),
        "wrong values": sum(len(line["wrong"]) for line in lines),
        "hangs": sum(bool(line["hangs"]) for line in lines),
        "episodes with another error": sum(bool(line["alarms"]) for line in lines),
        "episodes run again, the soak having been stopped": len(again),
    }
    results = [Result("all", "all", "measured", values={**counted})]
    for kind in get_args(Kind):
        of = [fault for fault in faults if fault["kind"] == kind]
        ends = [round(fault["end"], 3) for fault in of if fault["end"] is not None]
        places = Counter(fault["place"] for fault in of)
        values = {"faults": len(of), "places": dict(places.most_common())}
        results.append(Result("faults", kind, "measured", values=values, samples={"end": ends}))
    for line in lines:
        if said := bad(line):
            results.append(Result("bad", f"episode {line['episode']}", "measured", values={"said": said}))
    return results + _uses(lines)


def _uses(lines: Sequence[Line]) -> list[Result]:
    """Return what each process used that lived longest of those with its name."""
    lives: dict[str, dict[int, list[Line]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        for name, use in line["use"].items():
            lives[name][use["life"]].append(use)
    results = []
    for name in sorted(lives):
        longest = max(lives[name].values(), key=len)
        values: dict[str, Any] = {"episodes": len(longest), "lives": len(lives[name])}
        memory = [use["memory"] for use in longest[WARM_UP:]]
        if len(memory) >= WARM_UP:
            slope, _ = statistics.linear_regression(range(len(memory)), memory)
            values["slope"] = round(100 * 100 * slope / statistics.mean(memory), 3)
        for what in USES:
            values[what] = [min(use[what] for use in part) for part in (longest[:WARM_UP], longest[-WARM_UP:])]
        samples = {"memory": [use["memory"] for use in longest[:: max(1, len(longest) // POINTS)]]}
        results.append(Result("use", name, "measured", values=values, samples=samples))
    return results


def table(record: Record, style: str = "simple") -> str:
    """Render what was counted, how soon ranks ended, and what processes used."""
    cases = by_case(record)
    everything: Mapping[str, Any] = cases["all"]["all"].values
    counted = [[name, f"{value:,}"] for name, value in everything.items()]
    faults = []
    for kind, result in cases["faults"].items():
        ends: Sequence[float] = result.samples["end"]
        places: Any = result.values["places"]
        faults.append(
            [
                kind,
                str(result.values["faults"]),
                f"{statistics.median(ends):.2f}" if ends else "",
                f"{max(ends):.2f}" if ends else "",
                ", ".join(f"{place} {n}" for place, n in places.items()),
            ]
        )
    uses = []
    for name, result in cases.get("use", {}).items():
        values: Mapping[str, Any] = result.values
        memory = result.samples["memory"]
        pairs = [f"{a} → {b}" for a, b in (values[what] for what in USES)]
        slope = ""
        if "slope" in values:
            slope = f"{values['slope']:+.2f}, {'flat' if values['slope'] < FLAT else 'NOT FLAT'}"
        uses.append([name, str(values["episodes"]), f"{memory[0] / 1024:.0f} → {memory[-1] / 1024:.0f}", slope, *pairs])
    said: list[tuple[str, Any]] = [(name, result.values["said"]) for name, result in cases.get("bad", {}).items()]
    remarks = [f"{name}: {first}" + f" (and {len(more)} more)" * bool(more) for name, (first, *more) in said]
    return "\n\n".join(
        [
            render(["", "number"], counted, style),
            render(["fault", "number", "median end, s", "slowest end, s", "places"], faults, style),
            render(["process", "episodes", "MiB", "% in 100 episodes", *USES], uses, style),
            "\n".join(f"- {remark}" for remark in (*remarks, *record.notes)),
        ]
    ).rstrip()
