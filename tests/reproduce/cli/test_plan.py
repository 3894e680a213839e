"""predict and plan: what they print, and one line for whatever is wrong."""

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
        (["plan", "unet", "--autocast", "float8"], "'float8' is not one of 'bfloat16', 'float16'"),
        (["plan", "unet", "--fp32-precision", "tf16"], "'tf16' is not one of 'ieee', 'tf32'"),
        (["plan", "unet", "--size", "1", "8", "--master-weights"], "master_weights is for parameters in 16 bits"),
        (["plan", "unet", "--largest", "depth", "--autocast", "bfloat16"], "for training in float32; leave it out"),
        (["predict", "--run", "RUN", "--fp32-precision", "tf32"], "a run is predicted as it was run, in float32"),
        (
            ["predict", "unet-speed", "--autocast", "bfloat16"],
            "name a folder by --out; results/predicted is as published",
        ),
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


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = own()

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x * mask) + x
        return y


def own_by_keyword() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The mask has no batch dimension."""
    return Masked(), {"mask": torch.rand(8), "x": torch.rand(2, 8)}


@pytest.mark.parametrize(
    ("function", "more"), [("own", ["--input", "8"]), ("own_with_sample", []), ("own_by_keyword", [])]
)
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


def half() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(2))).half(), torch.rand(2, 4096).half()


def single() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(2))), torch.rand(2, 4096)


@pytest.mark.parametrize(
    ("function", "option", "faster"),
    [
        ("single", ["--autocast", "bfloat16"], True),
        ("single", ["--fp32-precision", "tf32"], True),
        ("half", ["--master-weights"], False),
    ],
)
def test_numbers_change_a_plan(
    function: str, option: list[str], faster: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its seconds; and PyTorch is left as it was."""
    before = torch.backends.cuda.matmul.fp32_precision, torch.is_autocast_enabled("cuda")
    texts = []
    for options in ([], option):
        arguments = ["--hardware", "a100x8", "--devices", "1", "--optimizer", "adam", "--batch-size", "4096", *options]
        assert main(["plan", f"tests.reproduce.cli.test_plan:{function}", *arguments]) == 0
        texts.append(capsys.readouterr().out)
    plain, other = (float(text.partition("\nstep ")[2].split()[0]) for text in texts)
    assert (other < plain) == faster and other != plain
    assert before == (torch.backends.cuda.matmul.fp32_precision, torch.is_autocast_enabled("cuda"))


@pytest.mark.slow
def test_the_largest_model_pipelined_is_larger(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--size", "1", "8", "--largest", "width", "--devices", "2", "--memory", "300MiB", "--batch-size", "8"]
    assert main(["plan", "unet", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    naive, pipelined = (int(line.partition("(1, ")[2].partition(")")[0]) for line in lines[1:3])
    assert naive < pipelined
