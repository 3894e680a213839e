"""Check that hardware descriptions are complete, name their sources, and predict right times."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from torchgpipe.plan.hardware.hardware import (
    FOLDER,
    WINOGRAD,
    Hardware,
    hardware_names,
    load_hardware,
)
from torchgpipe.plan.hardware.operators import Grid, Operator


@pytest.mark.parametrize("name", hardware_names())
def test_every_figure_has_a_source(name: str) -> None:
    hardware = load_hardware(name)
    required = {"peak.float32", "memory_bandwidth", "launch", "link_latency"}
    assert required <= hardware.sources.keys()
    for source in hardware.sources.values():
        assert len(source) > 10
    assert (WINOGRAD in hardware.compute_efficiency) == (WINOGRAD in hardware.memory_efficiency)
    assert hardware.processors > 0
    assert max(hardware.memory_efficiency.values()) <= 1


@pytest.mark.parametrize("name", hardware_names())
def test_no_card_is_faster_in_float32_than_in_tf32(name: str) -> None:
    hardware = load_hardware(name)
    if "tf32" in hardware.peak:
        for kind in ("matmul", "conv", "conv3x3"):
            operations = 1e15
            tf32, float32 = [
                hardware.seconds(Operator(kind, precision, operations, 0.0))
                for precision in ("tf32", "float32")
            ]
            assert float32 >= tf32 * (1 - 1e-9)


P40 = load_hardware("p40x8")
A100 = load_hardware("a100x8")
CONV = P40.compute_efficiency["conv"]
FASTER = P40.compute_efficiency[WINOGRAD]
MATMUL = P40.compute_efficiency["matmul"]
COPY = P40.memory_efficiency["conv"]
KERNEL = P40.memory_efficiency["elementwise"]
CONV_OF_A100 = A100.compute_efficiency["conv"]
TF32_OF_A100 = A100.compute_efficiency["conv.tf32"]
ATTENTION_OF_A100 = A100.compute_efficiency["attention"]
# This hardware launches, computes and moves bytes one after another.
CORE = replace(P40, launch_overlaps=False)
FOUR_PROCESSORS = replace(P40, processors=4)


def winograd(flops: float, moved: float) -> Operator:
    return Operator("winograd", "float32", flops, moved)


def elementwise(moved: float) -> Operator:
    return Operator("elementwise", "float32", 0, moved)


def conv(other: tuple[Operator, ...] = (), grid: Grid | None = None) -> Operator:
    """Return a convolution that takes one second on a P40 GPU at its peak rate."""
    return Operator("conv", "float32", 12e12, 0, other, grid)


def tiled(*grid: Any, **options: Any) -> Operator:
    """Return a convolution that is computed as a matrix product, split into tiles.

    The arguments are those of `Grid`, such as the sizes of the matrix product.
    """
    return conv((), Grid(*grid, **options))


SLOW = winograd(12e12 * FASTER / CONV / 1.1, 0)
FAST = winograd(6e11, 0)
READ = winograd(0, 346e8)


@pytest.mark.parametrize(
    ("node", "operator", "seconds"),
    [
        (P40, conv(), 1 / CONV),
        (P40, elementwise(346e9), 1 / KERNEL),
        (P40, elementwise(4), 1e-5),
        (P40, Operator("conv", "float32", 1, 346e9), 1 / COPY),
        # A matrix product is computed in whole tiles, in whole rounds of 30 processors.
        (P40, tiled(128, 128 * 30), 1 / CONV),
        # These are 30 tiles of 64 x 128.
        (P40, tiled(64, 128 * 30), 1 / CONV),
        # These are four tiles of 32 x 128.
        (FOUR_PROCESSORS, tiled(128, 128), 1 / CONV),
        # There is one tile, so 29 of 30 processors wait.
        (P40, tiled(32, 128), 30 / CONV),
        (P40, tiled(32, 128, divisible=True), 1 / CONV),
        (P40, tiled(32, 128, 60), 1 / CONV),
        (P40, tiled(3, 128, divisible=True), 32 / 3 / CONV),  # 29 of 32 rows are padding
        (P40, tiled(128, 3, divisible=True), 32 / 3 / CONV),
        # Of 31 tiles of the smallest size, the last one needs a second round.
        (P40, tiled(128, 32 * 31), 60 / 31 / CONV),
        (CORE, elementwise(346e9), 1 / KERNEL + 1e-5),
        (CORE, Operator("conv", "float32", 12e12, 346e9), 1 / CONV + 1 / COPY + 1e-5),
        # The efficiency depends on the dtype.
        (A100, Operator("conv", "tf32", 156e12, 0), 1 / TF32_OF_A100),
        (A100, Operator("conv", "bfloat16", 312e12, 0), 1 / CONV_OF_A100),
        (A100, Operator("attention", "float16", 312e12, 0), 1 / ATTENTION_OF_A100),
        (P40, Operator("conv", "tf32", 12e12, 0), 1 / CONV),
        (P40, Operator("attention", "float32", 12e12, 0), 1 / MATMUL),
        # If there is a second algorithm, the faster one counts.
        (P40, conv((SLOW,)), 1 / 1.1 / CONV),
        (P40, conv((FAST, READ)), 0.05 / FASTER + 0.1 / COPY),
        (P40, conv((SLOW, SLOW)), 1 / CONV),
    ],
)
def test_seconds(node: Hardware, operator: Operator, seconds: float) -> None:
    assert node.seconds(operator) == pytest.approx(seconds)
    if operator.other:
        efficiency = dict(node.compute_efficiency)
        del efficiency[WINOGRAD]
        without = replace(node, compute_efficiency=efficiency)
        assert without.seconds(operator) == pytest.approx(1 / CONV)


FIGURE = {"value": 1, "source": "x"}
# A change of a description, and what the error says.
BROKEN: list[tuple[Any, str]] = [
    ([], "expected an object"),
    ({"memory": 3}, "memory has to be a JSON object with the keys value|devices has to be"),
    ({"memory": {"value": -1, "source": "x"}}, "value of memory has to be a number above 0"),
    ({"memory": {"value": 1, "source": " "}}, "source of memory has to be text"),
    ({"speed": 3}, "'speed' is unknown"),
    ({"peak": {}}, "peak is missing"),
    ({"compute_efficiency": {"conv": FIGURE}}, "compute_efficiency.matmul is missing"),
    ({"memory_efficiency": {"pooling": FIGURE}}, "pooling is no class of operators"),
    ({"memory_efficiency": {"conv.float32": FIGURE}}, "conv.float32 is no class of operators"),
    ({"compute_efficiency": {"conv.float8": FIGURE}}, "conv.float8 is no class of operators"),
    ({"launch_overlaps": 1}, "launch_overlaps has to be true or false"),
]


@pytest.mark.parametrize(("change", "message"), BROKEN)
def test_refuses_what_is_no_description(tmp_path: Path, change: Any, message: str) -> None:
    description = json.loads((FOLDER / "p40x8.json").read_text())
    if isinstance(change, dict):
        description |= change
    else:
        description = change
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(description))
    with pytest.raises(ValueError, match=message) as raised:
        load_hardware(path)
    assert "mine.json" in str(raised.value)


BFLOAT16 = Operator("matmul", "bfloat16", 1, 1)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: load_hardware("nothing.json"), "cannot be read"),
        (lambda: load_hardware("p100"), "use one of a100x8, b200x8, .*, v100x8, or"),
        (lambda: P40.seconds(BFLOAT16), "no peak rate for bfloat16, only for float32"),
    ],
)
def test_refuses_what_is_unknown(ask: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ask()
