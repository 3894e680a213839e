"""Emulate all rows of the papers' speed tables on one GPU, at the papers' sizes (scale `paper`).

`python -m reproduce run` emulates the rows (the configurations of a table). One GPU holds all
partitions of a row and runs their tasks one at a time. Then the schedule is simulated twice with
the measured times of the tasks, as if each partition were on a GPU of its own:

1. Each GPU has a thread of its own that launches its kernels, as in a pipeline of ranks.
2. One thread launches the kernels of all GPUs.

If the second simulation is slower, kernel launches would limit the row's speed if one process ran
all GPUs.
"""

from benchmarks.gpu.experiments import (
    ENDING,
    LEAST,
    NO_TIME,
    about_failures,
    about_rows,
    few_rows,
    run_experiment,
    summary,
)
from benchmarks.gpu.part import Context, Fields
from reproduce.machine.devices import Devices
from reproduce.numbers.metrics import throughputs
from reproduce.predict.link import own_links
from reproduce.predict.rows import predict_run
from reproduce.records.record import Record
from torchgpipe.plan.hardware.hardware import load_hardware

PURPOSE = "what the papers' speed tables are on GPUs like this one, with a thread for each and one"
SHARE = 6
NEEDS = ["click"]

EXPERIMENTS = ("amoebanet-speed", "unet-speed", "resnet101-speed")
PAPER = ("--scale", "paper", "--on", "cuda", "--devices", "1", "--steps", "3")
# A single row of a small model without a link, so nothing is profiled or predicted.
TINY = ("--scale", "small", "--on", "cpu", "--devices", "1", "--steps", "1", "--row", "GPipe n2m4")
TINY_SETTINGS = ("--set", "L=3", "D=8", "batch_size=4", "balance=5,4")
PREDICTING = 30.0
"""Seconds that the predictions of an experiment may take."""


def run(context: Context) -> Fields:
    """Emulate one experiment after another; then predict the speeds of all emulated rows.

    A row is a configuration of an experiment, such as GPipe with two partitions.
    """
    paper = context.size == "paper"
    names = EXPERIMENTS if paper else EXPERIMENTS[:1]
    options = PAPER if paper else (*TINY, *TINY_SETTINGS)
    records: dict[str, Record] = {}
    tables: Fields = {}
    result: Fields = {"tables": tables}
    for number, name in enumerate(names):
        seconds = (context.seconds_left() - ENDING) / (len(names) - number)
        if seconds < LEAST and paper:
            result.setdefault("failed", {})[name] = NO_TIME
            continue
        rows = few_rows(name, seconds) if paper else ()
        record = run_experiment(context, name, (*options, *rows), seconds)
        if isinstance(record, str):
            result.setdefault("failed", {})[name] = record
        else:
            records[name] = record
            tables[name] = summary(record, emulated=True)
        context.write(result)
    for name, record in records.items():
        if context.seconds_left() > PREDICTING:
            _add_predictions(tables[name], record)
            context.write(result)
    return result


def _add_predictions(rows: Fields, record: Record) -> None:
    """Predict the speeds of rows on nodes with this machine's kind of GPU, if it is described.

    Descriptions of hardware, such as `h100x8`, are files of `torchgpipe.plan`.

    Args:
        rows: The summary of an experiment's rows (configurations), to which this function adds the
            predictions.
        record: The record of the experiment.
    """
    assert record.run is not None
    hardware = own_links(Devices(record.run.device, 1))
    if hardware is None or not any("speed" in row for row in rows.values()):
        return
    predicted = predict_run(record, load_hardware(hardware))
    for name, speed in throughputs(predicted.results).items():
        if name in rows:
            rows[name]["predicted"] = speed


def lines(result: Fields) -> list[str]:
    """Return a line for each experiment."""
    found = [f"{name}: {about_rows(rows)}" for name, rows in result["tables"].items()]
    return [*found, *about_failures(result)]
