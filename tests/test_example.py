"""The example and the tutorial train alike on one process and under torchrun; the example goes on after failures."""

import json
import re
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader

from reproduce.machine.description import ROOT
from torchgpipe.state.saved_files import read

from .behaviours.compare import differences
from .start import TORCHRUN, python

pytestmark = pytest.mark.slow

TWO = (*TORCHRUN, "--nproc-per-node", "2")

Steps = list[tuple[int, float, float]]
"""The number of each step, its loss, and the norm of its gradients."""


def started(*start: str, faults: Any = None, **environment: Any) -> subprocess.Popen[str]:
    """Start the example, in which ranks may fail: words before it in the order of a command line, then its own."""
    k = start.index("examples/train.py")
    failing = [] if faults is None else ["-m", "tests.failures.script", json.dumps(faults)]
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return python(*start[:k], *failing, *start[k:], errors=subprocess.STDOUT, **environment)


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
    return read(
        path,
        content,
        [key for key in content.state_dict_metadata if key.startswith(("model.", "optimizer."))],
    )


@pytest.mark.parametrize("model", ["amoebanetd", "transformer", "resnet18"])
def test_the_example(model: str) -> None:
    if model == "resnet18":
        pytest.importorskip("torchvision", exc_type=Exception)  # type: ignore[arg-type]
    example = ("examples/train.py", model, "--steps", "2", "--batch", "6", "--chunks", "3")
    alone, ranks = [
        [x for step in ended(started(*start, *example)) for x in step] for start in ((), TWO)
    ]
    assert len(alone) == 6
    # Convolutions may differ in their last bits from one start of Python to the next, in a single process, too.
    assert ranks == pytest.approx(alone, rel=1e-4)


def test_the_tutorial(tmp_path: Path) -> None:
    *alone, ranks = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "tutorial.md").read_text(), re.DOTALL
    )
    printed = ""
    for start, code in (((), "".join(alone)), (TWO, ranks)):
        script = tmp_path / "script.py"
        script.write_text(code)
        printed += python(*start, str(script), errors=subprocess.STDOUT).communicate(timeout=600)[0]
    losses = [
        float(loss) for loss in re.findall(r": (\d+\.\d+)", printed)
    ]  # two ranks may share a line
    assert len(losses) == 5, printed
    assert losses == pytest.approx(losses[:1] * 5, rel=1e-4)


def training(steps: int, folder: Path) -> tuple[str, ...]:
    return ("examples/train.py", "transformer", "--steps", str(steps), "--save", str(folder))


def test_fewer_ranks_and_restarts(tmp_path: Path) -> None:
    """Four ranks, of which a node of two is killed: the other two go on with a balance of their own.

    One of these is killed while it saves, and then one raises: the numbers are those without failures. Two ranks that
    are started by hand go on to the same. There is no dropout: its masks depend on the balance.
    """
    alone = started(*training(6, tmp_path / "alone"), "--partitions", "4", faults=[None])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    node = (*TWO, "--nnodes", "1:2", "--max-restarts", "3", "--rdzv-backend", "c10d")
    where = ("--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf")
    one, other = [
        started(
            *(*node, *where, f"last_call_timeout=5,is_host={int(first is None)}"),
            *training(4, tmp_path / "ranks"),
            faults=[first, [0, "dies while it saves", 6], [1, "raises", 1], None],
        )
        for first in (None, [1, "node", 3])
    ]
    expected = ended(alone)
    steps = [*ended(one), *ended(other, -signal.SIGKILL)]
    steps += ended(started(*TWO, "--standalone", *training(6, tmp_path / "ranks"), faults=[None]))
    assert {*steps} == {*expected}
    assert differences(saved(tmp_path / "ranks", 5), saved(tmp_path / "alone", 5)) == []
