import pytest
from msgspec.structs import replace

from reproduce.experiments import EXPERIMENTS
from reproduce.machine.description import Gpu, Machine
from reproduce.machine.git import Git
from reproduce.records.places import RESULTS
from reproduce.records.record import Record, Run, load
from reproduce.report.page import page
from reproduce.report.subjects import FOLDERS

TABLES = {
    experiment.name: experiment.table for experiment in EXPERIMENTS.values() if experiment.table
}
GPU = Gpu("a GPU", 16 << 30, 1500.0, 5000.0, 250.0, "PCIe 3.0 x16")
RUN = Run(
    "finished",
    ["python", "-m", "reproduce"],
    0,
    "2020-04-21T10:02:05Z",
    "2020-04-21T10:12:05Z",
    "cuda",
    2,
    None,
    Machine("Linux", "a CPU", 4, 8, 8 << 30, [GPU] * 2),
    {"torch": "2.11.0", "driver": "575.57"},
    Git("0123456789abcdef", dirty=True),
    [0.5, 0.25, 1.0],
)


def on_gpus(record: Record) -> Record:
    """Turn a run into one on GPUs, with twice as much reserved as allocated memory."""
    results = [replace(each, device="cuda") for each in record.results]
    for k, each in enumerate(results):
        if peaks := each.values.get("peak_allocated"):
            results[k] = replace(
                each, values=each.values | {"peak_reserved": [2 * peak for peak in peaks]}
            )
    return replace(record, name="gpus", run=RUN, results=results)


@pytest.fixture(scope="session")
def records() -> list[Record]:
    """Return committed records, a prediction for another machine, and in place of runs on GPUs one as if it was."""
    every = [load(path) for name in FOLDERS for path in sorted((RESULTS / name).glob("*.json"))]
    known = [each for each in every if each.run is None or each.run.device != "cuda"]
    i = [each.name for each in known].index("amoebanet-speed-p40x8")
    known[i] = replace(known[i], hardware={**(known[i].hardware or {}), "name": "a<b"})
    return [*known, on_gpus(next(each for each in known if each.kind == "measured"))]


@pytest.fixture(scope="session")
def text(records: list[Record]) -> str:
    return page(records)
