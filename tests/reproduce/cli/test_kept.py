"""Tests of the commands `publish` and `history`.

`publish` copies the record of a finished run to results/measured. The source code of the run must
be committed. `history` adds the results of a git revision, as one line, to a file in a folder or on
a branch. The report draws this history.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from reproduce.cli.records import published_name
from reproduce.error import Error
from reproduce.machine.description import Gpu
from reproduce.machine.git import Git, commit_file
from reproduce.records.places import MEASURED, RESULTS, find_record
from reproduce.records.record import Record, Run, load, save
from reproduce.tables.output import FIELDS

from ..made import commit, emulated, git, record, row

NAME = "resnet101-speed-small-2xa-fast-r-5000-20200421T1002"
GIT = Git("0123456789abcdef", dirty=False)


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder for runs, enter it, and return its subfolder for published runs."""
    measured = tmp_path / "measured"
    measured.mkdir()
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    for module in ("cli.records", "records.places"):
        monkeypatch.setattr(f"reproduce.{module}.MEASURED", measured)
    return measured


def keep(**changes: Any) -> tuple[Record, Run]:
    """Change a copy of a published record, save it as runs/mine.json, and return record and run.

    Args:
        changes: New values: `gpus` of the machine, `stolen` of all results (the share of the CPU
            that the host of a virtual machine took), and fields of the record's run. Without
            changes, the record can be published.
    """
    record = load(max(MEASURED.glob("resnet101-speed-small-*.json")))
    stolen, gpus = changes.pop("stolen", 0.0), changes.pop("gpus", [])
    assert record.run is not None
    machine = replace(record.run.machine, cpu="A fast(R) CPU R-5000 @ 3.0GHz", gpus=gpus)
    run = replace(record.run, machine=machine, git=GIT, started="2020-04-21T10:02:05Z")
    run = replace(run, **changes)
    results = []
    for result in record.results:
        samples = {**result.samples, "stolen": [stolen]}
        results.append(replace(result, samples=samples))
    record = replace(record, run=run, results=results)
    save(record, Path("runs/mine.json"))
    return record, run


@pytest.mark.parametrize("named", ["mine", "mine.json", "runs/mine.json"])
def test_a_run_is_published_and_found_by_its_new_name(
    named: str, measured: Path, command: Any
) -> None:
    """Check that a run can be published, and can then be shown by its new name.

    In the published record, a path in the run's command is cut to its last part, so that no folders
    of the user's machine are shown.
    """
    private = ["run", "x/y", "--out", "/home/me/runs/", "--link=/home/me/my.json", "/"]
    public = ["run", "x/y", "--out", "runs/", "--link=my.json", "/"]
    made, run = keep(command=private)

    command("publish", named)

    path, page_path = measured / f"{NAME}.json", measured / f"{NAME}.md"
    assert sorted(measured.iterdir()) == [path, page_path]
    assert load(path) == replace(made, name=NAME, run=replace(run, command=public))
    assert find_record(NAME) == path
    page, _ = command("show", "--format", "markdown", NAME)
    assert page_path.read_text() == page
    assert f"record: `{NAME}.json`" in page


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"state": "interrupted"},
            "the run was not finished (interrupted); run it again, or use --force",
        ),
        (
            {"state": "running", "git": None},
            "not finished (running); it is not known which git revision ran",
        ),
        ({"stolen": 0.03}, "mine: others disturbed rows of it (*); run it again, or use --force"),
        ({"git": replace(GIT, dirty=True)}, "the source code had changes that are in no commit"),
        ({"started": "2020-04-21T10:02:59Z"}, f"{NAME}.json is there already"),
    ],
)
def test_refused_unless_forced(
    changes: dict[str, Any], said: str, measured: Path, command: Any
) -> None:
    prediction = RESULTS / "predicted/unet-speed-p40x8.json"
    keep()
    if "started" in changes:
        command("publish", "mine")
    before = [path.read_text() for path in measured.iterdir()]
    keep(**changes)

    _, err = command("publish", "mine", code=2)

    assert err.startswith("reproduce: mine: ")
    assert said in err
    assert err.count("\n") == 1
    assert [path.read_text() for path in measured.iterdir()] == before
    command("publish", "mine", "--force")
    command("publish", str(prediction), "--force", code=2)  # a prediction was not measured


