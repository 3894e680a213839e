"""Test the program `benchmarks.names`, which finds names in docs that refer to nothing.

For example, a page can name a module, a file or an option that was renamed.
"""

from pathlib import Path

import pytest

from benchmarks.names import problems, recorded_revisions
from reproduce.error import Error
from reproduce.machine.git import Git, git
from reproduce.records.record import save

from ..reproduce.made import record

KNOWN = ["0a1b2c3d4e5f60718293a4b5c6d7e8f901234567"]

# A text, and what is wrong with it.
WRONG = {
    "At revision 414bf55, it was faster.": "414bf55 is the revision of no record in results/",
    "`python -m research.league`": "there is no module research.league",
    "by `benchmarks.overlap`": "there is no benchmarks.overlap",
    "`torchgpipe.gpipe.GPipe`, `torchgpipe.gpipe.Tee`": "there is no torchgpipe.gpipe.Tee",
    "[a file](x.md) (`tests/test_leeks.py`)": "there is no file tests/test_leeks.py",
    "`make everything`": "the Makefile has no target everything",
    "`python -m reproduce calibrate`": "reproduce has no command calibrate",
    "`python -m reproduce list --chunks 3`": "--chunks is no option of list",
    "`python -m benchmarks.schedules --loud`": "--loud is no option of benchmarks.schedules",
    "the option `--keep-freed-memory`": "--keep-freed-memory is no option of any program",
    "```sh\nmake test\nmake tea  # now\n```": "the Makefile has no target tea",
    "```python\nfrom torchgpipe.nothing import x\n```": "there is no torchgpipe.nothing",
}
RIGHT = [
    "Revision 0a1b2c3d4 of 2026-11-28 20261128 has a defaced 1.5e-10.",
    "`torchgpipe.schedules.draw`, `benchmarks/gates/*.py`, `results/report.html`, `tests/FILE`",
    "`make test ARGS=--slow`, `make regression BASE=main`, `python -m pytest --unheard-of`",
    "`python -m tests.planted.losses --runs 3 -- --restarts 14`",
    "`python -m reproduce run NAME --row X`, `--nproc-per-node`, `examples/train.py --save`",
    "```output\n--not-an-option of python -m what.is.printed\n```",
    "make do, reproduce it, benchmarks.overlap: words of a sentence",
]


@pytest.mark.parametrize("text", WRONG)
def test_what_is_not_there_is_named(text: str) -> None:
    found = [problem for _, problem in problems(text, KNOWN)]
    assert found == [WRONG[text]]


@pytest.mark.parametrize("text", RIGHT)
def test_what_is_there_is_right(text: str) -> None:
    assert list(problems(text, KNOWN)) == []


def test_a_problem_has_the_number_of_its_line() -> None:
    text = "one\n```sh\nmake test\n\nmake tea\n```\n\n`make\ncoffee`\n"
    assert [line for line, _ in problems(text, KNOWN)] == [5, 8]


def test_records_are_of_revisions_in_history(tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    git(tmp_path, "init", "--quiet")
    author = ("-c", "user.name=x", "-c", "user.email=x@y")
    git(tmp_path, *author, "commit", "--quiet", "--allow-empty", "-m", "first")
    first = git(tmp_path, "rev-parse", "HEAD").decode()
    other = "0" * 40
    save(record(git=Git(first, dirty=False)), results / "a.json")
    save(record(git=Git(other, dirty=False)), results / "b.json")

    revisions, missing = recorded_revisions(tmp_path)

    assert revisions == [first, other]
    assert missing == ["results/b.json: its revision 000000000 is not in the history of HEAD"]


def test_a_shallow_clone_cannot_tell(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    (tmp_path / ".git" / "shallow").write_text("0" * 40 + "\n")
    with pytest.raises(Error, match="this clone is shallow: run 'git fetch --unshallow'"):
        recorded_revisions(tmp_path)
