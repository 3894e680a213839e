"""Tests of `benchmarks.harness`, which several benchmarks use, and of `benchmarks.any_model`.

Even if an error or Ctrl-C ends a benchmark, all finished results must be kept. Pages must show what
is in the records of results.
"""

import contextlib
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import any_model, compiled, conformance, schedules
from benchmarks.any_model import check_model, main, table
from benchmarks.any_model_lists import LISTS, Case, torchvision_models
from benchmarks.gates import machinery
from benchmarks.harness import Found, collect, command, in_format, start, summarized
from benchmarks.render import block as benchmark_block
from reproduce.error import Error
from reproduce.machine.description import Gpu, Machine
from reproduce.machine.git import Git
from reproduce.records.record import FREED_MEMORY, Record, Result, load, save

from ..library.traced import Choosing, Residual, rows
from ..reproduce.made import record


def begun(path: Path | None, **more: Any) -> Record:
    arguments = [] if path is None else ["--out", str(path)]
    options = command("overlap", "A question.").parse_args(arguments)
    vars(options).update(more)
    return start(options, "overlap", "a title", {"time": "s"}, devices=2)


def test_a_record_says_where_and_how_but_no_paths(tmp_path: Path) -> None:
    path = tmp_path / "new" / "one.json"

    run = begun(path, base=Path("/somewhere"), chunks=[2, 4]).run

    assert run is not None
    assert run.state == "running"
    assert run.machine.cores >= 1
    assert run.versions["torch"]
    assert run.settings["chunks"] == [2, 4]
    assert "freed_memory" in run.settings
    assert torch.get_num_threads() == run.threads_per_device == 1
    assert "out" not in run.settings
    assert "base" not in run.settings
    assert str(tmp_path) not in str(run.command)


@pytest.mark.parametrize("program", [any_model, compiled, conformance, schedules, machinery])
def test_options_are_called_as_those_of_commands(program: Any, capsys: Any) -> None:
    with pytest.raises(SystemExit, match="0"):
        program.main(["--help"])
    said = capsys.readouterr().out
    assert "--out FILE" in said
    assert "--format {text,markdown,csv,json}" in said
    for other in ("--json", "--device ", "--against"):
        assert other not in said


def test_a_record_has_the_seed_and_no_format(tmp_path: Path) -> None:
    options = command("overlap", "A question.", seed=3).parse_args(["--format", "csv"])
    run = start(options, "overlap", "a title", {"time": "s"}, devices=2).run
    assert run is not None
    assert run.seed == 3
    assert run.settings.keys().isdisjoint({"seed", "format"})


def test_results_are_printed_in_each_format() -> None:
    result = Result("case", "way", "measured", samples={"time": [4.0, 1.0, 2.0]})
    made = record(summarized(result))

    def table(_: Record, style: str) -> str:
        return f"in style {style}"

    assert in_format("text", table)(made) == "in style simple"
    assert in_format("markdown", table)(made) == "in style pipe"
    (number,) = json.loads(in_format("json", table)(made))["numbers"]
    assert (number["value"], number["lower"], number["upper"]) == (2.0, 1.5, 3.0)
    assert number["samples"] == 3
    assert number["engine"] is None
    head, line = in_format("csv", table)(made).splitlines()
    assert head.startswith("experiment,row,")
    assert line.startswith("case,way,")


# The error that ends a benchmark after its first case, and the record's state.
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
        samples = {"time": [4.0, 1.0, 2.0]}
        yield [Result("case", "way", "measured", samples=samples, values={"other": 3})]

    def table(record: Record) -> str:
        return f"{len(record.results)} results"

    ended: Any = contextlib.nullcontext()
    if ending is not None:
        ended = pytest.raises((SystemExit, ZeroDivisionError))
    with ended:
        collect(begun(path), path, found(), 2, table)

    assert states == ["running"]
    record = load(path)
    assert record.run is not None
    assert record.run.state == state
    summary = {"time": 1.0, "spread": {"time": [1.0, 1.0, 1]}}
    if ending is None:
        summary = {"other": 3, "time": 2.0, "spread": {"time": [1.5, 3.0, 3]}}
    (result,) = record.results
    assert result.samples == {}
    assert result.values == summary
    assert list(tmp_path.iterdir()) == [path]
    if state != "running":
        assert capsys.readouterr().out == "1 results\n"


