"""publish: only a finished run of committed source code is copied to results/measured, under a fixed name."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from reproduce.cli.records import published_name
from reproduce.machine.description import Gpu
from reproduce.machine.git import Git
from reproduce.records.places import MEASURED, RESULTS, find_record
from reproduce.records.record import Record, Run, load, save

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
    record, stolen = load(max(MEASURED.glob("resnet101-speed-small-*.json"))), changes.pop("stolen", 0.0)
    assert record.run is not None
    machine = replace(record.run.machine, cpu="A fast(R) CPU R-5000 @ 3.0GHz", gpus=changes.pop("gpus", []))
    run = replace(record.run, **{"machine": machine, "git": GIT, "started": "2020-04-21T10:02:05Z", **changes})
    results = [replace(each, samples={**each.samples, "stolen": [stolen]}) for each in record.results]
    record = replace(record, run=run, results=results)
    save(record, Path("runs/mine.json"))
    return record, run


@pytest.mark.parametrize("named", ["mine", "mine.json", "runs/mine.json"])
def test_a_run_is_published_and_found_by_its_new_name(named: str, measured: Path, command: Any) -> None:
    """Folders of the machine that ran it stay private."""
    made, run = keep(command=["run", "x/y", "--out", "/home/me/runs/", "--link=/home/me/my.json", "/"])
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
        ({"state": "interrupted"}, "the run was not finished (interrupted); run it again, or use --force"),
        ({"state": "running", "git": None}, "not finished (running); it is not known which git revision ran"),
        ({"stolen": 0.03}, "mine: others disturbed rows of it (*); run it again, or use --force"),
        ({"git": replace(GIT, dirty=True)}, "the source code had changes that are in no commit"),
        ({"started": "2020-04-21T10:02:59Z"}, f"{NAME}.json is there already"),
    ],
)
def test_refused_unless_forced(changes: dict[str, Any], said: str, measured: Path, command: Any) -> None:
    keep()
    if "started" in changes:
        command("publish", "mine")
    before = [path.read_text() for path in measured.iterdir()]
    keep(**changes)
    _, err = command("publish", "mine", code=2)
    assert err.startswith("reproduce: mine: ") and said in err and err.count("\n") == 1
    assert [path.read_text() for path in measured.iterdir()] == before
    command("publish", "mine", "--force")
    command("publish", str(RESULTS / "predicted/unet-speed-p40x8.json"), "--force", code=2)  # it was not measured


@pytest.mark.usefixtures("measured")
def test_the_name_says_which_devices() -> None:
    for device, count, name in (("cuda", 4, "4xnvidia-h100-80gb-hbm3"), ("meta", 8, "8xmeta")):
        made = keep(device=device, devices=count, gpus=[Gpu("NVIDIA H100 80GB HBM3", 80 << 30)] * 8)
        assert published_name(*made) == f"resnet101-speed-small-{name}-20200421T1002"
    for path in MEASURED.glob("*.json"):
        record = load(path)
        assert record.run is not None and record.name == path.stem == published_name(record, record.run)
