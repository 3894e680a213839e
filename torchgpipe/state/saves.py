"""Saved states of a training, from which it goes on: `Saves`.

A state is whole or not there. Ranks write it into a folder of another name, and flush it to the disk. When all have,
rank 0 renames that folder. What a rank or machine that died has left is removed at the next save, and an older state
only when the newer one is whole.

What is written is a checkpoint of `torch.distributed.checkpoint`. Ranks agree on it by the messages of the pipeline, so
that a rank that fails or dies ends it for all.
"""

import os
import re
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from torchgpipe.caught import caught
from torchgpipe.partitioned import Partitioned
from torchgpipe.state.meeting import ONE_FOLDER, Meeting
from torchgpipe.state.saved_files import (
    FileLock,
    check,
    flush,
    marked,
    read,
    readable,
    remove,
    write,
)
from torchgpipe.state.state import State, same

_WHOLE = re.compile(r"([0-9]{6}|[1-9][0-9]{6,})-step-(0|-?[1-9][0-9]*)")
_PART = re.compile(r"part-[0-9a-f]{32}")


class Saves:
    """Save the states of a training in a folder, and go on from the newest.

        saves = Saves("states")
        found = saves.load(model, optimizer)                                      # None if there is none
        for step in range(found["step"] + 1 if found else 0, steps):
            ...
            saves.save(step, model, optimizer, data=generator.get_state())

    All ranks call both, between mini-batches. A state has the layers, the optimizer, the random state, and what else is
    given, and loads with any balance. With as many ranks as before, each gets back its own state of PyTorch's default
    generator; with another number, all get that of rank 0, which decides what the pipeline draws.

    Args:
        folder: one that all ranks see. Each pipeline needs one of its own. A second job that saves is refused, where
            the filesystem has locks.
        keep: how many whole states stay, the newest. Each is a checkpoint of `torch.distributed.checkpoint` in a folder
            `NUMBER-step-STEP`, numbered in the order in which they were saved.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 2) -> None:
        if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
            raise ValueError(f"keep must be a whole number of at least 1, but got {keep!r}")
        self.folder, self.keep = Path(folder), keep
        self._locked: FileLock | None = None

    def save(
        self, step: int, model: Partitioned, optimizer: Optimizer | None, **others: Any
    ) -> None:
        """Save the state after a step. When this returns, it is whole and on the disk. Gradients are not saved.

        Args:
            step: how far the training is.
            model: the pipeline.
            optimizer: that of this rank's parameters; `None` if there is none.
            others: what else the training goes on from, such as the state of a learning rate schedule, or of a
                generator of data: tensors and plain Python values, the same on all ranks.

        Raises:
            OSError: it cannot be written, such as for want of space; what was saved before stays.
            RuntimeError: a rank does not see the folder of rank 0, or another job saves into it.
            ValueError: the pipeline does not have all ranks; the optimizer holds something else; ranks give others
                that differ.
            RankFailed: another rank has failed.
        """
        if not isinstance(step, int) or isinstance(step, bool):
            raise TypeError(f"step must be a whole number, but got {step!r}")
        with model._together("save") as exchange, self._reported(step):
            ranks = Meeting(model.rank, exchange)
            if dist.is_initialized() and dist.get_world_size() > ranks.n:
                raise ValueError(
                    f"the pipeline has {ranks.n} of {dist.get_world_size()} ranks, and only one of all ranks can be "
                    "saved; where others hold replicas, use torch.distributed.checkpoint itself (docs/processes.md)"
                )
            state, given = State(model, optimizer, ranks.own), {"step": step, **others}
            part = cast(Path, ranks.first(self.folder, self._begin))
            try:
                told = ranks.through(part, (given, state.kind, state.options()))
                for rank, (theirs, *_) in enumerate(told):
                    if unlike := [
                        n
                        for n in {**given, **theirs}
                        if not same(given.get(n, ...), theirs.get(n, ...))
                    ]:
                        raise ValueError(
                            f"ranks {ranks.own} and {rank} give different values of {', '.join(unlike)} to save; all "
                            "ranks have to give the same, since all get back that of rank 0"
                        )
                content = state.content()
                if ranks.own == 0:
                    content["training"] = {
                        "step": step,
                        "others": others,
                        "ranks": ranks.n,
                        "optimizer": sorted({kind for _, kind, _ in told if kind}),
                        "options": {
                            name: each for *_, options in told for name, each in options.items()
                        },
                    }
                write(content, part, ranks)
                if ranks.own == 0:
                    number = max(self._whole(), default=0) + 1
                    while os.path.lexists(path := self.folder / f"{number:06}-step-{step}"):
                        number += 1  # what has that name was not made here
                    os.rename(part, path)
                    flush(self.folder)
                    for _, name in sorted(self._whole().items())[: -self.keep]:
                        old = self.folder / f"part-{uuid.uuid4().hex}"
                        os.rename(
                            self.folder / name, old
                        )  # first: what is removed in part must not look whole
                        remove(old)
                ranks.all(None)  # the others return when it is whole, too
            except BaseException:
                if (
                    ranks.n == 1
                ):  # else other ranks may still write into it, and the next save removes it
                    remove(part)
                raise

    def load(self, model: Partitioned, optimizer: Optimizer | None) -> dict[str, Any] | None:
        """Load the newest state; return its `step` and others in a dictionary, or `None` if there is none.

        Nothing is changed before every rank has read its part. Without an optimizer, only the rest is loaded. Gradients
        are let go of: what is left of a mini-batch that failed must not be added to those of the next.

        Raises:
            ValueError: the state is of another model or optimizer.
            RuntimeError: a rank does not see the folder of rank 0; the state is damaged.
            RankFailed: another rank has failed.
        """
        with model._together("load") as exchange:
            ranks = Meeting(model.rank, exchange)
            path = ranks.first(self.folder, self._newest)
            if path is None:
                return None
            with readable(path):
                sums = check(path, ranks)
            if ranks.all(sums)[0] != sums:
                raise RuntimeError(
                    f"rank {ranks.own} sees another state in {path} than rank 0: {ONE_FOLDER}"
                )
            state = State(model, optimizer, ranks.own)
            here = ranks.all(
                (
                    {key: _form(x) for key, x in state.fixed().items()},
                    state.kind,
                    [*state.options()],
                )
            )
            with readable(path):
                saved = FileSystemReader(path).read_metadata()
                training = read(path, saved, ["training"])["training"]
            same_ranks = training["ranks"] == ranks.n
            _check_alike(path, saved, training, here)
            with readable(path):
                content = read(
                    path, saved, state.wanted(saved.state_dict_metadata, same_ranks=same_ranks)
                )
            packed = state.packed(content, training["options"])
            ranks.all(None)  # all have read
            state.put(content, packed, same_ranks=same_ranks)
            return {"step": training["step"], **training["others"]}

    def _whole(self) -> dict[int, str]:
        """Return the names of whole states by their numbers."""
        names = os.listdir(self.folder) if self.folder.is_dir() else []
        found = [
            match
            for match in map(_WHOLE.fullmatch, names)
            if match and marked(self.folder / match[0])
        ]
        return {int(match[1]): match[0] for match in found}

    def _newest(self) -> str | None:
        """Return the name of the newest state; if there is none, see that there can be one before a training begins."""
        if whole := self._whole():
            return whole[max(whole)]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.folder).close()
        except OSError as error:
            raise OSError(
                error.errno, f"states cannot be saved in {self.folder}: {error.strerror}"
            ) from None
        return None

    def _begin(self) -> str:
        """Make a folder to write into; return its name, which no rank has asked its filesystem for before."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder.resolve() / "lock"
        self._locked = FileLock.all.get(path) or FileLock(path)  # as long as this lives
        for name in filter(_PART.fullmatch, os.listdir(self.folder)):
            remove(self.folder / name)
        name = f"part-{uuid.uuid4().hex}"
        (self.folder / name).mkdir()
        return name

    @contextmanager
    def _reported(self, step: int) -> Iterator[None]:
        """Say of a failure to write what it was and what remains, in a line."""
        try:
            yield
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or (
                    None if cause.__suppress_context__ else cause.__context__
                )
            if cause is None:
                raise
            stays = "what was saved before stays" if self._whole() else "nothing was saved before"
            raise OSError(
                cause.errno,
                f"step {step} cannot be saved in {self.folder}: {cause.strerror or cause}; {stays}",
            ) from caught(error)


