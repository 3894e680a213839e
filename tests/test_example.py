"""The example trains alike on one process and under torchrun."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def trained(*start: str, model: str) -> list[float]:
    """Return the losses and norms of two steps."""
    ran = subprocess.run(
        [*start, "examples/train.py", model, "--steps", "2", "--batch", "6", "--chunks", "3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr
    return [float(x) for x in re.findall(r"(?:loss|norm) ([\d.]+)", ran.stdout)]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["amoebanetd", "transformer", "resnet18"])
def test_the_example(model: str) -> None:
    if model == "resnet18":
        pytest.importorskip("torchvision", exc_type=Exception)  # type: ignore[arg-type]
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    alone = trained(sys.executable, model=model)
    assert len(alone) == 4
    # Convolutions may differ in their last bits from one start of Python to the next, in a single process, too.
    assert trained(*torchrun, model=model) == pytest.approx(alone, rel=1e-4)