Samples = dict[str, list[float]]
Cases = dict[str, dict[str, Samples]]


def written(folder: Path, name: str, cases: Cases) -> None:
    results = []
    for case, ways in cases.items():
        for way, samples in ways.items():
            config = {"version": f"torchgpipe {way}"}
            result = Result(case, way, "measured", config=config, samples=samples)
            results.append(summarized(result))
    run: dict[str, Any] = {
        "machine": Machine("Linux", "a CPU", 4, 4, None, [Gpu("a GPU", 2**30)]),
        "versions": {"torch": "2.11.0", "python": "3.12.1"},
        "git": Git("0123456789abcdef", True),
        "load": [0.251, 0.0, 0.0],
        "settings": {FREED_MEMORY: "kept"},
    }
    save(record(*results, **run), folder / f"{name}.json")


def times(forward: float, backward: float) -> Samples:
    both = forward + backward
    return {"forward": [forward] * 3, "backward": [backward] * 3, "both": [both] * 3}


# A record, and its table. No committed record has all of these columns.
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
    page = tmp_path / "page.md"

    block = benchmark_block(page, "machinery-here", tmp_path)
    other = benchmark_block(page, "machinery-later", tmp_path)

    narrow = re.sub(r" *\| *", "|", block)
    for row in ROWS.splitlines():
        assert f"\n{row}\n" in f"\n{narrow}\n"
    assert (
        "\nThe numbers of this [record](machinery-here.json) were measured on 2020-04-21 with "
        "torch 2.11.0, Python 3.12.1, a GPU, a CPU, 4 cores, freed memory kept, a load of 0.25 "
        "before the start, revision 012345678, with changes.\n"
    ) in block
    assert other == "Nothing measured is committed yet.\n"


@pytest.mark.parametrize("name", ["conformance", "nothing"])
def test_one_that_cannot_be_shown_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    written(tmp_path, name, {"a case": {"a way": {}}})
    said = rf"page\.md: the block from benchmarks/{name} cannot be made \(.*{name}\.json"
    with pytest.raises(Error, match=said):
        benchmark_block(tmp_path / "page.md", name, tmp_path)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "name",
    [
        "resnet18",
        # Each of these models has something special: the first auxiliary outputs, the second a
        # dictionary as its output, and the third concatenated tensors.
        pytest.param("googlenet", marks=SLOW),
        pytest.param("lraspp_mobilenet_v3_large", marks=SLOW),
        pytest.param("squeezenet1_0", marks=SLOW),
    ],
)
@pytest.mark.filterwarnings("ignore:GoogLeNet makes other calls")
def test_torchvision(name: str) -> None:
    build = torchvision_models()[name]
    result = check_model("torchvision", name, build())
    assert result.status == "measured"


def test_a_list_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []

    def build(kind: type[nn.Module]) -> Case:
        built.append(kind.__name__)
        return Case(kind(), rows())

    models = {"Residual": partial(build, Residual), "Choosing": partial(build, Choosing)}
    monkeypatch.setitem(LISTS, "torchvision", lambda: models)
    path = tmp_path / "record.json"
    for options, expected in (
        ("--model Choosing", ["Choosing"]),
        ("", ["Residual"]),
        ("", []),
        ("--again", ["Choosing", "Residual"]),
    ):
        built.clear()
        main(["torchvision", "--out", str(path), *options.split()])
        assert sorted(built) == expected

    record = load(path)
    residual, choosing = record.results
    assert (residual.row, residual.status) == ("Residual", "measured")
    assert (choosing.row, choosing.status) == ("Choosing", "failed")
    assert "return self.a(x) if" in (choosing.reason or "")
    page = table(record, "pipe")
    assert "Models of torchvision with equal results: Residual." in page
    assert "| Choosing " in page
    assert max(map(len, page.splitlines())) < 200
