"""Start Python, also by way of torchrun."""

import os
import subprocess
import sys
from pathlib import Path

from reproduce.machine.description import ROOT

TORCHRUN = (
    "-m",
    "torch.distributed.run",
    "--local-addr",
    "127.0.0.1",
)  # no network may know this machine's name


def python(
    *arguments: str,
    root: Path = ROOT,
    first: Path = ROOT,
    errors: int = subprocess.PIPE,
    **environment: str,
) -> subprocess.Popen[str]:
    """Start Python on a script or `-m module` in a checkout, with a folder that is searched for modules first."""
    path = os.pathsep.join([str(first), str(root)])
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment, "PYTHONPATH": path}
    command = [sys.executable, *arguments]
    return subprocess.Popen(
        command, cwd=root, env=env, stdout=subprocess.PIPE, stderr=errors, text=True
    )
