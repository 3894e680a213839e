"""Run an accuracy experiment: train every row for all of its epochs, from several seeds.

After every epoch a checkpoint is saved, so a stopped training resumes after its last complete epoch.
"""

import hashlib
import io
import itertools
import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reproduce.error import Error
from reproduce.experiments.recipe import AccuracyRow
from reproduce.machine.devices import Devices
from reproduce.records.record import write_atomically
from reproduce.run.accuracy.datasets import AccuracyNeeds, Batch
from reproduce.run.failure import explain
from reproduce.run.session import Session
from reproduce.run.training import make_optimizer, on_devices, update

SERIES = ("seed", "epoch", "top1_error", "train_loss", "epoch_time", "learning_rate")
Epoch = tuple[float, ...]  # a value for each name in `SERIES`


def plan_accuracy(session: Session) -> None:
    """Tell the progress display how many training steps to expect. Evaluation takes little time in comparison."""
    seeds = len(_needs(session).seeds)
    for row in cast("list[AccuracyRow]", session.scale.rows):
        session.recorder.put(session.result(row, status="interrupted"))
        session.progress.plan(
            session.job(row.name), seeds * row.recipe.epochs * _steps(session, row), row.work()
        )


def run_accuracy(session: Session) -> Iterator[tuple[str, bool]]:
    """Train all rows from the first seed, then from the next, so that rows can be compared as soon as possible.

    At the end, yield the name of their only group, "", and True.
    """
    rows = cast("list[AccuracyRow]", session.scale.rows)
    ended: dict[str, str] = {}  # rows that have failed, and their status
    paths = []
    for seed, row in itertools.product(_needs(session).seeds, rows):
        if row.name in ended:
            continue
        paths.append(_checkpoint(session, row, seed))
        try:
            _train(session, row, seed, paths[-1])
        except Exception as error:  # recorded as the row's result
            failure = explain(error)
            ended[row.name] = failure.status
            _put(session, row, [], status=failure.status, reason=f"seed {seed}: {failure.reason}")
            session.progress.finish(session.job(row.name))
        session.progress.stop()
        session.free()
    if "failed" not in ended.values():  # else the next run resumes the trainings
        _put_away(session, paths)
    yield "", True


def _train(session: Session, row: AccuracyRow, seed: int, path: Path) -> None:
    """Train until the last epoch, from the checkpoint if there is one."""
    epochs, steps = row.recipe.epochs, _steps(session, row)
    saved = load_checkpoint(path)
    done: list[Epoch] = saved["epochs"] if saved else []
    if saved:
        session.progress.say(
            f"{row.name}, seed {seed}: goes on after epoch {len(done)} of {epochs}, in\n{path}"
        )
        session.progress.finish(session.job(row.name), len(done) * steps)
        _put(session, row, done)
    session.start(f"{row.name}, building")
    training = AccuracyTraining(row, session.devices, seed, steps)
    if saved:
        training.load(saved["training"])
    while len(done) < epochs:
        done.append(_train_epoch(session, row, seed, training, len(done) + 1))
        _put(
            session, row, done[-1:]
        )  # before saving, so that an interrupt meanwhile does not lose the epoch
        save_checkpoint(path, {"epochs": done, "training": training.state()})


def _train_epoch(
    session: Session, row: AccuracyRow, seed: int, training: "AccuracyTraining", epoch: int
) -> Epoch:
    """Train on all mini-batches, then evaluate."""
    data = _needs(session).data
    what = f"{row.name}, seed {seed}, epoch {epoch} of {row.recipe.epochs}"

    def shown(batches: Iterable[Batch], text: str, job: str = "") -> Iterator[Batch]:
        for batch in batches:
            session.start(text, job)
            yield batch

    losses, learning_rate = [], 0.0
    session.devices.synchronize()
    started = time.perf_counter()
    for batch in shown(
        data.train_batches(row.batch_size, seed, epoch - 1), what, session.job(row.name)
    ):
        learning_rate = training.learning_rate
        losses.append(training.step(*batch))
    session.devices.synchronize()
    seconds = time.perf_counter() - started

    loss = float(torch.stack(losses).mean())
    if not math.isfinite(loss):
        raise FloatingPointError(f"the loss is {loss} in epoch {epoch}: the training has diverged")
    error = training.top1_error(shown(data.val_batches(row.batch_size), f"{what}, evaluating"))
    return (float(seed), float(epoch), error, loss, seconds, learning_rate)


