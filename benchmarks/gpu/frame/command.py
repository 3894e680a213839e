"""Find out in a few minutes what only a machine with GPUs can tell.

docs/measured.md explains the command `python -m benchmarks.gpu --out DIR`. The command runs several
measurements, called parts, one after another, and writes into DIR:

    command.json          the options of the command, and when it started
    page.md               a summary of all results, in at most 40 lines
    archive.tar.gz        all other files
    records/              records in the format of `python -m reproduce`
    NAME/outcome.json     how the part NAME ended
    NAME/result.json      what the part found
    NAME/log.txt          what the part printed
"""

import argparse
import json
import os
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import msgspec

from benchmarks.gates.base import VERSION, version
from benchmarks.gpu.frame.page import ABOUT, OUTCOME, page
from benchmarks.gpu.frame.processes import Outcome, count_gpus, run_part
from benchmarks.gpu.part import PARTS, RECORDS, Context, Part, Size, load_parts
from benchmarks.harness import command
from reproduce.error import Error, interruptible
from reproduce.machine.archives import unpack
from reproduce.machine.clocks import gpu_states
from reproduce.records.record import readable, save, write_atomically
from reproduce.run.recorder import closed, now, prepare_folder

PAGE = "page.md"
ARCHIVE = "archive.tar.gz"
TOP = "gpu"
"""The name of the folder within an archive."""
MINUTES = 8.0
DRY_RUN_SECONDS = 240.0
"""The limit of a dry run. It takes less than 40 s on two cores that are not busy."""
LEAST_SECONDS = 5.0
"""A part that has less time than this does not run."""


