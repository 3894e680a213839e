"""What each part of the model of a device does to its errors.

The parts are judged by timings that were published of single devices, from which the efficiencies are worked out, and
not by the rows of the speed tables, which are shown beside them.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from statistics import median

from reproduce.p40.efficiencies import COMPUTE, LAUNCH, MEMORY, errors, fitted
from reproduce.p40.single_convolutions import FIGURES, predicted
from reproduce.p40.timings import SOURCES, Timings
from reproduce.predict.rows import SPEED_TABLES, predict_table
from reproduce.tables.markdown import row_of, rule_of
from reproduce.tables.predicted import speed_up_errors
from torchgpipe.plan.hardware import Hardware, load_hardware

__all__ = ["choices", "convolutions", "effects", "held_out", "timings", "variants"]

RATE = "compute_efficiency."

PLAIN, UNFUSED = COMPUTE
ALL_THREE_BY_THREE = (("matmul", "conv"), ("conv3x3",))
FUSED = "winograd_fused"
FUSED_ALIKE = (PLAIN, (*UNFUSED, FUSED))
FUSED_BY_TIMINGS = (*COMPUTE, (FUSED,))
SHOWN = ("conv", *UNFUSED, FUSED)
FUSED_SHARES = (0.3, 0.4, 0.5)


@functools.cache
def variants() -> dict[str, Hardware]:
    """Return the P40's description without what is said, and as it is; each with efficiencies worked out alike."""
    node = load_hardware("p40x8")
    copying = _copying(node)
    untiled = replace(copying, processors=0)
    return {
        "one efficiency for 3 x 3": fitted(_lacking(untiled, *UNFUSED, FUSED), (), compute=ALL_THREE_BY_THREE),
        "Winograd kernels": fitted(untiled, (), compute=FUSED_ALIKE),
        "and whole tiles": fitted(copying, (), compute=FUSED_ALIKE),
        "and memory's share": fitted(node, compute=FUSED_ALIKE),
        "and fused ones apart": node,
    }


@functools.cache
def timings() -> str:
    """Return the errors of the published timings, by source and model, for each variant."""
    found = {name: errors(node) for name, node in variants().items()}
    lines = [row_of("source", "model", "ms, published", *found), rule_of(2 + len(found))]
    for name, source in SOURCES.items():
        for model, steps in source.steps.items():
            each = (" ".join(f"{x[name, model, k]:+.0%}" for k in range(len(steps))) for x in found.values())
            lines.append(row_of(name, model, " ".join(f"{ms:g}" for ms in steps), *each))
    roots = (f"{_root(list(x.values())):.1%}" for x in found.values())
    return "\n".join([*lines, row_of("root mean square", "", "", *roots)])


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
    found["fused Winograd kernels as fast as the timings have them"] = fitted(node, compute=FUSED_BY_TIMINGS)
    for share in FUSED_SHARES:
        rates = {**node.compute_efficiency, FUSED: share}
        found[f"fused ones at {share:.2f}"] = fitted(replace(node, compute_efficiency=rates))
    found["fused ones at the efficiency of the others"] = variants()["and memory's share"]
    slow = "issuing an operator takes as long as on the P40's machine"
    found[slow] = fitted(node, launch=node.launch)
    lines = [
        row_of("", *(f"`{kind}`" for kind in SHOWN), "memory", "timings", "median", "within 10%", "U-Net pipeline-8"),
        rule_of(len(SHOWN) + 5),
    ]
    for name, other in found.items():
        of_timings = errors(other, node.launch if name == slow else LAUNCH)
        speed_ups = _speed_ups(other)
        sizes = [abs(error) for error in speed_ups.values()]
        memory = sorted({f"{other.memory_efficiency[kind]:.2f}" for kind in MEMORY})
        cells = (
            *(f"{other.compute_efficiency[kind]:.2f}" for kind in SHOWN),
            " to ".join(dict.fromkeys((memory[0], memory[-1]))),
            f"{_root(list(of_timings.values())):.1%}",
            f"{median(sizes):.1%}",
            f"{sum(size <= 0.1 for size in sizes)} of {len(sizes)}",
            f"{speed_ups['unet pipeline-8']:+.1%}",
        )
        lines.append(row_of(name, *cells))
    return "\n".join(lines)