def _put(session: Session, row: AccuracyRow, epochs: Sequence[Epoch], **ended: Any) -> None:
    """Add epochs to the row's recorded samples."""
    before = session.recorded(row).samples
    samples = {
        name: before.get(name, []) + [epoch[i] for epoch in epochs] for i, name in enumerate(SERIES)
    }
    session.put(
        row,
        samples=samples,
        values={"samples_per_epoch": _steps(session, row) * row.batch_size},
        **ended,
    )


def _checkpoint(session: Session, row: AccuracyRow, seed: int) -> Path:
    """Return the path of a training's checkpoint. Its name has row, seed and a digest of all other settings."""
    data, made = _needs(session).data, session.scale.settings()["made"]
    depends_on = [
        row.config(),
        made and [made, session.seed],
        data.train_size,
        data.val_size,
        session.devices.kind,
        session.devices.threads,
    ]
    digest = hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()[:10]
    name = f"{session.experiment.name}-{session.scale.name}-{row.name}-seed{seed}-{digest}.pt"
    return session.recorder.path.parent / "checkpoints" / name.replace(" ", "-")


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Replace the checkpoint at `path` atomically: if killed, the old or the new one is there."""
    path.parent.mkdir(exist_ok=True)
    torch.save(state, content := io.BytesIO())
    write_atomically(path, content.getvalue())


def load_checkpoint(path: Path) -> dict[str, Any] | None:
    """Load the checkpoint at `path`, or return None if there is none; raise `Error` if it is broken."""
    try:
        return cast("dict[str, Any]", torch.load(path, map_location="cpu", weights_only=True))
    except FileNotFoundError:
        return None
    except Exception as error:
        raise Error(
            f"{path} cannot be read as a checkpoint ({type(error).__name__}); delete it"
        ) from error


def _put_away(session: Session, paths: Sequence[Path]) -> None:
    """Make the next run start from scratch: move checkpoints aside, or delete them if the data are generated."""
    for path in filter(Path.exists, paths):  # a training that ran out of memory may have none
        if session.scale.settings()["made"]:
            path.unlink()
        else:
            (kept := path.parent / session.recorder.path.stem).mkdir(exist_ok=True)
            path.replace(kept / path.name)


def _steps(session: Session, row: AccuracyRow) -> int:
    return _needs(session).data.train_size // row.batch_size


def _needs(session: Session) -> AccuracyNeeds:
    assert session.accuracy is not None
    return session.accuracy


class AccuracyTraining:
    """Train a row's model on its devices. Rows with the same seed start from the same parameters."""

    def __init__(self, row: AccuracyRow, devices: Devices, seed: int, steps_per_epoch: int) -> None:
        torch.manual_seed(seed)
        self.row, self.steps_per_epoch, self.steps = row, steps_per_epoch, 0
        self.devices = devices.first(row.devices)
        self.layers = on_devices(
            row, row.sized.layers(), self.devices
        )  # its state dict has no prefix of DataParallel
        shared = row.partitions is None and row.gpus > 1
        self.model = nn.DataParallel(self.layers, self.devices) if shared else self.layers
        self.optimizer = make_optimizer(row, self.model, lr=self.learning_rate)

    @property
    def learning_rate(self) -> float:
        """Give the learning rate of the next step."""
        return self.row.recipe.learning_rate(self.row.batch_size, self.steps / self.steps_per_epoch)

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        """Do one training step on a mini-batch and return its loss, still on its device."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate
        output = self._forward(images)
        loss = F.cross_entropy(output, labels.to(output.device, non_blocking=True))
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
            wrong += int((self._forward(images).argmax(dim=1).cpu() != labels).sum())
            total += len(labels)
        self.model.train()
        return 100 * wrong / total

    def _forward(self, images: Tensor) -> Tensor:
        output: Tensor = self.model(images.to(self.devices[0], non_blocking=True))
        return output

    def state(self) -> dict[str, Any]:
        """Return the state that is needed to resume the training."""
        return {
            "steps": self.steps,
            "model": self.layers.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
            "cuda": [
                torch.cuda.get_rng_state(device) for device in self.devices if device.type == "cuda"
            ],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Resume the training from a state."""
        self.steps = state["steps"]
        self.layers.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        for device, random in zip(self.devices, state["cuda"], strict=False):
            torch.cuda.set_rng_state(random, device)
