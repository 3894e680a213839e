"""Define the commands that work with records (files of results).

The commands are `show`, `compare`, `history`, `publish`, `import-paper`, `render` and `report`.
"""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from msgspec.structs import replace

from reproduce.cli.shared import FILE, PATH, alpha, command, shown, style, threshold
from reproduce.error import Error, Worse
from reproduce.machine.description import ROOT
from reproduce.machine.git import commit_file
from reproduce.records.places import MEASURED, OUT, RESULTS, RUNS, find_record, need_checkout
from reproduce.records.published import import_tables
from reproduce.records.record import Record, Run, load, readable, save, write_atomically
from reproduce.run.recorder import prepare_folder

PREDICTED = "results/predicted/unet-speed-p40x8.json"  # of the examples
PUBLISHED = "results/paper/tg-unet-speed.json"
HISTORY = "history.jsonl"
A_RUN = "unet-speed-small-20200421T100205Z"


@command(f"show {PREDICTED}", f"show {PUBLISHED} --format json")
@click.argument("records", nargs=-1, required=True)
@style
def show(records: tuple[str, ...], style: str) -> None:
    """Print the tables of records.

    RECORDS are paths of files, or names of runs in the folders runs and results/measured. In
    Markdown, the output also has the command, the machine and the versions of each run.
    """
    from reproduce.tables.all import written_records

    found = [load(find_record(name)) for name in records]
    click.echo(written_records(found, style), nl=False)


@command(f"publish {A_RUN}", f"publish runs/{A_RUN}.json")
@click.argument("record")
@click.option("--force", is_flag=True, help="Publish it in spite of the reasons against it.")
def publish(record: str, force: bool) -> None:
    """Copy a run into results/measured, where it can be committed.

    RECORD is the path of a record (file of results), or the name of a run. The copy is named after
    its experiments, scale, devices and time. The run's tables are written into a Markdown file of
    the same name. Absolute paths in the run's command are shortened to their last part.

    A run is not copied if it was not finished, if other programs disturbed it, if its source code
    had uncommitted changes or is unknown, or if results/measured already has a record of this name.
    """
    from reproduce.tables.all import document

    need_checkout("publish")
    found = load(find_record(record))
    if found.kind != "measured" or found.run is None:
        raise click.UsageError(
            f"{record}: this record was not measured by this program, so it cannot be published "
            "as measured"
        )
    path = MEASURED / f"{published_name(found, found.run)}.json"
    against = list(reasons_against(found, found.run))
    if path.exists():
        against.append(f"{shown(path)} is there already")
    if against and not force:
        raise Error(f"{record}: {'; '.join(against)}; run it again, or use --force")
    # The folders of the machine that made the run are private.
    command = [re.sub(r"^(--[a-z]+=)?/.*/(?=.)", r"\1", word) for word in found.run.command]
    renamed = replace(found, name=path.stem, run=replace(found.run, command=command))
    save(renamed, path)
    write_atomically(path.with_suffix(".md"), document(renamed))
    click.echo(f"published: {shown(path)}; 'make results' updates the tables that show it")


def reasons_against(record: Record, run: Run) -> Iterator[str]:
    """Yield reasons not to publish a run."""
    if run.state != "finished":
        yield f"the run was not finished ({run.state})"
    if run.git is None:
        yield "it is not known which git revision ran"
    elif run.git.dirty:
        yield "the source code had changes that are in no commit"
    if any(result.disturbed for result in record.results):
        yield "others disturbed rows of it (*)"


def published_name(record: Record, run: Run) -> str:
    """Return the name of a run's file in results/measured: experiments, scale, devices and time.

    An example is `unet-speed_unet-memory-paper-8xtesla-p40-20200421T1002`. Some results belong to
    no experiment, such as those of `python -m benchmarks.gpu`. For them, the name of the record
    stands in place of an experiment.
    """
    from reproduce.experiments import EXPERIMENTS

    machine = {"cpu": run.machine.cpu, "meta": "meta"}.get(run.device) or run.machine.gpus[0].name
    plain = re.sub(r"\(\w+\)|\bCPU\b|@.*", " ", machine)  # Intel(R) Xeon(R) CPU @ 2.00GHz
    name = "-".join(re.findall(r"[a-z0-9.]+", plain.lower()))
    subjects: dict[str, None] = {}
    for result in record.results:
        subject = result.experiment if result.experiment in EXPERIMENTS else record.name
        subjects[subject] = None
    experiments = "_".join(subjects)
    time = re.sub("[-:]", "", run.started[:16])
    return f"{experiments}-{record.scale}-{run.devices}x{name}-{time}"


