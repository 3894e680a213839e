"""What each part of the model of a device does to its errors, and how far from their limits other parts of a node are.

The parts are judged by timings that were published of single devices, from which the efficiencies are worked out, and
not by the rows of the speed tables, which are shown beside them.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from statistics import median

from reproduce.efficiencies import MEMORY, errors, fitted
from reproduce.paper import published
from reproduce.predict import predict_table, predictable, predictor_of, setup_of, speed
from reproduce.predicted_table import speed_up_errors
from reproduce.timings import SOURCES, Timings
from torchgpipe.checkpoint import checkpointed
from torchgpipe.plan.count import Counts
from torchgpipe.plan.hardware import Hardware, load_hardware
from torchgpipe.plan.predict import LayerSeconds, Predictor

__all__ = ["choices", "effects", "held_out", "resources", "slower_layers", "timings"]

TABLES = ("amoebanet-speed", "unet-speed", "resnet101-speed")
LONGER = (0.0, 0.1, 0.2, 0.3)


@functools.cache
def variants() -> dict[str, Hardware]:
    """Return the P40's description without what is said, and as it is; each with efficiencies worked out alike."""
    node = load_hardware("p40x8")
    copying = _copying(node)
    untiled = replace(copying, processors=0)
    plain = replace(
        untiled,
        compute_efficiency={kind: share for kind, share in node.compute_efficiency.items() if kind != "winograd"},
        sources={key: source for key, source in node.sources.items() if key != "compute_efficiency.winograd"},
    )
    return {
        "one efficiency for 3 x 3": fitted(plain, ()),
        "Winograd kernels": fitted(untiled, ()),
        "and whole tiles": fitted(copying, ()),
        "and memory's share": node,
    }


@functools.cache
def timings() -> str:
    """Return the errors of the published timings, by source and model, for each variant."""
    found = {name: errors(node) for name, node in variants().items()}
    lines = [_row("source", "model", "ms, published", *found), _rule(2 + len(found))]
    for name, source in SOURCES.items():
        for model, steps in source.steps.items():
            each = (" ".join(f"{x[name, model, k]:+.0%}" for k in range(len(steps))) for x in found.values())
            lines.append(_row(name, model, " ".join(f"{ms:g}" for ms in steps), *each))
    roots = (f"{_root(list(x.values())):.1%}" for x in found.values())
    return "\n".join([*lines, _row("root mean square", "", "", *roots)])


@functools.cache
def choices() -> str:
    """Return the efficiencies, had they been worked out otherwise, and what they would make of the speed tables."""
    node = load_hardware("p40x8")
    found = {"as in the description": node}
    found |= {f"without {name}": fitted(node, sources=_without(name)) for name in SOURCES}
    for kind in ("resnet", "densenet", "squeezenet"):
        found[f"with unsteady {kind}s, too"] = fitted(node, sources=_with_unsteady(kind))
    found["with all that is unsteady, too"] = fitted(node, sources=_with_unsteady(""))
    found["one each for norm, pool and elementwise"] = fitted(node, [[kind] for kind in MEMORY])
    found["issuing an operator takes as long as on the P40's machine"] = fitted(node, launch=node.launch)
    lines = [
        _row("", "`conv`", "`winograd`", "memory", "median error", "rows within 10%", "U-Net pipeline-8"),
        _rule(6),
    ]
    for name, other in found.items():
        speed_ups = _speed_ups(other)
        sizes = [abs(error) for error in speed_ups.values()]
        memory = sorted({f"{other.memory_efficiency[kind]:.2f}" for kind in MEMORY})
        cells = (
            *(f"{other.compute_efficiency[kind]:.2f}" for kind in ("conv", "winograd")),
            " to ".join(dict.fromkeys((memory[0], memory[-1]))),
            f"{median(sizes):.1%}",
            f"{sum(size <= 0.1 for size in sizes)} of {len(sizes)}",
            f"{speed_ups['unet pipeline-8']:+.1%}",
        )
        lines.append(_row(name, *cells))
    return "\n".join(lines)


def _copying(node: Hardware) -> Hardware:
    """Return the node if all that is bound by memory reached what a copy on the device does."""
    return replace(node, memory_efficiency=dict.fromkeys(node.memory_efficiency, node.memory_efficiency["conv"]))


def _without(name: str) -> dict[str, Timings]:
    """Return all sources but one."""
    return {other: timings for other, timings in SOURCES.items() if other != name}


def _with_unsteady(kind: str) -> dict[str, Timings]:
    """Return the sources with what was left out of them because it is unsteady: those models whose names start so."""
    return {
        name: timings._replace(
            steps={**timings.steps, **{m: steps for m, steps in timings.unsteady.items() if m.startswith(kind)}}
        )
        for name, timings in SOURCES.items()
    }


@functools.cache
def held_out() -> str:
    """Return each source's errors with efficiencies from the others, without and with memory's share."""
    node = load_hardware("p40x8")
    copying = _copying(node)
    lines = [_row("root mean square", *list(variants())[-2:]), _rule(2)]
    for name in SOURCES:
        cells = []
        for found in (fitted(copying, (), _without(name)), fitted(node, sources=_without(name))):
            cells.append(_root([error for (source, *_), error in errors(found).items() if source == name]))
        lines.append(_row(name, *(f"{cell:.1%}" for cell in cells)))
    return "\n".join(lines)


