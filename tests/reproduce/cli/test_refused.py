"""Errors of commands: one line and an exit code, before anything is run or written."""

import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from reproduce.records.places import RESULTS
from reproduce.records.record import save

from ..made import record, row

SPEED, MEMORY = ("run tiny-speed --on cpu --scale small", "run tiny-memory --on cpu --scale small")
GRID = "compare grid.json grid.json"
PREDICT = "predict --hardware here"
REPORT = "report --results results"
OWN = "tests.reproduce.cli.test_plan:own"
N_AND_M = [(n, m) for n in (2, 10) for m in (1, 4)]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change into a folder with a published table, a record of a grid, and files that are not records."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("reproduce.cli.run.Session", None)  # errors come before anything is measured
    for folder in ("results/paper", "empty", "broken/paper"):
        Path(folder).mkdir(parents=True)
    shutil.copy(RESULTS / "paper" / "tg-unet-speed.json", "results/paper")
    shutil.copy(RESULTS / "paper" / "tg-unet-speed.json", "record.json")
    save(record(*(row(f"n{n}m{m}", 1.0, config={"partitions": n, "chunks": m}) for n, m in N_AND_M)), Path("grid.json"))
    Path("broken/paper/x.json").write_text("{}")
    Path("text").write_text("text")


def files() -> list[Path]:
    return sorted(path for path in Path().rglob("*") if path.is_file())


