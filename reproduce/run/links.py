"""Say what copies between devices take, for an emulation in which one device plays all."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from reproduce.experiments import Row
from reproduce.machine.devices import Devices
from reproduce.models.counted import counted
from torchgpipe.plan.hardware import Hardware, hardware_names
from torchgpipe.plan.predict import Predictor, Setup


class Link:
    """Take the copies of a step from a hardware description.

    With `papers`, the rows at the published size, by name, they are in proportion: a copy takes the same share of a
    micro-batch's forward here as the description says of the published model. For a smaller model computes less for
    each byte that it hands on, and a core computes less than a GPU. Without, they take what the description says.
    """

    def __init__(self, hardware: Hardware, papers: Mapping[str, Row] | None) -> None:
        self.hardware, self.papers = hardware, papers
        self.title = hardware.name if papers is None else f"{hardware.name}, in proportion to the tasks"
        self._predictors: dict[tuple[str, tuple[int, ...], tuple[int, ...]], Predictor] = {}

    def copies(self, row: Row, forward: float) -> tuple[list[float], dict[tuple[int, int], float]]:
        """Return the seconds of each boundary's copy and of each skip's, where a micro-batch's forward takes so many.

        Each is one way; a skip is named by the partitions that stash and pop it.
        """
        paper = row
        if self.papers is not None:
            paper = self.papers.get(row.name.partition("/")[0]) or next(iter(self.papers.values()))
        predictor = self._predictor(paper)
        setup = Setup(
            batch_size=paper.batch_size,
            balance=row.balance or (),
            chunks=paper.chunks or 1,
            portals="portals" in row.components,
        )
        boundaries, skips = predictor.copies(setup)
        share = 1.0 if self.papers is None else forward / sum(predictor.layers(setup.sizes[0]).forward)
        return [each * share for each in boundaries], {route: each * share for route, each in skips.items()}

    def _predictor(self, row: Row) -> Predictor:
        key = (row.model, row.size, row.input_shape)
        if key not in self._predictors:
            self._predictors[key] = Predictor(counted(*key, memory=False), self.hardware)
        return self._predictors[key]


def own_links(devices: Devices) -> str | None:
    """Name the shipped description of a node of GPUs like the first of `devices`; None where there is none."""
    if devices.kind != "cuda":
        return None
    words = re.findall(r"[a-z0-9]+", torch.cuda.get_device_name(0).lower())
    return next((name for name in hardware_names() if name.rpartition("x")[0] in words), None)
