"""Test the GPU benchmark that measures the memory of each partition of a pipeline alone."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import memory
from benchmarks.gpu.alone import Partitions
from benchmarks.gpu.part import Context
from reproduce.experiments import EXPERIMENTS
from reproduce.experiments.row import Row
from reproduce.models.counted import counted, setup_of
from reproduce.records.record import load
from reproduce.tables.all import document
from torchgpipe.plan.predict.memory import setup_memory

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"size": (1, 2), "batch_size": 4, "input_shape": (3, 64, 64), "chunks": 4}


def unet(balance: tuple[int, ...] | None) -> Row:
    """Return a row (configuration) of a small U-Net. If `balance` is `None`, it has no pipeline."""
    row = EXPERIMENTS["unet-memory"].scale("paper").rows[3 if balance else 0]
    row = replace(row, **SMALL, balance=balance)
    if balance is None:
        return replace(row, chunks=None)
    return replace(row, partitions=len(balance))


OUTPUTS = 4 * 64 * 64 * 4
"""The bytes of the output of all micro-batches."""


@pytest.mark.parametrize("balance", [None, (65,), (16, 16, 16, 17)])
def test_a_partition_alone_takes_as_much_memory_as_is_predicted(balance: Any) -> None:
    """Check that a partition that runs alone has the memory peak predicted for the pipeline.

    Two differences are allowed:

    - A partition alone may need more: a prediction leaves out the tensors of the loss function.
    - A partition alone may need less: a prediction includes copies of an activation and of a
      gradient that other devices have sent.
    """
    row = unet(balance)
    counts = counted(row.sized)
    setup = setup_of(row.config(), len(counts))
    partitions = Partitions(row)
    for j, predicted in enumerate(setup_memory(counts, setup)):
        found, _ = memory.peaks(partitions, j, CPU)
        criterion = 2 * OUTPUTS if j == row.devices - 1 and row.devices > 1 else 64
        assert found <= predicted.peak + criterion
        assert found >= predicted.peak - predicted.copies


def test_a_partition_takes_no_memory_when_it_is_released() -> None:
    partitions = Partitions(unet((30, 35)))
    partitions.prepared(1, CPU)
    assert {p.device.type for p in partitions.layers[1].parameters()} == {"cpu"}
    partitions.release(1)
    assert {p.device.type for p in partitions.layers[1].parameters()} == {"meta"}


def run_tiny(tmp_path: Path) -> Any:
    context = Context("memory", "tiny", tmp_path / "memory", time.monotonic() + 60)
    context.folder.mkdir()
    return memory.run(context)


def test_a_dry_run_writes_a_record_and_lines(tmp_path: Path) -> None:
    result = run_tiny(tmp_path)

    (found,) = load(tmp_path / "records/gpu-memory.json").results
    row = result["rows"]["unet-memory/pipeline-2"]
    assert found.values["peak_allocated"] == row["allocated"]
    assert len(row["allocated"]) == 2
    assert found.scale == "tiny"
    assert found.published is None, "it did not repeat the published row"
    page = document(load(tmp_path / "records/gpu-memory.json"))
    assert "each partition ran alone" in page
    about, shares = memory.lines(result)
    assert "published 43.40" in about
    assert "reserved: not measured on a CPU" in about
    assert shares.startswith("1 of 1 rows, 2 partitions: allocated over predicted ")
    assert shares.endswith("; all fit")


def test_rows_in_the_papers_size_repeat_published_rows() -> None:
    found = memory._Measured(EXPERIMENTS["unet-memory"], unet((30, 35)))
    result = found.result(torch.device("cuda"), "paper")
    assert result.scale == "paper"
    assert result.published == f"tg-unet-memory/{found.row.published}"


def test_what_does_not_fit_says_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(partitions: Any, j: int, device: torch.device) -> tuple[int, int]:
        if j == 1:
            raise torch.OutOfMemoryError
        return 1 << 30, 2 << 30

    monkeypatch.setattr(memory, "peaks", full)
    result = run_tiny(tmp_path)

    (found,) = load(tmp_path / "records/gpu-memory.json").results
    assert found.status == "out of memory"
    assert str(found.reason).startswith("device 1 needs about 0.0 GiB, as predicted")
    (shares,) = memory.lines(result)
    assert shares.startswith("1 of 1 rows, 1 partitions: ")
    assert "unet-memory/pipeline-2: device 1 needs about" in shares


def test_other_errors_are_not_taken_for_a_lack_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*given: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(memory, "peaks", broken)
    with pytest.raises(ZeroDivisionError):
        run_tiny(tmp_path)
