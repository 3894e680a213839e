"""Steps on one device: the plain loop computes what the pipeline does, and the table says who could not run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.child import ROOT
from benchmarks.steps import compare, main, table
from benchmarks.steps_child import Steps
from reproduce.error import Error
from reproduce.records.record import Record, Result, load

ASKED = {"model": "U-Net", "scale": "small", "precision": "fp32", "layout": "contiguous", "n": 3, "m": 3, "batch": 6,
         "checkpoint": "except_last", "device": "cpu"}  # fmt: skip


@pytest.fixture(autouse=True)
def _settings_of_the_process() -> Iterator[None]:
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    threads, tf32 = torch.get_num_threads(), (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    yield
    torch.set_num_threads(threads)
    if cores is not None:
        os.sched_setaffinity(0, cores)
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32


CHANGES: list[dict[str, Any]] = [
    {"checkpoint": "never"}, {"checkpoint": "always"}, {}, {"m": 1}, {"n": 1}, {"m": 5, "checkpoint": "always"},
    {"layout": "channels_last"}, {"precision": "bf16", "checkpoint": "always"},
]  # fmt: skip


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_the_plain_loop_computes_the_same(changes: dict[str, Any]) -> None:
    """U-Net's skips cross the loop's partitions as they cross the pipeline's."""
    asked = {**ASKED, **changes}
    ours, theirs = Steps("gpipe", asked), Steps("plain", asked)
    for layer in (*ours.layers.modules(), *theirs.layers.modules()):
        if isinstance(layer, nn.Dropout2d):
            layer.p = 0.0  # the pipeline draws for each task apart, whatever order tasks run in
    assert ours.x.is_contiguous(memory_format=torch.channels_last) is (asked["layout"] == "channels_last")
    output = ours.run()
    assert torch.equal(output, theirs.run())
    if asked["precision"] == "bf16":
        assert output.dtype == torch.bfloat16  # whose gradients' sums depend on the order
    else:
        pairs = zip(ours.layers.parameters(), theirs.layers.parameters(), strict=True)
        assert all(a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad) for a, b in pairs)
    assert ours.seconds() > 0 and ours.peak() is None and ours.waits() is None


@pytest.mark.slow
def test_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "steps.json"
    what = ["--device=cpu", "--scale=small", "--model=U-Net", "--partitions", "1", "2", "--chunks=2", "--batch=4"]
    main([*what, "--rounds=2", f"--against={ROOT}", f"--json={file}"])
    kept = load(file)
    cases = [f"U-Net fp32 contiguous n={n} m=2" for n in (1, 2)]
    ways = [(result.experiment, result.row, len(result.samples["time"])) for result in kept.results]
    assert ways == [(case, way, 2) for case in cases for way in ("plain", "here", "other")]
    assert table(kept) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--device cpu --chunks 8 --batch 4", "--chunks 8: the batch has 4 samples"),
        ("--device cpu --partitions 0", "0 is not a whole number of at least 1"),
        ("--device cpu --scale small --model ResNet-101", "ResNet-101: at scale small there are AmoebaNet-D, U-Net"),
        ("", "there is no CUDA device here; give --device cpu --scale small"),
    ],
)
def test_what_it_refuses(
    options: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as raised:
        main(options.split())
    assert raised.value.code == 2
    assert said in capsys.readouterr().err


class Answers:
    """A measuring process with prepared answers; a text is why it has none."""

    def __init__(self, version: str, **answers: list[Any]) -> None:
        self.version, self.answers = version, answers

    def ask(self, what: str, *asked: Any) -> Any:
        answer = self.answers[what].pop(0)
        if isinstance(answer, str):
            raise Error(answer)
        return answer


def test_who_fails_is_left_out_and_the_table_says_why() -> None:
    ways = {
        "plain": Answers("a loop", plain=[None], seconds=[0.3, 0.2, 0.2], peak=[2**30], waits=[0]),
        "here": Answers("ours", gpipe=[None], seconds=[0.1, 0.2, 0.2], peak=[2**29], waits=[1]),
        "other": Answers("theirs", gpipe=["TypeError: what"]),
        "another": Answers("third", gpipe=[None], seconds=[0.1, "out of memory"]),
        "one more": Answers("fourth", gpipe=[None], seconds=[0.1, 0.1, 0.1], peak=["out of memory"]),
    }
    results = compare("a", ways, {}, 3)  # type: ignore[arg-type]
    assert {result.row: (result.status, result.reason) for result in results} == {
        "plain": ("measured", None),
        "here": ("measured", None),
        "other": ("failed", "TypeError: what"),
        "another": ("out of memory", "out of memory"),
        "one more": ("out of memory", "out of memory"),
    }
    more = [
        Result("b", "plain", "out of memory", reason="out of memory", config={"version": "plain loop"}),
        Result("b", "here", "measured", config={"version": "ours"}, samples={"time": [0.2]}),
        Result("b", "other", "measured", config={"version": "theirs"}, samples={"time": [0.3]}),
    ]
    record = Record("steps", "batch 4", "measured", {}, [*results[:3], *more])
    lines = table(record, "pipe").splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line]
    assert rows[0] == ["case", "plain loop, ms", "ours, ms", "theirs, ms", "x plain loop", "GiB", "waits", "x theirs"]
    assert rows[2] == ["a", "200.0", "200.0", "-", "1.00", "1.00 / 0.50 / -", "0 / 1 / -", ""]
    assert rows[3] == ["b", "-", "200.0", "300.0", "", "", "", "1.50"]
    assert lines[0] == "batch 4"
    assert lines[-4:] == [
        "- x plain loop: lowest 1.00, geometric mean 1.00, of 1",
        "- x theirs: lowest 1.50, geometric mean 1.50, of 1",
        "- theirs: TypeError: what (1 of 2)",
        "- plain loop: out of memory (1 of 2)",
    ]
