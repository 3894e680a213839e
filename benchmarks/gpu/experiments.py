"""Run an experiment of `reproduce` within a part of `benchmarks.gpu`, and read its record."""

import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.part import RECORDS, Context, Fields
from reproduce.experiments import EXPERIMENTS
from reproduce.machine.description import ROOT
from reproduce.numbers.metrics import throughput, throughputs
from reproduce.records.published import published
from reproduce.records.record import Record, Result, load

LEAST = 20.0
"""Seconds that an experiment needs at least: the start of a process, and one row."""
NO_TIME = "no time was left for it"
"""Why an experiment did not run."""
ENDING = 5.0
"""Seconds that an interrupted run may take to write its record."""
FEW_SECONDS = 120.0
"""An experiment that has less time runs only the rows in `FEW_ROWS`."""
FEW_ROWS = {
    "amoebanet-speed": ("n2m1", "n8m1", "n8m32"),
    "unet-speed": ("baseline", "pipeline-8"),
    "resnet101-speed": ("baseline", "pipeline-8"),
}
"""The rows of an experiment that its most important numbers need."""
SLOWER = 0.95
"""A row whose speed is below this share of its usual speed counts as slower."""


def run_experiment(
    context: Context, name: str, options: Sequence[str], seconds: float
) -> Record | str:
    """Run `python -m reproduce run` for an experiment, and return its record.

    The run writes its record and its tables into `DIR/records`. The record is saved after each
    round, in which each row runs one step. So a run that is ended early leaves its earlier rounds.

    Args:
        context: The context of the part.
        name: The name of the experiment.
        options: Further options of `run`.
        seconds: The seconds after which the run is interrupted, as by Ctrl-C.

    Returns:
        The record. If it has no number, a text that says how the run ended.
    """
    folder = context.folder.parent / RECORDS
    folder.mkdir(exist_ok=True)
    before = set(folder.glob("*.json"))
    command = [sys.executable, "-m", "reproduce", "run", name, "--out", str(folder), *options]
    context.say(f"for at most {seconds:.0f} s: {' '.join(command[1:])}")
    with subprocess.Popen(command, cwd=ROOT, stdout=sys.stderr) as process:
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            _await_end(process)
    written = set(folder.glob("*.json")) - before
    if written:
        record = load(written.pop())
        if any(result.samples or result.values for result in record.results):
            return record
    return f"its run ended with code {process.returncode} before its first round; see its log"


def few_rows(name: str, seconds: float) -> list[str]:
    """Return the options that choose a few rows of an experiment, if there is little time.

    Args:
        name: The name of the experiment.
        seconds: How much time the experiment has.
    """
    options: list[str] = []
    if seconds < FEW_SECONDS:
        for row in FEW_ROWS[name]:
            options += ["--row", row]
    return options


def _await_end(process: subprocess.Popen[bytes]) -> None:
    """Wait until an interrupted run has ended; kill the run if it has not ended after `ENDING`."""
    try:
        process.wait(ENDING)
    except subprocess.TimeoutExpired:
        process.kill()


def about_failures(result: Fields) -> list[str]:
    """Return a line for each experiment without a row: its name, and the reason."""
    return [f"{name}: {why}" for name, why in result.get("failed", {}).items()]


def summary(record: Record, *, emulated: bool) -> Fields:
    """Return the samples/s of each row (configuration), or the reason why it has no speed.

    Args:
        record: The record of one experiment.
        emulated: If true, the emulated rows of the record are taken. If false, the measured rows.
    """
    rows: Fields = {}
    for result in record.results:
        if result.emulated == emulated:
            rows[result.row] = _of_row(result)
    return rows


def _of_row(result: Result) -> Fields:
    speed = throughput(result)
    if speed is None:
        return {"status": result.status, "reason": result.reason}
    row: Fields = {"status": result.status, "speed": speed.middle}
    one_thread = result.values.get("one_thread_time")
    if one_thread is not None:
        row["one_thread"] = result.config["batch_size"] / one_thread
    if result.published:
        row["published"] = _published(result)
    return row


def _published(result: Result) -> float | None:
    """Return the published samples/s of the configuration that a result reproduces, or `None`."""
    table = EXPERIMENTS[result.experiment].table
    if table is None or result.published is None:
        return None
    name = result.published.rpartition("/")[2]
    return throughputs(published(table).results).get(name)


def about_rows(rows: Fields) -> str:
    """Return a text about an experiment: how many of its rows have a speed, and one of the speeds.

    It is the speed of the last row (configuration) that repeats a published row. The last row has
    the most devices.
    """
    timed = {name: row for name, row in rows.items() if "speed" in row}
    said = [f"{len(timed)} of {len(rows)} rows"]
    repeated = [name for name, row in timed.items() if row.get("published")]
    if repeated:
        name = repeated[-1]
        row = timed[name]
        speed = f"{name} {row['speed']:.0f} samples/s, published {row['published']:.0f}"
        if "predicted" in row:
            speed += f", predicted {row['predicted']:.0f}"
        said.append(speed)
    said += _about_one_thread(timed)
    return "; ".join(said)


def _about_one_thread(timed: dict[str, Any]) -> list[str]:
    """Say how many rows would be slower if one thread launched the kernels of all devices."""
    shares = {}
    for name, row in timed.items():
        if "one_thread" in row:
            shares[name] = row["one_thread"] / row["speed"]
    if not shares:
        return []
    bound = [name for name, share in shares.items() if share < SLOWER]
    worst = min(shares, key=lambda name: shares[name])
    return [
        f"one thread for all GPUs would slow down {len(bound)} of {len(shares)} rows, {worst} to "
        f"{shares[worst]:.0%} of its speed"
    ]
