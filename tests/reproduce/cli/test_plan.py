"""Tests of the output of the commands `plan`, `schedule` and `predict`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from reproduce.experiments import EXPERIMENTS
from reproduce.records.record import save
from reproduce.tables.layout import WIDTH

from ...library.traced import Masked, rows
from ..made import one_line, ran, record

HERE = "tests.reproduce.cli.test_plan"


def own() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))


def own_by_keyword() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return a model, and a sample input with a mask that has no batch dimension."""
    mask = torch.rand(6) > 0.5
    return Masked(), {"mask": mask, "x": rows()}


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        ("unet", "--size 1 8 --memory 1GiB --batch-size 8", "U-Net (1, 8), batch size 8, sgd"),
        (
            "unet",
            "--size 1 4 --hardware here --batch-size 6 --profile 6",
            "micro-batches of 3 and 6",
        ),
        (f"{HERE}:own", "--input 8 --schedules ZBH1,1F1B", "schedule 1F1B"),
        (f"{HERE}:own_by_keyword", "--hardware here", "layers profiled on "),
        pytest.param(
            "unet",
            "--size 1 8 --largest width --memory 300MiB --batch-size 8",
            "pipelined U-Net (1, ",
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
    output, told = command("schedule", "zbh1", "-n", "2", "-m", "2", "--svg", "two.svg")
    assert "1 | .  0  I0 1  I1 W0 W1" in output
    assert "kept at most, tasks by device: 2, 2" in output
    assert told == "written: two.svg\n"
    assert "<svg" in Path("two.svg").read_text()


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
    """Options for the precision change the predicted time, and PyTorch's settings are restored."""
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
    """`predict --run` predicts each row (configuration) of a recorded run.

    The run of this test has a small model and published balances.
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
