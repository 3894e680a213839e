"""Measure the overhead of pipelines: compare with a plain loop over the same layers, and with another torchgpipe.

docs/measured.md has its commands. A number is the median over all rounds, in microseconds per task: the time of
`model(x)`, and of `loss.backward()`, divided by n·m. It includes the time of the layers. Beside each engine is the
ratio of its total time to that of the other version (same engine if it has it) or, without another version, to the
plain loop. On CUDA all partitions are on one GPU.
"""

import argparse
import runpy
from collections.abc import Sequence
from contextlib import closing
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.gates.machinery_child import MODELS, MODES
from benchmarks.harness import Found, by_case, collect, command, positive, start
from benchmarks.pipelines import ENGINES
from reproduce.error import Error
from reproduce.machine.description import ROOT
from reproduce.machine.git import commit_of
from reproduce.records.record import Record, Result
from reproduce.regression.job import in_turn
from reproduce.regression.trees import TORCHGPIPE, committed
from reproduce.tables.layout import grid

DIRECTIONS = ("forward", "backward")
BOTH = "both"
VERSION = "torchgpipe/__version__.py"
OTHER = "other"
WAYS = ("plain", OTHER, *(way for engine in ENGINES for way in (f"{engine}, {OTHER}", engine)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every case and print a table."""
    parser = command("gates.machinery", __doc__, rounds=5, steps=20)
    parser.add_argument(
        "--against", type=other_torchgpipe, metavar="REV|DIR", help="another torchgpipe"
    )
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["linear"])
    parser.add_argument("--checkpoint", nargs="+", choices=MODES, default=["never", "always"])
    parser.add_argument("--partitions", type=positive, nargs="+", default=[1, 2, 4, 8], metavar="n")
    parser.add_argument("--chunks", type=positive, nargs="+", default=[1, 8, 32], metavar="m")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "--device cuda: there is no CUDA device here; leave it out to measure on the CPU"
        )
    devices = 1 if options.device == "cuda" else max(options.partitions)
    unit = dict.fromkeys((*DIRECTIONS, BOTH), "us/task")
    record = start(
        options, "gates.machinery", "time per task", unit, devices=devices, device=options.device
    )
    cases = [*product(options.model, options.checkpoint, options.partitions, options.chunks)]
    collect(record, options.json, measure(options, cases), len(cases), table)


def other_torchgpipe(text: str) -> Path | str:
    """Parse an argument: a folder with a torchgpipe, or a git revision of this repository."""
    if (Path(text) / VERSION).is_file():
        return Path(text).absolute()
    try:
        commit_of(ROOT, text)
    except Error as error:
        install = f"pip install --no-deps --target {text} torchgpipe==0.0.7"
        raise argparse.ArgumentTypeError(
            f"{error}, or a folder with a torchgpipe in it ({install})"
        ) from None
    return text


def measure(options: argparse.Namespace, cases: Sequence[tuple[str, str, int, int]]) -> Found:
    """Yield the results of one case after another."""
    other = options.against
    with TemporaryDirectory() as temporary:
        sides = [(ROOT, version(ROOT))]
        if isinstance(other, Path):
            sides.append((other, version(other)))
        elif other is not None:
            sides.append(
                (
                    committed(TORCHGPIPE, other, Path(temporary) / "other").folder,
                    f"torchgpipe {other}",
                )
            )
        for number, (model, checkpoint, n, m) in enumerate(cases):
            engines = ENGINES if n > 1 and options.device == "cpu" else ENGINES[:1]
            ways: dict[str, tuple[int, str | None]] = {
                "plain": (0, "plain"),
                **{each: (0, each) for each in engines},
            }
            if other is not None and sides[1][1].startswith(
                "torchgpipe 0.0."
            ):  # it has no option `engine`
                ways[OTHER] = 1, None
            elif other is not None:
                ways |= {f"{engine}, {OTHER}": (1, engine) for engine in engines}
            asked = options.steps, model, n, m, checkpoint, options.device
            case = f"{'' if model == 'linear' else f'{model} '}n={n} m={m} {checkpoint}"
            job = {
                "folders": [str(folder) for folder, _ in sides],
                "package": "torchgpipe",
                "maker": "benchmarks.gates.machinery_child:prepare",
                "cases": {case: {way: (side, (*asked, how)) for way, (side, how) in ways.items()}},
                "rounds": options.rounds,
                "seed": number,
                "least": 1,
            }
            unable: dict[str, str] = {}
            found: dict[str, list[list[tuple[float, float]]]] = {}
            with closing(in_turn(job, {})) as lines:
                for line in lines:
                    unable |= line.get("unable", {})
                    found |= line.get("samples", {})
            yield [
                _result(case, way, sides[side][1], found.get(way), unable.get(way))
                for way, (side, _) in ways.items()
            ]


def version(folder: Path) -> str:
    """Return the version of the torchgpipe in a folder."""
    return f"torchgpipe {runpy.run_path(str(folder / VERSION))['__version__']}"


def _result(
    case: str,
    way: str,
    version: str,
    turns: Sequence[Sequence[Sequence[float]]] | None,
    why: str | None,
) -> Result:
    if turns is None:
        return Result(case, way, "failed", reason=why, config={"version": version})
    pairs = [(1e6 * forward, 1e6 * backward) for turn in turns for forward, backward in turn]
    forward, backward = (list(times) for times in zip(*pairs, strict=True))
    samples = {"forward": forward, "backward": backward, BOTH: [sum(pair) for pair in pairs]}
    return Result(case, way, "measured", config={"version": version}, samples=samples)


def table(record: Record, style: str = "simple") -> str:
    """Render medians in µs per task, forward + backward, and the ratios of their sums."""
    cases = by_case(record)
    ways = [way for way in WAYS if any(way in found for found in cases.values())]
    others = [
        str(found[way].config["version"])
        for found in cases.values()
        for way in found
        if way.endswith(OTHER)
    ]
    name = "".join(others[:1]).removeprefix("torchgpipe ")
    titles = {
        "plain": "plain loop",
        OTHER: name,
        **{f"{engine}, {OTHER}": f"{engine}, {name}" for engine in ENGINES},
    }
    headers = [
        "case",
        *(title for way in ways for title in (titles.get(way, way), *["ratio"] * (way in ENGINES))),
    ]
    rows: list[list[str]] = []
    reasons: dict[str, None] = {}
    for case, found in cases.items():
        row = [case]
        for way in ways:
            values = found[way].values if way in found else {}
            if way in found and found[way].reason is not None:
                reasons[f"- {titles.get(way, way)}: {found[way].reason}"] = None
            row.append(
                " + ".join(f"{values[each]:.0f}" for each in DIRECTIONS) if BOTH in values else ""
            )
            if way in ENGINES:
                base = next(
                    found[each] for each in (f"{way}, {OTHER}", OTHER, "plain") if each in found
                ).values
                row.append(
                    f"{values[BOTH] / base[BOTH]:.2f}" if BOTH in values and BOTH in base else ""
                )
        rows.append(row)
    return "\n".join([grid(headers, rows, style), *(["", *reasons] if reasons else [])])


if __name__ == "__main__":
    main()
