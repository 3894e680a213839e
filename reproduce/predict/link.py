"""Compute how long copies between emulated devices take, from a description of hardware."""

import functools
import re
from collections.abc import Mapping
from itertools import pairwise

import torch

from reproduce.experiments.row import Row
from reproduce.machine.devices import Devices
from reproduce.models.counted import counted
from torchgpipe.plan.hardware.hardware import Hardware, hardware_names
from torchgpipe.plan.predict.predict import Predictor
from torchgpipe.plan.predict.setup import Setup


class Link:
    """A link between emulated devices, which computes how long the copies of a step take.

    The times come from a hardware description of GPUs. If the emulated tasks run on a CPU, or in a
    smaller model than the published one, copies with these times would be too fast or too slow in
    comparison with the tasks. So the times can be scaled.

    Args:
        hardware: The hardware description.
        papers: The published rows of the experiment, by their names. The times are scaled so that
            the ratio (copy time / forward time) of a row is the one that the description predicts
            for the published row. If there are no published rows, or if the published model has
            another number of layers, the ratio is the one that the description predicts for the
            emulated row itself. If `papers` is None, times are not scaled.
    """

    def __init__(self, hardware: Hardware, papers: Mapping[str, Row] | None) -> None:
        self.hardware = hardware
        self.papers = papers
        self.title = hardware.name
        if papers is not None:
            self.title = f"{hardware.name}, in proportion to the tasks"
        self._predictor = functools.cache(lambda model: Predictor(counted(model), hardware))

    def copies(self, row: Row, forward: float) -> tuple[list[float], dict[tuple[int, int], float]]:
        """Return the seconds of copies for one micro-batch, in one direction.

        Args:
            row: The row that is emulated.
            forward: The seconds of a micro-batch's forward in all partitions together.

        Returns:
            - For each boundary between partitions, the seconds of the copy.
            - For each skip, the seconds of its copy. A key is the pair of the partition that
              stashes the skip and the partition that pops it.
        """
        paper = self._published(row)
        predictor = self._predictor(paper.sized)
        setup = Setup(
            batch_size=paper.batch_size,
            balance=row.balance or (),
            chunks=paper.chunks or 1,
            portals="portals" in row.components,
        )
        boundaries, skips = predictor.copies(setup)
        share = 1.0
        if self.papers is not None:
            layers = predictor.layers(setup.sizes[0])
            share = forward / sum(layers.forward)
        scaled_skips = {route: seconds * share for route, seconds in skips.items()}
        return [seconds * share for seconds in boundaries], scaled_skips

    def _published(self, row: Row) -> Row:
        """Return the published row whose predicted ratio of copy time to forward time is used.

        This is the published row with the same name as `row` or, if there is none, the first
        published row. If there are no published rows at all, or if the published model has another
        number of layers (`--set` can change it), return `row` itself.
        """
        if not self.papers:
            return row
        name, _, _ = (row.changed_from or row.name).partition("/")
        paper = self.papers.get(name) or next(iter(self.papers.values()))
        layers = len(self._predictor(paper.sized).counts)
        return paper if sum(row.balance or ()) == layers else row


def own_links(devices: Devices) -> str | None:
    """Return the name of the hardware description that fits this machine's GPUs, or None."""
    if devices.kind != "cuda":
        return None
    words = re.findall(r"[a-z0-9]+", torch.cuda.get_device_name(0).lower())
    words += [first + second for first, second in pairwise(words)]  # "RTX 4090" is rtx4090
    for name in hardware_names():
        gpu, _, _ = name.rpartition("x")
        if gpu in words:
            return name
    return None