@dataclass(frozen=True)
class Plan:
    """The options with which one call of the command runs its parts (its measurements).

    Attributes:
        folder: The folder for all results. It exists and is empty.
        seconds: How many seconds all parts together may run.
        size: The size of the models: "paper" or "tiny", see `Context`.
        against: The folder of another torchgpipe to compare with, or `None`.
        gpus: The number of GPUs.
    """

    folder: Path
    seconds: float
    size: Size
    against: Path | None = None
    gpus: int = 0


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the parts and print the page of their results, or print the page of earlier results."""
    parser = command("gpu", __doc__, record=False, formats=False)
    add = parser.add_argument
    text = "write the page, the archive and all results into DIR"
    add("--out", type=Path, metavar="DIR", help=text)
    text = f"how long all parts together may run (default {MINUTES:g})"
    add("--minutes", type=_minutes, default=MINUTES, metavar="N", help=text)
    text = "a folder with another torchgpipe, to measure beside this one"
    add("--against", type=_torchgpipe, metavar="FOLDER", help=text)
    text = f"run only these parts: {', '.join(PARTS)}"
    add("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=text)
    text = "try all parts on the CPU at a tiny size, in less than a minute"
    add("--dry-run", action="store_true", help=text)
    text = "only print the page of the results in a folder or an archive, made anew"
    add("--page", type=Path, metavar="PATH", help=text)
    options = parser.parse_args(arguments)
    if options.page is not None:
        print(page_of(options.page), end="")
        return
    gpus = 0 if options.dry_run else count_gpus()
    if not options.dry_run and not gpus:
        parser.error("there is no CUDA device here; --dry-run tries the parts on the CPU")
    if not options.dry_run and options.out is None:
        parser.error("--out DIR is missing: name a folder for the results")
    with ExitStack() as stack:
        folder = options.out or Path(stack.enter_context(TemporaryDirectory()))
        prepare_folder(folder)
        if any(folder.iterdir()):
            parser.error(f"--out {folder}: there are files already; name an empty or new folder")
        plan = Plan(folder.absolute(), 60 * options.minutes, "paper", options.against, gpus)
        if options.dry_run:
            import_module("torch._dynamo")  # else each part would take seconds to import it
            plan = Plan(plan.folder, DRY_RUN_SECONDS, "tiny", options.against)
        names = [name for name in PARTS if name in options.only]
        with interruptible():
            good = run_parts(load_parts(names), plan)
        print((plan.folder / PAGE).read_text(), end="")
    if not good:
        sys.exit(1)


def _minutes(text: str) -> float:
    """Parse a command line argument as a number of minutes."""
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of minutes above 0")
    return minutes


def _torchgpipe(text: str) -> Path:
    """Parse a command line argument as a folder that contains the package torchgpipe."""
    if not (Path(text) / VERSION).is_file():
        install = f"pip install --no-deps --target {text} torchgpipe==0.0.7"
        raise argparse.ArgumentTypeError(f"there is no {VERSION} in {text} (try: {install})")
    return Path(text).absolute()


def page_of(path: Path) -> str:
    """Return the page that sums up the results in a folder or in an archive.

    Raises:
        Error: If the folder or the archive has no results of this command.
    """
    with TemporaryDirectory() as temporary:
        folder = path
        if path.is_file():
            try:
                unpack(path, Path(temporary), "data")
            except (tarfile.TarError, OSError) as error:
                raise Error(
                    f"--page {path}: not an archive of this command ({error}); name the folder or "
                    "the archive.tar.gz that an earlier run has written"
                ) from None
            folder = Path(temporary) / TOP
        if not (folder / ABOUT).is_file():
            raise Error(
                f"--page {path}: there is no {ABOUT} in it; name the DIR into which an earlier run "
                "has written its results (its option --out)"
            )
        return page(folder, load_parts(PARTS))


def run_parts(parts: Mapping[str, Part], plan: Plan) -> bool:
    """Run all parts; return whether all went well (none has failed or was killed).

    After each part, the page and the archive of all results are written anew. Ctrl-C or SIGTERM
    kills the part that is running. After that, the page and the archive are written a last time.
    """
    end = time.monotonic() + plan.seconds
    about = {
        "started": now(),
        "seconds": plan.seconds,
        "size": plan.size,
        "against": plan.against and version(plan.against),
        "parts": list(parts),
        "gpus": msgspec.to_builtins(gpu_states()),
    }
    write_atomically(plan.folder / ABOUT, json.dumps(about, indent=1) + "\n")
    shares = {name: part.SHARE for name, part in parts.items()}
    good = True
    for name, part in parts.items():
        folder = plan.folder / name
        folder.mkdir()
        left = end - time.monotonic()
        share = shares[name] / sum(shares.values())
        del shares[name]  # later parts also share the time that this part does not use

        # In a dry run, each part may use all the time that is left.
        limit = left if plan.size == "tiny" else left * share
        outcome = Outcome("interrupted")
        try:
            outcome = _run(part, plan, folder, limit)
        finally:
            write_atomically(folder / OUTCOME, msgspec.json.encode(outcome))
            _close_records(plan.folder / RECORDS, outcome)
            _keep(parts, plan.folder)
        good = good and outcome.ended not in ("failed", "killed")
        print(f"{name}: {outcome.ended}, {outcome.seconds:.0f} s {outcome.reason}", flush=True)
    return good


def _run(part: Part, plan: Plan, folder: Path, limit: float) -> Outcome:
    """Run a part (a measurement), unless time or a package is missing; return how it ended."""
    absent = " ".join(package for package in part.NEEDS if find_spec(package) is None)
    if absent:
        return Outcome("not run", reason=f"not installed: {absent} (pip install {absent})")
    if limit < LEAST_SECONDS:
        return Outcome("no time", reason=f"{max(0.0, limit):.0f} s were left for it")
    # The part's deadline comes before its limit, so that it can finish what it is doing then.
    deadline = time.monotonic() + limit - min(5.0, limit / 10)
    context = Context(folder.name, plan.size, folder, deadline, plan.against, plan.gpus)
    return run_part(part, context, limit)


def _close_records(folder: Path, outcome: Outcome) -> None:
    """Give records that an ended part left in state "running" the state in which they ended.

    This state is "finished" if the part (a measurement) has finished and no row of the record was
    interrupted, and otherwise "interrupted".
    """
    for record in readable(folder):
        if record.run is not None and record.run.state == "running":
            state: Literal["finished", "interrupted"] = "finished"
            interrupted = any(result.status == "interrupted" for result in record.results)
            if outcome.ended != "finished" or interrupted:
                state = "interrupted"
            save(closed(record, state), folder / f"{record.name}.json")


def _keep(parts: Mapping[str, Part], folder: Path) -> None:
    """Write the page and the archive with all results that are known so far."""
    write_atomically(folder / PAGE, page(folder, parts))
    unfinished = folder / f".{ARCHIVE}.part"
    left_out = (unfinished.name, ARCHIVE)

    def chosen(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if Path(member.name).name in left_out else member

    with tarfile.open(unfinished, "w:gz") as archive:
        archive.add(folder, TOP, filter=chosen)
    os.replace(unfinished, folder / ARCHIVE)
