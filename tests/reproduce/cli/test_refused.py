"""Tests of wrong command-line options.

If an option is wrong, a command must print an error in one line and exit with code 2. It must
neither run a model nor write a file.
"""

import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from reproduce.records.places import RESULTS
from reproduce.records.record import save

from ..made import record, row

SPEED = "run tiny-speed --on cpu --scale small"
MEMORY = "run tiny-memory --on cpu --scale small"
TWO = "compare two.json two.json"
PREDICT = "predict --hardware here"
REPORT = "report --results results"
OWN = "tests.reproduce.cli.test_plan:own"


REFUSED = {
    "run amoebanet-sped": "no experiment is called 'amoebanet-sped'; did you mean amoebanet-speed",
    "run tiny-accuracy --scale small --data x": (
        "--data x: the scale small trains on images that it generates; leave --data out"
    ),
    "run tiny-accuracy --on cpu --data x": (
        "--scale paper: it needs CUDA devices with 22 GiB of memory each"
    ),
    "run amoebanet-speed --seeds 2": "--data and --seeds are for experiments on accuracy",
    "run amoebanet-memory --engine ranks": "--engine is for experiments that time steps",
    "run amoebanet-speed --on cpu --devices 3": "machine has 2; use at most 2",
    "run amoebanet-speed --on cpu --scale paper": "it needs CUDA devices with 22 GiB of memory",
    "run tiny-memory tiny-speed --on meta": (
        "--on meta is for experiments on memory: amoebanet-memory,"
    ),
    "run tiny-memory --on meta --scale small": "its balances are profiled, and devices that",
    f"{SPEED} --resume": (
        "--resume: the folder runs has no interrupted run of this command; omit --resume"
    ),
    f"{SPEED} --out text": "--out text: cannot be written (File exists); name another",
    f"{SPEED} --row GPipe_n2": "--row 'GPipe_n2': no row is called so; did you mean",
    "run unet-speed --row '#'": (
        "--row '#': no row is called so; there are baseline, pipeline-1, pipeline-2 and 35 more "
        "('python -m reproduce list unet-speed' lists all)"
    ),
    "plan torchvision:resnet5": (
        "torchvision has no model 'resnet5'; did you mean resnet50 or resnet152 or "
    ),
    "run unet-speed unet-memory --row 'naive n2'": (
        "unet-memory has none of the rows naive n2; do not name this"
    ),
    f"{SPEED} --set n=4 m=16": "--set n=4 m=16: also name the row to change by --row,",
    f"{SPEED} --row n2m4 --set k=4": "--set k=4: n2m4 has no k to set; there are n, m, batch_size,",
    f"{SPEED} --row n2m4 --set n=4 m=x": "--set m=x: m is a number of micro-batches, such as 16",
    f"{SPEED} --row n2m4 --set": "Option '--set' requires an argument",
    f"{MEMORY} --trace t": "--trace: memory experiments time no step",
    f"{SPEED} --trace empty": "'--trace': File 'empty' is a directory.",
    f"{SPEED} --trace /dev/null/x/t": "--trace /dev/null/x: cannot be written (Not a directory)",
    "show none.json": "none.json: cannot be read (No such file or directory)",
    "show text": "text: not JSON: ",
    "compare record.json": "give from 2 to 26 results to compare, called A, B and so on, not 1",
    "compare record.json :results": (
        ":results: no such file or folder, and no git revision here; name a record"
    ),
    "compare record.json ''": ": no such file or folder, and no git revision",
    "compare record.json results": (
        "results: no record (*.json) in this folder; there are some in results/paper"
    ),
    "compare record.json record.json --alpha 0": "'--alpha'",
    f"{TWO} --alpha nan": "nan is not a finite number.",
    f"{TWO} --threshold nan": "nan is not a finite number.",
    "regression --slow-down inf": "inf is not a finite number.",
    f"{TWO} --filter n": "--filter n: give a field and its values, as in --filter n=2,4",
    f"{TWO} --filter =2": "--filter =2: give a field and its values, as in --filter n=2,4",
    f"{TWO} --filter n=3": "--filter n=3: no row to compare has this value; choose from 2, 10",
    f"{TWO} --filter x=3": (
        "--filter x=...: no row has x; there are experiment, row, scale, device, engine, "
    ),
    f"{TWO} --metric speed": (
        "--metric speed: no row of the records has this metric; they have the metrics throughput"
    ),
    PREDICT: "name either experiments, or a run by --run",
    f"{PREDICT} unet-speed --run record.json": "name either experiments, or a run by --run",
    f"{PREDICT} --run record.json": "--run record.json: it has no emulated rows",
    f"{PREDICT} --run record.json --out .": "--out is for published tables",
    f"{PREDICT} unet-speed": "predict --run RUN --hardware here for the models of a run",
    "predict unet-speed --hardware p41": "no hardware is called 'p41': use one of a100x8",
    "predict --run RUN --fp32-precision tf32": "a run is predicted in float32, the precision",
    "predict unet-speed --autocast bfloat16": (
        "also name a folder by --out, because the default folder"
    ),
    "schedule LoopedBFS": "no schedule is called 'LoopedBFS': use one of GPipe, 1F1B,",
    "schedule GPipe -n 100000": (
        "n = 100000 devices, m = 8 micro-batches and v = 1 stages on each device would be too large"
    ),
    "schedule Interleaved1F1B -v 100000": "v = 100000 stages on each device would be too large",
    "schedule missing.csv": "missing.csv",
    "schedule GPipe --out picture": (
        "--out picture: the name of a picture must end in .svg or .png"
    ),
    "schedule GPipe --out picture.pdf": (
        "--out picture.pdf: the name of a picture must end in .svg or .png"
    ),
    "plan unet --memory 24": "text with a unit such as '24GiB' or '80GB', but got '24'",
    "plan resnet101 --size 1 2": "leave --size out",
    "plan amoebanet --size 4 32": "positive multiple of 3",
    "plan unet --size 1 8 --devices 1 --memory 1MiB": "alone needs",
    "history two.json --smaller-is-better --format csv": "prints JSON of its own; leave one",
    "plan resnet101 --largest depth": "leave --largest out",
    "plan unet --largest height": "unet grows in depth or width; got 'height'",
    f"plan {OWN} --largest layers": "needs an argument layers with a whole number as its default",
    "plan torchvision:resnet18 --largest depth": "leave --largest out",
    "plan unet --input 3x32x32": "leave --input out",
    "plan resnet": (
        "no model is called 'resnet'; choose amoebanet, unet, resnet101, a model of torchvision"
    ),
    "plan torchvision:resnet18 --input 3,32,32": "a sample's shape is written as 3x224x224",
    "plan nowhere:model": "nowhere:model cannot be imported: No module named 'nowhere'",
    "plan math:pi": "math:pi has to be a function that returns a model, but it is of type float",
    "plan torch:Generator": "input, a criterion and a target. It returned Generator",
    f"plan {OWN}": "returns a model but no example input: let it return both",
    "plan unet --largest depth --hardware here": "nothing is timed for it: name a description",
    "plan unet --profile 8": "nothing is timed with a description; leave it out",
    "plan unet --size 1 8 --master-weights": "master_weights is for parameters in 16 bits",
    "plan unet --largest depth --master-weights": "master_weights is for parameters in 16 bits",
    "plan unet --largest depth --schedules 2F2B": "2F2B",
    "report --results nowhere": "'--results': Directory 'nowhere' does not exist.",
    "report --results empty": (
        "--results empty: no record (*.json) in its folders paper, predicted, measured"
    ),
    f"{REPORT} --out no/r.html": "no/r.html: cannot be written (No such file or directory)",
    "regression --base v --package mine --cases text --out /dev/null/x": (
        "--out /dev/null: cannot be written"
    ),
}
"""For each command line, the error message."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change into a folder with a published table, a record of two rows, and other files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("reproduce.run.session.Session", None)  # a run must not begin
    for folder in ("results/paper", "empty"):
        Path(folder).mkdir(parents=True)
    table = RESULTS / "paper" / "tg-unet-speed.json"
    shutil.copy(table, "results/paper")
    shutil.copy(table, "record.json")
    n2 = row("n2", 1.0, config={"partitions": 2})
    n10 = row("n10", 1.0, config={"partitions": 10})
    save(record(n2, n10), Path("two.json"))
    Path("text").write_text("text")


def files() -> list[Path]:
    return sorted(path for path in Path().rglob("*") if path.is_file())


@pytest.mark.usefixtures("tiny", "here")
@pytest.mark.parametrize(("arguments", "said"), REFUSED.items())
def test_what_is_wrong_is_one_line(arguments: str, said: str, command: Any) -> None:
    before = files()

    out, err = command(*shlex.split(arguments), code=2)

    assert err.startswith("reproduce: ")
    assert said in err
    assert err.count("\n") == 1
    if out:
        assert arguments.startswith("plan "), "a plan begins with a line that names the model"
        assert out.count("\n") == 1
    assert files() == before
