"""regression: its exit codes and tables with made-up samples, and once for real on a repository made of this tree."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from reproduce.cli.compare import compare
from reproduce.cli.main import main
from reproduce.cli.regression import regression
from reproduce.error import USAGE, Error
from reproduce.numbers.significance import Rule
from reproduce.regression import main as asked
from reproduce.regression.cases import CASES
from reproduce.regression.job import Settings
from reproduce.regression.trees import Tree

ROOT = Path(__file__).resolve().parents[3]
NAMES = [case.name for case in CASES]


def commit(root: Path) -> None:
    """Make a repository of a folder."""
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "all"]):
        subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x@example.com", *command], cwd=root, check=True)


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Replace checkouts and the job: cases slower by a factor, and cases that a side cannot run."""

    def make(slower: dict[str, float] | None = None, **unable: list[str]) -> None:
        @contextlib.contextmanager
        def trees(base: str, head: str | None) -> Iterator[tuple[Tree, Tree]]:
            yield Tree(tmp_path, base, "0" * 40), Tree(tmp_path, head or "the working tree", "1" * 40, dirty=True)

        def interleaved(base: Tree, head: Tree, settings: Settings) -> Iterator[dict[str, object]]:
            for case in settings.cases:
                sides = {side: "ImportError: gone" for side, cases in unable.items() if case in cases}
                if sides:
                    yield {"case": case, "unable": sides}
                    continue
                factor = (slower or {}).get(case, 1.0)
                for i in range(settings.restarts):
                    steady = [0.01 * (1 + k / 1000) for k in range(settings.rounds)]
                    noise = 1 + (-1) ** i * (i + 1) / 2000
                    yield {"case": case, "restart": i, "base": steady, "head": [factor * noise * x for x in steady]}

        monkeypatch.setattr(asked, "trees", trees)
        monkeypatch.setattr(asked, "interleaved", interleaved)

    return make


