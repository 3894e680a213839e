"""predict, plan and calibrate: what they print, and one line for whatever is wrong."""

from __future__ import annotations

import pytest

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
        (["plan", "resnet101", "--largest", "depth"], "one size only, there is no largest"),
        (["plan", "unet", "--largest", "depth", "--hardware", "here"], "nothing is timed for it: name a description"),
        (["plan", "unet", "--profile", "8"], "nothing is timed with a description; leave it out"),
        (["calibrate", "--out", "here.txt"], "ends in .json"),
    ],
)
def test_refuses_in_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) != 0
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


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
