"""Keep trainings on disk, epoch by epoch, so that one that was killed goes on where its last epoch ended.

A checkpoint is one file, replaced atomically: a kill at any moment leaves the last epoch's or the one before. Its name
ends in a digest of all that a training's course depends on, so that another configuration, seed or data set never goes
on from it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import weakref
from pathlib import Path
from typing import IO, Any

import torch

from reproduce.error import Error
from reproduce.records.decode import Json

VERSION = 1


class Checkpoints:
    """Hold a folder of checkpoints, which no other run uses at the same time."""

    def __init__(self, folder: Path, *, fresh: bool = False) -> None:
        """Take the folder. `fresh` asks not to go on from the checkpoints of runs before.

        Raises:
            Error: the folder cannot be written, or another run is using it.
        """
        self.folder = folder
        self.fresh = fresh
        self.written: set[Path] = set()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.lock: IO[str] = (folder / ".lock").open("w")
        except OSError as error:
            raise Error(f"{folder}: cannot be written ({_said(error)}); name another --out") from error
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.lock.close()
            raise Error(
                f"{folder}: another run keeps its checkpoints there; wait for it, or name another --out"
            ) from error
        self.close = weakref.finalize(self, self.lock.close)  # lets other runs use the folder

    def path(self, name: str, depends_on: Json) -> Path:
        """Return where the training called `name`, whose course depends on all this, has its checkpoint."""
        digest = hashlib.sha256(json.dumps([VERSION, depends_on], sort_keys=True).encode()).hexdigest()
        return self.folder / f"{name.replace(' ', '-')}-{digest[:10]}.pt"

    def save(self, path: Path, state: dict[str, Any]) -> None:
        """Replace the checkpoint at `path`.

        Raises:
            Error: it cannot be written.
        """
        part = path.with_suffix(".part")  # its name has no process id: what a kill leaves is written over
        try:
            with part.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError where the disk is full
            raise Error(f"{path}: cannot be written ({_said(error)}); make room, then run again") from error
        finally:
            part.unlink(missing_ok=True)
        self.written.add(path)

    def load(self, path: Path) -> dict[str, Any] | None:
        """Return the checkpoint at `path`; None where there is none to go on from.

        Raises:
            Error: it is broken.
        """
        if not path.exists() or (self.fresh and path not in self.written):
            return None
        try:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            raise Error(f"{path}: cannot be read ({_said(error)}); delete it, or use --fresh") from error
        self.written.add(path)
        return state

    def keep(self, path: Path, run: str) -> None:
        """Move the checkpoint of a finished training into the folder `run`, where no training goes on from it.

        Raises:
            Error: it cannot be moved.
        """
        try:
            (self.folder / run).mkdir(exist_ok=True)
            os.replace(path, self.folder / run / path.name)
        except OSError as error:
            raise Error(f"{path}: cannot be moved ({_said(error)}); it is left there") from error


def _said(error: Exception) -> str:
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(said.split())[:100]
