"""Train one row of an accuracy experiment: a model that learns by the row's recipe, and whose state can be kept."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reproduce.experiments.recipe import AccuracyRow
from reproduce.machine.devices import Devices
from reproduce.run.accuracy.datasets import Batch
from reproduce.run.training import make_optimizer, on_devices, update


class AccuracyTraining:
    """Train a row's model, on its devices, from a seed: rows of one seed start from the same parameters."""

    def __init__(self, row: AccuracyRow, devices: Devices, seed: int, steps_per_epoch: int) -> None:
        """Build everything.

        Raises:
            whatever the model or the devices raise, out of memory included.
        """
        torch.manual_seed(seed)
        self.row, self.steps_per_epoch, self.steps = row, steps_per_epoch, 0
        self.devices = devices.first(row.devices)
        self.layers = on_devices(row, row.build(), self.devices)  # it has parameters under their own names
        shared = row.partitions is None and row.gpus > 1
        self.model = nn.DataParallel(self.layers, self.devices) if shared else self.layers  # what is called
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
        """Return the share of images, in %, whose likeliest class is not theirs.

        Shapes: batches of (N, 3, H, W) and (N,).
        """
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
        """Return all that the rest of the training depends on."""
        return {
            "steps": self.steps,
            "model": self.layers.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
            "cuda": [torch.cuda.get_rng_state(device) for device in self.devices if device.type == "cuda"],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.steps = state["steps"]
        self.layers.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        for device, random in zip(self.devices, state["cuda"], strict=False):
            torch.cuda.set_rng_state(random, device)
