"""publish: a finished run of committed source code gets a fixed name in results/measured.

history: a line for each revision, in a file or on a branch; nothing else is lost, and the report draws it.
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
    """Change into an empty folder, with a subfolder for published runs."""
    for folder in ("runs", "measured"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path)
    for module in ("cli.records", "records.places"):
        monkeypatch.setattr(f"reproduce.{module}.MEASURED", tmp_path / "measured")
    return tmp_path / "measured"


def keep(**changes: Any) -> tuple[Record, Run]:
    """Save a publishable run in runs/, with the given changes."""
    record, stolen = (
        load(max(MEASURED.glob("resnet101-speed-small-*.json"))),
        changes.pop("stolen", 0.0),
    )
    assert record.run is not None
    machine = replace(
        record.run.machine, cpu="A fast(R) CPU R-5000 @ 3.0GHz", gpus=changes.pop("gpus", [])
    )
    run = replace(
        record.run, **{"machine": machine, "git": GIT, "started": "2020-04-21T10:02:05Z", **changes}
    )
    results = [
        replace(each, samples={**each.samples, "stolen": [stolen]}) for each in record.results
    ]
    record = replace(record, run=run, results=results)
    save(record, Path("runs/mine.json"))
    return record, run


@pytest.mark.parametrize("named", ["mine", "mine.json", "runs/mine.json"])
def test_a_run_is_published_and_found_by_its_new_name(
    named: str, measured: Path, command: Any
) -> None:
    """Folders of the machine that ran it stay private."""
    made, run = keep(
        command=["run", "x/y", "--out", "/home/me/runs/", "--link=/home/me/my.json", "/"]
    )
    command("publish", named)
    private = replace(run, command=["run", "x/y", "--out", "runs/", "--link=my.json", "/"])
    assert load(measured / f"{NAME}.json") == replace(made, name=NAME, run=private)
    assert sorted(path.name for path in measured.iterdir()) == [f"{NAME}.json", f"{NAME}.md"]
    assert find_record(NAME) == measured / f"{NAME}.json"
    page, _ = command("show", "--format", "markdown", NAME)
    assert (measured / f"{NAME}.md").read_text() == page and f"record: `{NAME}.json`" in page


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
    keep()
    if "started" in changes:
        command("publish", "mine")
    before = [path.read_text() for path in measured.iterdir()]
    keep(**changes)
    _, err = command("publish", "mine", code=2)
    assert err.startswith("reproduce: mine: ") and said in err and err.count("\n") == 1
    assert [path.read_text() for path in measured.iterdir()] == before
    command("publish", "mine", "--force")
    command(
        "publish", str(RESULTS / "predicted/unet-speed-p40x8.json"), "--force", code=2
    )  # it was not measured


@pytest.mark.usefixtures("measured")
def test_the_name_says_which_devices() -> None:
    for device, count, name in (("cuda", 4, "4xnvidia-h100-80gb-hbm3"), ("meta", 8, "8xmeta")):
        made = keep(device=device, devices=count, gpus=[Gpu("NVIDIA H100 80GB HBM3", 80 << 30)] * 8)
        assert published_name(*made) == f"resnet101-speed-small-{name}-20200421T1002"
    for path in MEASURED.glob("*.json"):
        record = load(path)
        assert record.run is not None and record.name == path.stem == published_name(
            record, record.run
        )


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Change into a checkout of two revisions, with a run of each, and counts of the second."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "measured").mkdir()
    Path("counts.json").write_text('{"linear": {"waits": 3}}')
    for i in (1, 2):
        monkeypatch.setenv("GIT_COMMITTER_DATE", f"2020-04-2{i}T00:00:00Z")
        commit(tmp_path, f"v{i}")
        rows = (
            row("a", 2.0),
            row("b", 1.0 * i, over="a"),
            row("c", 1.0, others=[0.2]),
            emulated(row("b", 0.5 * i)),
        )
        save(
            record(*rows, git=Git(git(tmp_path, "rev-parse", "HEAD"), dirty=False)),
            Path(f"measured/{i}.json"),
        )
    return git(tmp_path, "log", "--reverse", "--format=%h").split()


@pytest.mark.parametrize("branch", [[], ["--branch", "kept"]], ids=["file", "branch"])
def test_revisions_are_kept_and_drawn(branch: list[str], at: list[str], command: Any) -> None:
    before = git(Path(), "status", "--porcelain")
    for name in ("measured/2.json", "measured/1.json", "counts.json"):
        command("history", name, *branch)
    if branch:
        assert git(Path(), "status", "--porcelain") == before
        Path("history.jsonl").write_text(git(Path(), "show", "kept:history.jsonl") + "\n")
    with Path("history.jsonl").open("a") as file:
        file.write('{"git"\n')
    first, *others = command("history", "measured/1.json")[1].splitlines()
    assert first.startswith("history.jsonl:4: not JSON: ") and first.endswith("; the line is kept")
    assert others == [
        f"{said} numbers of {at[0]} {where}"
        for said, where in (
            ("replaced: 4", "on a CPU, 2 cores"),
            ("written: 4", "to history.jsonl"),
        )
    ]
    _, _, broken, last = Path("history.jsonl").read_text().splitlines()
    assert broken == '{"git"' and {
        field for number in json.loads(last)["numbers"] for field in number
    } <= {*FIELDS}
    assert command("report", "--results", ".")[1].startswith("skipped: history.jsonl:3: not JSON")
    text = Path("report.html").read_text()
    for kind, one, two in (
        ("time, measured", 1, 2),
        ("speedup, measured", 2, 1),
        ("time, emulated", 0.5, 1),
    ):
        assert f"e b, {kind}, small, cpu: {at[0]} {one}, {at[1]} {two}" in text
    assert "3 numbers that changed" in text, "the others did not, or were disturbed"


def test_what_github_action_benchmark_takes(at: list[str], command: Any) -> None:
    first, *others = json.loads(command("history", "measured/2.json", "counts.json", "--json")[0])
    assert first == {
        "name": "e a, time, measured, small, cpu",
        "unit": "s",
        "value": 2.0,
        "range": "1.9945-2.0055",
        "extra": "a CPU, 2 cores",
    }
    assert [each["unit"] for each in others] == ["s", "s", "count"], "no speed-up"


def test_what_is_refused(at: list[str], command: Any) -> None:
    for asked, said in (
        ("measured", "4 undisturbed numbers of revision"),  # of two
        ("counts.json --file measured/1.json", "measured/1.json: no line of it is of a history"),
        (f"counts.json --branch {git(Path(), 'branch', '--show-current')}", "is checked out"),
        ("counts.json --branch x --file ../h", "../h: on a branch, give a path within"),
        ("counts.json --branch a..b", "'a..b' is not a valid branch name"),
    ):
        assert said in command("history", *asked.split(), code=2)[1]
    commit_file(Path(), "kept", "a", lambda _: b"1")

    def meanwhile(_: bytes) -> bytes:
        commit_file(Path(), "kept", "b", lambda _: b"theirs")
        return b"ours"

    with pytest.raises(Error, match="does not contain"):
        commit_file(Path(), "kept", "b", meanwhile)
    assert [git(Path(), "show", f"kept:{name}") for name in "ab"] == ["1", "theirs"]
