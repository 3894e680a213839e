"""Run an accuracy experiment: train every row (configuration) to its last epoch, with each seed.

After every epoch, the state of the training is saved in a file. So a training that was stopped can
resume after its last complete epoch.
"""

import io
import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from reproduce.error import Error, Unwritable
from reproduce.experiments.datasets import AccuracyNeeds, Batch
from reproduce.experiments.recipe import AccuracyRow
from reproduce.machine.devices import Devices
from reproduce.numbers.accuracy import final_errors
from reproduce.records.record import SUCCESS, write_atomically
from reproduce.run.engines.failure import explain
from reproduce.run.recorder import UNKNOWN_RUN, described, note_earlier_runs
from reproduce.run.session import GroupDone, Session
from reproduce.run.training import make_optimizer, on_devices, update
from torchgpipe.tensors import accelerator

SERIES = ("seed", "epoch", "top1_error", "train_loss", "epoch_time", "learning_rate")
Epoch = tuple[float, ...]  # a value for each name in `SERIES`


def plan_accuracy(session: Session) -> None:
    """Plan an accuracy experiment: the rows (configurations) that will run, and their steps.

    The record gets the rows, and the progress display gets the number of training steps of each
    row. Evaluation is not counted, because it takes little time in comparison. If an interrupted
    run is continued, rows whose trainings have ended are left out.
    """
    seeds = len(_needs(session).seeds)
    for row in _rows(session):
        if _is_trained(session, row):
            continue
        session.plan(row)
        steps = seeds * row.recipe.epochs * _steps_per_epoch(session, row)
        guess = session.guess(row, row.work())
        session.progress.plan(session.job(row.name), steps, guess)


def run_accuracy(session: Session) -> Iterator[GroupDone]:
    """Train all rows (configurations) with the first seed, then all with the next seed, and so on.

    In this order, rows can be compared as soon as possible. At the end, yield ("", True), which
    means that the table of all rows is complete. The first item is the name of a group of rows, and
    is empty because there is only one group.
    """
    failures: dict[str, str] = {}  # maps names of failed rows to their status
    paths = []
    number = 0
    for seed in _needs(session).seeds:
        for row in _rows(session):
            number += 1
            if row.name in failures:
                continue
            path = _checkpoint(session, row, seed)
            paths.append(path)
            if _is_trained(session, row):  # by the interrupted run
                continue
            try:
                _train(session, row, seed, path, number)
            except Unwritable:  # without checkpoints, no other row can be trained either
                raise
            except Exception as error:  # recorded as the row's result
                failure = explain(error)
                failures[row.name] = failure.status
                reason = f"seed {seed}: {failure.reason}"
                _put(session, row, [], status=failure.status, reason=reason)
                session.finish(row.name)
            session.progress.stop()
            session.free()
    if "failed" not in failures.values():  # else the next run resumes the trainings
        _put_away(session, paths)
    yield "", True


def _is_trained(session: Session, row: AccuracyRow) -> bool:
    """Return whether the record has the result of the last epoch for every seed of a row."""
    found = session.found(row)
    if found is None or found.status not in SUCCESS:
        return False
    return len(final_errors(found)) == len(_needs(session).seeds)


def _train(session: Session, row: AccuracyRow, seed: int, path: Path, number: int) -> None:
    """Train a row (configuration) with one seed until the last epoch.

    If there is a checkpoint file of this training, resume from it.

    Args:
        session: The running experiment.
        row: The row.
        seed: The seed.
        path: The path of the checkpoint file.
        number: The number of this training, from 1, for the progress display.
    """
    trainings = len(_needs(session).seeds) * len(_rows(session))
    which = f"training {number} of {trainings}: {row.name}, seed {seed}"
    epochs = row.recipe.epochs
    steps = _steps_per_epoch(session, row)
    done: list[Epoch] = []
    runs: list[str] = []  # the runs that have trained these epochs
    saved = load_checkpoint(path)
    if saved:
        done = saved["epochs"]
        runs = saved.get("runs", [UNKNOWN_RUN])
        session.progress.say(
            f"{row.name}, seed {seed}: goes on after epoch {len(done)} of {epochs}, in\n{path}"
        )
        session.finish(row.name, len(done) * steps)
        note_earlier_runs(session.recorder, f"{row.name}, seed {seed}", len(done), runs)
        _put(session, row, done)
    session.start(f"building, {which}")
    training = AccuracyTraining(row, session.devices, seed, steps)
    if saved:
        training.load(saved["training"])
    while len(done) < epochs:
        epoch = _train_epoch(session, row, seed, training, len(done) + 1, which)
        done.append(epoch)
        # Save the record first, so that an interrupt before the checkpoint does not lose the epoch.
        _put(session, row, [epoch])
        runs = list(dict.fromkeys([*runs, described(session.recorder)]))
        state = {"epochs": done, "training": training.state(), "runs": runs}
        save_checkpoint(path, state)