@pytest.mark.usefixtures("measured")
def test_the_name_says_which_devices() -> None:
    gpus = [Gpu("NVIDIA H100 80GB HBM3", 80 << 30)] * 8
    for device, count, name in (("cuda", 4, "4xnvidia-h100-80gb-hbm3"), ("meta", 8, "8xmeta")):
        made = keep(device=device, devices=count, gpus=gpus)
        assert published_name(*made) == f"resnet101-speed-small-{name}-20200421T1002"
    record, run = keep(device="cuda", devices=1, gpus=gpus)
    case = replace(record.results[0], experiment="linear n=2 m=8 never")
    own = replace(record, name="gpu-machinery", scale="paper", results=[case, case])
    expected = "gpu-machinery-paper-1xnvidia-h100-80gb-hbm3-20200421T1002"
    assert published_name(own, run) == expected
    for path in MEASURED.glob("*.json"):
        record = load(path)
        assert record.name == path.stem
        assert record.run is not None
        assert published_name(record, record.run) == record.name


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Change into a git checkout with two revisions, and return the hashes of the revisions.

    For each revision, the checkout has the record of a run. It also has a file of counts, such as
    how often threads wait.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "measured").mkdir()
    Path("counts.json").write_text('{"linear": {"waits": 3}}')
    for i in (1, 2):
        monkeypatch.setenv("GIT_COMMITTER_DATE", f"2020-04-2{i}T00:00:00Z")
        commit(tmp_path, f"v{i}")
        revision = git(tmp_path, "rev-parse", "HEAD")
        a, b, c = row("a", 2.0), row("b", 1.0 * i, over="a"), row("c", 1.0, others=[0.2])
        emulated_b = emulated(row("b", 0.5 * i))
        made = record(a, b, c, emulated_b, git=Git(revision, dirty=False))
        save(made, Path(f"measured/{i}.json"))
    revisions = git(tmp_path, "log", "--reverse", "--format=%h")
    return revisions.split()


@pytest.mark.parametrize("branch", [[], ["--branch", "kept"]], ids=["file", "branch"])
def test_revisions_are_kept_and_drawn(
    branch: list[str], at: list[str], command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = at
    history = Path("history.jsonl")
    before = git(Path(), "status", "--porcelain")
    for name in ("measured/2.json", "counts.json"):
        command("history", name, *branch)
    if not branch:
        command("history", "measured/1.json")
    else:
        # The file is at the top of the branch, wherever one works.
        top = Path.cwd()
        monkeypatch.chdir("measured")
        command("history", "1.json", *branch)
        monkeypatch.chdir(top)
        assert git(Path(), "status", "--porcelain") == before
        kept = git(Path(), "show", "kept:history.jsonl")
        history.write_text(f"{kept}\n")
    with history.open("a") as file:
        file.write('{"git"\n')

    _, err = command("history", "measured/1.json")

    first, replaced, written = err.splitlines()
    assert first.startswith("history.jsonl:4: not JSON: ")
    assert first.endswith("; the line is kept")
    assert replaced == f"replaced: 4 numbers of {old} on a CPU, 2 cores"
    assert written == f"written: 4 numbers of {old} to history.jsonl"
    _, _, broken, last = history.read_text().splitlines()
    assert broken == '{"git"'
    for number in json.loads(last)["numbers"]:
        assert number.keys() <= set(FIELDS)

    _, err = command("report", "--results", ".")

    assert err.startswith("skipped: history.jsonl:3: not JSON")
    text = Path("report.html").read_text()
    assert f"e b, time, measured, small, cpu: {old} 1, {new} 2" in text
    assert f"e b, speedup, measured, small, cpu: {old} 2, {new} 1" in text
    assert f"e b, time, emulated, small, cpu: {old} 0.5, {new} 1" in text
    assert "3 numbers that changed" in text, "the others did not change, or were disturbed"


def test_what_github_action_benchmark_takes(at: list[str], command: Any) -> None:
    out, _ = command("history", "measured/2.json", "counts.json", "--smaller-is-better")

    first, *others = json.loads(out)
    assert first == {
        "name": "e a, time, measured, small, cpu",
        "unit": "s",
        "value": 2.0,
        "range": "1.9945-2.0055",
        "extra": "a CPU, 2 cores",
    }
    assert [each["unit"] for each in others] == ["s", "s", "count"], "no speed-up"


def test_what_is_refused(at: list[str], command: Any) -> None:
    branch = git(Path(), "branch", "--show-current")
    refused = {
        "measured": "4 undisturbed numbers, of the revisions",  # the folder has two revisions
        "counts.json --out measured/1.json": "measured/1.json is not a history",
        f"counts.json --branch {branch}": "is checked out",
        "counts.json --branch x --out ../h": "../h: name the file on the branch by a relative path",
        "counts.json --branch a..b": "'a..b' is not a valid branch name",
    }
    for asked, said in refused.items():
        _, err = command("history", *asked.split(), code=2)
        assert said in err
    commit_file(Path(), "kept", "a", lambda _: b"1")

    def meanwhile(_: bytes) -> bytes:
        commit_file(Path(), "kept", "b", lambda _: b"theirs")
        return b"ours"

    with pytest.raises(Error, match="does not contain"):
        commit_file(Path(), "kept", "b", meanwhile)
    assert git(Path(), "show", "kept:a") == "1"
    assert git(Path(), "show", "kept:b") == "theirs"


@pytest.mark.usefixtures("measured")
def test_a_report_is_written_into_the_current_folder(
    command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that `report` writes into the current folder, and not into the folder of results."""
    record, _ = keep()
    save(record, Path("measured/mine.json"))
    Path("here").mkdir()
    monkeypatch.chdir("here")
    out, _ = command("report", "--results", "..")
    assert out == "written: report.html\n"
    assert Path("report.html").exists()
    assert not Path("../report.html").exists()
