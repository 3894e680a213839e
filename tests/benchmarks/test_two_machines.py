"""Two machines that are network namespaces train to the losses of one process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks import two_machines


def ran(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.two_machines", *options],
        cwd=two_machines.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [["amoebanetd"], ["transformer", "--delay", "5", "--loss", "0.01"]],
    ids=["as it is", "delayed and lossy"],
)
def test_losses_are_those_of_one_process(options: list[str]) -> None:
    if (why := two_machines.problem()) is not None:
        pytest.skip(f"no network namespaces: {why}")
    done = ran(*options, "--steps", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal to the bit" in done.stdout


def test_a_difference_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [("2.0", "1.0", 0.1), ("1.5", "1.0", 0.1)]
    monkeypatch.setattr(two_machines, "Link", lambda *_: None)
    monkeypatch.setattr(two_machines, "trained", lambda *_, **__: steps)
    monkeypatch.setattr(two_machines, "on_two_machines", lambda *_: [*steps[:1], ("1.5", "1.0000001", 0.1)])
    with pytest.raises(SystemExit) as ended:
        two_machines.main(["--inside", "transformer"])
    assert ended.value.code == 1
    assert "DIFFERENT" in capsys.readouterr().out


@pytest.mark.parametrize("options", [["--loss", "1"], ["--delay", "-1"]])
def test_options_out_of_range(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        two_machines.main(options)
    assert "--loss is a share from 0 to below 1" in capsys.readouterr().err
