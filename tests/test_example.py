"""The example trains alike on one process and under torchrun, and goes on to the same numbers after failures."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader

from torchgpipe.saved_files import read

ROOT = Path(__file__).parents[1]

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")

Steps = list[tuple[int, float, float]]
"""The number of each step, its loss, and the norm of its gradients."""


def started(*start: str, model: str, arguments: str, faults: Any = None, dropout: bool = True) -> subprocess.Popen[str]:
    """Start the example, in which ranks may fail."""
    failing = [] if faults is None else ["-m", "tests.failing", json.dumps(faults)]
    settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return subprocess.Popen(
        [*start, *failing, "examples/train.py", model, *arguments.split()],
        cwd=ROOT,
        env=os.environ | settings | ({} if dropout else {"DROPOUT": "0"}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(process: subprocess.Popen[str], code: int = 0) -> Steps:
    """Wait for the end; return the steps."""
    printed, _ = process.communicate(timeout=600)
    assert process.returncode == code, printed
    found = re.findall(r"step (\d+): loss ([\d.]+), gradient norm ([\d.]+)", printed)
    return [(int(step), float(loss), float(norm)) for step, loss, norm in found]


def saved(folder: Path, step: int) -> dict[str, Tensor]:
    """Return the model and the optimizer's state as they were saved after a step."""
    (path,) = folder.glob(f"*-step-{step}")
    content = FileSystemReader(path).read_metadata()
    return read(path, content, [key for key in content.state_dict_metadata if key.startswith(("model.", "optimizer."))])


def assert_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["amoebanetd", "transformer", "resnet18"])
def test_the_example(model: str) -> None:
    if model == "resnet18":
        pytest.importorskip("torchvision", exc_type=Exception)  # type: ignore[arg-type]
    arguments = "--steps 2 --batch 6 --chunks 3"
    alone, ranks = [
        [x for step in ended(started(*start, model=model, arguments=arguments)) for x in step]
        for start in ((sys.executable,), (*TORCHRUN, "--nproc-per-node", "2"))
    ]
    assert len(alone) == 6
    # Convolutions may differ in their last bits from one start of Python to the next, in a single process, too.
    assert ranks == pytest.approx(alone, rel=1e-4)


@pytest.mark.slow
def test_restarts(tmp_path: Path) -> None:
    """A rank is killed while it trains, another while it saves, one raises: the numbers are those without failures."""
    start = (*TORCHRUN, "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2", "--max-restarts", "3")
    faults = [[1, "killed", 2], [0, "killed while saving", 6], [1, "raises", 1], None]
    runs = [
        started(*start, model="transformer", arguments=f"--steps 5 --save {tmp_path / name}", faults=given)
        for name, given in (("undisturbed", [None]), ("disturbed", faults))
    ]
    undisturbed, disturbed = map(ended, runs)
    assert [step for step, *_ in undisturbed] == [0, 1, 2, 3, 4]
    assert [step for step, *_ in disturbed] == [0, 1, 2, 2, 3, 4]
    assert {*disturbed} == {*undisturbed}
    assert_equal(saved(tmp_path / "disturbed", 4), saved(tmp_path / "undisturbed", 4))


@pytest.mark.slow
def test_fewer_ranks(tmp_path: Path) -> None:
    """Four ranks, of which a node of two is killed: the other two go on with a balance of their own.

    Two ranks that are started by hand do the same. There is no dropout: its masks depend on the balance.
    """
    alone = started(
        sys.executable,
        model="transformer",
        arguments=f"--partitions 4 --steps 6 --save {tmp_path / 'alone'}",
        faults=[None],
        dropout=False,
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    one, other = [
        started(
            *(*TORCHRUN, "--nnodes", "1:2", "--nproc-per-node", "2", "--max-restarts", "2", "--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"),
            *("--rdzv-conf", f"last_call_timeout=5,is_host={int(last is None)}"),
            model="transformer",
            arguments=f"--steps 4 --save {tmp_path / 'ranks'}",
            faults=[last, None, None],
            dropout=False,
        )
        for last in (None, [1, "node", 3])
    ]
    expected = ended(alone)
    steps = [*ended(one), *ended(other, -signal.SIGKILL)]
    by_hand = (*TORCHRUN, "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2")
    steps += ended(
        started(
            *by_hand,
            model="transformer",
            arguments=f"--steps 6 --save {tmp_path / 'ranks'}",
            faults=[None],
            dropout=False,
        )
    )
    assert {*steps} == {*expected}
    assert_equal(saved(tmp_path / "ranks", 5), saved(tmp_path / "alone", 5))
