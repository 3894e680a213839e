"""Tests of the links between emulated devices, which decide how long copies take."""

from dataclasses import replace

import pytest
import torch

from reproduce.experiments import EXPERIMENTS
from reproduce.experiments.row import COMPONENTS
from reproduce.machine.devices import Devices
from reproduce.predict.link import Link, own_links
from torchgpipe.plan.hardware.hardware import hardware_names, load_hardware

HARDWARE = replace(load_hardware("p40x8"), link_latency=0.0)
ROW = replace(
    EXPERIMENTS["unet-speed"].scale("small").rows[0],
    size=(1, 2),
    input_shape=(3, 64, 64),
    batch_size=4,
    partitions=4,
    chunks=4,
    checkpoint="except_last",
    balance=(16, 16, 16, 17),
)


def test_copies_take_what_the_hardware_says_or_the_published_share_of_a_forward() -> None:
    """Check how long an emulated copy between devices takes.

    Without published configurations, the copy takes as long as on the given hardware. With them,
    only the ratio of the copy's time to a forward's time is predicted. It is predicted for the
    published configuration of the same name or, if there is none, for the first published one. The
    published balance is not used, because it was made for other devices.
    """
    large, small = replace(ROW, batch_size=8, size=(1, 8)), ROW
    hardware = Link(HARDWARE, None)

    copies, skips = hardware.copies(large, 1.0)

    assert len(copies) == 3
    assert (0, 3) in skips
    assert hardware.copies(large, 2.0) == (copies, skips)

    # Without portals, skips go with the copies through each partition.
    through, beside = hardware.copies(replace(large, components=COMPONENTS[:2]), 1.0)

    expected = list(copies)
    for (source, destination), seconds in skips.items():
        for j in range(source, destination):
            expected[j] += seconds
    assert through == pytest.approx(expected)
    assert not beside

    papers = {"first": replace(large, batch_size=32), "pb": replace(large, balance=None)}
    link = Link(HARDWARE, papers)
    share = 3.0 / sum(link._predictor(large.sized).layers(2).forward)

    own_copies, own_skips = link.copies(replace(small, name="pb/x"), 3.0)
    first = link.copies(replace(small, name="first"), 3.0)
    unknown = link.copies(replace(small, name="none"), 3.0)

    assert own_copies == pytest.approx([seconds * share for seconds in copies])
    assert own_skips == pytest.approx({route: s * share for route, s in skips.items()})
    assert unknown == first
    assert first != (own_copies, own_skips)

    # If the published model has another number of layers, the row itself is used.
    other = replace(small, name="first", size=(1, 2), balance=(10, 10, 10, 10))
    assert link._published(other) is other
    assert link._published(replace(small, name="first")) is papers["first"]

    # An experiment without published models: the proportion is the one of the row's own model.
    alone, _ = Link(HARDWARE, {}).copies(large, 3.0)
    share = 3.0 / sum(link._predictor(large.sized).layers(large.batch_size // 4).forward)
    assert alone == pytest.approx([seconds * share for seconds in copies])


def test_gpus_have_the_links_of_a_shipped_node(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {
        "Tesla P40": "p40x8",
        "NVIDIA A100-SXM4-80GB": "a100x8",
        "NVIDIA GeForce RTX 4090": "rtx4090x4",
        "NVIDIA A10": None,
    }
    for gpu, expected in known.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, gpu=gpu: gpu)
        assert own_links(Devices("cuda", 1)) == expected
        assert expected in (None, *hardware_names())
    assert own_links(Devices("cpu", 2, threads=1)) is None