def test_an_unchanged_tree_passes(made_up: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    made_up()
    assert main(["regression", "--base", "v1"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and out.startswith("regression: time in ms; lower is better\n")
    assert all(name in out for name in NAMES) and "worse" not in out.split("\n- ")[0]
    (mean,) = (line for line in out.splitlines() if line.startswith("geometric mean of 8"))
    assert mean.split()[4] == "1.00" and mean.endswith("~"), "it is judged, too"
    assert "A: v1 (" in out and "git 0000000" in out and "B: the working tree (" in out and "git 1111111+" in out
    assert "20 restarts of both sides" in out and "9 tests share the risk" in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("factor", "options", "code", "verdict"),
    [
        (1.1, [], 1, "worse"),
        (1.04, [], 0, "~"),
        (1.04, ["--threshold", "0.03"], 1, "worse"),
        (0.8, [], 0, "better"),
        (1.1, ["--alpha", "0.00001"], 2, None),
    ],
)
def test_a_slower_case(
    factor: float,
    options: list[str],
    code: int,
    verdict: str | None,
    made_up: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    made_up({"U-Net GPipe": factor})
    assert main(["regression", "--base", "v1", *options]) == code
    out, err = capsys.readouterr()
    assert (err == "reproduce: slower than v1: U-Net GPipe\n") == (code == 1)
    lines = [line.split() for line in out.splitlines() if line.startswith("U-Net GPipe")]
    assert [line[-1] for line in lines] == ([] if verdict is None else [verdict])


def test_all_slower_is_judged_together(made_up: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    made_up(dict.fromkeys(NAMES, 1.2))
    assert main(["regression", "--base", "v1", "--format", "json"]) == 1
    out, err = capsys.readouterr()
    (shown,) = json.loads(out)["tables"]
    rows = shown["rows"]
    assert shown["geometric_mean"] == {"B": rows[-1]["ratio"]}, "one number of that name"
    assert rows[-1]["row"] == "geometric mean" and rows[-1]["verdict"] == "worse"
    assert rows[-1]["ratio"] == pytest.approx(1.2, rel=0.01) and "all together" in err


def test_a_base_without_a_case(made_up: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    made_up(base=["U-Net GPipe", "machinery never"])
    assert main(["regression", "--base", "v1"]) == 0
    assert "not in base (A): machinery never, U-Net GPipe: ImportError: gone" in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.mark.parametrize(
    ("unable", "said"),
    [
        ({"head": ["U-Net GPipe"]}, "1 case cannot run in the working tree: U-Net GPipe: ImportError: gone"),
        ({"base": NAMES}, "no case runs in v1, so nothing shows that there is no regression"),
    ],
)
def test_what_cannot_be_compared_does_not_pass(
    unable: dict[str, list[str]], said: str, made_up: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    made_up(**unable)
    assert main(["regression", "--base", "v1"]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("style", ["text", "markdown", "csv", "json"])
def test_a_planted_delay_is_told_in_every_format(
    style: str, made_up: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    made_up()
    assert main(["regression", "--base", "v1", "--slow-down", "0.1", "--format", style]) == 0
    assert "WITH A PLANTED DELAY of 10%" in " ".join(capsys.readouterr().out.split())


def test_markdown_is_written_also_where_it_fails(
    made_up: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made_up({"U-Net GPipe": 1.2})
    file = tmp_path / "table.md"
    assert main(["regression", "--base", "v1", "--markdown", str(file), "--format", "csv"]) == 1
    assert file.read_text().startswith("## regression") and "| U-Net GPipe" in file.read_text()
    assert capsys.readouterr().out.startswith("experiment,row,metric")


def test_defaults_stand_in_one_place() -> None:
    """The command's are written out, as to import the others takes seconds that `--help` has no use for."""
    offered = {option.name: option.default for option in regression.params}
    settings, rule = Settings([]), Rule()
    assert (offered["restarts"], offered["rounds"]) == (settings.restarts, settings.rounds)
    for command in (regression, compare):
        offered = {option.name: option.default for option in command.params}
        assert (offered["alpha"], offered["threshold"]) == (rule.alpha, rule.threshold)


def test_a_filter(made_up: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    made_up()
    assert main(["regression", "--base", "v1", "--case", "u-net g", "--restarts", "8"]) == 0
    out = capsys.readouterr().out
    assert "U-Net GPipe" in out and "U-Net naive" not in out and "1 test share" in " ".join(out.split())


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ([], 2, "Missing option '--base'"),
        (["--base", "nowhere-to-be-found"], 2, "nowhere-to-be-found: no such git revision here; name a commit"),
        (["--base", "HEAD", "--head", "nowhere"], 2, "nowhere: no such git revision here"),
        (["--base", "HEAD", "--case", "x"], 2, "--case x: no case's name contains it; there are machinery never, "),
        (["--base", "HEAD", "--restarts", "5"], 2, "of 8 cases at --alpha 0.01, nothing could be called significant; "),
        (["--base", "HEAD", "--rounds", "0"], 2, "'--rounds': 0 is not in the range"),
        (["--base", "HEAD", "--slow-down", "-1"], 2, "'--slow-down': -1.0 is not in the range"),
        (["--base", "HEAD", "--markdown", "/dev/null/x"], 1, "--markdown /dev/null: cannot be written"),
    ],
)
def test_what_is_wrong_is_one_line(
    options: list[str],
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "torchgpipe").mkdir()
    (tmp_path / "torchgpipe" / "__init__.py").write_text("")
    commit(tmp_path)
    monkeypatch.setattr(asked, "trees", functools.partial(asked.trees, root=tmp_path))
    assert main(["regression", *options]) == code
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("reproduce: ") and said in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code"), [(Error("it broke"), 1), (Error("it broke", USAGE), 2), (KeyboardInterrupt(), 130)]
)
def test_what_breaks_it_off(
    error: BaseException,
    code: int,
    made_up: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made_up()

    def interleaved(*arguments: object) -> Iterator[dict[str, object]]:
        yield {"case": NAMES[0], "restart": 0, "base": [1.0], "head": [1.0]}
        raise error

    monkeypatch.setattr(asked, "interleaved", interleaved)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["regression", "--base", "v1"]) == code
    shown = capsys.readouterr().err
    assert shown.startswith("\rrestart 1 of 20 done\nreproduce: "), "the message has a line of its own"


# --- for real --------------------------------------------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Make a repository of this tree, with one commit."""
    root = tmp_path / "repository"
    for package in ("torchgpipe", "benchmarks", "reproduce"):
        shutil.copytree(ROOT / package, root / package, ignore=shutil.ignore_patterns("__pycache__"))
    commit(root)
    return root


@contextlib.contextmanager
def begun(root: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Begin a comparison of a repository, which a test that fails does not leave running."""
    command = [sys.executable, "-m", "reproduce", "regression", "--base", "HEAD", "--case", "machinery never", *options]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.terminate()


def worktrees(root: Path) -> list[str]:
    done = subprocess.run(["git", "worktree", "list"], cwd=root, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


@pytest.mark.slow
def test_for_real(repository: Path) -> None:
    """No difference can be larger than this threshold, so that the machine's noise is no part of the test."""
    with (repository / "torchgpipe" / "__init__.py").open("a") as file:
        file.write("\n# a change\n")
    with begun(repository, "--threshold", "1000", "--restarts", "8", "--rounds", "1") as process:
        out, err = process.communicate()
    assert (process.returncode, err) == (0, ""), err
    assert "machinery never" in out and "8 restarts of both sides" in out and "B: the working tree (" in out
    assert len(worktrees(repository)) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "said"), [(signal.SIGINT, 130, "reproduce: interrupted"), (signal.SIGTERM, 143, "")]
)
def test_ended_it_leaves_nothing(number: signal.Signals, code: int, said: str, repository: Path) -> None:
    with begun(repository, "--restarts", "100000") as process:
        while len(worktrees(repository)) == 1:
            assert process.poll() is None
            time.sleep(0.1)
        (temporary,) = [Path(line.split()[0]) for line in worktrees(repository)[1:]]
        while not jobs(temporary):
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(number)
        out, err = process.communicate()
    assert (process.returncode, out, err.strip()) == (code, "", said)
    assert len(worktrees(repository)) == 1 and not temporary.parent.exists() and not jobs(temporary)


def jobs(temporary: Path) -> list[Path]:
    """List the processes that were started to measure what is in a folder, and are not yet gone."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (process / "cmdline").read_bytes().split(b"\0")
            if b"reproduce.regression.interleave" in line and str(temporary).encode() in line:
                found.append(process)
    return found
