"""Answer the rows for several ranks, in two processes."""

from __future__ import annotations

from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ..plain import Plain
from .page import PAGE, Row, read
from .run import differences, left_by, names, pipeline

RANKS = 2


def left_in_group(row: Row, kind: Any, rank: int, store: Path) -> dict[str, Any]:
    """Run a row's code in a process group of its own: one that was left in the middle is of no more use."""
    patience = timedelta(seconds=60)  # only a hang takes as long
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=patience)
    try:
        return left_by(row.code, names(kind, rank, mesh=init_device_mesh("cpu", (RANKS,))))
    finally:
        dist.destroy_process_group()


def answer(row: Row, engine: str, mode: str, plain: dict[str, Any], rank: int, folder: Path) -> str:
    try:
        ours = left_in_group(row, pipeline(engine, mode), rank, folder / f"{row.name} {engine} {mode}")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    different = differences(ours, plain, rounded=row.rounded)
    return f"differs: {different}" if different else "right"


def answer_all(rank: int, link: Connection, asked: list[tuple[str, str, str]], folder: Path) -> None:
    """Say of each row that is asked, with an engine and a mode: `"right"`, or what differs or was raised."""
    torch.set_num_threads(1)
    rows = {row.name: row for row in read(PAGE.read_text(encoding="utf-8"))}
    plain = {
        name: left_in_group(rows[name], Plain, rank, folder / f"{name} plain")
        for name in dict.fromkeys(name for name, _, _ in asked)
    }
    link.send(
        {
            f"{name} {engine} {mode}": answer(rows[name], engine, mode, plain[name], rank, folder)
            for name, engine, mode in asked
        }
    )
