"""The harness: nothing finished is lost, whatever ends a benchmark; a page shows what a record holds.

`benchmarks.any_model`: a few of its models, and its record.
"""

import contextlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.any_model import check_model, main, table
from benchmarks.any_model_lists import LISTS, Case, torchvision_models
from benchmarks.harness import Found, collect, command, start, summarized
from benchmarks.render import block as benchmark_block
from reproduce.error import Error
from reproduce.machine.description import Gpu, Machine
from reproduce.machine.git import Git
from reproduce.records.record import FREED_MEMORY, Record, Result, load, save

from ..library.traced import Choosing, Residual, rows
from ..reproduce.made import record


def begun(path: Path | None, **more: Any) -> Record:
    options = command("overlap", "A question.").parse_args(
        [] if path is None else ["--json", str(path)]
    )
    vars(options).update(more)
    return start(options, "overlap", "a title", {"time": "s"}, devices=2)


def test_a_record_says_where_and_how_but_no_paths(tmp_path: Path) -> None:
    run = begun(tmp_path / "new" / "one.json", against=Path("/somewhere"), chunks=[2, 4]).run
    assert (
        run is not None
        and run.state == "running"
        and run.machine.cores >= 1
        and run.versions["torch"]
    )
    assert run.settings["chunks"] == [2, 4] and "freed_memory" in run.settings
    assert torch.get_num_threads() == run.threads_per_device == 1
    assert not {"json", "against"} & run.settings.keys() and str(tmp_path) not in str(run.command)


# What ends a benchmark after its first case, and the record's state.
ENDS: dict[str, tuple[BaseException | None, str]] = {
    "nothing": (None, "finished"),
    "Ctrl-C": (KeyboardInterrupt(), "interrupted"),
    "a child": (Error("the measuring process ended"), "interrupted"),
    "a bug": (ZeroDivisionError(), "running"),
}


@pytest.mark.parametrize(("ending", "state"), ENDS.values(), ids=ENDS)
def test_what_is_finished_is_kept(
    ending: BaseException | None, state: str, tmp_path: Path, capsys: Any
) -> None:
    path = tmp_path / "one.json"
    states: list[str] = []

    def found() -> Found:
        yield [Result("case", "way", "measured", samples={"time": [1.0]})]
        states.append(json.loads(path.read_text())["run"]["state"])
        if ending is not None:
            raise ending
        yield [
            Result(
                "case", "way", "measured", samples={"time": [4.0, 1.0, 2.0]}, values={"other": 3}
            )
        ]

    ended = (
        contextlib.nullcontext()
        if ending is None
        else pytest.raises((SystemExit, ZeroDivisionError))
    )
    with ended:
        collect(begun(path), path, found(), 2, lambda record: f"{len(record.results)} results")
    record = load(path)
    assert states == ["running"] and record.run is not None and record.run.state == state
    summary = {"time": 1.0, "spread": {"time": [1.0, 1.0, 1]}}
    if ending is None:
        summary = {"other": 3, "time": 2.0, "spread": {"time": [1.0, 4.0, 3]}}
    assert [(result.samples, result.values) for result in record.results] == [({}, summary)]
    assert [file.name for file in tmp_path.iterdir()] == ["one.json"]
    if state != "running":
        assert capsys.readouterr().out == "1 results\n"


Cases = dict[str, dict[str, dict[str, list[float]]]]


def written(folder: Path, name: str, cases: Cases) -> None:
    results = [
        summarized(
            Result(case, way, "measured", config={"version": f"torchgpipe {way}"}, samples=samples)
        )
        for case, ways in cases.items()
        for way, samples in ways.items()
    ]
    machine = Machine("Linux", "a CPU", 4, 4, None, [Gpu("a GPU", 2**30)])
    versions, git = {"torch": "2.11.0", "python": "3.12.1"}, Git("0123456789abcdef", True)
    made = record(
        *results,
        machine=machine,
        versions=versions,
        git=git,
        load=[0.251, 0.0, 0.0],
        settings={FREED_MEMORY: "kept"},
    )
    save(made, folder / f"{name}.json")


