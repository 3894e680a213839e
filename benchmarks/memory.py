"""Peak live bytes of training steps, beside another torchgpipe's.

    python -m benchmarks.memory --against DIR

DIR is a folder that another version was installed into: pip install --no-deps --target DIR torchgpipe==0.0.7

Each partition's storages are counted as operators return them, the same way for both versions; parameters, the input
and gradients included. A figure is the sum of the partitions' peaks, as of devices of their own. A count has no noise.
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
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every partition's peak to FILE")
    options = parser.parse_args(arguments)

    under = circumstances()
    here, other = Child("memory_child.py", ROOT), Child("memory_child.py", options.against)
    peaks: dict[str, dict[str, list[int]]] = {}
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
    more = [case for case, found in peaks.items() for engine in ENGINES if sum(found[engine]) > sum(found["other"])]
    if more:
        raise SystemExit(f"memory: more than {other.version} in {len(more)} of {len(peaks) * len(ENGINES)} cases")


def table(result: dict[str, Any], style: str = "simple") -> str:
    """Render the sums of the partitions' peaks, in MiB, and their ratios to the other version's."""
    from tabulate import tabulate

    other = result["versions"]["other"]
    rows = []
    for case, found in result["peak_bytes"].items():
        row = [case, f"{sum(found['other']) / 2**20:.3f}"]
        for engine in ENGINES:
            row += [f"{sum(found[engine]) / 2**20:.3f}", f"{sum(found[engine]) / sum(found['other']):.3f}"]
        rows.append(row)
    headers = ["case", f"{other}, MiB", *(h for engine in ENGINES for h in (f"{engine}, MiB", "ratio"))]
    align = ("left", *["right"] * (len(headers) - 1))
    return tabulate(rows, headers=headers, disable_numparse=True, colalign=align, tablefmt=style)


if __name__ == "__main__":
    main()