def _train_epoch(  # noqa: PLR0913 - all that an epoch depends on
    session: Session,
    row: AccuracyRow,
    seed: int,
    training: "AccuracyTraining",
    epoch: int,
    which: str,
) -> Epoch:
    """Train for one epoch, evaluate the model, and return the results of the epoch.

    The results are numbers in the order of `SERIES`, such as the top-1 error and the mean loss.
    `which` is the name of the training in the progress display.
    """
    data = _needs(session).data
    devices = session.devices
    job = session.job(row.name)
    text = f"epoch {epoch} of {row.recipe.epochs}, {which}"

    losses = []
    learning_rate = 0.0
    devices.synchronize()
    started = time.perf_counter()
    for images, labels in data.train_batches(row.batch_size, seed, epoch - 1):
        session.start(text, job)
        learning_rate = training.learning_rate
        loss = training.step(images, labels)
        losses.append(loss)
    devices.synchronize()
    seconds = time.perf_counter() - started

    mean_loss = float(torch.stack(losses).mean())
    if not math.isfinite(mean_loss):
        raise FloatingPointError(
            f"the loss is {mean_loss} in epoch {epoch}: the training has diverged"
        )

    def evaluated() -> Iterator[Batch]:
        for batch in data.val_batches(row.batch_size):
            session.start(f"evaluating, {text}")
            yield batch

    error = training.top1_error(evaluated())
    return (float(seed), float(epoch), error, mean_loss, seconds, learning_rate)


def _put(session: Session, row: AccuracyRow, epochs: Sequence[Epoch], **ended: Any) -> None:
    """Add the results of some epochs of a row (configuration) to the record, and write its file."""
    found = session.found(row)
    before = {} if found is None else found.samples
    samples = {name: list(before.get(name, [])) for name in SERIES}
    for epoch in epochs:
        for name, value in zip(SERIES, epoch, strict=True):
            samples[name].append(value)
    values = {"samples_per_epoch": _steps_per_epoch(session, row) * row.batch_size}
    session.put(row, samples=samples, values=values, **ended)