@command(
    "import-paper tables.json",
    "import-paper tables.json --out paper",
    name="import-paper",
)
@click.argument("source", type=PATH)
@click.option(
    "--out",
    type=PATH,
    default=OUT / "paper",
    metavar="DIR",
    help="Where to put them. Default: results/paper in a checkout, else paper.",
)
def import_paper(source: Path, out: Path) -> None:
    """Write a record for each table of the papers.

    A record is a file of results. SOURCE is a JSON file that contains all tables of the papers.
    """
    prepare_folder(out)
    for path in import_tables(source, out):
        click.echo(shown(path))


@command("render", "render --check")
@click.option("--check", is_flag=True, help="Write nothing; fail if anything is stale.")
@click.pass_obj
def render(benchmarks: Any, check: bool) -> None:
    """Rewrite the tables that are made from records.

    A record is a file of results. The tables are in pages in results/, and in blocks between marker
    comments in README.md and docs/. Blocks with results of benchmarks stay as they are, unless this
    command is started as python -m benchmarks.render.
    """
    from reproduce.tables import render

    need_checkout("render")
    files = render.render(ROOT, benchmarks)
    changed = render.stale(files)
    if check and changed:
        named = ", ".join(str(path.relative_to(ROOT)) for path in changed)
        raise Worse(f"stale: {named}; run 'make results'")
    for path in changed:
        write_atomically(path, files[path])
        click.echo(str(path.relative_to(ROOT)))
    if not changed:
        click.echo(f"{len(files)} files are as their records say")


@command("report", "report --results results --out page.html")
@click.option(
    "--results",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="DIR",
    help="Folder of the folders paper, predicted and measured. Default: results, with the runs in "
    "runs.",
)
@click.option(
    "--out",
    type=FILE,
    metavar="FILE",
    default=Path("report.html"),
    help="Where to write it. Default: report.html, in the current folder.",
)
@click.option(
    "--trace",
    "traces",
    type=PATH,
    multiple=True,
    metavar="FILE",
    help="Timeline to draw, as run --trace or torchgpipe.timeline writes it; may be repeated.",
)
def report(results: Path | None, out: Path, traces: tuple[Path, ...]) -> None:
    """Write a page with all numbers, figures and machines.

    The page shows published, predicted, measured and emulated numbers side by side. It also shows
    your own runs in the folder runs. If a run is left out, the page says why. If DIR (by default,
    the current folder) has a file history.jsonl, the page also draws the numbers in this file,
    which the command history writes. Files that cannot be read are skipped, and named on stderr.
    """
    from reproduce.report.page import page
    from reproduce.report.subjects import FOLDERS
    from reproduce.report.trace import read_trace
    from reproduce.tables.history import read_history

    folder = results or RESULTS
    broken: list[Error] = []
    records = []
    for name in FOLDERS:
        records += readable(folder / name, broken.append)
    own = readable(RUNS, broken.append) if results is None else []
    kept = (results or Path()) / HISTORY
    lines = []
    for _, line in read_history(content_of(kept), str(kept), broken.append):
        if line is not None:
            lines.append(line)
    for error in broken:
        click.echo(f"skipped: {error}", err=True)
    if not records and not own:
        raise click.UsageError(
            f"--results {folder}: no record (*.json) in its folders {', '.join(FOLDERS)}"
        )
    timelines = []
    for trace in traces:
        timelines += read_trace(trace)
    skipped = [str(error) for error in broken]
    write_atomically(out, page(records, timelines, lines, own, skipped))
    click.echo(f"written: {out}")


def content_of(path: Path) -> bytes:
    """Return the content of a file, or empty bytes if there is no such file."""
    return path.read_bytes() if path.exists() else b""


