"""Tests of the command `python -m benchmarks.gpu` and its page, with made-up measurements."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.gpu import __main__ as program
from benchmarks.gpu.frame import command
from benchmarks.gpu.frame.command import ARCHIVE, PAGE, Plan, main, page_of, run_parts
from benchmarks.gpu.frame.page import ABOUT, OUTCOME, page
from benchmarks.gpu.frame.processes import Outcome
from benchmarks.gpu.frame.watch import Watched
from benchmarks.gpu.part import MOST_LINES, PARTS, RESULT, Context, Fields, Part, load_parts
from reproduce.error import Error
from reproduce.records.record import load

from ...reproduce.made import row
from .fakes import Fake, answers, outcome, result


def keeps(context: Context) -> Fields:
    context.save(context.new_record("answers", {}, []))
    return {}


def breaks_off(context: Context) -> Fields:
    keeps(context)
    raise ValueError("no luck")


def keeps_a_killed_run(context: Context) -> Fields:
    """Save the record of a run that was killed in the middle of a row."""
    context.save(context.new_record("answers", {}, [row("a", status="interrupted")]))
    return {}


def test_records_say_whether_their_part_was_finished(tmp_path: Path) -> None:
    states = {"keeps": "finished", "breaks-off": "interrupted", "killed": "interrupted"}
    parts: dict[str, Part] = {
        "keeps": Fake(keeps),
        "breaks-off": Fake(breaks_off),
        "killed": Fake(keeps_a_killed_run),
    }

    run_parts(parts, Plan(tmp_path, 600.0, "tiny"))

    for name, state in states.items():
        run = load(tmp_path / "records" / f"gpu-{name}.json").run
        assert run is not None
        assert run.state == state
        assert run.ended is not None


def test_what_there_was_no_time_for_is_named(tmp_path: Path) -> None:
    parts: dict[str, Part] = {"answers": Fake(answers)}

    good = run_parts(parts, Plan(tmp_path, 1.0, "tiny"))

    assert good
    assert outcome(tmp_path, "answers").ended == "no time"
    said = (tmp_path / PAGE).read_text()
    assert "- **answers** (no time): a question; 1 s were left for it\n" in said


def test_a_part_passes_on_the_time_that_it_did_not_need(tmp_path: Path) -> None:
    def tell(context: Context) -> Fields:
        return {"left": context.seconds_left()}

    parts: dict[str, Part] = {"first": Fake(tell, 1.0), "second": Fake(tell, 3.0)}

    run_parts(parts, Plan(tmp_path, 4000.0, "paper"))

    # A part has to be ready five seconds before it is killed.
    assert 900 < result(tmp_path, "first")["left"] < 995
    assert 3900 < result(tmp_path, "second")["left"] < 3995


def written(folder: Path, name: str, outcome: Outcome, result: Fields) -> None:
    (folder / name).mkdir()
    (folder / name / OUTCOME).write_bytes(msgspec.json.encode(outcome))
    (folder / name / RESULT).write_text(json.dumps(result))


def test_the_page_has_at_most_40_lines(tmp_path: Path) -> None:
    parts: dict[str, Part] = {name: Fake(answers) for name in PARTS}
    for name in PARTS:
        found = {f"value {k}": f"{k}\n" for k in range(2 * MOST_LINES)}
        written(tmp_path, name, Outcome("finished", 3.0), found)
    about = {"started": "2020-04-21T10:02:05Z", "seconds": 480.0, "size": "paper"}
    about |= {"against": "torchgpipe 0.0.7", "parts": list(PARTS), "gpus": []}
    (tmp_path / ABOUT).write_text(json.dumps(about))

    said = page(tmp_path, parts)

    assert len(said.splitlines()) == 40
    assert "beside torchgpipe 0.0.7" in said
    assert f"  - value 1 is 1\n  - more is in machine/{RESULT}\n" in said


def test_the_page_says_how_the_gpus_were_clocked(tmp_path: Path) -> None:
    parts: dict[str, Part] = {"first": Fake(answers), "second": Fake(answers)}
    cap = {"software power cap": 12}
    hot = Watched(0, 50, 40, clock=(1400.0, 1755.0), temperature=83.0, slowed_by=cap)
    written(tmp_path, "first", Outcome("finished", 3.0, gpus=[hot]), {})
    cool = [Watched(0, 9, 7, clock=(1980.0, 1980.0), slowed_by={}), Watched(1, 9, 0)]
    written(tmp_path, "second", Outcome("finished", 3.0, gpus=cool), {})
    about = {"started": "2020-04-21T10:02:05Z", "seconds": 480.0, "size": "paper"}
    before = [{"index": 0, "clock": 345.0, "temperature": 31.0}]
    about |= {"against": None, "parts": list(parts), "gpus": before}
    (tmp_path / ABOUT).write_text(json.dumps(about))

    said = page(tmp_path, parts)

    assert "GPU 0 ran at 345 MHz and 31 °C before, at 1400 to 1980 MHz and at most 83 °C" in said
    assert "; slowed by software power cap in first (12 of 40 looks).\n" in said


def test_a_result_without_what_its_lines_need(tmp_path: Path) -> None:
    class Strict(Fake):
        def lines(self, result: Fields) -> list[str]:
            return [str(result["missing"])]

    run_parts({"strict": Strict(answers)}, Plan(tmp_path, 60.0, "tiny"))

    said = (tmp_path / PAGE).read_text()
    assert f"  - strict/{RESULT} cannot be shown in words (KeyError: 'missing')\n" in said


def test_a_part_that_cannot_be_imported(tmp_path: Path) -> None:
    parts = load_parts(["nothing_of_this_name"])

    assert not run_parts(parts, Plan(tmp_path, 60.0, "tiny"))

    reason = outcome(tmp_path, "nothing_of_this_name").reason
    assert reason == "ModuleNotFoundError: No module named 'benchmarks.gpu.nothing_of_this_name'"


def test_the_page_is_made_anew_from_the_results_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--dry-run", "--only", "machine", "--out", str(tmp_path)])

    said = (tmp_path / PAGE).read_text()
    assert "- **machine** (finished" in said
    assert "within cpu" in said
    assert capsys.readouterr().out.endswith(said)
    for place in (tmp_path, tmp_path / ARCHIVE):
        main(["--page", str(place)])
        assert capsys.readouterr().out == said


def test_results_are_not_mixed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="2"):
        main(["--dry-run", "--out", str(tmp_path)])
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.endswith("there are files already; name an empty or new folder")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--minutes 0 --dry-run", "0 is not a number of minutes above 0"),
        ("--against /nowhere", "there is no torchgpipe/__version__.py in /nowhere (try: pip "),
        ("--only everything", "invalid choice: 'everything'"),
        ("--dry-run --format json", "unrecognized arguments: --format json"),
    ],
)
def test_what_it_refuses(options: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(options.split())
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        main(["--out", "anywhere"])
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.endswith("there is no CUDA device here; --dry-run tries the parts on the CPU")


def test_results_need_a_folder(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(command, "count_gpus", lambda: 1)
    with pytest.raises(SystemExit, match="2"):
        main([])
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.endswith("--out DIR is missing: name a folder for the results")


def test_a_page_of_nothing(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("no archive")
    with pytest.raises(Error, match=r"^--page .*file: not an archive of this command \("):
        page_of(file)
    with pytest.raises(Error, match=rf"^--page .*: there is no {ABOUT} in it; name the DIR"):
        page_of(tmp_path)


def test_missing_packages_are_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "NEEDED", ("torch", "no_such_package", "nor_this"))
    said = r"^python -m benchmarks.gpu: not installed: no_such_package nor_this \(pip install no_"
    with pytest.raises(SystemExit, match=said):
        program.main()
