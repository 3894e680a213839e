"""Tests of the output of the commands `plan`, `schedule` and `predict`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from reproduce.experiments import EXPERIMENTS
from reproduce.numbers.sources import load_side
from reproduce.predict.largest import Largest
from reproduce.records.record import save
from reproduce.tables.layout import WIDTH
from reproduce.tables.output import of_largest

from ...library.traced import Masked, rows
from ..made import one_line, ran, record

HERE = "tests.reproduce.cli.test_plan"


def own() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))


def deep(layers: int = 2, width: int = 128) -> tuple[nn.Module, torch.Tensor]:
    """Return a model with layers of equal sizes, and a sample input."""
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)]), torch.rand(2, width)


def own_by_keyword() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return a model, and a sample input with a mask that has no batch dimension."""
    mask = torch.rand(6) > 0.5
    return Masked(), {"mask": mask, "x": rows()}


def with_loss(layers: int = 2) -> tuple[nn.Module, torch.Tensor, Any, torch.Tensor]:
    """Return a model with a large output, a sample input, a criterion, and a target."""
    hidden = [nn.Linear(8, 8) for _ in range(layers)]
    model = nn.Sequential(*hidden, nn.Linear(8, 5000))
    return model, torch.rand(2, 8), nn.CrossEntropyLoss(), torch.zeros(2, dtype=torch.long)


def without_loss(layers: int = 2) -> tuple[nn.Module, torch.Tensor]:
    """Return the model and the sample of `with_loss`."""
    model, sample, _, _ = with_loss(layers)
    return model, sample


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        (f"{HERE}:with_loss", "--hardware here", " with the loss: "),
        (f"{HERE}:with_loss", "--hardware h100x8", " with the loss: "),
        (f"{HERE}:without_loss", "--hardware h100x8", " without the loss; give a criterion"),
        (
            "unet",
            "--size 1 8 --memory 1GiB --batch-size 8",
            "on p40x8 No hardware was given, so p40x8 is assumed. Name yours by --hardware: here",
        ),
        (f"{HERE}:own", "--input 8 --autocast bfloat16 --hardware h100x8", "sgd, autocast to bf"),
        (
            f"{HERE}:deep",
            "--hardware rtx4090x4 --batch-size 8 --devices 5",
            "rtx4090x4 describes 4 devices. All 5 devices are assumed to be connected as fast",
        ),
        pytest.param(
            "unet",
            "--size 1 4 --hardware here --batch-size 6 --profile 6",
            "micro-batches of 3 and 6",
            marks=pytest.mark.slow,
        ),
        (f"{HERE}:own", "--input 8 --schedules ZBH1,1F1B", "schedule 1F1B"),
        (f"{HERE}:own_by_keyword", "--hardware here", "layers profiled on "),
        (
            f"{HERE}:deep",
            "--largest layers --memory 2MB --headroom 0 --batch-size 4",
            f"pipelined: {HERE}:deep (28): 0.5 M parameters, 1.8 MiB on the fullest device - only",
        ),
        pytest.param(
            "unet",
            "--size 1 8 --largest width --memory 300MiB --batch-size 8",
            "pipelined: U-Net (1, ",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_plans(model: str, options: str, said: str, command: Any) -> None:
    output, _ = command("plan", model, "--devices", "2", *options.split())
    assert said in one_line(output)
    assert max(map(len, output.splitlines())) <= WIDTH


def test_schedules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any) -> None:
    monkeypatch.chdir(tmp_path)
    output, told = command("schedule", "zbh1", "-n", "2", "-m", "2", "--out", "two.svg")
    assert "1 | .  0  I0 1  I1 W0 W1" in output
    assert "kept at most, tasks by device: 2, 2" in output
    assert told == "written: two.svg\n"
    assert "<svg" in Path("two.svg").read_text()


def test_times_of_schedules_are_in_one_unit(command: Any) -> None:
    """Check that the command `schedule` shows the times of two schedules in the same unit.

    There are 3 devices and 6 micro-batches. Each device has a third of the model. On each device,
    the forward of a micro-batch takes one unit of time, and the backward takes two.

    - A step of 1F1B takes the time of 6 + 2 forwards and backwards: 8 x 3 units.
    - A step of Interleaved1F1B takes 7 x 3 units, because two stages on each device halve the idle
      time. These stages are half as large, so a column of the picture is half a unit.
    """
    size = ("-n", "3", "-m", "6")
    plain, _ = command("schedule", "1F1B", *size)
    interleaved, _ = command("schedule", "Interleaved1F1B", *size)
    numbers, _ = command("schedule", "Interleaved1F1B", *size, "--format", "json")

    unit = "a unit is the forward of one micro-batch through 1/3 of the model"
    assert "the step takes 24 units" in plain
    assert f"{unit}; a column is a unit" in one_line(plain)
    assert "the step takes 21 units" in interleaved
    assert f"{unit}; a column is 1/2 of a unit" in one_line(interleaved)
    values = {each["metric"]: each["value"] for each in json.loads(numbers)["numbers"]}
    assert values["step"] == 21
    assert values["kept"] == [8, 6, 4]
    assert values["bubble"] == pytest.approx(1 / 7)


def test_the_largest_models_as_numbers() -> None:
    found = [Largest("naive", None, (1, 8)), Largest("pipelined", (1, 56), None, 21_649_348, 1e9)]
    none, size, parameters, memory = of_largest(found, "a title")
    assert (none["row"], none["reason"]) == ("naive", "no size fits")
    assert (size["row"], size["metric"], size["value"]) == ("pipelined", "size", [1, 56])
    assert parameters["value"] == 21_649_348
    assert parameters["reason"] == "at least: no larger size was tried"
    assert (memory["unit"], memory["value"]) == ("bytes", 1e9)


