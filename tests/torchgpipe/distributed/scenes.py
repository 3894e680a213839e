"""Scenes that several processes play together: started once for all scenes of a test module, which takes seconds."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, spawn

Scene = Callable[[int], None]


def play(scenes: Iterable[Scene], world: int) -> dict[str, list[str]]:
    """Let `world` ranks play each scene; return what each rank has to say of each, nothing if all was right."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    queue = get_context("spawn").SimpleQueue()
    with suppress(ProcessException):  # a rank that failed in a scene may leave others waiting: they say less
        spawn(_rank, ([*scenes], world, port, queue), world)
    said: dict[str, list[str]] = {}
    while not queue.empty():
        name, rank, text = queue.get()
        said.setdefault(name, []).append(text and f"on rank {rank}: {text}")
    return said


def _rank(rank: int, scenes: list[Scene], world: int, port: int, queue: Any) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(world)}
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for scene in scenes:
        try:
            scene(rank)
            queue.put((scene.__name__, rank, ""))
        except Exception:
            queue.put((scene.__name__, rank, traceback.format_exc()))
        dist.barrier()
    dist.destroy_process_group()
