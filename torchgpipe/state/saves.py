"""Save states of a training, and load a state to continue the training: `Saves`.

A state is saved in three steps:

1. All ranks write the state into one folder with a preliminary name, and flush the files to the
   disk.
2. When every rank has written its files, rank 0 gives the folder its final name. Now the state
   counts as complete.
3. Rank 0 removes older states.

If a rank or a machine fails before the folder has its final name, the state is incomplete, and the
next save removes the folder.

The files of a state are a checkpoint of `torch.distributed.checkpoint`. During a save, ranks
exchange values through the connections of the pipeline. If a rank fails or dies then, the pipeline
raises an error on all other ranks, as during training.
"""

import os
import pickle
import re
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader

from torchgpipe.caught import caught, shortened
from torchgpipe.partitioned import Partitioned
from torchgpipe.state.fits import check_fits, form_of
from torchgpipe.state.meeting import ONE_FOLDER, Meeting
from torchgpipe.state.optimizers import Content, Groups, Optimizers, same
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
from torchgpipe.state.state import State, check_whole

_WHOLE = re.compile(r"([0-9]{6}|[1-9][0-9]{6,})-step-(0|-?[1-9][0-9]*)")
"""Matches the name of a folder with a complete state."""

_PART = re.compile(r"part-[0-9a-f]{32}")
"""Matches the preliminary name of a folder that is being written or removed."""


