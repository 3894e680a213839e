"""Tests of what nvidia-smi is asked about the clocks of GPUs, with a program that stands in for it.

Records have its answers from the start and from the end of a run.
"""

from pathlib import Path

import pytest

from reproduce.machine.clocks import GpuState, gpu_states, nvidia_smi
from reproduce.machine.devices import Devices
from reproduce.records.record import Record
from reproduce.run.recorder import closed, new_run

LINES = """0, 1980, 2619, 698.52, 71, 0x0000000000000024
1, 345, [N/A], [N/A], 33, 0x0000000000000001"""
BOTH = [
    GpuState(0, 1980.0, 2619.0, 698.52, 71.0, ["software power cap", "software thermal slowdown"]),
    GpuState(1, 345.0, temperature=33.0),
]
TELLS = f"echo '{LINES}'"
# A driver from before 2023.
IS_OLD = f"""case "$*" in
*clocks_event_reasons*) echo 'Field "clocks_event_reasons.active" is not valid'; exit 2 ;;
*clocks_throttle_reasons.active*noheader,nounits*) echo '{LINES}' ;;
esac"""


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of a program nvidia-smi, which is yet to be written."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path / "nvidia-smi"


def write(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("script", "expected"), [(TELLS, BOTH), (IS_OLD, BOTH), ("exit 9", [])], ids=str
)
def test_clocks(script: str, expected: list[GpuState], smi: Path) -> None:
    write(smi, script)
    assert gpu_states() == expected


def test_without_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_states() == []
    assert nvidia_smi("-q") is None


def test_a_run_has_the_clocks_of_its_start_and_of_its_end(smi: Path) -> None:
    write(smi, f"echo '{LINES.splitlines()[0]}'")
    run = new_run(Devices("cpu", 1, 1), 0, ["python"])
    write(smi, f"echo '{LINES.splitlines()[1]}'")

    record = closed(Record("name", "title", "measured", {}, [], run=run), "finished")

    assert record.run is not None
    assert record.run.gpus_at_start == BOTH[:1]
    assert record.run.gpus_at_end == BOTH[1:]
    assert record.run.state == "finished"
