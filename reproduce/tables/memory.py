"""Make the memory tables: the published models' sizes, counted exactly, and each device's measured peak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reproduce.experiments import Experiment
from reproduce.records.decode import Json
from reproduce.records.published import published
from reproduce.records.record import Result
from reproduce.tables.cells import outcome, papers_of, size, without_empty
from reproduce.tables.layout import Table, failures, in_lines, many, span

__all__ = ["memory_tables"]

MiB, GiB = 2**20, 2**30
FLOAT_BYTES = 4

KINDS = {  # device and values of a result -> what a table of them is called, and what the bytes are
    ("cpu", "peak_allocated"): ("live bytes", "the bytes of all tensors alive, counted"),
    ("meta", "peak_allocated"): (
        "live bytes on meta",
        "the bytes that all tensors alive would have, counted on a whole run without data (device meta)",
    ),
    ("cuda", "peak_allocated"): ("allocated", "bytes allocated to tensors (torch.cuda.max_memory_allocated)"),
    ("cuda", "peak_reserved"): (
        "reserved, as published",
        "bytes that the caching allocator holds (torch.cuda.max_memory_reserved), the published kind",
    ),
}


def memory_tables(experiment: Experiment, results: Sequence[Result]) -> list[Table]:
    """Return the table of the published models, and one of measured peaks for each kind of bytes."""
    counted = [result for result in results if result.device == "meta" and "parameters" in result.values]
    run = [result for result in results if result.device != "meta" or not _only_counted(result)]
    kinds = [
        (value, *said)
        for (device, value), said in KINDS.items()
        if any(result.device == device and result.values.get(value) for result in run)
    ]
    if run and not kinds:
        kinds = [("peak_allocated", "nothing", "of no row, see above")]
    return [
        *([_published_models(experiment, counted)] if counted else []),
        *(_peaks(experiment, run, *kind) for kind in kinds),
    ]


def _only_counted(result: Result) -> bool:
    return result.status == "measured" and "peak_allocated" not in result.values


def _published_models(experiment: Experiment, results: Sequence[Result]) -> Table:
    papers = papers_of(experiment)
    rows = []
    for result in results:
        paper = papers[(result.published or "").rpartition("/")[2]].values
        rows.append(
            [
                result.row,
                size(result.config),
                f"{result.values['parameters']:,}",
                f"{paper['parameters'] / 1e6:,.1f} M",
                f"{result.values['model_bytes'] / GiB:.2f}",
                _gib(paper, "model_memory"),
                _gib(paper, "peak_activation_memory"),
                _gib(paper, "memory"),
            ]
        )
    headings = (
        "row",
        "size",
        "parameters",
        "published",
        "model\nGiB",
        "published\nGiB",
        "published\nactivations",
        "published\nin all",
    )
    per_parameter = [result.values["model_bytes"] // result.values["parameters"] for result in results]
    stateless = max(per_parameter) == 2 * FLOAT_BYTES
    state = "itself and its gradient" if stateless else "itself, its gradient and the optimizer's state"
    notes = [
        "counted on the models themselves, without memory for them (device meta); nothing is estimated",
        f"model: {span(per_parameter)} bytes per parameter: {state}",
    ]
    columns = published(experiment.table).columns
    if "peak_activation_memory" in columns:
        notes.append(
            "published activations, in GiB: the devices' summed peak, as reserved by the allocator, less the model"
        )
    if "memory" in columns:
        notes.append("published in all, in GiB: the devices' summed peak, as reserved by the allocator")
    kept_headings, kept_rows = without_empty(headings, rows)
    return Table(f"{experiment.title}: the published models", kept_headings, kept_rows, notes, left=2)


def _gib(paper: Mapping[str, Json], name: str) -> str:
    if name not in paper:
        return ""
    return "out of memory" if paper[name] is None else f"{paper[name]:.2f}"


def _peaks(experiment: Experiment, results: Sequence[Result], value: str, name: str, meaning: str) -> Table:
    most = max((max(result.values.get(value) or [0]) for result in results), default=0)
    unit, digits, scale = (GiB, 1 if most >= 100 * GiB else 2, "GiB") if most >= 10 * GiB else (MiB, 0, "MiB")

    def write(size: float) -> str:
        return f"{size / unit:.{digits}f}"

    rows = []
    for result in results:
        peaks = result.values.get(value)
        if not peaks:
            rows.append([result.row, size(result.config), outcome(result), "", "", ""])
            continue
        each = in_lines([write(peak) for peak in peaks])
        model = result.values["model_bytes"]
        rows.append([result.row, size(result.config), each, write(sum(peaks)), write(model), write(sum(peaks) - model)])
    headings = ("row", "size", f"peak of each device\n{scale}", "sum", "model", "activations")
    configs = [result.config for result in results]
    chunks = [config["chunks"] for config in configs if config["chunks"] is not None]
    notes = [
        f"scale {results[0].scale}; batch size {span([config['batch_size'] for config in configs])}"
        + (f"; pipelines in {span(chunks)} micro-batches" if chunks else ""),
        f"peak: {meaning}; activations: the sum less the model",
        *failures([(result.row, str(result.reason)) for result in results if result.status == "failed"]),
    ]
    lacking = sum(result.status == "needs devices" for result in results)
    if lacking:
        notes.append(f"{many(lacking, 'row')} not run for want of devices")
    return Table(f"{experiment.title}: measured peak, {name}", headings, rows, notes, left=2)