class Saves:
    """A folder to which the states of a training are saved, and from which they are loaded.

        saves = Saves("states")
        found = saves.load(model, optimizer)                  # None if there is no state
        for step in range(found["step"] + 1 if found else 0, steps):
            ...
            saves.save(step, model, optimizer, data=generator.get_state())

    A state has the values of the layers, of the optimizer and of random generators, and values that
    the caller adds. All ranks have to call `load` and `save`, and only between two mini-batches.

    A state can be loaded into a pipeline with another balance or another number of ranks. If the
    number of ranks is the same, each rank loads its own state of PyTorch's default random
    generator. Otherwise, all ranks load the generator state of rank 0.

    If there are several replicas of the pipeline, only the ranks of one replica call `save`, and
    the ranks of all replicas call `load`.

    Args:
        folder: A folder that all ranks can read and write. Each pipeline needs a separate folder.
            On filesystems with locks, `save` raises an error if another job saves into the folder.
        keep: How many complete states to keep; older states are removed. Each state is a folder
            `NUMBER-step-STEP`, where NUMBER increases with each save, and STEP is the step that was
            saved.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 2) -> None:
        if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
            raise ValueError(f"keep must be a whole number of at least 1, but got {keep!r}")
        self.folder = Path(folder)
        self.keep = keep
        self._locked: FileLock | None = None

    def save(self, step: int, model: Partitioned, optimizer: Optimizers, **others: Any) -> None:
        """Save the state of the training after a step; gradients are not saved.

        When this method returns, the whole state is on the disk.

        Args:
            step: The number of the step that the training has just completed.
            model: The pipeline.
            optimizer: The optimizer of this rank's parameters, a list of optimizers, or `None` if
                there is none.
            **others: Further values that the training needs to continue, such as the state of a
                learning rate schedule, or of a generator that draws samples. The values are tensors
                and plain Python values. All ranks have to give equal values.

        Raises:
            OSError: If the state cannot be written, for example because the disk is full. States
                that were saved earlier are kept.
            RuntimeError: If a rank does not see the folder of rank 0, or if another job saves into
                the same folder.
            TypeError: If a value cannot be pickled, such as a function.
            ValueError: If ranks outside of the pipeline hold parts of its parameters, if the
                optimizer has state that does not belong to a parameter, or if ranks give different
                values of `others`.
            RankFailed: If another rank has failed.
        """
        if not isinstance(step, int) or isinstance(step, bool):
            raise TypeError(f"step must be a whole number, but got {shortened(step)}")
        if not isinstance(model, Partitioned):
            raise TypeError(
                f"save(step, model, optimizer) takes a pipeline as its model, but got "
                f"{type(model).__name__}"
            )
        with model._together("save") as exchange, self._reported(step, others):
            ranks = Meeting(model.rank, exchange)
            check_whole(model)
            state = State(model, optimizer, ranks.own)
            part = cast(Path, ranks.first(self.folder, self._begin))
            training = {"step": step, "others": others, "ranks": ranks.n}
            try:
                self._write(part, ranks, state, training)
            except BaseException:
                # With several ranks, leave the folder, because other ranks may still write into it.
                # The next save removes it.
                if ranks.n == 1:
                    remove(part)
                raise

    def _write(self, part: Path, ranks: Meeting, state: State, training: Content) -> None:
        """Write a state into a folder, together with all ranks; rank 0 then renames the folder.

        `part` is the path of this folder, which has a preliminary name until the state is complete.
        """
        given = {"step": training["step"], **training["others"]}
        own = (given, state.kinds(), state.kind_of(), state.options(), state.groups())
        told = ranks.through(part, own)
        kinds: set[str] = set()
        kind_of: dict[str, str] = {}
        options: Content = {}
        groups: Groups = {}
        for rank, of_rank in enumerate(told):
            theirs, their_kinds, their_kind_of, their_options, their_groups = of_rank
            if rank != ranks.own:
                _check_same(ranks.own, given, rank, theirs)
            kinds |= {*their_kinds}
            kind_of |= their_kind_of
            options |= their_options
            groups |= their_groups
        content = state.content()
        if ranks.own == 0:
            about: Content = {"optimizer": sorted(kinds), "kind_of": kind_of}
            about |= {"options": options, "groups": groups}
            content["training"] = training | about
        write(content, part, ranks)
        if ranks.own == 0:
            self._complete(part, training["step"])
        ranks.all(None)  # all ranks wait here until the state is complete

    def _complete(self, part: Path, step: int) -> None:
        """Give the folder of a complete state its final name, and remove old states."""
        number = max(self._whole(), default=0) + 1
        # A folder with this name can exist that this library has not made.
        while os.path.lexists(path := self.folder / f"{number:06}-step-{step}"):
            number += 1
        os.rename(part, path)
        flush(self.folder)
        whole = sorted(self._whole().items())
        for _, name in whole[: -self.keep]:
            # The folder is renamed first, so that a partly removed state does not look complete.
            old = self.folder / _new_part()
            os.rename(self.folder / name, old)
            remove(old)

    def load(self, model: nn.Module, optimizer: Optimizers) -> dict[str, Any] | None:
        """Load the newest state into the layers, the optimizer and the random generators.

        Nothing is changed before every rank has read its part of the state, so an error in reading
        leaves everything as it was. All gradients are deleted. Otherwise, gradients of a mini-batch
        that failed would be added to those of the next mini-batch.

        Args:
            model: The pipeline, or the whole model without a pipeline, for example for inference.
            optimizer: The optimizer of this rank's parameters, or a list of optimizers. If it is
                `None`, the saved state of the optimizer is not loaded.

        Returns:
            A dictionary with the saved `step` and the `others` that `save` was given, or `None` if
            there is no state.

        Raises:
            ValueError: If the state is of another model or class of optimizer; see also `save`.
            RuntimeError: If a rank does not see the folder of rank 0, or the state is damaged.
            RankFailed: If another rank has failed.
        """
        if not isinstance(model, Partitioned):
            return self._load_newest(Meeting(0, lambda own: [own]), model, optimizer)
        with model._together("load") as exchange:
            return self._load_newest(Meeting(model.rank, exchange), model, optimizer)

    def _load_newest(
        self, ranks: Meeting, model: nn.Module, optimizer: Optimizers
    ) -> dict[str, Any] | None:
        if optimizer is not None:
            check_whole(model)
        if ranks.n > 1:
            path = ranks.first(self.folder, self._newest)
            return None if path is None else self._load(path, ranks, model, optimizer)
        while (name := self._newest()) is not None:
            path = self.folder / name
            try:
                return self._load(path, ranks, model, optimizer)
            except RuntimeError:
                # If another job saves into the folder, it can have removed this state meanwhile.
                if self._newest() == name:
                    raise
        return None

    def _load(
        self, path: Path, ranks: Meeting, model: nn.Module, optimizer: Optimizers
    ) -> dict[str, Any]:
        with readable(path):
            sums = check(path, ranks)
        if ranks.all(sums)[0] != sums:
            raise RuntimeError(
                f"rank {ranks.own} sees another state in {path} than rank 0: {ONE_FOLDER}"
            )
        state = State(model, optimizer, ranks.own)
        forms = {key: form_of(x) for key, x in state.fixed().items()}
        held = ranks.all((forms, state.kinds(), state.kind_of()))
        with readable(path):
            saved = FileSystemReader(path).read_metadata()
            training = read(path, saved, ["training"])["training"]
        check_fits(path, saved, training, held)
        same_ranks = training["ranks"] == ranks.n
        with readable(path):
            keys = state.wanted(saved.state_dict_metadata, same_ranks=same_ranks)
            content = read(path, saved, keys, state.fixed())
        # States of older versions have no options of groups.
        packed = state.packed(content, training["options"], training.get("groups", {}))
        ranks.all(None)  # now every rank has read its part
        state.put(content, packed, same_ranks=same_ranks)
        return {"step": training["step"], **training["others"]}

    def _whole(self) -> dict[int, str]:
        """Return a dictionary of all complete states, from folder numbers to folder names."""
        whole: dict[int, str] = {}
        if not self.folder.is_dir():
            return whole
        for name in os.listdir(self.folder):
            match = _WHOLE.fullmatch(name)
            if match and marked(self.folder / name):
                whole[int(match[1])] = name
        return whole

    def _newest(self) -> str | None:
        """Return the folder name of the newest state, or `None` if there is no state.

        If there is no state, check that states can be written, and raise an error if they cannot.
        So the error comes before the training, and not at the first save.
        """
        whole = self._whole()
        if whole:
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
        """Lock the folder, remove incomplete states, and make a subfolder for a new state.

        Return the subfolder's preliminary name. The name is random, so that no rank has looked it
        up before: a network filesystem can remember for a while that a folder does not exist.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder.resolve() / "lock"
        # This object holds the lock as long as it exists.
        self._locked = FileLock.all.get(path) or FileLock(path)
        for name in os.listdir(self.folder):
            if _PART.fullmatch(name):
                remove(self.folder / name)
        name = _new_part()
        (self.folder / name).mkdir()
        return name

    @contextmanager
    def _reported(self, step: int, others: Content) -> Iterator[None]:
        """Convert an error within this context into an error that says why a state is not saved.

        Raises:
            OSError: If a file cannot be written. The message says whether earlier states exist,
                which are kept.
            TypeError: If one of the values that the caller adds (`others`) cannot be pickled.
        """
        try:
            yield
        except Exception as error:
            cause = _os_error(error)
            if cause is None:
                _check_pickles(others)
                raise
            stays = "what was saved before stays" if self._whole() else "nothing was saved before"
            why = cause.strerror or cause
            raise OSError(
                cause.errno, f"step {step} cannot be saved in {self.folder}: {why}; {stays}"
            ) from caught(error)


