"""Read and write the files of a saved training state.

The files are a checkpoint of `torch.distributed.checkpoint`, and one more file with the checksums
of the others. All ranks write a state together. They use a `Meeting`, which exchanges values
between ranks, to tell each other what they write.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import shutil
import weakref
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchgpipe.caught import caught, in_one_line
from torchgpipe.state.meeting import Meeting

MARK = "saved-by-torchgpipe.json"
"""The name of the file that is written last. It has the checksums of all other files."""

_BLOCK = 2**20
"""How many bytes of a file are read at once."""


def marked(path: Path) -> bool:
    """Return whether a folder holds a state that this library has saved.

    Such a folder has the file `MARK`. States that were saved before this library wrote such a file
    are recognized by the content of their file `.metadata`.

    A broken link (for example, to a disk that is not mounted) counts as a state, so that loading
    the state fails with an error. If a broken link did not count, an older state would be loaded
    without notice.
    """
    with suppress(OSError):
        if (path / MARK).is_file() or not path.exists():
            return True
        metadata = (path / ".metadata").read_bytes()
        return b"training" in metadata and b"random.0" in metadata
    return False


def remove(path: Path) -> None:
    """Remove a folder with its files, or only the link if `path` is a link; ignore errors."""
    with suppress(OSError):
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path)


def check(path: Path, ranks: Meeting) -> dict[str, int]:
    """Check that a state's files are as they were written; return the checksums of all files.

    Each rank compares a different part of the files with their saved checksums. If the state was
    saved by a version of this library without checksums, nothing is compared, and the result is
    empty.

    Raises:
        ValueError: If the checksum of a file differs from the saved one.
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
    """Write a checkpoint to the disk, together with all other ranks.

    Args:
        content: The keys and values that this rank writes.
        path: The folder of the checkpoint.
        ranks: An object through which this rank exchanges values with the other ranks.
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
    """Write the file `MARK` to the disk, with the checksums of all other files of a state.

    Args:
        path: The folder of the state.
        sums: For each rank, the checksums of the files that the rank has written.
    """
    every: dict[str, int] = {}
    for part in sums:
        every |= part
    mark = path / MARK
    mark.write_text(json.dumps(every))
    flush(mark)
    flush(path)


def is_sparse(x: object) -> bool:
    """Return whether a value is a sparse tensor, so that its memory is not one block."""
    return isinstance(x, Tensor) and x.layout is not torch.strided


class _Box:
    """A container for a sparse tensor, so that PyTorch's checkpoint writer pickles the tensor.

    The writer would write the memory of a tensor as one block, but a sparse tensor has no such
    block. A value that is not a tensor, such as a `_Box`, is pickled.
    """

    def __init__(self, sparse: Tensor) -> None:
        self.sparse = sparse


class _Files(FileSystem):
    """A filesystem for PyTorch's checkpoint writer, which computes a checksum of each new file."""

    def __init__(self) -> None:
        self._made: dict[str, _File] = {}

    def create_stream(  # type: ignore[override]
        self, path: str | os.PathLike[str], mode: str
    ) -> _File:
        file = _File(io.FileIO(path, mode))
        self._made[os.path.basename(path)] = file
        return file

    def sums(self) -> dict[str, int]:
        """Return a dictionary from the final name of each written file to its checksum."""
        # PyTorch writes `.metadata` under a name that ends with `.tmp`, and renames it.
        return {name.removesuffix(".tmp"): file.sum for name, file in self._made.items()}


class _File(io.BufferedWriter):
    """A file that computes a checksum of its content while it is written.

    If PyTorch's writer fails, it closes the file and then flushes it. For a closed file, `flush`
    does nothing, because an error in `flush` would hide the error of the writer.
    """

    sum = 0

    def write(self, content: Any) -> int:
        self.sum = zlib.crc32(content, self.sum)
        return super().write(content)

    def flush(self) -> None:
        if not self.closed:
            super().flush()


class _ToCpu(DefaultLoadPlanner):
    """Reads pickled values, and loads all tensors in them onto the CPU.

    Such a tensor may have been saved on a GPU that this process does not use, or does not have.
    """

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        loaded = torch.load(value, weights_only=False, map_location="cpu")
        self.state_dict[read_item.dest_index.fqn] = loaded


def read(
    path: Path, saved: Metadata, keys: list[str], own: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Read the values of some keys from a checkpoint; return a dictionary from keys to values.

    Args:
        path: The folder of the checkpoint.
        saved: The metadata of the checkpoint.
        keys: The keys of the values to read.
        own: The present values of some keys. If a present value is a tensor whose class wraps other
            tensors, such as an eight-bit tensor, the saved tensor is read into a copy of the
            present tensor.
    """
    content: dict[str, Any] = {}
    for key in keys:
        present = None if own is None else own.get(key)
        if isinstance(present, Tensor) and is_traceable_wrapper_subclass(present):
            content[key] = present.detach().clone()
        else:
            content[key] = _blank(saved.state_dict_metadata[key])
    planner = _ToCpu(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(content, saved, True)
    reader = FileSystemReader(path)
    reader.set_up_storage_reader(saved, True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    reader.read_data(plan, planner).wait()
    return {key: x.sparse if isinstance(x, _Box) else x for key, x in content.items()}


def _blank(saved: Any) -> Tensor | None:
    """Return an uninitialized tensor, into which PyTorch can read a saved tensor.

    `saved` is the metadata of a saved value. If the value is not a tensor, return `None`.
    """
    if not isinstance(saved, TensorStorageMetadata):
        return None
    return torch.empty(saved.size, dtype=saved.properties.dtype, device="cpu")


def flush(path: Path) -> None:
    """Make sure that a file's content, or a folder's list of file names, is on the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Convert any error within this context into an error that says which state cannot be read.

    Raises:
        RuntimeError: If anything fails within the context. The message names `path`, which is the
            folder of the state, and says what to do.
    """
    try:
        yield
    except Exception as error:
        raise RuntimeError(
            f"the state in {path} cannot be read ({in_one_line(error)}); if it is damaged, remove "
            "this folder, so that the state before it is loaded next time"
        ) from caught(error)


class FileLock:
    """An exclusive lock on a file, which this process holds as long as this object exists.

    The lock is a `flock`, which belongs to the open file. A POSIX lock (`lockf`) would end too
    early: as soon as this process closes any descriptor of the file, for example while it copies
    the folder.

    A process that opens the file twice cannot lock it twice. So the whole process shares one
    `FileLock` for each file. The dictionary `FileLock.all` has these objects.

    A forked process inherits the open file, but closes it at once. Otherwise, the file would still
    be locked after the parent process has ended, until the forked process ends, too.

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
                f"another job saves into {path.parent} (one of its processes holds the lock); give "
                "each job a folder of its own, and save only one of several replicas"
            ) from None
        except OSError:
            pass  # this filesystem has no locks
        FileLock.all[path] = self


def _close_inherited() -> None:
    for lock in FileLock.all.values():
        lock.close()
    FileLock.all.clear()


os.register_at_fork(after_in_child=_close_inherited)
