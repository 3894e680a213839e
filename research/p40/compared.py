"""The model beside others: simpler ones, which tell how little says as much, and itself without a part.

Each is judged by the published rows of the same eight P40s, in absolute throughput and in speed-ups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from typing import Any

from reproduce.predict.older import OLDER
from reproduce.predict.rows import SPEED_TABLES, predict_table, predictable
from reproduce.records.published import published
from reproduce.tables.predicted import speed_up_errors, throughput_errors
from research.p40.fit import COMPUTE, errors, fitted
from research.p40.timings import SOURCES, Timings
from torchgpipe.plan.hardware import Hardware

__all__ = ["TABLES", "as_published", "described", "judged", "others", "root_mean_square"]

TABLES = {"history": tuple(OLDER), "today": SPEED_TABLES}
NO_WINOGRAD = (("matmul", "conv"), ("conv3x3",))


def others(node: Hardware) -> dict[str, tuple[Hardware, int]]:
    """Return the models that the node's is compared with, and how many of their constants were fitted."""
    plain = _without_winograd(replace(node, processors=0))
    ones = dict.fromkeys(node.memory_efficiency, 1.0)
    peaks = replace(plain, compute_efficiency=dict.fromkeys(plain.compute_efficiency, 1.0), memory_efficiency=ones)
    free = replace(peaks, memory_bandwidth=math.inf, link_bandwidth=math.inf, link_latency=0.0, launch=0.0)
    (together,) = COMPUTE
    apart = (together[:-1], together[-1:])
    return {
        "floating-point operations only": (free, 0),
        "data sheets' peaks only": (peaks, 0),
        "three constants: convolutions, 3 x 3 ones, memory": (fitted(plain, compute=NO_WINOGRAD), 3),
        "without Winograd kernels": (fitted(_without_winograd(node), compute=NO_WINOGRAD), 3),
        "without whole tiles": (fitted(replace(node, processors=0)), 2),
        "Winograd kernels with an efficiency of their own": (fitted(node, compute=apart), 3),
        "fitted to unsteady timings, too": (fitted(node, {name: _all(x) for name, x in SOURCES.items()}), 2),
    }


def described(node: Hardware) -> dict[str, Any]:
    """Return what a model makes of the published rows."""
    found: dict[str, Any] = {}
    for name, experiments in TABLES.items():
        records = [predict_table(experiment, node) for experiment in experiments]
        found[name] = {
            "throughput": judged([x for record in records for x in throughput_errors(record).values()]),
            "speed-up": judged([x for record in records for x in speed_up_errors(record).values()]),
        }
    return found


def as_published() -> dict[str, Any]:
    """Return how far the speed-ups that GPipe's authors published, on TPUs, are from those of the same rows here."""
    found: dict[str, Any] = {}
    for name, experiments in TABLES.items():
        off = []
        for experiment in experiments:
            first, *rows = published(predictable()[experiment]).results
            for row in rows:
                theirs = next((x for key, x in row.values.items() if key.startswith("speedup_gpipe")), None)
                if theirs is not None:
                    off.append(theirs / (row.values["throughput"] / first.values["throughput"]) - 1)
        found[name] = {"speed-up": judged(off)}
    return found


def judged(off: list[float]) -> dict[str, float]:
    """Return the median and the largest size of errors, and how many are within 10%."""
    sizes = [abs(x) for x in off]
    return {"median": round(median(sizes), 6), "largest": round(max(sizes), 6),
            "within 10%": sum(x <= 0.1 for x in sizes), "rows": len(sizes)}  # fmt: skip


def root_mean_square(node: Hardware, sources: Mapping[str, Timings] = SOURCES) -> float:
    """Return it of the errors of the timings."""
    squares = [x * x for values in errors(node, sources).values() for x in values]
    return round(math.sqrt(sum(squares) / len(squares)), 4)


def _without_winograd(node: Hardware) -> Hardware:
    kept = {kind: share for kind, share in node.compute_efficiency.items() if kind != "winograd"}
    sources = {key: source for key, source in node.sources.items() if key != "compute_efficiency.winograd"}
    return replace(node, compute_efficiency=kept, sources=sources)


def _all(timings: Timings) -> Timings:
    return timings._replace(steps={**timings.steps, **timings.unsteady})
