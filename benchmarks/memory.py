"""Peak live bytes of training steps, beside another torchgpipe's.

    python -m benchmarks.memory --against DIR

DIR is a folder that another version was installed into: pip install --no-deps --target DIR torchgpipe==0.0.7

All storages are counted as operators return them, the same way for both versions; parameters, the input and gradients
included. Gradients are dropped after each step; if they stayed, this version would hold one set more. The partitions
are CPU devices, which share one memory, so what counts is the peak of their sum. Counts have no noise, but where
threads are at work at once, how far each has come is a matter of time: such cases are counted several times. "auto" is
what `GPipe` chooses by itself, and its median is what must not be above the other's; "across", its choice on GPUs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.child import ROOT, Child
from benchmarks.circumstances import circumstances, keep
from benchmarks.memory_child import MODELS
from benchmarks.pipelines import ENGINES as NAMED
from reproduce.regression.interleave import folder_with_torchgpipe

CASES = [
    (model, n, m, checkpoint)
    for model in MODELS
    for n in (1, 2, 4)
    for m in (1, 4, 8)
    for checkpoint in ("never", "except_last", "always")
]
ENGINES = ("auto", *NAMED)
REPETITIONS = 5
Peaks = dict[str, dict[str, list[int]]]


def repetitions(n: int, m: int, engine: str) -> int:
    """Return how often a case is counted: more than once where threads overlap, as 0.0.7's do in forward."""
    return REPETITIONS if n > 1 and m > 1 and engine in ("other", "auto", "workers") else 1


def main(arguments: Sequence[str] | None = None) -> None:
    """Count every case and print a table; exit with 1 where this version holds more than the other."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=folder_with_torchgpipe, required=True, metavar="DIR",
                        help="folder with another torchgpipe")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every peak to FILE")
    options = parser.parse_args(arguments)

    under = circumstances()
    here, other = Child("memory_child.py", ROOT), Child("memory_child.py", options.against)
    peaks: Peaks = {}
    try:
        for model, n, m, checkpoint in CASES:
            case = peaks[f"{model}, n={n} m={m} {checkpoint}"] = {}
            for engine in ("other", *ENGINES):
                child, asked = (other, None) if engine == "other" else (here, engine)
                times = repetitions(n, m, engine)
                case[engine] = [child.ask(model, n, m, checkpoint, asked) for _ in range(times)]
            print(f"\r{len(peaks)}/{len(CASES)} cases", end="", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        here.close()
        other.close()
        print(file=sys.stderr)

    result = {"versions": {"here": here.version, "other": other.version}, "peak_bytes": peaks}
    print(table(result))
    if options.json is not None:
        keep(options.json, "memory", under, result)
    if more := above(peaks):
        raise SystemExit(f"memory: more than {other.version} in {len(more)} of {len(peaks)} cases: {'; '.join(more)}")


def above(peaks: Peaks) -> list[str]:
    """Return the cases in which the engine that `GPipe` chooses holds more than the other version, by the medians."""
    return [case for case, found in peaks.items() if "auto" in found and _ratios(found)["auto"][0] > 1]


def table(result: dict[str, Any], style: str = "simple") -> str:
    """Render the ratios to the other version's peaks by model and checkpoint mode, lowest to highest median over the
    cases, and the highest repetition where that is above the medians; then each case with one above 1, in MiB."""
    from tabulate import tabulate

    def by(case: str) -> str:
        model, setup = case.rsplit(", ", 1)
        return f"{model}, {setup.split()[-1]}"

    peaks = result["peak_bytes"]
    ratios = {case: _ratios(found) for case, found in peaks.items()}
    engines = list(dict.fromkeys(engine for found in ratios.values() for engine in found))
    rows = [
        [group, *(_range([found[engine] for case, found in ratios.items() if by(case) == group]) for engine in engines)]
        for group in dict.fromkeys(map(by, peaks))
    ]
    over = [
        [
            case, engine, f"{median:.4f}", f"{highest:.4f}",
            f"{max(peaks[case][engine]) / 2**20:.3f} of {statistics.median(peaks[case]['other']) / 2**20:.3f}",
        ]
        for case, found in ratios.items()
        for engine, (median, highest) in found.items()
        if highest > 1
    ]  # fmt: skip
    headers = [f"of {result['versions']['other']}'s peak", *engines]
    text = tabulate(rows, headers=headers, disable_numparse=True, tablefmt=style)
    if over:
        headers = ["above it", "", "median", "highest", "MiB at the highest"]
        text += "\n\n" + tabulate(over, headers=headers, disable_numparse=True, tablefmt=style)
    return text


def _ratios(found: dict[str, list[int]]) -> dict[str, tuple[float, float]]:
    """Return, for each engine, the median and the highest of its peaks by the median of the other version's."""
    other = statistics.median(found["other"])
    return {
        engine: (statistics.median(counts) / other, max(counts) / other)
        for engine, counts in found.items()
        if engine != "other"
    }


def _range(ratios: list[tuple[float, float]]) -> str:
    medians, highest = [median for median, _ in ratios], max(highest for _, highest in ratios)
    once = f", once {highest:.3f}" if f"{highest:.3f}" > f"{max(medians):.3f}" else ""
    return f"{min(medians):.3f} to {max(medians):.3f}{once}"


if __name__ == "__main__":
    main()