def _check_pickles(others: Content) -> None:
    """Raise `TypeError` if one of the values that the caller adds to a state cannot be pickled."""
    for name, value in others.items():
        try:
            pickle.dumps(value)
        except Exception as error:  # noqa: PERF203 - the message names the value
            raise TypeError(
                f"the value {name} cannot be saved, because it cannot be pickled ({error}); give "
                "tensors and plain Python values, such as a state_dict()"
            ) from None


def _new_part() -> str:
    return f"part-{uuid.uuid4().hex}"


def _os_error(error: BaseException) -> OSError | None:
    """Return the first `OSError` among an error and its causes; `None` if there is none."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        if cause.__cause__ is not None or cause.__suppress_context__:
            cause = cause.__cause__
        else:
            cause = cause.__context__
    return cause


def _check_same(own: int, given: Content, rank: int, theirs: Content) -> None:
    """Raise `ValueError` if this rank (`own`) and another rank (`rank`) give different values."""
    names = {**given, **theirs}
    unlike = [name for name in names if not same(given.get(name, ...), theirs.get(name, ...))]
    if unlike:
        raise ValueError(
            f"ranks {own} and {rank} give different values of {', '.join(unlike)} to save; all "
            "ranks have to give equal values, because all ranks load the values of rank 0"
        )
