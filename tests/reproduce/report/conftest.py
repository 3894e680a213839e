import pytest
from msgspec.structs import replace

from reproduce.experiments import EXPERIMENTS
from reproduce.machine.description import Gpu, Machine
from reproduce.machine.git import Git
from reproduce.records.places import RESULTS
from reproduce.records.record import Record, Run, load
from reproduce.report.page import page
from reproduce.report.subjects import FOLDERS

TABLES = {each.name: each.table for each in EXPERIMENTS.values() if each.table}
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
    """Return a copy of a record. The copy says that its results were measured on GPUs.

    In the copy, the reserved memory is twice the allocated memory.
    """
    results = []
    for result in record.results:
        values = dict(result.values)
        if peaks := values.get("peak_allocated"):
            values["peak_reserved"] = [2 * peak for peak in peaks]
        results.append(replace(result, device="cuda", values=values))
    return replace(record, name="gpus", run=RUN, results=results)


@pytest.fixture(scope="session")
def records() -> list[Record]:
    """Return the committed records, with two changes for these tests.

    In one prediction, the name of the hardware looks like HTML markup. A made-up run on GPUs
    replaces the committed runs on GPUs.
    """
    found, measured = [], []
    for folder in FOLDERS:
        for path in sorted((RESULTS / folder).glob("*.json")):
            record = load(path)
            if record.name == "amoebanet-speed-p40x8":
                hardware = {**(record.hardware or {}), "name": "a<b"}
                record = replace(record, hardware=hardware)
            if record.run is None or record.run.device != "cuda":
                found.append(record)
                if record.kind == "measured":
                    measured.append(record)
    return [*found, on_gpus(measured[0])]


@pytest.fixture(scope="session")
def own(records: list[Record]) -> list[Record]:
    """Return two records of one experiment that a user has run twice.

    The report shows only the newer record. In both runs, other programs used the cores while one
    row (configuration) was timed.
    """
    source = records[-1]
    results = []
    for result in source.results:
        samples = dict(result.samples)
        if result.row == "n2m4" and "step_time" in samples:
            samples["others"] = [0.5] * len(samples["step_time"])
        results.append(replace(result, samples=samples))
    new = replace(RUN, started="2026-04-21T10:02:05Z")
    old = replace(RUN, started="2025-04-21T10:02:05Z")
    return [
        replace(source, name="my-new-run", results=results, run=new),
        replace(source, name="my-old-run", results=results, run=old),
    ]


@pytest.fixture(scope="session")
def text(records: list[Record]) -> str:
    return page(records)
