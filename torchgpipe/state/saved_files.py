"""The files of a saved state: a checkpoint of `torch.distributed.checkpoint`, and its checksums.

Ranks use a `Meeting` to exchange what each rank writes.
"""

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
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torchgpipe.caught import caught, in_one_line
from torchgpipe.state.meeting import Meeting

MARK = "saved-by-torchgpipe.json"
"""The name of the file that is written last. It has the checksums of all other files."""

_BLOCK = 2**20
"""How many bytes of a file are read at once."""


def marked(path: Path) -> bool:
    """Return whether a folder holds a state that this library has saved.

    Older versions did not write the file `MARK`, so the content of `.metadata` identifies their
    folders. A broken link (for example, to a disk that is not mounted) counts as a state. Then
    loading fails with an error, and does not silently load an older state.
    """
    with suppress(OSError):
        if (path / MARK).is_file() or not path.exists():
            return True
        metadata = (path / ".metadata").read_bytes()
        return b"training" in metadata and b"random.0" in metadata
    return False


def remove(path: Path) -> None:
    """Remove a folder, or a link to a folder, and ignore errors."""
    with suppress(OSError):
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path)


def check(path: Path, ranks: Meeting) -> dict[str, int]:
    """Check some of a state's files on this rank, and return the checksums of all files.

    Each rank checks a different part of the files.

    Raises:
        ValueError: If a file's content does not have the checksum from the time of writing.
    """
    mark = path / MARK
    if not mark.exists():
        return {}
    sums: dict[str, int] = json.loads(mark.read_text())
    names = sorted(sums)
    for name in names[ranks.own :: ranks.n]:
        if _checksum(path / name) != sums[name]:
            raise ValueError(f"{name} is not as it was written, by its checksum")
    return sums


def _checksum(path: Path) -> int:
    found = 0
    with open(path, "rb") as file:
        while content := file.read(_BLOCK):
            found = zlib.crc32(content, found)
    return found


def write(content: dict[str, Any], path: Path, ranks: Meeting) -> None:
    """Write a checkpoint together with all other ranks, and flush it to the disk.

    Args:
        content: The values that this rank writes.
        path: The folder of the checkpoint.
        ranks: The exchange of values between ranks.
    """
    first = ranks.own == 0
    writer = FileSystemWriter(path)
    writer.fs = files = _Files()
    content = {key: _Box(x) if is_sparse(x) else x for key, x in content.items()}
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(content, writer.storage_meta(), first)
    writer.set_up_storage_writer(first)
    # Every rank computes the same global plan from the local plans of all ranks.
    local = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan(ranks.through(path, local))
    own_plan = writer.prepare_global_plan(plans)[ranks.own]
    written = writer.write_data(planner.finish_plan(own_plan), planner)
    results = ranks.through(path, written.wait())
    sums = ranks.all(files.sums())
    if first:
        for told in path.glob("told-*"):  # every rank has read these files by now
            told.unlink()
        writer.finish(metadata, results)
        _mark(path, [*sums, files.sums()])


def _mark(path: Path, sums: list[dict[str, int]]) -> None:
    """Write the checksums of all ranks' files as the last file of a state, and flush it."""
    every: dict[str, int] = {}
    for part in sums:
        every |= part
    mark = path / MARK
    mark.write_text(json.dumps(every))
    flush(mark)
    flush(path)


def is_sparse(x: object) -> bool:
    """Return whether a value is a sparse tensor, which has several parts in memory."""
    return isinstance(x, Tensor) and x.layout is not torch.strided


class _Box:
    """A sparse tensor in a saved state.

    PyTorch's checkpoint writer writes the memory of a tensor, which a sparse tensor does not have.
    It pickles a box with the tensor.
    """

    def __init__(self, sparse: Tensor) -> None:
        self.sparse = sparse


class _Files(FileSystem):
    """A filesystem for PyTorch's checkpoint writer that computes the checksum of each file."""

    def __init__(self) -> None:
        self._made: dict[str, _File] = {}

    def create_stream(self, path: str | os.PathLike[str], mode: str) -> _File:  # type: ignore[override]
        file = _File(io.FileIO(path, mode))
        self._made[os.path.basename(path)] = file
        return file

    def sums(self) -> dict[str, int]:
        """Return the checksum of each file by the file's final name."""
        # PyTorch writes `.metadata` under a name that ends with `.tmp`, and renames it.
        return {name.removesuffix(".tmp"): file.sum for name, file in self._made.items()}


class _File(io.BufferedWriter):
    """A file that computes its checksum; `flush` does nothing after the file was closed.

    PyTorch's writer flushes a closed file after an item that it could not write.
    """

    sum = 0

    def write(self, content: Any) -> int:
        self.sum = zlib.crc32(content, self.sum)
        return super().write(content)

    def flush(self) -> None:
        if not self.closed:
            super().flush()


def read(path: Path, saved: Metadata, keys: list[str]) -> dict[str, Any]:
    """Return the values of a checkpoint that have these keys."""
    content: dict[str, Any] = {}
    for key in keys:
        content[key] = _blank(saved.state_dict_metadata[key])
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(content, saved, True)
    reader = FileSystemReader(path)
    reader.set_up_storage_reader(saved, True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    reader.read_data(plan, planner).wait()
    return {key: x.sparse if isinstance(x, _Box) else x for key, x in content.items()}


def _blank(saved: Any) -> Tensor | None:
    """Return an empty tensor into which PyTorch reads, or `None` if the value is not a tensor."""
    if not isinstance(saved, TensorStorageMetadata):
        return None
    return torch.empty(saved.size, dtype=saved.properties.dtype, device="cpu")


def flush(path: Path) -> None:
    """Flush the content of a file, or the list of names in a folder, to the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Convert any error within the context into a `RuntimeError` that says what to do.

    Raises:
        RuntimeError: If the state cannot be read. The message names the folder of the state.
    """
    try:
        yield
    except Exception as error:
        raise RuntimeError(
            f"the state in {path} cannot be read ({in_one_line(error)}); if it is damaged, remove "
            "the folder, and the previous state is loaded"
        ) from caught(error)


class FileLock:
    """An exclusive lock on a file, which is held as long as this object exists.

    The lock belongs to the open file (`flock`). A POSIX lock (`lockf`) ends as soon as this process
    closes any descriptor of the file, for example after it has copied the folder. With `flock`, a
    process cannot lock a file twice. So there is one object for each file, and the whole process
    shares it (`FileLock.all`). A forked process inherits the open file, and closes it. Otherwise
    the forked process would hold the lock after the end of the process that has taken the lock.

    Raises:
        RuntimeError: If another process holds the lock.
    """

    all: ClassVar[weakref.WeakValueDictionary[Path, FileLock]] = weakref.WeakValueDictionary()

    def __init__(self, path: Path) -> None:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        self.close = weakref.finalize(self, os.close, file)
        self.close.atexit = False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # systems raise different errors
            raise RuntimeError(
                f"another job saves into {path.parent} (a process of it holds the lock); give each "
                "job a folder of its own"
            ) from None
        except OSError:
            pass  # this filesystem has no locks
        FileLock.all[path] = self


def _close_inherited() -> None:
    for lock in FileLock.all.values():
        lock.close()
    FileLock.all.clear()


os.register_at_fork(after_in_child=_close_inherited)
