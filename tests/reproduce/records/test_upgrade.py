"""Upgrade: a record of the version before loads, with everything where it belongs now."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reproduce.error import Error
from reproduce.machine.description import Gpu
from reproduce.records.record import VERSION, load, save
from reproduce.records.upgrade import UPGRADES

DATA = Path(__file__).with_name("data")
OLD = DATA / f"record-v{VERSION - 1}.json"


def test_the_version_before_is_read() -> None:
    assert VERSION - 1 in UPGRADES
    record = load(OLD)
    assert record.run is not None
    assert record.run.versions == {"torch": "2.11.0", "cuda": "12.8", "driver": "575.57.08"}
    assert record.run.machine.gpus == [Gpu("Tesla P40", 24032378880, clock=1531.0, power_limit=250.0)] * 2
    assert [result.status for result in record.results] == ["measured", "needs devices"]
    assert record.results[0].samples["step_time"] == [1.5, 1.25]


def test_what_is_written_is_the_newest_version(tmp_path: Path) -> None:
    record = load(OLD)
    save(record, tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text())["version"] == VERSION
    assert load(tmp_path / "r.json") == record


def changed(*place: str | int, to: Any) -> dict[str, Any]:
    """Return the old file's contents with something else at that place."""
    data: dict[str, Any] = json.loads(OLD.read_text())
    at: Any = data
    for step in place[:-1]:
        at = at[step]
    at[place[-1]] = to
    return data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (changed("run", to=[]), "run: Expected `object | null`, got `array`"),
        (changed("run", "machine", to=3), "run.machine: Expected `object`, got `int`"),
        (changed("run", "machine", "gpus", to={}), "run.machine.gpus: Expected `array`, got `object`"),
        (changed("run", "machine", "gpus", 1, to="x"), "run.machine.gpus[1]: Expected `object`, got `str`"),
        (changed("run", "machine", "gpus", 0, "max_clock", to="fast"),
         "run.machine.gpus[0].clock: Expected `float | null`, got `str`"),
    ],
)  # fmt: skip
def test_a_broken_old_file_is_refused(data: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps(data))
    with pytest.raises(Error) as caught:
        load(path)
    assert str(caught.value) == f"{path}: {message}"


RESULTS = Path(__file__).resolve().parents[3] / "results"


COMMITTED = sorted(RESULTS.rglob("*.json"))


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_every_committed_record_loads_and_is_written_as_it_was(path: Path, tmp_path: Path) -> None:
    record = load(path)
    assert record.results
    save(record, tmp_path / path.name)
    assert (tmp_path / path.name).read_bytes() == path.read_bytes()