@command(
    "history runs benchmarks/gates/counts.json",
    "history b.json --branch history --smaller-is-better",
)
@click.argument("sources", nargs=-1, required=True)
@click.option(
    "--out",
    "file",
    type=FILE,
    default=HISTORY,
    show_default=True,
    metavar="FILE",
    help="The history file.",
)
@click.option(
    "--branch",
    metavar="NAME",
    help="Commit FILE to this branch instead. Files here stay as they are.",
)
@style
@click.option(
    "--smaller-is-better",
    is_flag=True,
    help="Print the numbers of which less is better in the JSON that github-action-benchmark takes "
    "as customSmallerIsBetter.",
)
def history(
    sources: tuple[str, ...], file: Path, branch: str | None, style: str, smaller_is_better: bool
) -> None:
    """Add a revision's numbers to a history file.

    The file has a line for each git revision and machine. The command report draws the numbers as
    curves. SOURCES are records (files of results), folders of records, or files of counts, such as
    benchmarks/gates/counts.json. All sources must come from one revision and one machine. Numbers
    that other programs disturbed are left out.
    """
    from reproduce.tables.history import added, for_github, line_of, line_table
    from reproduce.tables.output import written

    if smaller_is_better and style != "text":
        raise click.UsageError(
            f"--format {style}: --smaller-is-better always prints JSON of its own; leave one of "
            "these two options out"
        )
    line = line_of(sources)
    said: list[str] = []
    place = f"{branch}:{file}" if branch else str(file)

    def with_line(old: bytes) -> bytes:
        return added(old, line, place, said.append)

    if branch is None:
        write_atomically(file, with_line(content_of(file)))
    else:
        commit_file(Path(), branch, str(file), with_line)
    said.append(f"written: {len(line.numbers)} numbers of {line.git.name(7)} to {place}")
    click.echo("\n".join(said), err=True)
    if smaller_is_better:
        click.echo(json.dumps(for_github(line), indent=1))
        return
    table = line_table(line)
    click.echo(written(style, line.numbers, f"{table.text()}\n", table.markdown()), nl=False)


@command("compare results/paper results/predicted", "compare HEAD~1 HEAD --all")
@click.argument("sides", nargs=-1, required=True, metavar="A B [C ...]")
@click.option("--all", "every", is_flag=True, help="Name the rows that are on one side only.")
@click.option(
    "--metric",
    metavar="NAME",
    help="throughput, time, memory, reserved, speedup or another value. Default: the first of the "
    "table's metrics that two sides have, never speedup.",
)
@click.option(
    "--filter",
    "filters",
    multiple=True,
    metavar="FIELD=VALUE",
    help="Only such rows; n=2,4 takes both values; may be repeated.",
)
@threshold(0.05)
@alpha("in each row")
@style
@click.option("--force", is_flag=True, help="Compare absolute numbers even of different machines.")
@click.option(
    "--fail-on-regression",
    is_flag=True,
    help="Exit with 1 if a side is worse than A, with 2 if a row of A cannot be judged.",
)
@click.option(
    "--allow-missing",
    is_flag=True,
    help="With --fail-on-regression: name rows that cannot be judged. Exit with 0 if other rows of "
    "the same metric can be judged, and are not worse.",
)
def compare(
    sides: Sequence[str], fail_on_regression: bool, allow_missing: bool, **options: Any
) -> None:
    """Compare results with those of A, row by row.

    Each of A, B and so on is a record, a folder of records, a JSON file of pytest-benchmark, or a
    git revision. A row is one configuration in these results. REVISION stands for the records in
    results/measured at this revision, and REVISION:PATH for the records in another file or folder.
    """
    if not 2 <= len(sides) <= 26:
        raise click.UsageError(
            f"give from 2 to 26 results to compare, called A, B and so on, not {len(sides)}"
        )
    if allow_missing and not fail_on_regression:
        raise click.UsageError("--allow-missing changes what --fail-on-regression does: give both")
    from reproduce.tables.comparison import Options, compared

    text, gate = compared(sides, Options(**options))
    click.echo(text, nl=False)
    if fail_on_regression:
        said = gate.check(allow_missing=allow_missing)
        if said:
            click.echo(f"reproduce: nothing is worse, but {said}", err=True)