@pytest.mark.usefixtures("tiny", "here")
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ("run amoebanet-sped", 2, "no experiment is called 'amoebanet-sped'; did you mean amoebanet-speed"),
        ("run x", 2, "there are amoebanet-speed, amoebanet-memory"),
        ("run tiny-accuracy --scale small --data x", 2, "--data x: scale small makes its own data; leave --data out"),
        ("run tiny-accuracy --on cpu --data x", 2, "--scale paper: it needs CUDA devices with 22 GiB of memory each"),
        ("run amoebanet-speed --seeds 2", 2, "--data and --seeds are for experiments on accuracy"),
        ("run amoebanet-memory --engine ranks", 2, "--engine is for experiments that time steps"),
        ("run amoebanet-speed --on cpu --devices 3", 2, "machine offers 2; use at most 2"),
        ("run amoebanet-speed --on cpu --scale paper", 2, "it needs CUDA devices with 22 GiB of memory"),
        ("run tiny-memory tiny-speed --on meta", 2, "--on meta is for experiments on memory: amoebanet-memory,"),
        ("run tiny-memory --on meta --scale small", 2, "its balances are profiled, and devices that"),
        (f"{SPEED} --out text", 1, "--out text: cannot be written (File exists); name another"),
        (f"{SPEED} --row GPipe_n2", 2, "--row 'GPipe_n2': no row is called so; did you mean"),
        ("run unet-speed --row '#'", 2, "--row '#': no row is called so; there are baseline, pipeline-1"),
        ("run unet-speed unet-memory --row 'naive n2'", 2, "unet-memory has none of the rows naive n2; leave it out"),
        (f"{MEMORY} --trace t", 2, "--trace: memory experiments time no step"),
        (f"{SPEED} --trace empty", 2, "'--trace': File 'empty' is a directory."),
        (f"{SPEED} --trace /dev/null/x/t", 1, "--trace /dev/null/x: cannot be written (Not a directory)"),
        ("show none.json", 1, "none.json: cannot be read (No such file or directory)"),
        ("show text", 1, "text: not JSON: "),
        ("compare record.json", 2, "compare at least two sides, and at most 26; given: 1"),
        ("compare record.json nowhere", 2, "nowhere: no such file or folder, and no git revision here"),
        ("compare record.json text", 1, "text: not JSON"),
        ("compare record.json record.json --alpha 0", 2, "'--alpha'"),
        (f"{GRID} --filter n", 2, "--filter n: give a field and its values, as in --filter n=2,4"),
        (f"{GRID} --filter =2", 2, "--filter =2: give a field and its values, as in --filter n=2,4"),
        (f"{GRID} --filter n=3", 2, "--filter n=3: no row is left; n is 2, 10"),
        (f"{GRID} --filter x=3", 2, "--filter x=...: no row has x; there are experiment, row, scale, device, engine, "),
        (f"{GRID} --metric speed", 2, "--metric speed: no row has it; there are throughput, time, speedup"),
        (f"{GRID} --row n", 2, "--row and --col go together"),
        (f"{GRID} --row n --col m --format csv", 2, "text or markdown, not csv"),
        (f"{GRID} --row x --col m", 2, "--row x: no row has x; there are experiment, row, scale, device, engine"),
        (f"{GRID} --row n --col m,x", 2, "--col x: no row has x; there are experiment, row, scale, device"),
        (f"{GRID} --row experiment --col m", 2, "'n2m1' and 'n10m1' are both at e x 1; name another field, such as pa"),
        (PREDICT, 2, "name either experiments, or a run by --run"),
        (f"{PREDICT} unet-speed --run record.json", 2, "name either experiments, or a run by --run"),
        (f"{PREDICT} --run record.json", 2, "--run record.json: it has no emulated rows"),
        (f"{PREDICT} --run record.json --out .", 2, "--out is for published tables"),
        (f"{PREDICT} unet-speed", 2, "predict --run RUN --hardware here those of a run"),
        ("predict unet-sped", 2, "did you mean unet-speed"),
        ("predict unet-speed --hardware p41", 2, "no hardware is called 'p41'; there are a100x8"),
        ("predict --run RUN --fp32-precision tf32", 2, "a run is predicted as it was run, in float32"),
        ("predict unet-speed --autocast bfloat16", 2, "name a folder by --out; results/predicted is as published"),
        ("plan unet --memory much", 2, "text such as '24GiB'"),
        ("plan resnet101 --size 1 2", 2, "leave --size out"),
        ("plan amoebanet --size 4 32", 1, "positive multiple of 3"),
        ("plan unet --size 1 8 --devices 1 --memory 1MiB", 1, "alone needs"),
        ("plan resnet101 --largest depth", 2, "leave --largest out"),
        ("plan unet --input 3x32x32", 2, "leave --input out"),
        ("plan resnet", 1, "no model is called 'resnet'; there are amoebanet, unet, resnet101, torchvision's"),
        ("plan torchvision:resnet5", 1, "resnet5"),
        ("plan torchvision:resnet18 --input 3,32,32", 2, "a sample's shape is written as 3x224x224"),
        ("plan nowhere:model", 1, "nowhere:model cannot be imported: No module named 'nowhere'"),
        ("plan math:pi", 1, "math:pi has to be a function that returns a model, got float"),
        ("plan torch:Generator", 1, "has to return a model, or a model and a sample; got Generator"),
        (f"plan {OWN}", 1, "returns no sample beside its model: let it return both"),
        ("plan unet --largest depth --hardware here", 2, "nothing is timed for it: name a description"),
        ("plan unet --profile 8", 2, "nothing is timed with a description; leave it out"),
        ("plan unet --size 1 8 --master-weights", 1, "master_weights is for parameters in 16 bits"),
        ("plan unet --largest depth --autocast bfloat16", 2, "for training in float32; leave it out"),
        ("report --results nowhere", 2, "'--results': Directory 'nowhere' does not exist."),
        ("report --results empty", 2, "--results empty: no record (*.json) in its folders paper, predicted, measured"),
        ("report --results broken", 1, 'broken/paper/x.json: not a record (its "format" is not'),
        (f"{REPORT} --out no/r.html", 1, "no/r.html: cannot be written (No such file or directory)"),
        ("regression", 2, "give --base REV, or --bisect GOOD BAD"),
        ("regression --base HEAD --markdown /dev/null/x", 1, "--markdown /dev/null: cannot be written"),
    ],
)
def test_what_is_wrong_is_one_line(arguments: str, code: int, said: str, command: Any) -> None:
    before = files()
    out, err = command(*shlex.split(arguments), code=code)
    assert err.startswith("reproduce: ") and said in err and err.count("\n") == 1
    assert out == "" or (arguments.startswith("plan ") and out.count("\n") == 1), "a plan has said what it is of"
    assert files() == before
