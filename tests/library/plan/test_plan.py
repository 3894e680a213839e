"""Test that a plan fits in memory and describes itself, or an error says why there is none."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Linear, Sequential
from torch.nn.functional import cross_entropy, mse_loss

from torchgpipe import GPipe
from torchgpipe.plan import Hardware, Impossible, Plan, load_hardware, plan
from torchgpipe.plan.hardware.amount import amount, parse_amount
from torchgpipe.plan.predict.setup import micro_batch_sizes
from torchgpipe.plan.search.search import chunk_choices
from torchgpipe.schedules import make

from ...parts import explode
from ..layers import Lambda

NODE = replace(load_hardware("p40x8"), launch=1e-9, link_latency=1e-9)
CPU = replace(NODE, launch_overlaps=False, workspace=1000.0)
X = torch.empty(4, 32)
MiB, GiB = 2**20, 2**30
ASKED = {"memory": "4MiB", "chunks": [1], "checkpoint": ["never"]}


def out_of_memory(x: Tensor) -> Tensor:
    """Raise OutOfMemoryError if the layer computes real numbers (its input is not on `meta`)."""
    if not x.is_meta:
        explode(torch.OutOfMemoryError())
    return x


FULL = Sequential(Linear(32, 4), Lambda(out_of_memory))


def model() -> Sequential:
    sizes = [32, 64, 256, 256, 128, 512, 64, 32, 8]
    layers = [Linear(a, b) for a, b in pairwise(sizes)]
    return Sequential(*layers)


def on_cpus(found: Plan) -> GPipe:
    """Make the pipeline that a plan describes, with CPUs as its devices."""
    return found.gpipe(devices=["cpu"] * len(found.balance))


@pytest.mark.parametrize("batch_size", [1, 2, 7, 37, 512])
def test_every_m_is_tried(batch_size: int) -> None:
    tried = {tuple(micro_batch_sizes(batch_size, m)) for m in chunk_choices(batch_size)}
    every_m = range(1, batch_size + 1)
    assert tried == {tuple(micro_batch_sizes(batch_size, m)) for m in every_m}


@pytest.mark.parametrize(
    ("node", "headroom", "left"),
    [(NODE, None, 0.15), (NODE, 0.5, 0.5), (CPU, None, 0), (CPU, 1, 1)],
)
def test_leaves_headroom_to_the_allocator(
    node: Hardware, headroom: float | None, left: float
) -> None:
    arguments: dict[str, Any] = {"batch_size": 1024, "devices": 4, "memory": "8MiB"}
    found = plan(model(), X, hardware=node, headroom=headroom, optimizer="adam", **arguments)
    room = (found.memory - node.workspace) / (1 + left)
    assert found.room == pytest.approx(room)
    assert max(found.peaks) <= found.room
    assert ("left to the allocator" in str(found)) == (found.room < found.memory)


def test_describes_a_pipeline_and_itself() -> None:
    arguments: dict[str, Any] = {"batch_size": 64, "devices": 2, "memory": "1GiB"}
    found = plan(model(), X, hardware="h100x8", optimizer="adam", **arguments)

    pipeline = on_cpus(found)
    assert isinstance(pipeline, GPipe)
    assert pipeline.balance == found.balance
    assert pipeline.chunks == found.chunks
    assert pipeline.checkpoint == found.checkpoint
    assert pipeline(torch.rand(64, 32)).shape == (64, 8)
    one, two = found.by_devices[1], found.by_devices[2]
    least_bound = min(one.bound, two.bound)
    assert found.seconds == min(one.limit, two.limit)
    assert found.gap == found.seconds / least_bound - 1
    assert found.gap >= 0
    text = str(found)
    for line in text.splitlines():
        assert len(line) <= 80
    for word in (str(found.balance), found.checkpoint, "h100x8", "bubble", "1.0 GiB"):
        assert word in text
    assert "predicted, not measured" in text


def test_chooses_a_schedule_that_needs_less_memory() -> None:
    """Check that a plan has the 1F1B schedule if there is too little memory for GPipe's.

    With GPipe's schedule, devices keep more micro-batches in memory.
    """
    how: dict[str, Any] = {"batch_size": 4096, "devices": 4, "headroom": 0, "hardware": NODE}
    how["chunks"] = 16
    names = ["GPipe", "1F1B", "ZBH1", "Interleaved1F1B"]
    free = plan(model(), X, memory="1GiB", schedules=names, **how)
    least = {name: plan(model(), X, memory="1GiB", schedules=name, **how) for name in names}
    assert free.seconds <= min(each.seconds for each in least.values())
    assert str(free.schedule) in names

    room = max(least["1F1B"].peaks)
    found = plan(model(), X, memory=room, schedules=["GPipe", "1F1B"], **how)
    assert found.schedule == "1F1B"
    assert found.checkpoint == "never"
    assert max(found.peaks) <= room
    assert "schedule    1F1B" in str(found)
    assert on_cpus(found).schedule.name == "1F1B"
    with pytest.raises(Impossible):
        plan(model(), X, memory=room, **how)


def test_a_layer_fits_whose_gradients_are_made_once() -> None:
    """Check that a layer with P bytes of parameters fits on a device with 2.5 P bytes of memory.

    With one micro-batch, the layer fits: its parameters and its gradients take 2 P bytes. With two
    micro-batches, it does not fit. The gradients of the second micro-batch take another P bytes,
    until they are added to those of the first.
    """
    layer = Sequential(Linear(4096, 4096))
    sample = torch.empty(1, 4096)
    room = 2.5 * sum(p.nbytes for p in layer.parameters())
    how: dict[str, Any] = {"batch_size": 4, "devices": 1, "headroom": 0, "hardware": NODE}
    found = plan(layer, sample, memory=room, optimizer="sgd", **how)
    assert found.chunks == 1
    with pytest.raises(Impossible, match=r"layer 0 .* alone needs"):
        plan(layer, sample, memory=room * 0.79, optimizer="sgd", **how)


def test_names_another_way_to_train_where_no_pipeline_has_room() -> None:
    """Check that an error recommends FSDP if only FSDP fits.

    A pipeline has to give two of the three layers to one of the two devices, which has not enough
    memory for them. FSDP gives half of everything to each device.
    """
    layers = [Linear(256, 256, bias=False, dtype=torch.bfloat16) for _ in range(3)]
    sample = torch.empty(1, 256, dtype=torch.bfloat16)
    how: dict[str, Any] = {"batch_size": 8, "devices": 2, "headroom": 0, "hardware": "h100x8"}
    how |= {"optimizer": "adam", "master_weights": True}

    with pytest.raises(Impossible, match="smaller batch; FSDP on 2 devices has room: take fully_"):
        plan(Sequential(*layers), sample, memory="2.5MiB", **how)


def test_tries_more_tasks_than_it_likes_where_nothing_else_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    how: dict[str, Any] = {"batch_size": 3000, "devices": 1, "headroom": 0, "hardware": NODE}
    free = plan(model(), X, memory="4MiB", **how)
    monkeypatch.setattr("torchgpipe.plan.search.search.MOST_TASKS", 3 * 2)
    found = plan(model(), X, memory="4MiB", **how)
    assert found.chunks > 2
    assert max(found.peaks) <= 4 * MiB
    assert found.seconds >= free.seconds


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"memory": "1.5MiB", "devices": 1}, Impossible, "use more devices"),
        (
            {"memory": 2.2 * MiB, "devices": 1, "batch_size": 3000},
            Impossible,
            "no balance fits 1 device",
        ),
        (
            {"memory": "4MiB", "devices": 1, "optimizer": "adam"},
            Impossible,
            "what its step makes need 4.2 MiB",
        ),
        (
            {"memory": "400KiB", "devices": 8, "batch_size": 8},
            Impossible,
            r"layer 4 \(4\) alone needs .* more than the 400.0 KiB",
        ),
        (
            {**ASKED, "devices": 1, "batch_size": 3000},
            Impossible,
            "the chunks, .* asked for .*=1 .*'never'.*=3000 .*'always' needs",
        ),
        ({"memory": "lots"}, ValueError, "text with a unit such as '24GiB'"),
        ({"memory": "24"}, ValueError, "text with a unit such as '24GiB'"),
        (
            {"hardware": "here", "sample": X.to("meta")},
            ValueError,
            "nothing takes time .* such as hardware='h100x8'",
        ),
        (
            {"hardware": "here", "module": FULL},
            ValueError,
            "layer 1 with 2 samples does not fit the memory of cpu, .*: give a",
        ),
        ({"hardware": "h100"}, ValueError, "no hardware is called 'h100': use one of a100x8"),
        (
            {"headroom": -0.1},
            ValueError,
            "headroom must be a share of the tensors' bytes, 0 or more",
        ),
        ({"headroom": "15%"}, ValueError, "such as 0.15 for 15 %, but got '15%'"),
        ({"optimizer": "lion"}, ValueError, "optimizer must be one of none, sgd"),
        ({"batch_size": 0}, ValueError, "batch_size must be"),
        ({"devices": 0}, ValueError, "devices must be a whole number of at least 1, got 0"),
        ({"devices": 2.0}, ValueError, "devices must be a whole number of at least 1, got 2.0"),
        (
            {"chunks": 1.5},
            TypeError,
            "chunks must be one whole number or a sequence of them, got 1.5",
        ),
        (
            {"chunks": [65]},
            ValueError,
            "chunks must be a whole number from 1 to the batch size 64, got 65",
        ),
        ({"chunks": []}, ValueError, "chunks must name at least one whole number, got none"),
        (
            {"schedules": "LoopedBFS"},
            ValueError,
            "no schedule is called 'LoopedBFS': use one of GPipe, 1F1B",
        ),
        ({"schedules": 5}, ValueError, "no schedule is called 5: use one of GPipe, 1F1B"),
        (
            {"schedules": make("1F1B", 9, 4)},
            Impossible,
            r"none of the schedules that were asked for can run 8 layers on 8 devices",
        ),
        ({"target": X}, TypeError, "give criterion=, too, or leave out target="),
        (
            {"criterion": mse_loss},
            TypeError,
            "^mse_loss needs a target: give the sample's target",
        ),
        ({"criterion": "mse", "target": X}, TypeError, "criterion must be a function .*'mse'"),
        (
            {"criterion": mse_loss, "target": X[:3]},
            ValueError,
            r"must have the sample's batch size, 4, .* has the shape \(3, 32\)",
        ),
        (
            {"criterion": cross_entropy, "target": torch.empty(4, 9)},
            ValueError,
            r"the criterion fails on \(2, 8\) float32: .*; check the target",
        ),
        ({"checkpoint": "often"}, ValueError, "checkpoint must be among .*, got 'often'"),
        ({"module": Linear(1, 1)}, TypeError, "only an nn.Sequential"),
        ({"master_weights": True}, ValueError, "master_weights is for parameters in 16 bits"),
        (
            {"autocast": torch.float64},
            ValueError,
            r"autocast must be torch\.float16 or torch\.bfloat16",
        ),
    ],
)
def test_refuses_in_one_line(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {"module": model(), "sample": X, "batch_size": 64}
    arguments |= {"headroom": 0, "hardware": NODE, **change}
    with pytest.raises(error, match=message) as raised:
        plan(**arguments)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("24GiB", 24 * GiB), ("80 GB", 80e9), ("1.5mib", 1.5 * MiB), (1024, 1024), ("7B", 7)],
)
def test_amounts(text: str | float, nbytes: float) -> None:
    assert parse_amount(text) == nbytes
    assert parse_amount(amount(nbytes)) == pytest.approx(nbytes, rel=0.05)


def test_a_model_on_meta_cannot_be_moved() -> None:
    with torch.device("meta"):
        layers = model()
    found = plan(layers, X, batch_size=64, devices=2, hardware="h100x8")
    on_cpu = ["cpu"] * len(found.balance)
    refusal = "on device 'meta' and has no values to move: build it on a real device"
    for devices in (None, on_cpu):
        with pytest.raises(ValueError, match=refusal):
            found.gpipe(devices=devices)
    on_meta = ["meta"] * len(found.balance)
    assert found.gpipe(devices=on_meta).balance == found.balance