@functools.cache
def effects() -> str:
    """Return the efficiencies of each variant, and its errors in the rows of the speed tables."""
    nodes = variants()
    errors = {name: _speed_ups(node) for name, node in nodes.items()}
    lines = [_row("", *nodes), _rule(len(nodes))]
    lines.append(_row("efficiency of `conv`", *(f"{x.compute_efficiency['conv']:.2f}" for x in nodes.values())))
    lines.append(_row("of `conv3x3`", *(f"{x.compute_efficiency['conv3x3']:.2f}" for x in nodes.values())))
    lines.append(_row("of `winograd`", *(_share(x, "winograd") for x in nodes.values())))
    lines.append(_row("share of memory's bandwidth", *(f"{x.memory_efficiency['norm']:.2f}" for x in nodes.values())))
    for row in next(iter(errors.values())):
        lines.append(_row(row, *(f"{errors[name][row]:+.1%}" for name in nodes)))
    sizes = {name: [abs(e) for e in rows.values()] for name, rows in errors.items()}
    lines.append(_row("median", *(f"{median(sizes[name]):.1%}" for name in nodes)))
    lines.append(_row("rows within 10%", *(str(sum(e <= 0.1 for e in sizes[name])) for name in nodes)))
    return "\n".join(lines)


def resources() -> str:
    """Return the shares of a step during which the busiest device, its links and the host would be at work."""
    node = load_hardware("p40x8")
    lines = [
        _row("", "busiest device", "busiest sender", "all copies, one by one", "Python issuing operators"),
        _rule(4),
    ]
    for experiment in TABLES:
        for row in published(predictable()[experiment]).results:
            predictor = predictor_of(row.config, node)
            setup = setup_of(row.config, len(predictor.counts))
            if len(setup.balance) == 1:
                continue
            timeline = predictor.step(setup).timeline
            n, m = timeline.partitions, len(setup.sizes)
            copies, skips = predictor.copies(setup)
            routes = {(j, j + 1): seconds for j, seconds in enumerate(copies)}
            for route, seconds in skips.items():
                routes[route] = routes.get(route, 0.0) + seconds
            # Forward sends along every route, and backward against it.
            sent = [m * sum(s for route, s in routes.items() if j in route) for j in range(n)]
            issued = sum(len(layer.forward) for layer in predictor.counts.low)
            issued *= m + checkpointed(setup.checkpoint, m)
            shares = (
                max(timeline.busy(j) for j in range(n)),
                max(sent),
                2 * m * sum(routes.values()),
                issued * node.launch,
            )
            cells = (f"{share / timeline.seconds:.0%}" for share in shares)
            lines.append(_row(f"{experiment.partition('-')[0]} {row.row}", *cells))
    return "\n".join(lines)


def slower_layers() -> str:
    """Return the errors of U-Net's speed-ups, did the layers of `pipeline-8`'s busiest partition take longer."""
    node = load_hardware("p40x8")
    rows = published(predictable()["unet-speed"]).results
    predictors = [predictor_of(row.config, node) for row in rows]
    setup = setup_of(rows[-1].config, len(predictors[-1].counts))
    timeline = predictors[-1].step(setup).timeline
    a, b = setup.cuts[max(range(timeline.partitions), key=timeline.busy)]

    errors = []
    for longer in LONGER:
        found = [speed(_Slower(each.counts, node, range(a, b), 1 + longer), row.config)["throughput"]
                 for each, row in zip(predictors, rows, strict=True)]  # fmt: skip
        papers = [row.values["throughput"] for row in rows]
        errors.append([x / found[0] / (paper / papers[0]) - 1 for x, paper in zip(found, papers, strict=True)])
    titles = (f"{longer:.0%} longer" if longer else "as predicted" for longer in LONGER)
    lines = [_row(f"layers {a} to {b - 1} of {setup.cuts[-1][-1]}", *titles), _rule(len(LONGER))]
    for row, *of_row in list(zip(rows, *errors, strict=True))[1:]:
        lines.append(_row(row.row, *(f"{error:+.1%}" for error in of_row)))
    return "\n".join(lines)


class _Slower(Predictor):
    """Predict steps with some layers slower by a factor."""

    def __init__(self, counts: Counts, hardware: Hardware, slow: range, factor: float) -> None:
        super().__init__(counts, hardware)
        self._slow, self._factor = slow, factor

    def layers(self, size: int) -> LayerSeconds:
        """Return the seconds of every layer for micro-batches of `size` samples."""
        found = super().layers(size)
        forward, graph, backward = (
            [seconds * (self._factor if i in self._slow else 1.0) for i, seconds in enumerate(each)]
            for each in (found.forward, found.graph, found.backward)
        )
        return replace(found, forward=forward, graph=graph, backward=backward)


def _speed_ups(node: Hardware) -> dict[str, float]:
    """Return the errors of the speed-ups, without the tables' first rows."""
    return {
        f"{experiment.partition('-')[0]} {row}": error
        for experiment in TABLES
        for row, error in speed_up_errors(predict_table(experiment, node)).items()
    }


def _share(node: Hardware, kind: str) -> str:
    return f"{node.compute_efficiency[kind]:.2f}" if kind in node.compute_efficiency else ""


def _root(values: list[float]) -> float:
    return float((sum(x * x for x in values) / len(values)) ** 0.5)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _rule(columns: int) -> str:
    return _row("---", *["---:"] * columns)
