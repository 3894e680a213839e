"""Train one row of an accuracy experiment: a model that learns by the row's recipe, and whose state can be kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reproduce.experiments.recipe import AccuracyRow
from reproduce.machine.devices import Devices
from reproduce.run.accuracy.datasets import Batch
from reproduce.run.training import make_optimizer, on_devices


class AccuracyTraining:
    """Train a row's model, on its devices, from a seed: rows of one seed start from the same parameters."""

    def __init__(self, row: AccuracyRow, devices: Devices, seed: int, steps_per_epoch: int) -> None:
        """Build everything.

        Raises:
            whatever the model or the devices raise, out of memory included.
        """
        torch.manual_seed(seed)
        self.devices = devices.first(row.devices)
        self.layers = on_devices(row, row.build(), self.devices)  # it has parameters under their own names
        shared = row.partitions is None and row.gpus > 1
        self.model = nn.DataParallel(self.layers, self.devices) if shared else self.layers  # what is called
        self.optimizer = make_optimizer(row, self.model, lr=row.recipe.base_lr)

        def factor(step: int) -> float:
            return row.recipe.learning_rate(row.batch_size, step / steps_per_epoch) / row.recipe.base_lr

        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)

    @property
    def learning_rate(self) -> float:
        """Give the learning rate of the next step."""
        return float(self.schedule.get_last_lr()[0])

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        """Do one training step on a mini-batch and return its loss, still on its device."""
        output = self._forward(images)
        loss = F.cross_entropy(output, labels.to(output.device, non_blocking=True))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.schedule.step()
        return loss.detach()

    @torch.no_grad()
    def top1_error(self, batches: Iterable[Batch], before: Callable[[], None] = lambda: None) -> float:
        """Return the share of images, in %, whose likeliest class is not theirs; call `before` each mini-batch.

        Shapes: batches of (N, 3, H, W) and (N,).
        """
        wrong = total = 0
        self.model.eval()
        try:
            for images, labels in batches:
                before()
                found = self._forward(images).argmax(dim=1).cpu()
                wrong += int((found != labels).sum())
                total += len(labels)
        finally:
            self.model.train()
        return 100 * wrong / total

    def _forward(self, images: Tensor) -> Tensor:
        output: Tensor = self.model(images.to(self.devices[0], non_blocking=True))
        return output

    def state(self) -> dict[str, Any]:
        """Return all that the rest of the training depends on: model, optimizer, schedule, and random numbers."""
        cuda = [torch.cuda.get_rng_state(device) for device in self.devices if device.type == "cuda"]
        return {
            "model": self.layers.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "random": {"cpu": torch.get_rng_state(), "cuda": cuda},
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.layers.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        torch.set_rng_state(state["random"]["cpu"])
        for device, random in zip(self.devices, state["random"]["cuda"], strict=False):
            torch.cuda.set_rng_state(random, device)
