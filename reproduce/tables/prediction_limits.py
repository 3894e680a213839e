"""How far from their limits the parts of a node are in the speed tables' rows, and what slower layers would do."""

from __future__ import annotations

from dataclasses import replace

from reproduce.predict.rows import SPEED_TABLES, predictable, predictor_of, setup_of, speed
from reproduce.records.published import published
from reproduce.tables.markdown import row_of, rule_of
from torchgpipe.checkpoint import checkpointed
from torchgpipe.plan.count import Counts
from torchgpipe.plan.hardware import Hardware, load_hardware
from torchgpipe.plan.predict import LayerSeconds, Predictor

__all__ = ["resources", "slower_layers"]

LONGER = (0.0, 0.1, 0.2, 0.3)


def resources() -> str:
    """Return the shares of a step during which the busiest device, its links and the host would be at work."""
    node = load_hardware("p40x8")
    lines = [
        row_of("", "busiest device", "busiest sender", "all copies, one by one", "Python issuing operators"),
        rule_of(4),
    ]
    for experiment in SPEED_TABLES:
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
            lines.append(row_of(f"{experiment.partition('-')[0]} {row.row}", *cells))
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
    lines = [row_of(f"layers {a} to {b - 1} of {setup.cuts[-1][-1]}", *titles), rule_of(len(LONGER))]
    for row, *of_row in list(zip(rows, *errors, strict=True))[1:]:
        lines.append(row_of(row.row, *(f"{error:+.1%}" for error in of_row)))
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
