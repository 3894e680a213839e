"""predict, plan and calibrate: what they print, and one line for whatever is wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from reproduce.cli.main import main
from reproduce.tables.layout import WIDTH


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["predict", "unet-sped"], "did you mean unet-speed"),
        (["predict", "unet-speed", "--hardware", "p41"], "no hardware is called 'p41'; there are a100x8"),
        (["plan", "unet", "--memory", "much"], "text such as '24GiB'"),
        (["plan", "resnet101", "--size", "1", "2"], "leave --size out"),
        (["plan", "amoebanet", "--size", "4", "32"], "positive multiple of 3"),
        (["plan", "unet", "--size", "1", "8", "--devices", "1", "--memory", "1MiB"], "alone needs"),
        (["plan", "resnet101", "--largest", "depth"], "leave --largest out"),
        (["plan", "unet", "--input", "3x32x32"], "leave --input out"),
        (["plan", "resnet"], "no model is called 'resnet'; there are amoebanet, unet, resnet101, torchvision's"),
        (["plan", "torchvision:resnet5"], "resnet5"),
        (["plan", "torchvision:resnet18", "--input", "3,32,32"], "a sample's shape is written as 3x224x224"),
        (["plan", "nowhere:model"], "nowhere:model cannot be imported: No module named 'nowhere'"),
        (["plan", "math:pi"], "math:pi has to be a function that returns a model, got float"),
        (["plan", "torch:Generator"], "has to return a model, or a model and a sample; got Generator"),
        (["plan", "tests.reproduce.cli.test_plan:own"], "returns no sample beside its model: let it return both"),
        (["plan", "unet", "--largest", "depth", "--hardware", "here"], "nothing is timed for it: name a description"),
        (["plan", "unet", "--profile", "8"], "nothing is timed with a description; leave it out"),
        (["calibrate", "--out", "here.txt"], "ends in .json"),
    ],
)
def test_refuses_in_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) != 0
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def own() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))


def own_with_sample() -> tuple[nn.Module, torch.Tensor]:
    return own(), torch.rand(2, 8)


@pytest.mark.parametrize(("function", "more"), [("own", ["--input", "8"]), ("own_with_sample", [])])
@pytest.mark.parametrize("hardware", ["p40x8", "here"])
def test_plans_a_model_of_ones_own(
    function: str, more: list[str], hardware: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--devices", "2", "--hardware", hardware, *more]
    assert main(["plan", f"tests.reproduce.cli.test_plan:{function}", *arguments]) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"tests.reproduce.cli.test_plan:{function}, batch size 128, sgd\n")
    assert max(map(len, output.splitlines())) <= WIDTH


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (["--size", "1", "8", "--memory", "1GiB", "--batch-size", "8"],
         ["U-Net (1, 8), batch size 8, sgd", "predicted, not measured"]),
        (["--size", "1", "4", "--hardware", "here", "--batch-size", "6", "--profile", "6"],
         ["predicted, not measured: layers profiled on ", "micro-batches of 3 and 6"]),
    ],
)  # fmt: skip
def test_plans(arguments: list[str], lines: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "unet", "--devices", "2", *arguments]) == 0
    output = capsys.readouterr().out
    assert all(line in " ".join(output.split()) for line in lines)
    assert max(map(len, output.splitlines())) <= WIDTH


@pytest.mark.slow
def test_the_largest_model_pipelined_is_larger(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--size", "1", "8", "--largest", "width", "--devices", "2", "--memory", "300MiB", "--batch-size", "8"]
    assert main(["plan", "unet", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    naive, pipelined = (int(line.partition("(1, ")[2].partition(")")[0]) for line in lines[1:3])
    assert naive < pipelined
