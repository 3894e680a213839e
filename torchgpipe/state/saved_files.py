"""The files of a saved state: a checkpoint of `torch.distributed.checkpoint`, on which ranks agree by a meeting."""

from __future__ import annotations

import fcntl
import io
import json
import os
import shutil
import weakref
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial, reduce
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torchgpipe.caught import caught
from torchgpipe.state.meeting import Meeting

MARK = "saved-by-torchgpipe.json"
"""The file of a state that is written last, and has the checksums of all others."""


def marked(path: Path) -> bool:
    """Return whether a folder was made here; by an older version, if it has no mark but what that has always saved.

    A link to what is not there now, such as a disk, counts: not to find the newest state must not go unnoticed.
    """
    with suppress(OSError):
        if (path / MARK).is_file() or not path.exists():
            return True
        older = (path / ".metadata").read_bytes()
        return b"training" in older and b"random.0" in older
    return False


def remove(path: Path) -> None:
    """Remove a folder, or a link to one, as far as that can be removed."""
    with suppress(OSError):
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path)


def check(path: Path, ranks: Meeting) -> dict[str, int]:
    """Raise `ValueError` if a file is not as it was written; each rank looks at some. Return all checksums."""
    sums: dict[str, int] = json.loads((path / MARK).read_text()) if (path / MARK).exists() else {}
    for name in sorted(sums)[ranks.own :: ranks.n]:
        with open(path / name, "rb") as file:
            found = reduce(
                lambda found, content: zlib.crc32(content, found),
                iter(partial(file.read, 2**20), b""),
                0,
            )
        if found != sums[name]:
            raise ValueError(f"{name} is not as it was written, by its checksum")
    return sums


def write(content: dict[str, Any], path: Path, ranks: Meeting) -> None:
    """Write a checkpoint, each rank its part, and flush it."""
    writer, planner = (
        FileSystemWriter(path),
        DefaultSavePlanner(False, False),
    )  # dictionaries and lists stay as given
    writer.fs = files = _Files()
    planner.set_up_planner(content, writer.storage_meta(), ranks.own == 0)
    writer.set_up_storage_writer(ranks.own == 0)
    # Every rank works out the same global plan.
    local = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan(ranks.through(path, local))
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[ranks.own])
    results = ranks.through(path, writer.write_data(plan, planner).wait())
    sums = ranks.all(files.sums())
    if ranks.own == 0:
        for told in path.glob("told-*"):  # which all have read by now
            told.unlink()
        writer.finish(metadata, results)
        every = {name: each for part in (*sums, files.sums()) for name, each in part.items()}
        (path / MARK).write_text(json.dumps(every))
        flush(path / MARK)
        flush(path)


class _Files(FileSystem):
    def __init__(self) -> None:
        self._made: dict[str, _File] = {}

    def create_stream(self, path: str | os.PathLike[str], mode: str) -> _File:  # type: ignore[override]
        self._made[os.path.basename(path)] = file = _File(io.FileIO(path, mode))
        return file

    def sums(self) -> dict[str, int]:
        """Return the checksums of what was written."""
        return {
            name.removesuffix(".tmp"): file.sum for name, file in self._made.items()
        }  # they are renamed


class _File(io.BufferedWriter):
    """A file that may be flushed after its end: PyTorch's writer does so with an item that could not be written."""

    sum = 0

    def write(self, content: Any) -> int:
        self.sum = zlib.crc32(content, self.sum)
        return super().write(content)

    def flush(self) -> None:
        if not self.closed:
            super().flush()


def read(path: Path, saved: Metadata, keys: list[str]) -> dict[str, Any]:
    """Return the parts of a checkpoint with these keys."""
    tensors = {
        key: meta
        for key in keys
        if isinstance(meta := saved.state_dict_metadata[key], TensorStorageMetadata)
    }
    blank = {
        key: torch.empty(x.size, dtype=x.properties.dtype, device="cpu")
        for key, x in tensors.items()
    }
    content, reader, planner = (
        dict.fromkeys(keys) | blank,
        FileSystemReader(path),
        DefaultLoadPlanner(False, False),
    )
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
            f"the state in {path} cannot be read ({type(error).__name__}{line and ': '}{line}); if it is damaged, "
            "remove it, and the one before is loaded"
        ) from caught(error)


class FileLock:
    """Lock a file for as long as this object lives; raise `RuntimeError` if another process has it.

    The lock belongs to the open file (`flock`). One of POSIX (`lockf`) would end when this process closes any
    descriptor of the file, such as after a copy of the folder. As a second opening of the file would not get the lock,
    there is one object for each file, which all share (`FileLock.all`). A forked process closes the file that it has
    inherited, or it would keep the lock when this process has ended.
    """

    all: ClassVar[weakref.WeakValueDictionary[Path, FileLock]] = weakref.WeakValueDictionary()

    def __init__(self, path: Path) -> None:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        self.close = weakref.finalize(self, os.close, file)
        self.close.atexit = False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # systems differ
            raise RuntimeError(
                f"another job saves into {path.parent} (a process of it holds the lock); give each job a folder of its "
                "own"
            ) from None
        except OSError:
            pass  # a filesystem without locks
        FileLock.all[path] = self


def _close_inherited() -> None:
    for lock in FileLock.all.values():
        lock.close()
    FileLock.all.clear()


os.register_at_fork(after_in_child=_close_inherited)
