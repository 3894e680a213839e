"""`benchmarks.conformance`: what it compares with, whether it finds planted faults, and a few of its checks."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.conformance import main, table
from benchmarks.conformance_checks import CHECKS
from benchmarks.conformance_engines import NotOffered, Pipeline, Plain, Ranks, Tensors, Threads, rank, squares
from benchmarks.conformance_parts import batch, mlp
from benchmarks.conformance_ranks import compared, run
from reproduce.records.record import load


def test_the_plain_layers() -> None:
    """By micro-batch, batch norm counts each; else, losses and gradients are those of the mini-batch."""
    x, target = batch(8)
    pipe = Plain(mlp(nn.BatchNorm1d(6)), [3, 2], chunks=4, by_micro_batch=True)
    pipe.step(x, target)
    assert pipe.found()["2.num_batches_tracked"] == 4
    pipe, layers = Plain(mlp(), [2, 2], chunks=4), mlp()
    pipe.step(x, target)
    loss = squares(layers(x), target)
    loss.backward()
    found = pipe.found()
    expected = {f"gradient of {name}": p.grad for name, p in layers.named_parameters()}
    assert compared([{"loss 0": loss, **expected, **layers.state_dict()}], found).kind == "equal"


class AnotherGradient(Threads):
    def gradients(self) -> Tensors:
        return {name: x if x is None or "0.weight" not in name else x * 1.01 for name, x in super().gradients().items()}


class NoGradient(Threads):
    def gradients(self) -> Tensors:
        return {**super().gradients(), "0.bias": None}


class NoStatistics(Threads):
    def step(self, x: Any, target: Any) -> None:
        super().step(x, target)
        for name, buffer in self.module.named_buffers():
            if name.endswith("num_batches_tracked"):
                buffer.zero_()


class LessState(Threads):
    def found(self) -> Tensors:
        return {name: x for name, x in super().found().items() if name != "0.bias"}


class Refuses(Threads):
    package = "tests"

    def step(self, x: Any, target: Any) -> None:
        raise ValueError("batches of eight are refused")


class Fails(Threads):
    def step(self, x: Any, target: Any) -> None:
        torch.zeros(2) + torch.zeros(3)


class HasNone(Threads):
    def step(self, x: Any, target: Any) -> None:
        raise NotOffered("it takes no step")


class Ends(Ranks):
    def step(self, x: Any, target: Any) -> None:
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        super().step(x, target)


class Hangs(Ranks):
    def step(self, x: Any, target: Any) -> None:
        time.sleep(1000 * rank())


FAULTS: list[tuple[type[Pipeline], str, str, str]] = [
    (Threads, "equal micro-batches", "equal", ""),
    (Ranks, "batch norm, by mini-batch", "equal", ""),
    (Threads, "a skip over a partition, in a model as it is written", "equal", ""),
    (Threads, "another balance", "equal", ""),
    (Threads, "in backward of the first partition", "equal", ""),
    (Ranks, "in the criterion", "equal", ""),
    (AnotherGradient, "equal micro-batches", "differs", "gradient of 0.weight differs by"),
    (NoGradient, "equal micro-batches", "differs", "gradient of 0.bias missing"),
    (NoStatistics, "batch norm, by micro-batch", "differs", "2.num_batches_tracked differs by 4"),
    (LessState, "equal micro-batches", "differs", "0.bias: on no rank"),
    (Refuses, "equal micro-batches", "refused", "ValueError: batches of eight are refused"),
    (Fails, "equal micro-batches", "fails", "RuntimeError: The size of tensor a"),
    (HasNone, "equal micro-batches", "not offered", "it takes no step"),
    (Ends, "equal micro-batches", "ends", "SIGKILL"),
    (Hangs, "equal micro-batches", "hangs", "not finished after 4 seconds"),
]


@pytest.mark.parametrize("engine, check, kind, said", FAULTS)
def test_how_a_check_ends(engine: type[Pipeline], check: str, kind: str, said: str) -> None:
    outcome = run(CHECKS[check], engine, limit=4.0 if engine is Hangs else 60.0)
    assert outcome.kind == kind and outcome.said.startswith(said), outcome


ONE = torch.ones(2)
FOUND: list[tuple[list[dict[str, Tensor | bool | None]], str]] = [
    ([{"x": ONE}, {"y": ONE, "so": True}], ""),
    ([{"x": ONE, "y": ONE}, {"y": ONE, "so": True}], ""),
    ([{"x": ONE}, {"y": ONE * 2, "so": True}], "y differs by 1, where the largest value is 1"),
    ([{"x": ONE, "y": ONE}, {"y": ONE * 2, "so": True}], "y differs by 1, where the largest value is 1"),
    ([{"x": ONE}, {"y": ONE}], "so: on no rank"),
    ([{"x": ONE, "so": True}, {"y": ONE, "so": False}], "not so: so"),
    ([{"x": ONE, "so": True}, {"y": ONE, "z": ONE}], "z: there, but not in the model"),
]


@pytest.mark.parametrize("ranks, said", FOUND)
def test_all_ranks_together_are_compared(ranks: list[dict[str, Tensor | bool | None]], said: str) -> None:
    assert compared([*ranks], {"x": ONE, "y": ONE, "so": True}).said == said


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "record.json"
    main(["--engine", "threads", "--json", str(path), "one micro-batch", "dropout equal over balances"])
    page = "\n".join(
        "|".join(cell.strip() for cell in line.split("|")) for line in table(load(path), "pipe").split("\n")
    )
    assert "|threads|this library|1||||1|||" in page
    assert "|dropout equal over balances|threads|differs|not so: both are equal|" in page
    with pytest.raises(SystemExit):
        main(["one batch"])
    assert "there is no check 'one batch'; the checks are equal micro-batches, one" in capsys.readouterr().err
