"""The files of a saved state: a checkpoint of `torch.distributed.checkpoint`, on which ranks agree by a meeting."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torchgpipe.caught import caught
from torchgpipe.state.meeting import Meeting


def write(content: dict[str, Any], path: Path, ranks: Meeting) -> None:
    """Write a checkpoint, each rank its part, and flush it."""
    writer, planner = FileSystemWriter(path), DefaultSavePlanner(False, False)  # dictionaries and lists stay as given
    writer.fs = _Files()
    planner.set_up_planner(content, writer.storage_meta(), ranks.own == 0)
    writer.set_up_storage_writer(ranks.own == 0)
    # Every rank works out the same global plan.
    plans, metadata = planner.create_global_plan(ranks.all(writer.prepare_local_plan(planner.create_local_plan())))
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[ranks.own])
    results = ranks.all(writer.write_data(plan, planner).wait())
    if ranks.own == 0:
        writer.finish(metadata, results)
        flush(path)


class _Files(FileSystem):
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> _File:  # type: ignore[override]
        return _File(io.FileIO(path, mode))


class _File(io.BufferedWriter):
    """A file that may be flushed after its end: PyTorch's writer does so with an item that could not be written."""

    def flush(self) -> None:
        if not self.closed:
            super().flush()


def read(path: Path, saved: Metadata, keys: list[str]) -> dict[str, Any]:
    """Return the parts of a checkpoint with these keys."""
    content: dict[str, Any] = {}
    for key in keys:
        meta = saved.state_dict_metadata[key]
        content[key] = None
        if isinstance(meta, TensorStorageMetadata):
            content[key] = torch.empty(meta.size, dtype=meta.properties.dtype, device="cpu")
    reader = FileSystemReader(path)
    planner = DefaultLoadPlanner(False, False)
    planner.set_up_planner(content, saved, True)
    reader.set_up_storage_reader(saved, True)
    reader.read_data(reader.prepare_local_plan(planner.create_local_plan()), planner).wait()
    return content


def flush(folder: Path) -> None:
    """Let the names in a folder reach the disk."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Say of a state that cannot be read which it is, and what to do."""
    try:
        yield
    except Exception as error:
        line, *_ = str(error).splitlines() or [""]
        raise RuntimeError(
            f"the state in {path} cannot be read ({type(error).__name__}: {line}); if it is damaged, remove it, and "
            "the one before is loaded"
        ) from caught(error)
