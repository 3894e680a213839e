"""Make the tables of memory: the sizes of the published models, and the peaks of each device."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from reproduce.experiments.row import Experiment
from reproduce.numbers.metrics import outcome
from reproduce.records.record import SUCCESS, Result
from reproduce.tables.layout import Column, GiB, MiB, Table, in_lines, span
from reproduce.tables.rows import ROW, SIZE, Rows

FLOAT_BYTES = 4
PEAK = "peak_allocated"
RESERVED = "peak_reserved"


@dataclass(frozen=True)
class Kind:
    """A kind of bytes that a table of memory shows, such as allocated or reserved bytes.

    Attributes:
        value: The name of the value in records.
        title: The name of the kind in titles of tables.
        meaning: What the bytes are, for a note below the table.
    """

    value: str
    title: str
    meaning: str


APART = (
    "each partition ran alone, one after another on one device, with zeros in place of what its "
    "neighbours send"
)
LIVE = "the bytes of all tensors alive, counted"
ON_META = (
    "the bytes that all tensors alive would have, counted on a whole run without data (device meta)"
)
ALLOCATED = "bytes allocated to tensors (torch.cuda.max_memory_allocated)"
HELD = "bytes that the caching allocator holds (torch.cuda.max_memory_reserved), the published kind"
ONE_GPU = (
    "where this machine has fewer GPUs than the row has devices, one GPU took their place: there, "
    "allocated bytes are the bytes of all tensors alive, counted, and reserved bytes are not known"
)
KINDS = {  # maps a device and the name of a value to a kind of bytes
    ("cpu", PEAK): Kind(PEAK, "live bytes", LIVE),
    ("meta", PEAK): Kind(PEAK, "live bytes on meta", ON_META),
    ("cuda", PEAK): Kind(PEAK, "allocated", ALLOCATED),
    ("cuda", RESERVED): Kind(RESERVED, "reserved, as published", HELD),
}


def memory_tables(experiment: Experiment, results: Sequence[Result]) -> list[Table]:
    """Return the tables of a memory experiment.

    If the run has counted the sizes of the papers' models, the first table has these sizes. Then
    there is a table for each kind of bytes, such as allocated bytes, with the peak of each device.
    """
    counted = []
    run = []
    known = set()
    for result in results:
        on_meta = result.device == "meta"
        if on_meta and "parameters" in result.values:
            counted.append(result)
        # On meta, a measured row without a peak is a model whose parameters were only counted.
        if on_meta and result.status == "measured" and PEAK not in result.values:
            continue
        run.append(result)
        for name, value in result.values.items():
            if value:
                known.add((result.device, name))
    kinds = [kind for key, kind in KINDS.items() if key in known]
    if run and not kinds:
        kinds = [Kind(PEAK, "nothing", "of no row, see above")]
    tables = []
    if counted:
        tables.append(_published_models(Rows(experiment, counted)))
    rows = Rows(experiment, run)
    return tables + [_peaks(rows, kind) for kind in kinds]


def _published_models(rows: Rows) -> Table:
    def parameters(result: Result) -> object:
        return result.values["parameters"]

    def model(result: Result) -> float:
        size: float = result.values["model_bytes"]
        return size / GiB

    columns = [
        ROW,
        SIZE,
        Column("parameters", parameters, "{:,}"),
        rows.published("published", "parameters", "{:,.1f} M", 1e6),
        Column("model\nGiB", model, "{:.2f}"),
        rows.published("published\nGiB", "model_memory", "{:.2f}"),
        rows.published("published\nactivations", "peak_activation_memory", "{:.2f}"),
        rows.published("published\nin all", "memory", "{:.2f}"),
    ]
    per_parameter = []
    for result in rows:
        size = result.values["model_bytes"]
        per_parameter.append(size // result.values["parameters"])
    state = "itself, its gradient and the optimizer's state"
    if max(per_parameter) == 2 * FLOAT_BYTES:
        state = "itself and its gradient"
    known = rows.publication.columns
    peak = "in GiB: the devices' summed peak, as reserved by the allocator"
    notes = [
        "counted on the models themselves, without memory for them (device meta); nothing is "
        "estimated",
        f"model: {span(per_parameter)} bytes per parameter: {state}",
    ]
    if "peak_activation_memory" in known:
        notes.append(f"published activations, {peak}, less the model")
    if "memory" in known:
        notes.append(f"published in all, {peak}")
    return rows.table(": the published models", columns, notes)


def _peaks(rows: Rows, kind: Kind) -> Table:
    most = max([0, *chain.from_iterable(_peaks_of(result, kind) for result in rows)])
    unit, word, form = _unit(most)

    def each_device(result: Result) -> str:
        peaks = [peak / unit for peak in _peaks_of(result, kind)]
        if not peaks and result.status in SUCCESS:
            return "-"
        return in_lines(peaks, form) or outcome(result)

    def total(result: Result) -> float | None:
        peaks = _peaks_of(result, kind)
        return sum(peaks) / unit if peaks else None

    def model(result: Result) -> float | None:
        if not _peaks_of(result, kind):
            return None
        size: float = result.values["model_bytes"]
        return size / unit

    def activations(result: Result) -> float | None:
        peaks = _peaks_of(result, kind)
        if not peaks:
            return None
        size: float = result.values["model_bytes"]
        return (sum(peaks) - size) / unit

    columns = [
        ROW,
        SIZE,
        Column(f"peak of each device\n{word}", each_device),
        Column("sum", total, form),
        Column("model", model, form),
        Column("activations", activations, form),
    ]
    meaning = f"peak: {kind.meaning}; activations: the sum less the model"
    notes = [_circumstances(rows), meaning]
    if any(map(_one_gpu_played_several, rows)):
        notes.append(ONE_GPU)
    if any(config.get("apart") for config in rows.configs):
        notes.append(APART)
    notes.extend(rows.problems())
    return rows.table(f": measured peak, {kind.title}", columns, notes)


def _unit(most: int) -> tuple[int, str, str]:
    """Choose the unit of a column whose largest value is `most` bytes.

    Return the number of bytes in the unit, the name of the unit, and the format of the numbers.
    """
    if most < 10 * GiB:
        return MiB, "MiB", "{:.0f}"
    if most < 100 * GiB:
        return GiB, "GiB", "{:.2f}"
    return GiB, "GiB", "{:.1f}"


def _circumstances(rows: Rows) -> str:
    """Return a note with the scale, the batch sizes, and the numbers of micro-batches."""
    note = f"scale {rows.results[0].scale}; batch size {rows.span('batch_size')}"
    pipelines = [config for config in rows.configs if config["chunks"] is not None]
    # A mini-batch with few samples has fewer micro-batches than `chunks`.
    micro_batches = [config["micro_batches_effective"] for config in pipelines]
    if micro_batches:
        note += f"; pipelines in {span(micro_batches)} micro-batches"
    return note


def _one_gpu_played_several(result: Result) -> bool:
    """Return whether one GPU took the place of all devices of a row.

    Then its tensors were counted, and the allocator's bytes are not known.
    """
    counted = bool(result.values.get(PEAK)) and not result.values.get(RESERVED)
    return result.device == "cuda" and counted


def _peaks_of(result: Result, kind: Kind) -> list[int]:
    """Return a row's peak bytes of a kind, such as reserved bytes: a number for each device.

    If the peaks are not known, return an empty list.
    """
    return result.values.get(kind.value) or []
