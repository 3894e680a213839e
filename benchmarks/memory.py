"""Peak live bytes of training steps, beside another torchgpipe's.

    python -m benchmarks.memory --against DIR

DIR is a folder that another version was installed into: pip install --no-deps --target DIR torchgpipe==0.0.7

All storages are counted as operators return them, the same way for both versions; parameters, the input and gradients
included. The partitions are CPU devices, which share one memory, so what counts is the peak of their sum. Counts have
no noise, but for the workers engine: its partitions are at work at once, and how far each has come is a matter of time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.child import ROOT, Child, folder_with_torchgpipe
from benchmarks.circumstances import circumstances, keep
from benchmarks.memory_child import MODELS

CASES = [
    (model, n, m, checkpoint)
    for model in MODELS
    for n in (1, 2, 4)
    for m in (1, 4, 8)
    for checkpoint in ("never", "except_last", "always")
]
ENGINES = ("inline", "graph", "workers")


def main(arguments: Sequence[str] | None = None) -> None:
    """Count every case and print a table; exit with 1 where this version holds more than the other."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=folder_with_torchgpipe, required=True, metavar="DIR",
                        help="folder with another torchgpipe")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the peaks to FILE")
    options = parser.parse_args(arguments)

    under = circumstances()
    here, other = Child("memory_child.py", ROOT), Child("memory_child.py", options.against)
    peaks: dict[str, dict[str, int]] = {}
    try:
        for model, n, m, checkpoint in CASES:
            case = peaks[f"{model}, n={n} m={m} {checkpoint}"] = {"other": other.ask(model, n, m, checkpoint, None)}
            for engine in ENGINES:
                case[engine] = here.ask(model, n, m, checkpoint, engine)
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
    more = [case for case, found in peaks.items() for engine in ENGINES if found[engine] > found["other"]]
    if more:
        raise SystemExit(f"memory: more than {other.version} in {len(more)} of {len(peaks) * len(ENGINES)} cases")


def table(result: dict[str, Any], style: str = "simple") -> str:
    """Render the ratios to the other version's peaks, lowest and highest, by model and checkpoint mode; then each case
    that is above, in MiB."""
    from tabulate import tabulate

    def by(case: str) -> str:
        model, setup = case.rsplit(", ", 1)
        return f"{model}, {setup.split()[-1]}"

    peaks = result["peak_bytes"]
    rows: list[list[str]] = []
    for group in dict.fromkeys(map(by, peaks)):
        ratios = {e: [found[e] / found["other"] for case, found in peaks.items() if by(case) == group] for e in ENGINES}
        rows.append([group, *(f"{min(r):.3f} to {max(r):.3f}" for r in ratios.values())])
    above = [
        [case, f"{engine}: {ours / other:.3f}, {ours / 2**20:.3f} of {other / 2**20:.3f} MiB"]
        for case, found in peaks.items()
        for engine in ENGINES
        for ours, other in [(found[engine], found["other"])]
        if ours > other
    ]
    headers = [f"of {result['versions']['other']}'s peak", *ENGINES]
    text = tabulate(rows, headers=headers, disable_numparse=True, tablefmt=style)
    if above:
        text += "\n\n" + tabulate(above, headers=["above it", ""], disable_numparse=True, tablefmt=style)
    return text


if __name__ == "__main__":
    main()