def _lacking(node: Hardware, *kinds: str) -> Hardware:
    """Return the node without these kernels."""
    return replace(
        node,
        compute_efficiency={kind: share for kind, share in node.compute_efficiency.items() if kind not in kinds},
        sources={key: source for key, source in node.sources.items() if key.removeprefix(RATE) not in kinds},
    )


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
    """Return each source's errors with efficiencies from the others, for the last variants."""
    node = load_hardware("p40x8")
    copying = _copying(node)
    lines = [row_of("root mean square", *list(variants())[-3:]), rule_of(3)]
    for name in SOURCES:
        cells = []
        others = _without(name)
        for found in (
            fitted(copying, (), others, compute=FUSED_ALIKE),
            fitted(node, sources=others, compute=FUSED_ALIKE),
            fitted(node, sources=others),
        ):
            cells.append(_root([error for (source, *_), error in errors(found).items() if source == name]))
        lines.append(row_of(name, *(f"{cell:.1%}" for cell in cells)))
    return "\n".join(lines)


@functools.cache
def effects() -> str:
    """Return the efficiencies of each variant, and its errors in the rows of the speed tables."""
    nodes = variants()
    errors = {name: _speed_ups(node) for name, node in nodes.items()}
    lines = [row_of("", *nodes), rule_of(len(nodes))]
    lines.append(row_of("efficiency of `conv`", *(f"{x.compute_efficiency['conv']:.2f}" for x in nodes.values())))
    lines.append(row_of("of `conv3x3`", *(f"{x.compute_efficiency['conv3x3']:.2f}" for x in nodes.values())))
    lines.extend(row_of(f"of `{kind}`", *(_share(x, kind) for x in nodes.values())) for kind in (*UNFUSED, FUSED))
    lines.append(row_of("share of memory's bandwidth", *(f"{x.memory_efficiency['norm']:.2f}" for x in nodes.values())))
    for row in next(iter(errors.values())):
        lines.append(row_of(row, *(f"{errors[name][row]:+.1%}" for name in nodes)))
    sizes = {name: [abs(e) for e in rows.values()] for name, rows in errors.items()}
    lines.append(row_of("median", *(f"{median(sizes[name]):.1%}" for name in nodes)))
    lines.append(row_of("rows within 10%", *(str(sum(e <= 0.1 for e in sizes[name])) for name in nodes)))
    ablation = {name: speed_up_errors(predict_table("unet-ablation", node)) for name, node in nodes.items()}
    for row in next(iter(ablation.values())):
        lines.append(row_of(f"ablation {row}", *(f"{ablation[name][row]:+.1%}" for name in nodes)))
    return "\n".join(lines)


def convolutions() -> str:
    """Return the errors of convolutions that were timed by themselves, with fused kernels as the others and apart."""
    nodes = list(variants().values())[-2:]
    each = ("fused alike", "fused apart")
    titles = ("card", "images", "kernel", "filters", "forward, us", *each, "with both gradients, us", *each)
    lines = [row_of(*titles), rule_of(len(titles) - 1)]
    for figure in FIGURES:
        images, filters, kernel, *_ = figure.shape
        cells = [" x ".join(map(str, images)), " x ".join(map(str, kernel)), str(filters)]
        for k, published in enumerate((figure.seconds, figure.total)):
            errors = (predicted(figure, node)[k] / published - 1 for node in nodes)
            cells += [f"{1e6 * published:.0f}", *(f"{error:+.0%}" for error in errors)]
        lines.append(row_of(figure.card.name, *cells))
    return "\n".join(lines)


def _speed_ups(node: Hardware) -> dict[str, float]:
    """Return the errors of the speed-ups, without the tables' first rows."""
    return {
        f"{experiment.partition('-')[0]} {row}": error
        for experiment in SPEED_TABLES
        for row, error in speed_up_errors(predict_table(experiment, node)).items()
    }


def _share(node: Hardware, kind: str) -> str:
    return f"{node.compute_efficiency[kind]:.2f}" if kind in node.compute_efficiency else ""


def _root(values: list[float]) -> float:
    return float((sum(x * x for x in values) / len(values)) ** 0.5)
