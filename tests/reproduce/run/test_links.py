"""Links: what copies take in an emulation, as a description says or in proportion, and whose links they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from reproduce.experiments import EXPERIMENTS, Row
from reproduce.machine.devices import Devices
from reproduce.run.emulation import Link, own_links
from torchgpipe.plan.hardware.hardware import hardware_names, load_hardware

BALANCES = {2: (30, 35), 4: (16, 16, 16, 17)}


def pipeline(n: int, **changes: Any) -> Row:
    unet = EXPERIMENTS["unet-speed"].scale("small").rows[0]
    row = replace(unet, size=(1, 2), input_shape=(3, 64, 64), batch_size=4, partitions=n, chunks=4, balance=BALANCES[n])
    return replace(row, **changes)


HARDWARE = replace(load_hardware("p40x8"), link_latency=0.0)
WITHOUT_PORTALS = ("dependency", "streams")


def test_copies_take_what_the_hardware_says() -> None:
    link = Link(HARDWARE, None)
    copies, skips = link.copies(pipeline(4), 1.0)
    assert len(copies) == 3 and {(0, 3)} <= set(skips)
    assert link.copies(pipeline(4), 2.0) == (copies, skips), "however long tasks take"
    through, beside = link.copies(pipeline(4, components=WITHOUT_PORTALS), 1.0)
    assert not beside
    assert through == pytest.approx(
        [copy + sum(s for (a, b), s in skips.items() if a <= j < b) for j, copy in enumerate(copies)]
    ), "without portals, a skip passes every boundary on its way"
    twice = link.copies(pipeline(4, batch_size=8), 1.0)[0]
    assert twice == pytest.approx([2 * copy for copy in copies])


def test_copies_are_in_proportion_to_the_published_model() -> None:
    """The row's own paper row counts, or the first one; its published balance suited other devices."""
    large, small = pipeline(4, batch_size=8, size=(1, 8)), pipeline(4)
    papers = {"first": replace(large, batch_size=32), "pb": replace(large, balance=None)}
    link = Link(HARDWARE, papers)
    copies, skips = link.copies(replace(small, name="pb/x"), 3.0)
    own, theirs = Link(HARDWARE, None).copies(large, 1.0)
    forward = sum(link._predictor(large.model, large.size, large.input_shape).layers(2).forward)
    assert copies == pytest.approx([copy / forward * 3 for copy in own])
    assert skips == pytest.approx({route: skip / forward * 3 for route, skip in theirs.items()})
    assert link.copies(replace(small, name="none"), 3.0) != (copies, skips)
    assert link.copies(replace(small, name="first"), 3.0) == link.copies(replace(small, name="none"), 3.0)


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [
        ("Tesla P40", "p40x8"),
        ("NVIDIA A100-SXM4-80GB", "a100x8"),
        ("NVIDIA H100 80GB HBM3", "h100x8"),
        ("NVIDIA GeForce RTX 4090", None),
        ("NVIDIA A10", None),
    ],
)
def test_gpus_have_the_links_of_a_shipped_node_of_them(
    gpu: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: gpu)
    assert own_links(Devices("cuda", 1)) == expected
    assert expected is None or expected in hardware_names()
    assert own_links(Devices("cpu", 2, threads=1)) is None
