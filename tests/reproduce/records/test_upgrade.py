"""Upgrade: a record of the first version loads, with everything where it belongs now."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reproduce.machine.description import Gpu
from reproduce.records.places import RESULTS
from reproduce.records.record import VERSION, load, save
from reproduce.records.upgrade import upgrade

OLD = Path(__file__).with_name("data") / "record-v1.json"
COMMITTED = sorted(RESULTS.rglob("*.json"))


@pytest.mark.parametrize("version", range(1, VERSION))
def test_an_old_version_is_read_and_written_as_the_newest(version: int, tmp_path: Path) -> None:
    data = json.loads(OLD.read_text())
    if version == 2:
        data = {**upgrade(data, 1), "version": 2}
        data["results"][0]["over_published"] = "n2m1"
    (tmp_path / "old.json").write_text(json.dumps(data))
    record = load(tmp_path / "old.json")
    assert record.run is not None
    assert record.run.versions == {"torch": "2.11.0", "cuda": "12.8", "driver": "575.57.08"}
    assert record.run.machine.gpus == [Gpu("Tesla P40", 24032378880, clock=1531.0, power_limit=250.0)] * 2
    assert [result.status for result in record.results] == ["measured", "needs devices"]
    assert record.results[0].samples["step_time"] == [1.5, 1.25]
    save(record, tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text())["version"] == VERSION
    assert load(tmp_path / "r.json") == record


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_every_committed_record_loads_and_is_written_as_it_was(path: Path, tmp_path: Path) -> None:
    record = load(path)
    assert record.results
    save(record, tmp_path / path.name)
    assert (tmp_path / path.name).read_bytes() == path.read_bytes()
