"""Descriptions are whole and have sources; the P40's efficiencies are what others' measurements need."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch

from torchgpipe.plan.hardware import FOLDER, WORK, Hardware, hardware_names, load_hardware
from torchgpipe.plan.operators import CLASSES, Counter, Operator


@pytest.mark.parametrize("name", hardware_names())
def test_every_figure_has_a_source(name: str) -> None:
    hardware = load_hardware(name)
    assert {"peak.float32", "memory_bandwidth", "launch", "link_latency"} <= set(hardware.sources)
    assert all(len(source) > 10 for source in hardware.sources.values())
    assert set(WORK) <= set(hardware.compute_efficiency)
    assert set(CLASSES) <= set(hardware.memory_efficiency)
    assert all(share <= 1 for share in hardware.memory_efficiency.values())


def test_five_nodes_are_shipped() -> None:
    assert hardware_names() == ["a100x8", "h100x8", "h200x8", "p40x8", "v100x8"]


@pytest.mark.parametrize(
    ("operator", "seconds"),
    [
        (Operator("conv", "float32", 12e12, 0), 1 / 0.46),
        (Operator("elementwise", "float32", 0, 346e9), 1 / 0.695),
        (Operator("elementwise", "float32", 0, 4), 1e-5),
        (Operator("conv", "float32", 1, 346e9), 1 / 0.695),
    ],
)
def test_seconds(operator: Operator, seconds: float) -> None:
    assert load_hardware("p40x8").seconds(operator) == pytest.approx(seconds)


def test_issuing_comes_before_computing_where_it_does_not_overlap() -> None:
    node = load_hardware("p40x8")
    operator = Operator("elementwise", "float32", 0, 346e9)
    assert replace(node, launch_overlaps=False).seconds(operator) == pytest.approx(1 / 0.695 + 1e-5)


BROKEN: list[tuple[Any, str]] = [
    ([], "expected an object"),
    ({"memory": 3}, "memory has to be an object with value and source|devices has to be"),
    ({"memory": {"value": -1, "source": "x"}}, "memory: value has to be a number above 0"),
    ({"memory": {"value": 1, "source": " "}}, "memory: source has to say"),
    ({"speed": 3}, "'speed' is unknown"),
    ({"peak": {}}, "peak is missing"),
    ({"compute_efficiency": {"conv": {"value": 1, "source": "x"}}}, "compute_efficiency.matmul is missing"),
    ({"launch_overlaps": 1}, "launch_overlaps has to be true or false"),
]


@pytest.mark.parametrize(("change", "message"), BROKEN)
def test_refuses_what_is_no_description(tmp_path: Path, change: Any, message: str) -> None:
    whole = json.loads((FOLDER / "p40x8.json").read_text())
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**whole, **change} if isinstance(change, dict) else change))
    with pytest.raises(ValueError, match=message) as raised:
        load_hardware(path)
    assert "mine.json" in str(raised.value)


@pytest.mark.parametrize(("name", "message"), [("nothing.json", "cannot be read"), ("p100", "there are a100x8")])
def test_refuses_names(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_hardware(name)


def test_an_unknown_type_of_number() -> None:
    with pytest.raises(ValueError, match="no peak rate for bfloat16; it has float32"):
        load_hardware("p40x8").seconds(Operator("matmul", "bfloat16", 1, 1))


# jcjohnson/cnn-benchmarks: milliseconds of forward and backward, batch 16, on a Pascal Titan X of the P40's chip.
TITAN_X: dict[str, float] = {"vgg16": 128.62, "resnet50": 103.58, "resnet152": 217.91}


def needed(model: str, kind: str, node: Hardware) -> float:
    """Return the compute efficiency of `kind` with which the model takes as long as was measured."""
    torchvision = pytest.importorskip("torchvision", reason="the measured models are torchvision's")
    with torch.device("meta"):
        built = getattr(torchvision.models, model)()
        with Counter() as counter:
            y = built(torch.empty(16, 3, 224, 224))
            y.backward(torch.empty_like(y))
    low, high = 0.01, 10.0
    for _ in range(40):
        middle = (low + high) / 2
        tried = replace(node, compute_efficiency={**node.compute_efficiency, kind: middle})
        if tried.total(counter.operators) * 1e3 > TITAN_X[model]:
            low = middle
        else:
            high = middle
    return low


def test_the_p40_efficiencies_are_what_a_titan_x_of_the_same_chip_needs() -> None:
    p40 = load_hardware("p40x8")
    titan = replace(p40, peak={"float32": 10.16e12}, memory_bandwidth=480e9, launch=5e-6)
    assert p40.compute_efficiency["conv3x3"] == pytest.approx(needed("vgg16", "conv3x3", titan), abs=0.03)
    conv = mean(needed(model, "conv", titan) for model in ("resnet50", "resnet152"))
    assert p40.compute_efficiency["conv"] == pytest.approx(conv, abs=0.03)
