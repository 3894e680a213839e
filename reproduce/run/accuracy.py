"""Run an accuracy experiment: train every row (configuration) to its last epoch, with each seed.

After every epoch, a checkpoint is saved. So a training that was stopped can resume after its last
complete epoch.
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

from reproduce.error import Error
from reproduce.experiments.datasets import AccuracyNeeds, Batch
from reproduce.experiments.recipe import AccuracyRow
from reproduce.machine.devices import Devices
from reproduce.records.record import write_atomically
from reproduce.run.engines.failure import explain
from reproduce.run.session import GroupDone, Session
from reproduce.run.training import make_optimizer, on_devices, update
from torchgpipe.tensors import accelerator

SERIES = ("seed", "epoch", "top1_error", "train_loss", "epoch_time", "learning_rate")
Epoch = tuple[float, ...]  # a value for each name in `SERIES`


def plan_accuracy(session: Session) -> None:
    """Record which rows will run, and tell the progress display how many training steps they have.

    Evaluation is not counted, because it takes little time in comparison.
    """
    seeds = len(_needs(session).seeds)
    for row in _rows(session):
        session.plan(row)
        steps = seeds * row.recipe.epochs * _steps_per_epoch(session, row)
        guess = session.guess(row, row.work())
        session.progress.plan(session.job(row.name), steps, guess)


def run_accuracy(session: Session) -> Iterator[GroupDone]:
    """Train all rows with the first seed, then all rows with the next seed, and so on.

    In this order, rows can be compared as soon as possible. All rows are in one group, whose name
    is "". At the end, yield this name, and True, which means that the group is finished.
    """
    failures: dict[str, str] = {}  # the status of each row that has failed, by its name
    paths = []
    number = 0
    for seed in _needs(session).seeds:
        for row in _rows(session):
            number += 1
            if row.name in failures:
                continue
            path = _checkpoint(session, row, seed)
            paths.append(path)
            try:
                _train(session, row, seed, path, number)
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


def _train(session: Session, row: AccuracyRow, seed: int, path: Path, number: int) -> None:
    """Train a row with one seed until the last epoch. If there is a checkpoint, resume from it.

    `number` is the number of this training, from 1, for the progress display.
    """
    trainings = len(_needs(session).seeds) * len(_rows(session))
    which = f"training {number} of {trainings}: {row.name}, seed {seed}"
    epochs = row.recipe.epochs
    steps = _steps_per_epoch(session, row)
    done: list[Epoch] = []
    saved = load_checkpoint(path)
    if saved:
        done = saved["epochs"]
        session.progress.say(
            f"{row.name}, seed {seed}: goes on after epoch {len(done)} of {epochs}, in\n{path}"
        )
        session.finish(row.name, len(done) * steps)
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
        save_checkpoint(path, {"epochs": done, "training": training.state()})


def _train_epoch(  # noqa: PLR0913 - all that an epoch depends on
    session: Session,
    row: AccuracyRow,
    seed: int,
    training: "AccuracyTraining",
    epoch: int,
    which: str,
) -> Epoch:
    """Train for an epoch, evaluate, and return the epoch's values, in the order of `SERIES`.

    `which` names the training in the progress display.
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
    """Add the values of some epochs to the samples of a row in the record."""
    found = session.found(row)
    before = {} if found is None else found.samples
    samples = {name: list(before.get(name, [])) for name in SERIES}
    for epoch in epochs:
        for name, value in zip(SERIES, epoch, strict=True):
            samples[name].append(value)
    values = {"samples_per_epoch": _steps_per_epoch(session, row) * row.batch_size}
    session.put(row, samples=samples, values=values, **ended)


def _checkpoint(session: Session, row: AccuracyRow, seed: int) -> Path:
    """Return the path of the checkpoint of a row's training with one seed.

    The file's name contains the row, the seed, and a digest of all other settings. So a training
    never resumes from a checkpoint that was saved with other settings.
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
    """Replace the checkpoint at `path` atomically.

    If the program is killed meanwhile, either the old or the new checkpoint exists.
    """
    path.parent.mkdir(exist_ok=True)
    content = io.BytesIO()
    torch.save(state, content)
    write_atomically(path, content.getvalue())


def load_checkpoint(path: Path) -> dict[str, Any] | None:
    """Load the checkpoint at `path`; return None if there is no checkpoint.

    If the checkpoint is broken, raise `Error`.
    """
    try:
        return cast("dict[str, Any]", torch.load(path, map_location="cpu", weights_only=True))
    except FileNotFoundError:
        return None
    except Exception as error:
        raise Error(
            f"{path} cannot be read as a checkpoint ({type(error).__name__}); delete it"
        ) from error


def _put_away(session: Session, paths: Sequence[Path]) -> None:
    """Move the checkpoints to a folder named after the record, so that the next run starts anew.

    If the data is generated, delete the checkpoints instead.
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
    """The training of a row's model on the row's devices.

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
        """Return the learning rate of the next step."""
        row = self.row
        epoch = self.steps / self.steps_per_epoch
        return row.recipe.learning_rate(row.batch_size, epoch)

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        """Run one training step on a mini-batch; return the loss as a tensor on its device."""
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
        """Return the top-1 error in % over batches of images (N, 3, H, W) and classes (N,)."""
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
        """Return the state that is needed to resume the training."""
        gpus = [device for device in self.devices if device.type == "cuda"]
        return {
            "steps": self.steps,
            "model": self.layers.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
            "cuda": [accelerator.RANDOM.get_rng_state(gpu) for gpu in gpus],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restore the training from a state, to resume it."""
        self.steps = state["steps"]
        self.layers.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        for device, random in zip(self.devices, state["cuda"], strict=False):
            accelerator.RANDOM.set_rng_state(random, device)
