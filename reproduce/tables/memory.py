"""Make the memory tables: the published models' sizes, counted exactly, and each device's measured peak."""

from collections.abc import Sequence

from reproduce.experiments.row import Experiment
from reproduce.numbers.metrics import outcome
from reproduce.records.record import Result
from reproduce.tables.layout import Column, GiB, MiB, Table, in_lines, span
from reproduce.tables.rows import ROW, SIZE, Rows

FLOAT_BYTES = 4
KINDS = {  # device and name of the values -> title of the table, meaning of the bytes
    ("cpu", "peak_allocated"): ("live bytes", "the bytes of all tensors alive, counted"),
    ("meta", "peak_allocated"): (
        "live bytes on meta",
        "the bytes that all tensors alive would have, counted on a whole run without data (device meta)",
    ),
    ("cuda", "peak_allocated"): (
        "allocated",
        "bytes allocated to tensors (torch.cuda.max_memory_allocated)",
    ),
    ("cuda", "peak_reserved"): (
        "reserved, as published",
        "bytes that the caching allocator holds (torch.cuda.max_memory_reserved), the published kind",
    ),
}


def memory_tables(experiment: Experiment, results: Sequence[Result]) -> list[Table]:
    """Return the table of the published models, and one of measured peaks for each kind of bytes."""
    counted = [
        result for result in results if result.device == "meta" and "parameters" in result.values
    ]
    # On meta, a measured row without a peak is a model that was only counted.
    run = [
        x
        for x in results
        if x.device != "meta" or x.status != "measured" or "peak_allocated" in x.values
    ]
    known = {
        (result.device, name) for result in run for name, value in result.values.items() if value
    }
    kinds = [(kind[1], *words) for kind, words in KINDS.items() if kind in known]
    if run and not kinds:
        kinds = [("peak_allocated", "nothing", "of no row, see above")]
    models = [_published_models(Rows(experiment, counted))] if counted else []
    return models + [_peaks(Rows(experiment, run), *kind) for kind in kinds]


def _published_models(rows: Rows) -> Table:
    columns = [
        ROW,
        SIZE,
        Column("parameters", lambda result: result.values["parameters"], "{:,}"),
        rows.published("published", "parameters", "{:,.1f} M", 1e6),
        Column("model\nGiB", lambda result: result.values["model_bytes"] / GiB, "{:.2f}"),
        rows.published("published\nGiB", "model_memory", "{:.2f}"),
        rows.published("published\nactivations", "peak_activation_memory", "{:.2f}"),
        rows.published("published\nin all", "memory", "{:.2f}"),
    ]
    per_parameter = [result.values["model_bytes"] // result.values["parameters"] for result in rows]
    stateless = max(per_parameter) == 2 * FLOAT_BYTES
    state = (
        "itself and its gradient" if stateless else "itself, its gradient and the optimizer's state"
    )
    peak, known = (
        "in GiB: the devices' summed peak, as reserved by the allocator",
        rows.publication.columns,
    )
    notes = [
        "counted on the models themselves, without memory for them (device meta); nothing is estimated",
        f"model: {span(per_parameter)} bytes per parameter: {state}",
        f"published activations, {peak}, less the model"
        if "peak_activation_memory" in known
        else None,
        f"published in all, {peak}" if "memory" in known else None,
    ]
    return rows.table(": the published models", columns, notes)


def _peaks(rows: Rows, value: str, name: str, meaning: str) -> Table:
    most = max((max(result.values.get(value) or [0]) for result in rows), default=0)
    large = (GiB, "{:.1f}" if most >= 100 * GiB else "{:.2f}", "GiB")
    unit, form, word = (MiB, "{:.0f}", "MiB") if most < 10 * GiB else large

    def each_device(result: Result) -> str:
        return in_lines([peak / unit for peak in result.values.get(value) or []], form) or outcome(
            result
        )

    def sized(heading: str, peak: int, model: int) -> Column[Result]:
        def cell(result: Result) -> float | None:
            peaks = result.values.get(value)
            return (
                (peak * sum(peaks) + model * result.values["model_bytes"]) / unit if peaks else None
            )

        return Column(heading, cell, form)

    columns = [
        ROW,
        SIZE,
        Column(f"peak of each device\n{word}", each_device),
        sized("sum", 1, 0),
        sized("model", 0, 1),
        sized("activations", 1, -1),
    ]
    chunks = [result.config["chunks"] for result in rows if result.config["chunks"] is not None]
    notes = [
        f"scale {rows.results[0].scale}; batch size {span([result.config['batch_size'] for result in rows])}"
        + (f"; pipelines in {span(chunks)} micro-batches" if chunks else ""),
        f"peak: {meaning}; activations: the sum less the model",
        *rows.problems(),
    ]
    return rows.table(f": measured peak, {name}", columns, notes)
