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

__all__ = ["AccuracyTraining", "build"]


def build(row: AccuracyRow) -> nn.Sequential:
    """Build the row's ResNet, sized (bottlenecks in every stage, width, expansion), or ResNet-101."""
    from reproduce.models.resnet import resnet, resnet101

    if not row.size:
        return resnet101(row.num_classes)
    blocks, width, expansion = row.size
    return resnet((blocks,) * 4, width=width, expansion=expansion, num_classes=row.num_classes)


class AccuracyTraining:
    """Train a row's model, on its devices, from a seed: rows of one seed start from the same parameters."""

    def __init__(self, row: AccuracyRow, devices: Devices, seed: int, steps_per_epoch: int) -> None:
        """Build everything.

        Raises:
            whatever the model or the devices raise, out of memory included.
        """
        torch.manual_seed(seed)
        model = build(row)
        self.devices = devices.first(row.devices)
        self.model: nn.Module  # what is called; `layers` is what has parameters under their own names
        self.layers: nn.Module
        if row.partitions is not None:
            from torchgpipe import GPipe

            self.layers = self.model = GPipe(
                model,
                row.balance,
                devices=self.devices,
                chunks=row.chunks or 1,
                checkpoint=row.checkpoint or "never",
                deferred_batch_norm=row.deferred_batch_norm,
            )
        else:
            self.layers = self.model = model.to(self.devices[0])
            if row.gpus > 1:
                self.model = nn.DataParallel(model, self.devices)

        options: dict[str, Any] = {**row.optimizer.options, "lr": row.recipe.base_lr}
        self.optimizer: torch.optim.Optimizer = getattr(torch.optim, row.optimizer.name)(
            self.model.parameters(), **options
        )

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

    def top1_error(self, batches: Iterable[Batch], before: Callable[[], None] = lambda: None) -> float:
        """Return the share of images, in %, whose likeliest class is not theirs. `before` is called before each
        mini-batch.

        Shapes: batches of (N, 3, H, W) and (N,).
        """
        wrong = total = 0
        self.model.eval()
        try:
            with torch.no_grad():
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
        return {
            "model": self.layers.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "random": {"cpu": torch.get_rng_state(), "cuda": self._cuda_random()},
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.layers.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        torch.set_rng_state(state["random"]["cpu"])
        for device, random in zip(self.devices, state["random"]["cuda"], strict=False):
            torch.cuda.set_rng_state(random, device)

    def _cuda_random(self) -> list[Tensor]:
        return [torch.cuda.get_rng_state(device) for device in self.devices if device.type == "cuda"]
