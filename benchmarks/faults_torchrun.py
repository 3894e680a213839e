"""What torchrun does, and how long it takes, when something goes wrong with one of its ranks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.child import ROOT
from benchmarks.faults_cases import Case
from benchmarks.faults_judge import error_in
from benchmarks.faults_outside import BEGIN, Outside
from benchmarks.two_machines import NAMES, address

VICTIM = 2
LIMIT = 240.0  # seconds

_BLAMED = re.compile(r"Root Cause.*?rank +: (\d+).*?exitcode +: (-?\d+)", re.DOTALL)


class Told(NamedTuple):
    """How a node of torchrun has ended: how many seconds after the fault, whom it blames, and errors of its ranks."""

    seconds: float | None
    blamed: str
    errors: list[str]


def run(outside: Outside, fault: str) -> list[Told]:
    """Let something go wrong in forward on one of four ranks; return how each node ended. A cut link takes two."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        case = json.dumps(Case(fault, "forward", VICTIM, outside.silence, name))
        script = ["-m", "benchmarks.faults_rank", case]
        start = [sys.executable, "-m", "torch.distributed.run"]
        if fault == "link cut":
            nodes = [
                ["ip", "netns", "exec", NAMES[k], *start, "--nnodes", "2", "--node-rank", str(k), "--nproc-per-node",
                 "2", "--master-addr", address(0), "--master-port", "29400", "--local-addr", address(k), *script]
                for k in range(2)
            ]  # fmt: skip
        else:
            nodes = [[*start, "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "4", *script]]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        if outside.private:
            environment["GLOO_SOCKET_IFNAME"] = "link" if fault == "link cut" else "lo"
        processes = []
        for k, node in enumerate(nodes):
            with (folder / f"{k}.said").open("w") as said:
                processes.append(subprocess.Popen(node, cwd=ROOT, env=environment, stdout=said, stderr=said))
        try:
            return _ended(outside, fault, folder, processes)
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _ended(outside: Outside, fault: str, folder: Path, processes: list[subprocess.Popen[bytes]]) -> list[Told]:
    limit = time.monotonic() + BEGIN
    while not (folder / "fault").exists() and time.monotonic() < limit:
        time.sleep(0.01)
    if fault == "link cut":
        outside.cut({VICTIM // 2})
    (folder / "done").touch()
    at = float((folder / "fault").read_text())
    seconds: dict[int, float] = {}
    while len(seconds) < len(processes) and time.monotonic() < at + LIMIT:
        time.sleep(0.01)
        for k, process in enumerate(processes):
            if k not in seconds and process.poll() is not None:
                seconds[k] = time.monotonic() - at
    outside.cut(set())
    told = []
    for k in range(len(processes)):
        said = (folder / f"{k}.said").read_text(errors="replace")
        blamed = _BLAMED.search(said)
        errors = [
            error_in("\n".join(line for line in said.splitlines() if line.startswith(f"[rank{rank}]")))
            for rank in range(4)
        ]
        who = f"rank {blamed[1]}, exit code {blamed[2]}" if blamed else "nobody"
        told.append(Told(seconds.get(k), who, errors))
    return told
