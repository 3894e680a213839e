"""Start Python in another process, also with torchrun."""

import os
import subprocess
import sys
from pathlib import Path

from reproduce.machine.description import ROOT

# The address is given, because a network does not always know the name of the machine.
TORCHRUN = ("-m", "torch.distributed.run", "--local-addr", "127.0.0.1")


def python(
    *arguments: str,
    root: Path = ROOT,
    first: Path = ROOT,
    errors: int = subprocess.PIPE,
    **environment: str,
) -> subprocess.Popen[str]:
    """Start Python with a script or `-m module` in a git checkout of this project.

    Args:
        arguments: The arguments of Python.
        root: The folder of the checkout, which is also the working directory.
        first: A folder in which Python looks for modules before it looks in the checkout.
        errors: The argument `stderr` of `subprocess.Popen`.
        environment: Additional environment variables.
    """
    path = os.pathsep.join([str(first), str(root)])
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment, "PYTHONPATH": path}
    command = [sys.executable, *arguments]
    return subprocess.Popen(
        command, cwd=root, env=env, stdout=subprocess.PIPE, stderr=errors, text=True
    )
