"""Peak live bytes of training steps, beside another torchgpipe's.

    python -m benchmarks.memory --against DIR

DIR is a folder that another version was installed into: pip install --no-deps --target DIR torchgpipe==0.0.7

All storages are counted as operators return them, the same way for both versions; parameters, the input and gradients
included. Gradients are dropped after each step; if they stayed, this version would hold one set more. The partitions
are CPU devices, which share one memory, so what counts is the peak of their sum.

What is judged is the graph engine, on one device ("graph") and as it works across several, such as GPUs ("across"): it
runs one task at a time, so its counts have no noise. Where threads are at work at once, how far each has come is a
matter of time: such cases are counted several times, and workers, which "auto" chooses for several CPU partitions, are
reported only.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Sequence

from benchmarks.child import ROOT, children
from benchmarks.harness import Found, by_case, command, keep, render, start
from benchmarks.memory_child import MODELS
from benchmarks.pipelines import ENGINES as NAMED
from reproduce.records.record import Record, Result

CASES = [
    (model, n, m, checkpoint)
    for model in MODELS
    for n in (1, 2, 4)
    for m in (1, 4, 8)
    for checkpoint in ("never", "except_last", "always")
]
ENGINES = ("auto", *NAMED)
JUDGED = ("graph", "across")
ALLOWED = 1.01
"""By the other version's peak. A task's node holds the gradient of the task's output until its backward has ended,
which was seen to make up to 0.7 %."""
REPETITIONS = 5


def repetitions(n: int, m: int, engine: str) -> int:
    """Return how often a case is counted: more than once where threads overlap, as 0.0.7's do in forward."""
    return REPETITIONS if n > 1 and m > 1 and engine in ("other", "auto", "workers") else 1


def main(arguments: Sequence[str] | None = None) -> None:
    """Count every case and print a table; exit with 1 where an engine that is judged holds too much."""
    options = command("memory", __doc__, against=True).parse_args(arguments)
    record = start(options, "memory", "peak memory of training steps", {"peak": "bytes"}, devices=4)
    record = keep(record, options.json, measure(options), len(CASES), table)
    if above := too_much(record):
        raise SystemExit(f"memory: above {ALLOWED:g} of the other version's peak: {'; '.join(above)}")


def measure(options: Namespace) -> Found:
    """Yield the results of one case after another."""
    with children("memory_child.py", here=ROOT, other=options.against) as versions:
        for model, n, m, checkpoint in CASES:
            results = []
            for engine in ("other", *ENGINES):
                child, asked = (versions["other"], None) if engine == "other" else (versions["here"], engine)
                times = range(repetitions(n, m, engine))
                samples = {"peak": [child.ask(model, n, m, checkpoint, asked) for _ in times]}
                case, config = f"{model}, n={n} m={m} {checkpoint}", {"version": child.version}
                results.append(Result(case, engine, "measured", config=config, samples=samples))
            yield results


def too_much(record: Record) -> list[str]:
    """Return the cases and engines that hold more than is allowed."""
    found = {case: _ratios(engines) for case, engines in by_case(record).items()}
    return [
        f"{case}, {engine}: {ratios[engine][0]:.4f}"
        for case, ratios in found.items()
        for engine in JUDGED
        if engine in ratios and ratios[engine][0] > ALLOWED
    ]


def table(record: Record, style: str = "simple") -> str:
    """Render the ratios to the other version's peaks by model and checkpoint mode, lowest to highest median over the
    cases, and the highest repetition where that is above the medians; then each case with one above 1, in MiB."""

    def by(case: str) -> str:
        model, setup = case.rsplit(", ", 1)
        return f"{model}, {setup.split()[-1]}"

    cases = by_case(record)
    ratios = {case: _ratios(found) for case, found in cases.items()}
    engines = list(dict.fromkeys(engine for found in ratios.values() for engine in found))
    rows = [
        [group, *(_range([found[engine] for case, found in ratios.items() if by(case) == group]) for engine in engines)]
        for group in dict.fromkeys(map(by, cases))
    ]
    over = [
        [
            case, engine, f"{median:.4f}", f"{highest:.4f}",
            f"{max(_peaks(cases[case][engine])) / 2**20:.3f} of "
            f"{statistics.median(_peaks(cases[case]['other'])) / 2**20:.3f}",
        ]
        for case, found in ratios.items()
        for engine, (median, highest) in found.items()
        if highest > 1
    ]  # fmt: skip
    version = next(iter(cases.values()))["other"].config["version"]
    text = render([f"of {version}'s peak", *engines], rows, style)
    if over:
        text += "\n\n" + render(["above it", "", "median", "highest", "MiB at the highest"], over, style)
    return text


def _peaks(counted: Result) -> list[int | float]:
    return counted.samples["peak"]


def _ratios(found: dict[str, Result]) -> dict[str, tuple[float, float]]:
    """Return, for each engine, the median and the highest of its peaks by the median of the other version's."""
    other = statistics.median(_peaks(found["other"]))
    return {
        engine: (statistics.median(_peaks(counted)) / other, max(_peaks(counted)) / other)
        for engine, counted in found.items()
        if engine != "other"
    }


def _range(ratios: list[tuple[float, float]]) -> str:
    medians, highest = [median for median, _ in ratios], max(highest for _, highest in ratios)
    once = f", once {highest:.3f}" if f"{highest:.3f}" > f"{max(medians):.3f}" else ""
    return f"{min(medians):.3f} to {max(medians):.3f}{once}"


if __name__ == "__main__":
    main()
