"""Keep the numbers in docs/prediction.md: blocks between marks are made from records, and by nobody's hand.

    <!-- predicted: amoebanet-speed-p40x8 -->     the tables of that record of predictions
    <!-- predicted: errors -->                    the errors of all speed tables' rows together
    <!-- predicted: efficiencies p40x8 -->        a description's figures and their sources
    <!-- predicted: gains -->                     AmoebaNet-D's m = 4 over m = 1, by n, and its share of the ideal
    <!-- predicted: choices -->                   the efficiencies, had they been worked out from less, or otherwise
    <!-- predicted: convolutions -->              the errors of convolutions that others timed by themselves
    <!-- predicted: held out -->                  the errors of each source, predicted from the others
    <!-- predicted: effects -->                   the model without what was added to it, against all published figures
    <!-- predicted: timings -->                   the errors of what the efficiencies were worked out from, and of more
    <!-- predicted: resources -->                 how busy devices, links and host are in the rows of the speed tables
    <!-- predicted: slower layers -->             U-Net's rows, did some of its layers take longer
    <!-- end -->

What is between them is replaced as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from statistics import median

from reproduce.machine.description import ROOT
from reproduce.predict.rows import SPEED_TABLES
from reproduce.records.published import published
from reproduce.records.record import load
from reproduce.tables.predicted import predicted_tables, speed_up_errors
from reproduce.tables.prediction_effects import choices, convolutions, effects, held_out, timings
from reproduce.tables.prediction_limits import resources, slower_layers
from torchgpipe.plan.hardware import load_hardware

__all__ = ["DOCS", "SPEED", "rendered"]

DOCS = ROOT / "docs" / "prediction.md"
SPEED = tuple(f"{name}-p40x8" for name in SPEED_TABLES)
BLOCKS: dict[str, Callable[[], str]] = {
    "choices": choices,
    "convolutions": convolutions,
    "effects": effects,
    "held out": held_out,
    "timings": timings,
    "resources": resources,
    "slower layers": slower_layers,
}
BLOCK = re.compile(r"(<!-- predicted: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def rendered(text: str, folder: Path) -> str:
    """Return the page with every block made anew from the records in `folder`."""
    return BLOCK.sub(lambda match: f"{match[1]}\n{_block(match[2], folder)}\n\n{match[3]}", text)


def _block(name: str, folder: Path) -> str:
    if name == "errors":
        return _errors(folder)
    if name == "gains":
        return _gains(folder)
    if name in BLOCKS:
        return BLOCKS[name]()
    if name.startswith("efficiencies "):
        return _figures(name.split()[1])
    tables = predicted_tables(load(folder / f"{name}.json"))
    return "\n\n".join(table.markdown().replace("## ", "### ", 1).strip() for table in tables)


def _errors(folder: Path) -> str:
    errors = {
        f"{name.partition('-')[0]} {row}": error
        for name in SPEED
        for row, error in speed_up_errors(load(folder / f"{name}.json")).items()
    }
    sizes = [abs(error) for error in errors.values()]
    within = sum(size <= 0.1 for size in sizes)
    beyond = ", ".join(f"{row} ({error:+.1%})" for row, error in errors.items() if abs(error) > 0.1)
    return "\n".join(
        [
            "| | target | predicted |",
            "| --- | ---: | ---: |",
            f"| median error of the {len(sizes)} rows' speed-ups | 3% | {median(sizes):.1%} |",
            f"| rows within 10% | {0.9:.0%} | {within / len(sizes):.1%} ({within} of {len(sizes)}) |",
            "",
            f"Beyond 10%: {beyond or 'none'}.",
        ]
    )


def _gains(folder: Path) -> str:
    predicted = {r.row: r.values["throughput"] for r in load(folder / f"{SPEED[0]}.json").results}
    papers = {r.row: r.values["throughput"] for r in published("tg-amoebanetd-speed").results}
    lines = ["| n | published, m = 4 over m = 1 | predicted | equal partitions: n·m / (n + m - 1) | published, of that "
             "| predicted, of that |", "| ---: | ---: | ---: | ---: | ---: | ---: |"]  # fmt: skip
    for n in (2, 4, 8):
        gains = [table[f"n{n}m4"] / table[f"n{n}m1"] for table in (papers, predicted)]
        ideal = n * 4 / (n + 3)
        cells = (*(f"{gain:.2f}" for gain in (*gains, ideal)), *(f"{gain / ideal:.0%}" for gain in gains))
        lines.append(f"| {n} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _figures(name: str) -> str:
    hardware = load_hardware(name)
    lines = ["| figure | value | source |", "| --- | ---: | --- |"]
    for key, source in hardware.sources.items():
        table, _, item = key.partition(".")
        value = getattr(hardware, table)
        lines.append(f"| `{key}` | {value[item] if item else value:.4g} | {source} |")
    return "\n".join(lines)
