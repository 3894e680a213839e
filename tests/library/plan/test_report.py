"""Test the text of a plan: its tables, its sentences, its rounded numbers, and its progress."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import Linear, Sequential

from torchgpipe.plan import Hardware, Impossible, load_hardware, plan

from .test_plan import NODE, X, model


def table(text: str, heading: str) -> list[list[str]]:
    """Return the rows of the table that begins with `heading` in a plan's text.

    Each row is a list of the texts of its cells.
    """
    (part,) = [part for part in text.split("\n\n") if part.lstrip().startswith(heading)]
    rows = []
    for line in part.splitlines():
        cells = line.replace("|", " ").split()
        if cells[0].isdecimal():
            rows.append(cells)
    return rows


@pytest.mark.parametrize(("link", "better"), [(1e7, False), (NODE.link_bandwidth, True)])
def test_the_last_sentence_is_as_the_tables_say(link: float, better: bool) -> None:
    arguments: dict[str, Any] = {"batch_size": 1024, "devices": 2, "optimizer": "adam", "chunks": 8}
    node = replace(NODE, link_bandwidth=link)
    found = plan(model(), X, hardware=node, memory="64MiB", **arguments)
    text = str(found)
    *_, words = text.split("\n\n")
    sentence = " ".join(words.split())
    if not better:
        assert "2 devices has room" not in sentence
        return
    _, ours = table(text, "devices  samples/s")
    _, beside = table(text, "data parallel")
    rate, data_parallel, fsdp = [
        float(cell.replace(",", "")) for cell in (ours[1], beside[1], beside[6])
    ]
    fastest = max(data_parallel, fsdp)
    assert f"2 devices has room, and is {fastest / rate - 1:.0%} faster" in sentence
    assert ("take fully_shard in place" in sentence) == (fsdp > data_parallel)
    assert beside[2:6] == ["0.01", "1", "x", "512"]


def test_a_table_of_schedules() -> None:
    names = ["GPipe", "1F1B"]
    options: dict[str, Any] = {"batch_size": 4096, "devices": 2, "hardware": NODE, "chunks": 16}
    found = plan(model(), X, schedules=names, **options)
    assert [name for name, _ in found.by_schedule] == names
    for name, best in found.by_schedule:
        alone = plan(model(), X, schedules=name, **options)
        assert best is not None
        assert best.seconds == alone.seconds
        assert "\nschedule " not in str(alone).partition("\nbubble")[2]
    assert found.seconds == min(best.seconds for _, best in found.by_schedule if best is not None)
    rows = [line.split()[0] for line in str(found).splitlines() if line[:5] in ("GPipe", "1F1B ")]
    assert rows == names


def test_names_the_slowest_layer() -> None:
    found = plan(model(), X, batch_size=4096, devices=2, hardware=NODE, chunks=4)
    slowest = found.bottleneck
    first, second = found.balance
    start, stop = [(0, first), (first, first + second)][slowest.device]
    timed = found.predictor.layers(1024)
    seconds = [f + b for f, b in zip(timed.graph, timed.backward, strict=True)]
    assert sum(seconds[start:stop]) >= sum(seconds) / 2
    assert slowest.layer is not None
    assert start <= slowest.layer < stop
    assert seconds[slowest.layer] == max(seconds[start:stop])
    assert slowest.share == seconds[slowest.layer] / sum(seconds[start:stop])
    name = str(slowest.layer)
    said = f"Device {slowest.device} works longest; its slowest layer is layer {name} ({name}), "
    assert f"{said}{slowest.share:.0%} of its work." in " ".join(found.reason.split())


H100 = load_hardware("h100x8")


@pytest.mark.parametrize(
    ("node", "options", "precision"),
    [
        (H100, {}, "float32"),
        (H100, {"autocast": torch.bfloat16}, "autocast to bfloat16"),
        (H100, {"convolution": True}, "float32 and TF32"),
        (NODE, {"convolution": True}, "float32"),
        ("here", {"convolution": True}, "float32"),
        (H100, {"half": True}, "bfloat16"),
        (H100, {"half": True, "master_weights": True}, "bfloat16, float32 master weights"),
    ],
)
def test_says_the_precision(node: Hardware | str, options: dict[str, Any], precision: str) -> None:
    layers: list[torch.nn.Module] = [Linear(8, 8)]
    if options.pop("convolution", False):
        layers = [torch.nn.Conv1d(1, 1, 3, padding=1), *layers]
    x = torch.empty(4, 1, 8)
    if options.pop("half", False):
        layers = [layer.bfloat16() for layer in layers]
        x = x.bfloat16()
    found = plan(Sequential(*layers), x, batch_size=4, devices=1, hardware=node, **options)
    assert found.precision == precision
    assert f"\nprecision   {precision}\n" in str(found)
    assert f"a step in {precision}, " in found.summary


def test_progress_is_told() -> None:
    told: list[str] = []
    plan(model(), X, batch_size=8, devices=2, hardware=NODE, progress=told.append)
    assert told[0] == "counting the operators of the layers"
    assert told[1].startswith("searching with GPipe: choice 0 of ")


def test_a_plan_for_exactly_so_many_devices() -> None:
    found = plan(model(), X, batch_size=64, devices=3, hardware="h100x8")
    for n in (1, 2, 3):
        on = found.on(n)
        assert len(on.peaks) == n
        assert on.seconds == found.by_devices[n].limit >= found.seconds
    with pytest.raises(Impossible, match="no setup for 4 devices was found, but there are"):
        found.on(4)