def wide(layers: int = 2) -> tuple[nn.Module, torch.Tensor]:
    """Return a model whose last output is far larger than all other tensors, and a sample input."""
    growing = [nn.Sequential(nn.Linear(8, 2048), nn.Linear(2048, 8)) for _ in range(layers)]
    return nn.Sequential(*growing, nn.Linear(8, 50_000)), torch.rand(2, 8)


def wide_half(layers: int = 2) -> tuple[nn.Module, torch.Tensor]:
    module, sample = wide(layers)
    return module.to(torch.bfloat16), sample.to(torch.bfloat16)


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("function", "options", "said", "fits"),
    [
        ("wide", "", "float32, GPipe", False),
        ("wide", "--schedules 1F1B", "float32, 1F1B", True),
        ("wide", "--schedules gpipe,1f1b", "float32, GPipe or 1F1B", True),
        ("wide", "--schedules Interleaved1F1B", "float32, Interleaved1F1B", True),
        ("wide", "--autocast bfloat16", "autocast to bfloat16, GPipe", True),
        ("wide_half", "--master-weights", "bfloat16, float32 master weights, GPipe", True),
    ],
)
def test_options_of_the_largest_model(
    function: str, options: str, said: str, *, fits: bool, command: Any
) -> None:
    given = "--largest layers --devices 2 --headroom 0 --batch-size 100 --hardware a100x8"
    memory = ["--memory", "30MB"]
    output, _ = command("plan", f"{HERE}:{function}", *given.split(), *memory, *options.split())
    text = one_line(output)
    assert f"{said} - naive: " in text
    assert (f"pipelined: none: not even {HERE}:{function} (1) fits" in text) == (not fits)
    assert ("try --schedules 1F1B" in text) == (not fits)


@pytest.mark.slow
def test_the_largest_model_has_room_for_its_loss(command: Any) -> None:
    options = "--largest layers --devices 2 --headroom 0 --batch-size 8 --memory 1MB --format json"
    sizes = {}
    for function in ("with_loss", "without_loss"):
        output, _ = command("plan", f"{HERE}:{function}", *options.split())
        sizes[function] = [each["value"] for each in json.loads(output)["numbers"]]
    assert sizes["with_loss"] != sizes["without_loss"]
    for ours, theirs in zip(sizes["with_loss"], sizes["without_loss"], strict=True):
        assert ours <= theirs


def single() -> tuple[nn.Module, torch.Tensor]:
    """Return a model and a sample input in single precision."""
    model = nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 4096))
    return model, torch.rand(2, 4096)


def half() -> tuple[nn.Module, torch.Tensor]:
    """Return a model and a sample input in half precision."""
    model, sample = single()
    return model.half(), sample.half()


@pytest.mark.parametrize(
    ("function", "option"),
    [
        ("single", "--autocast bfloat16"),
        ("single", "--fp32-precision tf32"),
        ("half", "--master-weights"),
    ],
)
def test_numbers_change_a_plan(function: str, option: str, command: Any) -> None:
    """Check that options for the precision of numbers change the time that `plan` predicts.

    Afterwards, PyTorch's own settings for the precision must be as before.
    """
    given = "--hardware a100x8 --devices 1 --optimizer adam --batch-size 4096"

    def planned(*options: str) -> float:
        """Return the predicted seconds of a step."""
        text, _ = command("plan", f"{HERE}:{function}", *given.split(), *options)
        _, _, rest = text.partition("\nstep ")
        return float(rest.split()[0])

    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision, torch.is_autocast_enabled("cuda")
    plain, other = planned(), planned(*option.split())
    after = matmul.fp32_precision, torch.is_autocast_enabled("cuda")

    assert other != plain
    assert (other < plain) == (function == "single")
    assert after == before


@pytest.mark.parametrize(
    ("hardware", "how"), [("p40x8", "description p40x8"), ("here", "times on this machine")]
)
def test_a_run_is_predicted_row_by_row(
    hardware: str, how: str, tmp_path: Path, command: Any
) -> None:
    """Check that `predict --run` predicts each row (configuration) of a recorded run.

    The recorded run has a small model, split by the published balances.
    """
    paper = EXPERIMENTS["unet-speed"].scale("paper")
    balances = {row.name: row.balance for row in paper.rows if row.published}
    made = ran(
        "unet-speed", "small", lambda row: [20.0] * 3 if row.published else None, emulated=True
    )
    rows = []
    for each in made:
        small = {"C": 4, "input_shape": [3, 64, 64], "balance": balances[each.row]}
        rows.append(replace(each, config={**each.config, **small}))
    path = tmp_path / "run.json"
    save(record(*rows), path)

    out, _ = command("predict", "--run", str(path), "--hardware", hardware)

    assert "unet-speed: emulated and predicted" in out
    assert how in one_line(out)
    cells = {}
    for line in out.splitlines():
        if line:
            name, *numbers = line.replace(",", "").split()
            cells[name] = numbers
    for name in balances:
        ours, predicted, times = map(float, cells[name])
        assert ours == 20
        assert predicted / ours == pytest.approx(times, rel=0.02)


def test_predictions_in_several_precisions_are_kept_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any
) -> None:
    """Check that predictions of one table in two precisions are different rows of a comparison."""
    monkeypatch.chdir(tmp_path)
    for more in ((), ("--autocast", "bfloat16")):
        asked = ("unet-ablation", "--hardware", "h100x8", "--out", "mine", *more)
        command("predict", *asked)
    side = load_side("A", "mine")
    assert side.superseded == 0
    found = {entry.hardware for entry in side.entries if entry.result.status == "predicted"}
    assert found == {"h100x8", "h100x8, autocast-bfloat16"}