def times(forward: float, backward: float) -> dict[str, list[float]]:
    return {"forward": [forward] * 3, "backward": [backward] * 3, "both": [forward + backward] * 3}


# A record, and its table, which has columns that no committed record has.
MACHINERY: Cases = {
    "n=1": {"plain": times(2, 2), "other": times(20, 20), "graph": times(5, 5)},
    "n=2": {
        "plain": times(1, 1),
        "other": times(4, 6),
        "graph": times(1, 1),
        "workers": times(2, 3),
    },
    "n=3": {
        "plain": times(2, 3),
        "workers, other": times(1, 1),
        "graph": times(5, 5),
        "workers": times(4, 4),
    },
}
ROWS = """|case|plain loop|other|graph|ratio|workers, other|workers|ratio|
|n=1|2 + 2|20 + 20|5 + 5|0.25||||
|n=2|1 + 1|4 + 6|1 + 1|0.20||2 + 3|0.50|
|n=3|2 + 3||5 + 5|2.00|1 + 1|4 + 4|4.00|"""


def test_a_record_is_shown(tmp_path: Path) -> None:
    written(tmp_path, "machinery-here", MACHINERY)
    block = benchmark_block(tmp_path / "page.md", "machinery-here", tmp_path)
    narrow = ["|".join(cell.strip() for cell in line.split("|")) for line in block.splitlines()]
    assert [row for row in ROWS.splitlines() if row not in narrow] == []
    assert (
        "\nMeasured 2020-04-21, torch 2.11.0, Python 3.12.1, a GPU, a CPU, 4 cores, freed memory kept, load 0.25 "
        "before the start, revision 012345678, with changes; [record](machinery-here.json)\n"
    ) in block
    assert (
        benchmark_block(tmp_path / "page.md", "machinery-later", tmp_path)
        == "Nothing measured is committed yet.\n"
    )


@pytest.mark.parametrize("name", ["conformance", "nothing"])
def test_one_that_cannot_be_shown_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    written(tmp_path, name, {"a case": {"a way": {}}})
    with pytest.raises(
        Error, match=rf"page\.md: the block from benchmarks/{name} cannot be made \(.*{name}\.json"
    ):
        benchmark_block(tmp_path / "page.md", name, tmp_path)


# Auxiliary outputs, a class token, windows with masks, a dictionary of outputs, concatenation.
SLOW = ("googlenet", "vit_b_32", "swin_t", "lraspp_mobilenet_v3_large", "squeezenet1_0")


@pytest.mark.parametrize(
    "name", ["resnet18", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_torchvision(name: str) -> None:
    assert check_model("torchvision", name, torchvision_models()[name]()).status == "measured"


def test_a_list_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []

    def build(kind: type[nn.Module]) -> Case:
        built.append(kind.__name__)
        return Case(kind(), rows())

    models = {kind.__name__: partial(build, kind) for kind in (Residual, Choosing)}
    monkeypatch.setitem(LISTS, "torchvision", lambda: models)
    path = tmp_path / "record.json"
    for more, now in (
        (["--only", "Choosing"], ["Choosing"]),
        ([], ["Residual"]),
        ([], []),
        (["--again"], [*models]),
    ):
        built.clear()
        main(["torchvision", "--json", str(path), *more])
        assert sorted(built) == sorted(now)
    record = load(path)
    assert {each.row: each.status for each in record.results} == {
        "Residual": "measured",
        "Choosing": "failed",
    }
    assert "return self.a(x) if" in (record.results[1].reason or "")
    page = table(record, "pipe")
    assert "Equal, of torchvision: Residual." in page
    assert "| Choosing " in page
    assert max(map(len, page.splitlines())) < 200