def _form(x: Any) -> str:
    """Return type and shape of a tensor that is here, or was saved, and nothing of other parts."""
    if isinstance(x, TensorStorageMetadata):
        return f"{x.properties.dtype} {[*x.size]}".removeprefix("torch.")
    return f"{x.dtype} {[*x.shape]}".removeprefix("torch.") if isinstance(x, torch.Tensor) else ""


def _check_alike(
    path: Path,
    saved: Metadata,
    training: dict[str, Any],
    here: list[tuple[dict[str, str], str | None, list[str]]],
) -> None:
    """Raise `ValueError` if a saved state is not of the model and optimizer that ranks have."""
    decided = ("model.", "generator.")
    there = {
        key: _form(x) for key, x in saved.state_dict_metadata.items() if key.startswith(decided)
    }
    now = {key: each for forms, _, _ in here for key, each in forms.items()}
    optimizers = sorted({kind for _, kind, _ in here if kind})
    if optimizers:
        there |= {f"optimizer of {name}": "" for name in training["options"]}
        now |= {f"optimizer of {name}": "" for *_, names in here for name in names}
    unlike = [f"{k} ({there[k]}, here {now[k]})" for k in now if there.get(k, now[k]) != now[k]]
    wrong = [
        f"{what} {', '.join(keys[:5])}{f' and {len(keys) - 5} more' * (len(keys) > 5)}"
        for what, keys in (
            ("it lacks", [key for key in now if key not in there]),
            ("it has besides", [key for key in there if key not in now]),
            ("of another shape or type are", unlike),
        )
        if keys
    ]
    if wrong:
        raise ValueError(f"the state in {path} is of another model: {'; '.join(wrong)}")
    if optimizers and optimizers != (kinds := training["optimizer"]):
        raise ValueError(
            f"the state in {path} is of the optimizer {', '.join(kinds)}, not of {', '.join(optimizers)}"
        )
