"""plan: what it prints."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from reproduce.cli.main import main
from reproduce.tables.layout import WIDTH

HERE = "tests.reproduce.cli.test_plan"


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
    ("model", "options", "said"),
    [
        ("unet", "--size 1 8 --memory 1GiB --batch-size 8", "U-Net (1, 8), batch size 8, sgd"),
        ("unet", "--size 1 4 --hardware here --batch-size 6 --profile 6", "micro-batches of 3 and 6"),
        (f"{HERE}:own", "--input 8", "predicted, not measured"),
        (f"{HERE}:own", "--input 8", f"{HERE}:own, batch size 128, sgd"),
        (f"{HERE}:own_with_sample", "--hardware here", f"{HERE}:own_with_sample, batch size 128, sgd"),
        (f"{HERE}:own_by_keyword", "", f"{HERE}:own_by_keyword, batch size 128, sgd"),
        (f"{HERE}:own_by_keyword", "--hardware here", "layers profiled on "),
    ],
)
def test_plans(model: str, options: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", model, "--devices", "2", *options.split()]) == 0
    output = capsys.readouterr().out
    assert said in " ".join(output.split())
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
        assert main(["plan", f"{HERE}:{function}", *arguments]) == 0
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
