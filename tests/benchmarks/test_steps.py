"""Steps on one device: the plain loop computes what the pipeline does, and the table says who could not run."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.child import ROOT
from benchmarks.steps import compare, main, table
from benchmarks.steps_child import Steps

ASKED = {"scale": "small", "precision": "fp32", "layout": "contiguous", "n": 3, "m": 3, "batch": 6, "device": "cpu"}


@pytest.fixture(autouse=True)
def _settings_of_the_process() -> Iterator[None]:
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    threads, tf32 = torch.get_num_threads(), (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    yield
    torch.set_num_threads(threads)
    if cores is not None:
        os.sched_setaffinity(0, cores)
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
@pytest.mark.parametrize("changes", [{}, {"m": 1}, {"n": 1}, {"m": 5}, {"layout": "channels_last"}], ids=str)
def test_the_plain_loop_computes_the_same(checkpoint: str, changes: dict[str, Any]) -> None:
    """U-Net's skips cross the loop's partitions as they cross the pipeline's."""
    asked = {**ASKED, "model": "U-Net", "checkpoint": checkpoint, **changes}
    ours, theirs = Steps("gpipe", asked), Steps("plain", asked)
    for layer in (*ours.layers.modules(), *theirs.layers.modules()):
        if isinstance(layer, nn.Dropout2d):
            layer.p = 0.0  # the pipeline draws for each task apart, whatever order tasks run in
    assert ours.x.is_contiguous(memory_format=torch.channels_last) is (asked["layout"] == "channels_last")
    assert torch.equal(ours.run(), theirs.run())
    pairs = list(zip(ours.layers.parameters(), theirs.layers.parameters(), strict=True))
    assert pairs and all(a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad) for a, b in pairs)
    assert ours.seconds() > 0 and ours.peak() is None and ours.waits() is None


@pytest.mark.parametrize("how", ["gpipe", "plain"])
def test_autocast(how: str) -> None:
    steps = Steps(how, {**ASKED, "model": "U-Net", "precision": "bf16", "checkpoint": "always"})
    assert steps.run().dtype == torch.bfloat16


def test_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "steps.json"
    what = ["--device=cpu", "--scale=small", "--model=U-Net", "--partitions", "1", "2", "--chunks=2", "--batch=4"]
    main([*what, "--rounds=2", f"--against={ROOT}", f"--json={file}"])
    kept = json.loads(file.read_text())
    assert list(kept["cases"]) == ["U-Net fp32 contiguous n=1 m=2", "U-Net fp32 contiguous n=2 m=2"]
    for case in kept["cases"].values():
        assert {name: len(found["seconds"]) for name, found in case.items()} == {"plain": 2, "here": 2, "other": 2}
    assert table(kept) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--device cpu --chunks 0", "--chunks from 1 to the batch"),
        ("--device cpu --chunks 8 --batch 4", "--chunks from 1 to the batch"),
        ("--device cpu --rounds 0", "--rounds and --partitions must be at least 1"),
        ("--device cpu --scale small --model ResNet-101", "ResNet-101: at scale small there are AmoebaNet-D, U-Net"),
        ("--against /nowhere", "there is no torchgpipe in /nowhere"),
    ],
)
def test_what_it_refuses(options: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(options.split())
    assert raised.value.code == 2
    assert said in capsys.readouterr().err


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        main([])
    assert "there is no CUDA device here; give --device cpu --scale small" in capsys.readouterr().err


def test_the_table_says_who_could_not_run() -> None:
    steps = {"seconds": [0.2, 0.2, 0.3], "peak": 2**30, "waits": 0}
    ours = {"seconds": [0.1, 0.2, 0.2], "peak": 2**29, "waits": 1}
    result = {
        "what": "batch 4",
        "versions": {"plain": "plain loop", "here": "ours", "other": "theirs"},
        "cases": {
            "a": {"plain": steps, "here": ours, "other": {"unable": "out of memory"}},
            "b": {"plain": {"unable": "out of memory"}, "here": ours, "other": steps},
        },
    }
    lines = table(result, "pipe").splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line]
    cells = {case: row for case, *row in rows}
    assert cells["case"] == ["plain loop, ms", "ours, ms", "theirs, ms", "x plain loop", "GiB", "waits", "x theirs"]
    assert cells["a"] == ["200.0", "200.0", "-", "1.50", "1.00 / 0.50 / -", "0 / 1 / -", ""]
    assert cells["b"] == ["-", "200.0", "200.0", "", "- / 0.50 / 1.00", "- / 1 / 0", "1.50"]
    assert lines[0] == "batch 4"
    assert lines[-4:] == [
        "- x plain loop: lowest 1.50, geometric mean 1.50, of 1",
        "- x theirs: lowest 1.50, geometric mean 1.50, of 1",
        "- theirs: out of memory (1 of 2)",
        "- plain loop: out of memory (1 of 2)",
    ]


class Answers:
    """A measuring process that answers what it is told to."""

    def __init__(self, **answers: list[Any]) -> None:
        self.answers = answers

    def ask(self, what: str, *asked: Any) -> Any:
        return self.answers[what].pop(0)


def test_who_fails_on_the_way_is_left_out() -> None:
    children = {
        "plain": Answers(plain=[None], seconds=[0.1, "out of memory"]),
        "here": Answers(gpipe=[None], seconds=[0.2, 0.3, 0.4], peak=[5], waits=[0]),
        "other": Answers(gpipe=["TypeError: what"]),
        "another": Answers(gpipe=[None], seconds=[0.1, 0.1, 0.1], peak=["out of memory"]),
    }
    found = compare(children, {}, 3, random.Random(0))  # type: ignore[arg-type]
    assert found == {
        "plain": {"unable": "out of memory"},
        "here": {"seconds": [0.2, 0.3, 0.4], "peak": 5, "waits": 0},
        "other": {"unable": "TypeError: what"},
        "another": {"unable": "out of memory"},
    }
