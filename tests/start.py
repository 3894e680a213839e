"""Start Python, also by torchrun."""

import os
import subprocess
import sys
from pathlib import Path

from reproduce.machine.description import ROOT

# The address is given because networks may not know the name of the machine.
TORCHRUN = ("-m", "torch.distributed.run", "--local-addr", "127.0.0.1")


def python(
    *arguments: str,
    root: Path = ROOT,
    first: Path = ROOT,
    errors: int = subprocess.PIPE,
    **environment: str,
) -> subprocess.Popen[str]:
    """Start Python on a script or `-m module` in a checkout.

    Args:
        arguments: The arguments of Python.
        root: The checkout, which is also the working directory.
        first: The folder that is searched for modules before the checkout.
        errors: Where standard error goes, as for `subprocess.Popen`.
        environment: Further variables of the environment.
    """
    path = os.pathsep.join([str(first), str(root)])
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment, "PYTHONPATH": path}
    command = [sys.executable, *arguments]
    return subprocess.Popen(
        command, cwd=root, env=env, stdout=subprocess.PIPE, stderr=errors, text=True
    )
