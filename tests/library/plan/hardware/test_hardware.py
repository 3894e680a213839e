"""Descriptions are whole and have sources; the P40's efficiencies are what others' measurements need."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from torchgpipe.plan.hardware.hardware import FOLDER, WINOGRAD, WORK, Hardware, hardware_names, load_hardware
from torchgpipe.plan.hardware.operators import CLASSES, Operator
from torchgpipe.plan.hardware.tiles import Grid


@pytest.mark.parametrize("name", hardware_names())
def test_every_figure_has_a_source(name: str) -> None:
    hardware = load_hardware(name)
    assert {"peak.float32", "memory_bandwidth", "launch", "link_latency"} <= set(hardware.sources)
    assert all(len(source) > 10 for source in hardware.sources.values())
    assert set(WORK) <= set(hardware.compute_efficiency)
    assert {*CLASSES} - {WINOGRAD} <= set(hardware.memory_efficiency)
    assert (WINOGRAD in hardware.compute_efficiency) == (WINOGRAD in hardware.memory_efficiency)
    assert hardware.processors > 0
    assert all(share <= 1 for share in hardware.memory_efficiency.values())


P40 = load_hardware("p40x8")
CONV, FASTER = (P40.compute_efficiency[kind] for kind in ("conv", WINOGRAD))
COPY, KERNEL = P40.memory_efficiency["conv"], P40.memory_efficiency["elementwise"]


@pytest.mark.parametrize(
    ("operator", "seconds"),
    [
        (Operator("conv", "float32", 12e12, 0), 1 / CONV),
        (Operator("elementwise", "float32", 0, 346e9), 1 / KERNEL),
        (Operator("elementwise", "float32", 0, 4), 1e-5),
        (Operator("conv", "float32", 1, 346e9), 1 / COPY),
        (Operator("conv", "float32", 12e12, 0, (), Grid(128, 128 * 30)), 1 / CONV),
        (Operator("conv", "float32", 12e12, 0, (), Grid(3, 128 * 300)), 32 / 3 / CONV),
    ],
)
def test_seconds(operator: Operator, seconds: float) -> None:
    assert P40.seconds(operator) == pytest.approx(seconds)


A100 = load_hardware("a100x8")


@pytest.mark.parametrize(
    ("node", "operator", "rate"),
    [
        (A100, Operator("conv", "tf32", 1e15, 0), A100.peak["tf32"] * A100.compute_efficiency["conv.tf32"]),
        (A100, Operator("conv", "bfloat16", 1e15, 0), A100.peak["bfloat16"] * A100.compute_efficiency["conv"]),
        (A100, Operator("attention", "float16", 1e15, 0), 312e12 * A100.compute_efficiency["attention"]),
        (P40, Operator("conv", "tf32", 1e15, 0), 12e12 * CONV),
        (P40, Operator("attention", "float32", 1e15, 0), 12e12 * P40.compute_efficiency["matmul"]),
    ],
)
def test_the_rate_of_a_type_of_numbers(node: Hardware, operator: Operator, rate: float) -> None:
    assert node.seconds(operator) == pytest.approx(1e15 / rate)


SLOW = Operator("winograd", "float32", 12e12 * FASTER / CONV / 1.1, 0)
FAST = Operator("winograd", "float32", 6e11, 0)
READ = Operator("winograd", "float32", 0, 346e8)


@pytest.mark.parametrize(
    ("other", "seconds"),
    [
        ((), 1 / CONV),
        ((SLOW,), 1 / 1.1 / CONV),
        ((FAST, READ), 0.05 / FASTER + 0.1 / COPY),
        ((SLOW, SLOW), 1 / CONV),
    ],
)
def test_the_faster_way_counts(other: tuple[Operator, ...], seconds: float) -> None:
    operator = Operator("conv3x3", "float32", 12e12, 0, other)
    assert P40.seconds(operator) == pytest.approx(seconds)
    without = {kind: share for kind, share in P40.compute_efficiency.items() if kind != WINOGRAD}
    assert replace(P40, compute_efficiency=without).seconds(operator) == pytest.approx(1 / CONV)


CORE = replace(P40, launch_overlaps=False)


@pytest.mark.parametrize(
    ("operator", "seconds"),
    [
        (Operator("elementwise", "float32", 0, 346e9), 1 / KERNEL + 1e-5),
        (Operator("conv", "float32", 12e12, 346e9), 1 / CONV + 1 / COPY + 1e-5),
    ],
)
def test_a_core_issues_computes_and_moves_bytes_one_after_another(operator: Operator, seconds: float) -> None:
    assert CORE.seconds(operator) == pytest.approx(seconds)


BROKEN: list[tuple[Any, str]] = [
    ([], "expected an object"),
    ({"memory": 3}, "memory has to be an object with value and source|devices has to be"),
    ({"memory": {"value": -1, "source": "x"}}, "memory: value has to be a number above 0"),
    ({"memory": {"value": 1, "source": " "}}, "memory: source has to say"),
    ({"speed": 3}, "'speed' is unknown"),
    ({"peak": {}}, "peak is missing"),
    ({"compute_efficiency": {"conv": {"value": 1, "source": "x"}}}, "compute_efficiency.matmul is missing"),
    ({"memory_efficiency": {"pooling": {"value": 1, "source": "x"}}}, "pooling is no class of operators"),
    ({"memory_efficiency": {"conv.float32": {"value": 1, "source": "x"}}}, "conv.float32 is no class of operators"),
    ({"compute_efficiency": {"conv.float8": {"value": 1, "source": "x"}}}, "conv.float8 is no class of operators"),
    ({"processors": {"value": -3, "source": "x"}}, "processors: value has to be a number above 0"),
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


# What is asked for, and what is said about it.
UNKNOWN: list[tuple[Callable[[], object], str]] = [
    (lambda: load_hardware("nothing.json"), "cannot be read"),
    (lambda: load_hardware("p100"), "there are a100x8, h100x8, h200x8, p40x8, v100x8"),
    (lambda: P40.seconds(Operator("matmul", "bfloat16", 1, 1)), "no peak rate for bfloat16; it has float32"),
]


@pytest.mark.parametrize("ask, message", UNKNOWN)
def test_refuses_what_is_unknown(ask: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ask()
