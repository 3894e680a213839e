"""history: a line for each revision, in a file or on a branch; nothing else is lost, and the report draws it."""

import json
from pathlib import Path
from typing import Any

import pytest

from reproduce.error import Error
from reproduce.machine.git import Git, commit_file
from reproduce.records.record import save
from reproduce.tables.output import FIELDS

from ..made import emulated, record, row
from ..repository import commit, git


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Change into a checkout of two revisions, with a run of each, and counts of the second."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "measured").mkdir()
    Path("counts.json").write_text('{"linear": {"waits": 3}}')
    for i in (1, 2):
        monkeypatch.setenv("GIT_COMMITTER_DATE", f"2020-04-2{i}T00:00:00Z")
        commit(tmp_path, f"v{i}")
        rows = row("a", 2.0), row("b", 1.0 * i, over="a"), row("c", 1.0, others=[0.2]), emulated(row("b", 0.5 * i))
        save(record(*rows, git=Git(git(tmp_path, "rev-parse", "HEAD"), dirty=False)), Path(f"measured/{i}.json"))
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
    assert others == [f"{said} numbers of {at[0]} {where}" for said, where in (
        ("replaced: 4", "on a CPU, 2 cores"), ("written: 4", "to history.jsonl"))]  # fmt: skip
    _, _, broken, last = Path("history.jsonl").read_text().splitlines()
    assert broken == '{"git"' and {field for number in json.loads(last)["numbers"] for field in number} <= {*FIELDS}
    assert command("report", "--results", ".")[1].startswith("skipped: history.jsonl:3: not JSON")
    text = Path("report.html").read_text()
    for kind, one, two in (("time, measured", 1, 2), ("speedup, measured", 2, 1), ("time, emulated", 0.5, 1)):
        assert f"e b, {kind}, small, cpu: {at[0]} {one}, {at[1]} {two}" in text
    assert "3 numbers that changed" in text, "the others did not, or were disturbed"


def test_what_github_action_benchmark_takes(at: list[str], command: Any) -> None:
    first, *others = json.loads(command("history", "measured/2.json", "counts.json", "--json")[0])
    assert first == {"name": "e a, time, measured, small, cpu", "unit": "s", "value": 2.0, "range": "1.9945-2.0055",
                     "extra": "a CPU, 2 cores"}  # fmt: skip
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
