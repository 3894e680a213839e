"""Functions that start Python in another process.

The process is new, or it is forked from a server that has already imported torch.
"""

import os
import runpy
import subprocess
import sys
import tempfile
from multiprocessing import forkserver, get_context
from pathlib import Path
from typing import Any

from reproduce.machine.description import ROOT

# The address is given, because a network does not always know the name of the machine.
TORCHRUN = ("-m", "torch.distributed.run", "--local-addr", "127.0.0.1")


PRELOADED = [
    "benchmarks.harness",
    "benchmarks.others.ours",
    "benchmarks.others.pipelining",
    "tests.behaviours.rows.training",
    "tests.failures.program",
    "tests.reproduce.run.works",
    "torch.distributed.pipelining",
]
"""What the server of `forking` imports. Then its processes need not import it, which takes long."""


def forking() -> Any:
    """Return the `multiprocessing` API with which new processes are forked from a server.

    The server has imported torch and this library, so a new process starts fast. As it has only one
    thread, forking is safe. All tests share the server that the first call starts.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()
    return context


def forked(module: str) -> tuple[int | None, str, str]:
    """Run a module as a program (`python -m module`), in a process forked from a server.

    Returns:
        The exit code, and what the program wrote to stdout and to stderr.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, "out"), Path(folder, "err")]
        process = forking().Process(target=_run, args=(module, *files))
        process.start()
        process.join()
        out, err = (file.read_text() for file in files)
        return process.exitcode, out, err


def _run(module: str, *files: Path) -> None:
    os.chdir(ROOT)
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    sys.argv = [module]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def python(
    *arguments: str,
    root: Path = ROOT,
    first: Path = ROOT,
    errors: int = subprocess.PIPE,
    **environment: str,
) -> subprocess.Popen[str]:
    """Start Python in a new process, with a git checkout of this project.

    Args:
        arguments: The arguments of Python, such as a script, or `-m` and a module.
        root: The folder of the checkout, which becomes the working directory.
        first: A folder in which Python looks for modules before it looks in the checkout.
        errors: Where the process writes its errors: the argument `stderr` of `subprocess.Popen`.
        environment: Additional environment variables.
    """
    path = os.pathsep.join([str(first), str(root)])
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment, "PYTHONPATH": path}
    command = [sys.executable, *arguments]
    return subprocess.Popen(
        command, cwd=root, env=env, stdout=subprocess.PIPE, stderr=errors, text=True
    )