def _checkpoint(session: Session, row: AccuracyRow, seed: int) -> Path:
    """Return the path of the checkpoint file for training a row (configuration) with one seed.

    The name of the file contains the row, the seed, and a digest of all other settings. So a
    training never resumes from a checkpoint that was saved with other settings.
    """
    data = _needs(session).data
    made = session.scale.settings()["made"]
    config = row.config()
    # The group is no setting of the training, so the name of the checkpoint does not depend on it.
    del config["group"]
    depends_on = [
        config,
        made and [made, session.seed],
        data.train_size,
        data.val_size,
        session.devices.kind,
        session.devices.threads,
    ]
    text = json.dumps(depends_on, sort_keys=True)
    digest = sha256(text.encode()).hexdigest()
    name = f"{session.experiment.name}-{session.scale.name}-{row.name}-seed{seed}-{digest[:10]}.pt"
    folder = session.recorder.path.parent / "checkpoints"
    return folder / name.replace(" ", "-")


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write the state of a training to the checkpoint file `path`, which is replaced atomically.

    If this process is killed meanwhile, the file still has a whole checkpoint: the old or the new.
    """
    path.parent.mkdir(exist_ok=True)
    content = io.BytesIO()
    torch.save(state, content)
    write_atomically(path, content.getvalue())


def load_checkpoint(path: Path) -> dict[str, Any] | None:
    """Load the state of a training from the checkpoint file `path`; return None if it is missing.

    Raises:
        Error: The file cannot be read as a checkpoint.
    """
    try:
        return cast("dict[str, Any]", torch.load(path, map_location="cpu", weights_only=True))
    except FileNotFoundError:
        return None
    except Exception as error:
        raise Error(
            f"{path} cannot be read as a checkpoint of a training ({type(error).__name__}); "
            "delete this file"
        ) from error


def _put_away(session: Session, paths: Sequence[Path]) -> None:
    """Move away the checkpoint files of finished trainings, so that the next run starts anew.

    They are moved to a folder that has the name of the record (the file of results). If the data is
    generated, and not a real data set, the checkpoint files are deleted instead.
    """
    made = session.scale.settings()["made"]
    for path in paths:
        if not path.exists():  # the training ran out of memory
            continue
        if made:
            path.unlink()
        else:
            folder = path.parent / session.recorder.path.stem
            folder.mkdir(exist_ok=True)
            path.replace(folder / path.name)


def _rows(session: Session) -> list[AccuracyRow]:
    return cast("list[AccuracyRow]", session.scale.rows)


def _steps_per_epoch(session: Session, row: AccuracyRow) -> int:
    return _needs(session).data.train_size // row.batch_size


def _needs(session: Session) -> AccuracyNeeds:
    assert session.accuracy is not None
    return session.accuracy


class AccuracyTraining:
    """The training of a row (configuration): its model on its devices, and its optimizer.

    All trainings of the same model with the same seed start from the same parameters.
    """

    def __init__(self, row: AccuracyRow, devices: Devices, seed: int, steps_per_epoch: int) -> None:
        torch.manual_seed(seed)
        self.row = row
        self.steps_per_epoch = steps_per_epoch
        self.steps = 0
        self.devices = devices.first(row.devices)
        # `layers` is saved, and not the `DataParallel` module, whose state dict has a prefix.
        self.layers = on_devices(row, row.sized.layers(), self.devices)
        self.model = self.layers
        if row.partitions is None and row.gpus > 1:
            self.model = nn.DataParallel(self.layers, self.devices)
        self.optimizer = make_optimizer(row, self.model, lr=self.learning_rate)

    @property
    def learning_rate(self) -> float:
        """Return the learning rate of the next training step."""
        row = self.row
        epoch = self.steps / self.steps_per_epoch
        return row.recipe.learning_rate(row.batch_size, epoch)

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        """Run one training step on a mini-batch; return the loss as a detached tensor.

        Args:
            images: The images, of the shape (N, 3, H, W).
            labels: The classes of the images, of the shape (N,).
        """
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate
        output = self._forward(images)
        labels = labels.to(output.device, non_blocking=True)
        loss = cross_entropy(output, labels)
        loss.backward()
        update(self.optimizer)
        self.steps += 1
        return loss.detach()

    @torch.no_grad()
    def top1_error(self, batches: Iterable[Batch]) -> float:
        """Evaluate the model: return its top-1 error over all batches, in %.

        A batch consists of images of the shape (N, 3, H, W) and their classes, of the shape (N,).
        """
        wrong = total = 0
        self.model.eval()
        for images, labels in batches:
            output = self._forward(images)
            predicted = output.argmax(dim=1).cpu()
            wrong += int((predicted != labels).sum())
            total += len(labels)
        self.model.train()
        return 100 * wrong / total

    def _forward(self, images: Tensor) -> Tensor:
        output: Tensor = self.model(images.to(self.devices[0], non_blocking=True))
        return output

    def state(self) -> dict[str, Any]:
        """Return the states of the model, the optimizer and the random generators, by name."""
        gpus = [device for device in self.devices if device.type == "cuda"]
        return {
            "steps": self.steps,
            "model": self.layers.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
            "cuda": [accelerator.RANDOM.get_rng_state(gpu) for gpu in gpus],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Resume the training from a state that the method `state` has returned."""
        self.steps = state["steps"]
        self.layers.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        for device, random in zip(self.devices, state["cuda"], strict=False):
            accelerator.RANDOM.set_rng_state(random, device)
