"""Write the cells of tables: numbers to three digits, with their quartiles, and words where there is no number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reproduce.experiments import Experiment
from reproduce.numbers.spread import Spread, speed_up, throughput
from reproduce.records.decode import Json
from reproduce.records.published import published
from reproduce.records.record import Result
from reproduce.run.training import MODELS
from reproduce.tables.layout import failures, many, span

__all__ = ["Results", "about_publication", "circumstances", "count", "outcome", "paper_ratio", "paper_row", "papers_of",
           "problems", "size", "speed_up_cell", "three_digits", "throughput_cell", "without_empty"]  # fmt: skip

Results = Mapping[str, Result]  # by row


def papers_of(experiment: Experiment) -> Results:
    """Return the published rows that the experiment reproduces."""
    return {result.row: result for result in published(experiment.table).results}


def paper_row(result: Result | None, papers: Results) -> Result | None:
    """Return the published row that a result reproduces; None where there is none."""
    return None if result is None else papers.get((result.published or "").rpartition("/")[2])


def size(config: Mapping[str, Json]) -> str:
    """Return a model's size, such as `(18, 256)`; nothing where it has but one."""
    names = MODELS[config["model"]][0] if config["model"] in MODELS else ()
    return "({})".format(", ".join(str(config[name]) for name in names)) if names else ""


def count(value: Json) -> str:
    """Return a whole number, or a dash for None."""
    return "-" if value is None else str(value)


def outcome(result: Result) -> str:
    """Say in a word or three how a row ended that has no number."""
    return str(result.reason) if result.status == "needs devices" else result.status


def throughput_cell(result: Result) -> str:
    """Return samples per second, or why there are none."""
    found = throughput(result)
    return outcome(result) if found is None else _write(found)


def speed_up_cell(result: Result, over: Result | None, quartiles: bool = True) -> str:
    """Return the speed-up over another row; nothing where one of the two was not timed."""
    if result is over:
        return "1" if result.samples else ""
    found = None if over is None else speed_up(result, over)
    if found is None:
        return ""
    return _write(found if quartiles else Spread(found.median))


def paper_ratio(row: Result | None, over: Result | None) -> str:
    """Return the ratio of two published throughputs."""
    if row is None or over is None:
        return ""
    return f"{row.values['throughput'] / over.values['throughput']:.2f}"


def _write(value: Spread) -> str:
    if value.low is None or value.high is None:
        return three_digits(value.median)
    return f"{three_digits(value.median)} ({three_digits(value.low)}-{three_digits(value.high)})"


def three_digits(value: float) -> str:
    """Return a number with three digits, or all that stand before the point."""
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def without_empty(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """Leave out the columns that are empty in every row."""
    kept = [i for i in range(len(headings)) if any(row[i] for row in rows)]
    return [headings[i] for i in kept], [[row[i] for i in kept] for row in rows]


def circumstances(results: Results) -> str:
    """Say what all rows have in common: scale, model, batch size and steps."""
    configs = [result.config for result in results.values()]
    steps = [len(result.samples["step_time"]) for result in results.values() if "step_time" in result.samples]
    sizes = sorted({size(config) for config in configs})
    model = " ".join([str(configs[0]["model"]), ", ".join(sizes)]).strip()
    shape = " x ".join(map(str, configs[0]["input_shape"]))
    parts = [
        f"scale {next(iter(results.values())).scale}: {model}, input {shape}",
        f"batch size {span([config['batch_size'] for config in configs])}",
        f"{span(steps)} timed step{'' if max(steps) == 1 else 's'} per row" if steps else "no step timed",
    ]
    return "; ".join(parts)


def about_publication(experiment: Experiment, papers: Results) -> str:
    """Say what the published numbers are, and which of their conditions ours do not share."""
    table = published(experiment.table)
    source, hardware = table.source or {}, table.hardware or {}
    batches = [result.config["batch_size"] for result in papers.values()]
    bases = {result.config["checkpoint"] for result in papers.values() if result.config["chunks"] == 1}
    by = source.get("paper") or source.get("repo")
    said = [f"published: {by}, on {hardware.get('num_gpus')} x {hardware.get('gpu')}"]
    if len(set(batches)) > 1:
        said.append(f"its batch size differs from row to row ({span(batches)}), so its speed-ups mix in larger batches")
    if bases == {"always"}:
        said.append("its m=1 rows recompute everything (checkpoint=always), which naive here does not")
    return "; ".join(said)


def problems(results: Results) -> list[str]:
    """Say why rows have no numbers."""
    found = failures([(each.row, str(each.reason)) for each in results.values() if each.status == "failed"])
    lacking = sum(result.status == "needs devices" for result in results.values())
    if lacking:
        found.append(f"{many(lacking, 'row')} not run for want of devices")
    for value in ("utilization_problem", "memory_problem"):
        reasons = dict.fromkeys(str(each.values[value]) for each in results.values() if value in each.values)
        found.extend(f"no {value.partition('_')[0]}: {reason}" for reason in reasons)
    return found
