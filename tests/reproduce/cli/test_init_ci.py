"""Tests of the command `init-ci`, which writes a CI workflow that runs `regression`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from reproduce.cli.init_ci import WORKFLOW
from reproduce.error import Error
from reproduce.machine.origin import PACKAGE

from ..made import commit, git

CASES = """
from reproduce.regression.timed import Case

def runs():
    import mine
    return mine.step

def fails():
    import mine
    return mine.no_such_step

CASES = [Case("runs", runs), Case("fails", fails)]
"""
MINE = ["--package", "mine", "--cases", "bench/cases.py"]
HOST = "https://host.example"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change into the repository of a user's package with benchmark cases, and return its folder.

    Git is set up to replace the address `HOST` of a made-up server by the folder that contains the
    repository.
    """
    root = tmp_path / "own"
    (root / "mine").mkdir(parents=True)
    (root / "bench").mkdir()
    (root / "mine" / "__init__.py").write_text("def step(): pass\n")
    (root / "bench" / "cases.py").write_text(CASES)
    (root / ".gitignore").write_text("ignored.py\n")
    (root / "ignored.py").write_text(CASES)
    (tmp_path / "outside.py").write_text(CASES)
    commit(root, "v1")
    monkeypatch.chdir(root)
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", f"url.{tmp_path.as_uri()}.insteadOf")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", HOST)
    return root


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Replace the trial run by which `init-ci` finds out which benchmark cases work.

    Returns:
        A dictionary, which is empty at first. To let a case fail, a test adds the name of the case
        and the reason.
    """
    reasons: dict[str, str] = {}

    def unable(project: object, cases: Mapping[str, object]) -> dict[str, str]:
        return {case: reasons[case] for case in cases if case in reasons}

    monkeypatch.setattr("reproduce.regression.trial.unable", unable)
    return reasons


@pytest.mark.parametrize(
    ("options", "installs", "file"),
    [
        ([], f"python -m pip install '{PACKAGE}[reproduce] @ '\"$REPRODUCE\"", None),
        ([], f"python -m pip install '{PACKAGE}[reproduce] @ '\"$REPRODUCE\" .", "pyproject.toml"),
        (
            ["--build", "make it"],
            f"pip install '{PACKAGE}[reproduce] @ '\"$REPRODUCE\" .",
            "setup.py",
        ),
    ],
)
@pytest.mark.usefixtures("tried", "own")
def test_the_workflow_of_another_package(
    options: list[str], installs: str, file: str | None, command: Any
) -> None:
    """Check the CI workflow that is written for a package other than torchgpipe.

    The workflow must contain the git address of `reproduce` exactly once. It must install
    `reproduce` from this address, and not from a package index.
    """
    if file is not None:
        Path(file).touch()

    out, err = command("init-ci", *MINE, *options, "--from", f"{HOST}/own@v1")

    assert (
        out == f"wrote {WORKFLOW}: commit it and bench/cases.py, and every pull request is judged\n"
    )
    assert err == "trying runs, fails\n"
    text = WORKFLOW.read_text()
    assert f"  REPRODUCE: git+{HOST}/own@v1\n" in text
    body = text.partition("\n")[2]
    assert body.count(HOST) == 1
    assert body.count(PACKAGE) == 1
    assert f"{installs}\n" in body
    Requirement(f"{PACKAGE}[reproduce] @ git+{HOST}/own@v1")  # as pip reads it
    built = f" --build '{options[1]}'" if options else ""
    assert f"regression.md --package mine --cases bench/cases.py{built}\n" in body


@pytest.mark.usefixtures("tried")
def test_a_command_of_ones_own_installs_everything(own: Path, command: Any) -> None:
    command("init-ci", *MINE, "--set-up", "make all")

    text = WORKFLOW.read_text()
    assert "        run: |\n          make all\n" in text
    assert "REPRODUCE:" not in text


NO_ADDRESS = "no way, so name the git repository from which CI installs this program, as in --from"
FOLDER = "a folder of this machine: give an address such as https://HOST/OWNER/REPOSITORY@TAG"
BOTH = "use it only together with --package, and not with --set-up"
REFUSED: list[tuple[list[str], str]] = [
    ([], "is not in torchgpipe's repository"),
    (MINE, NO_ADDRESS),
    ([*MINE, "--from", "a b"], "a b: give https://HOST/OWNER/REPOSITORY@TAG"),
    ([*MINE, "--from", f"{HOST}/nowhere@v1"], f"'git ls-remote {HOST}/nowhere' fails"),
    ([*MINE, "--from", f"{HOST}/own@v2"], "has no branch and no tag v2"),
    ([*MINE, "--from", f"{HOST}/own", "--set-up", "make"], BOTH),
    (["--from", f"{HOST}/own"], BOTH),
    ([*MINE, "--from", "file:///OWN@v1"], FOLDER),
    ([*MINE, "--from", "git+file://localhost/OWN"], FOLDER),
    ([*MINE, "--from", "../own@v1"], FOLDER),
    (["--package", "mine", "--cases", "ignored.py"], "git ignores this file"),
    (["--package", "mine", "--cases", "../outside.py"], "CI has only the files in the repository"),
    (["--package", "mine", "--cases", "none.py"], "none.py: there is no such file"),
]


@pytest.mark.parametrize(("options", "said"), REFUSED)
@pytest.mark.usefixtures("tried", "own")
def test_what_would_not_run_is_refused(
    options: list[str], said: str, monkeypatch: pytest.MonkeyPatch, command: Any
) -> None:
    def unknown() -> str:
        raise Error("no way")

    monkeypatch.setattr("reproduce.cli.init_ci.own_address", unknown)

    _, err = command("init-ci", *options, code=2)

    assert said in err
    assert err.count("\n") == 1
    assert not WORKFLOW.exists()


def test_a_case_that_does_not_run_is_refused(
    own: Path, tried: dict[str, str], command: Any
) -> None:
    tried["fails"] = "AttributeError: gone"

    _, err = command("init-ci", *MINE, "--set-up", "make", code=2)

    *_, last = err.splitlines()
    reason = "fails does not run (AttributeError: gone); nothing is written"
    assert last == f"reproduce: --cases bench/cases.py: {reason}"
    assert not WORKFLOW.exists()


@pytest.mark.usefixtures("tried")
def test_where_there_is_nothing_to_judge(
    own: Path, monkeypatch: pytest.MonkeyPatch, command: Any
) -> None:
    asked = ["init-ci", "--package", "mine", "--cases"]
    monkeypatch.chdir(own / "bench")
    _, err = command(*asked, "cases.py", code=2)
    assert f"run this command in the top folder of the repository, {own}\n" in err

    monkeypatch.chdir(own.parent)
    _, err = command(*asked, "outside.py", code=2)
    assert "is not in a git repository" in err

    git(own.parent, "init", "--quiet")
    _, err = command(*asked, "outside.py", code=2)
    assert "has no commit yet: commit the package first" in err


@pytest.mark.slow  # PyTorch is imported in another process
def test_each_case_is_tried(own: Path, command: Any) -> None:
    _, err = command("init-ci", *MINE, "--set-up", "make", code=2)
    *_, last = err.splitlines()
    assert "fails does not run (AttributeError: module 'mine' has no attribute" in last
    assert "runs does" not in last

    cases = own / "bench" / "cases.py"
    cases.write_text(cases.read_text().replace(', Case("fails", fails)', ""))
    command("init-ci", *MINE, "--set-up", "make")
    assert WORKFLOW.exists()
