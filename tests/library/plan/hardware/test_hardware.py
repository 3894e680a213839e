"""Hardware descriptions are complete and have sources; the P40's efficiencies fit published measurements."""

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
    assert {"peak.float32", "memory_bandwidth", "launch", "link_latency"} <= set(hardware.sources)
    assert all(len(source) > 10 for source in hardware.sources.values())
    assert (WINOGRAD in hardware.compute_efficiency) == (WINOGRAD in hardware.memory_efficiency)
    assert hardware.processors > 0
    assert all(share <= 1 for share in hardware.memory_efficiency.values())


P40, A100 = map(load_hardware, ("p40x8", "a100x8"))
CONV, FASTER = (P40.compute_efficiency[kind] for kind in ("conv", WINOGRAD))
COPY, KERNEL = P40.memory_efficiency["conv"], P40.memory_efficiency["elementwise"]
CORE = replace(
    P40, launch_overlaps=False
)  # it launches, computes and moves bytes one after another
SLOW = Operator("winograd", "float32", 12e12 * FASTER / CONV / 1.1, 0)
FAST = Operator("winograd", "float32", 6e11, 0)
READ = Operator("winograd", "float32", 0, 346e8)


def conv(other: tuple[Operator, ...] = (), grid: Grid | None = None) -> Operator:
    return Operator("conv", "float32", 12e12, 0, other, grid)


@pytest.mark.parametrize(
    ("node", "operator", "seconds"),
    [
        (P40, conv(), 1 / CONV),
        (P40, Operator("elementwise", "float32", 0, 346e9), 1 / KERNEL),
        (P40, Operator("elementwise", "float32", 0, 4), 1e-5),
        (P40, Operator("conv", "float32", 1, 346e9), 1 / COPY),
        # Products are in whole tiles, on whole rounds of 30 processors.
        (P40, conv((), Grid(128, 128 * 30)), 1 / CONV),
        (P40, conv((), Grid(64, 128 * 30)), 1 / CONV),  # in tiles of 64 x 128
        (
            replace(P40, processors=4),
            conv((), Grid(128, 128)),
            1 / CONV,
        ),  # in four tiles of 32 x 128
        (P40, conv((), Grid(32, 128)), 30 / CONV),  # one processor works, the others wait
        (P40, conv((), Grid(32, 128, divisible=True)), 1 / CONV),
        (P40, conv((), Grid(32, 128, 60)), 1 / CONV),
        (P40, conv((), Grid(3, 128, divisible=True)), 32 / 3 / CONV),  # 29 of 32 rows are padding
        (P40, conv((), Grid(128, 3, divisible=True)), 32 / 3 / CONV),
        (
            P40,
            conv((), Grid(128, 32 * 31)),
            60 / 31 / CONV,
        ),  # 31 of the smallest tiles: a second round for one
        (CORE, Operator("elementwise", "float32", 0, 346e9), 1 / KERNEL + 1e-5),
        (CORE, Operator("conv", "float32", 12e12, 346e9), 1 / CONV + 1 / COPY + 1e-5),
        # Depends on the dtype.
        (A100, Operator("conv", "tf32", 156e12, 0), 1 / A100.compute_efficiency["conv.tf32"]),
        (A100, Operator("conv", "bfloat16", 312e12, 0), 1 / A100.compute_efficiency["conv"]),
        (
            A100,
            Operator("attention", "float16", 312e12, 0),
            1 / A100.compute_efficiency["attention"],
        ),
        (P40, Operator("conv", "tf32", 12e12, 0), 1 / CONV),
        (P40, Operator("attention", "float32", 12e12, 0), 1 / P40.compute_efficiency["matmul"]),
        # The faster algorithm counts, if there is one.
        (P40, conv((SLOW,)), 1 / 1.1 / CONV),
        (P40, conv((FAST, READ)), 0.05 / FASTER + 0.1 / COPY),
        (P40, conv((SLOW, SLOW)), 1 / CONV),
    ],
)
def test_seconds(node: Hardware, operator: Operator, seconds: float) -> None:
    assert node.seconds(operator) == pytest.approx(seconds)
    without = {kind: share for kind, share in node.compute_efficiency.items() if kind != WINOGRAD}
    if operator.other:
        assert replace(node, compute_efficiency=without).seconds(operator) == pytest.approx(
            1 / CONV
        )


BROKEN: list[tuple[Any, str]] = [
    ([], "expected an object"),
    ({"memory": 3}, "memory has to be an object with value and source|devices has to be"),
    ({"memory": {"value": -1, "source": "x"}}, "memory: value has to be a number above 0"),
    ({"memory": {"value": 1, "source": " "}}, "memory: source has to say"),
    ({"speed": 3}, "'speed' is unknown"),
    ({"peak": {}}, "peak is missing"),
    (
        {"compute_efficiency": {"conv": {"value": 1, "source": "x"}}},
        "compute_efficiency.matmul is missing",
    ),
    (
        {"memory_efficiency": {"pooling": {"value": 1, "source": "x"}}},
        "pooling is no class of operators",
    ),
    (
        {"memory_efficiency": {"conv.float32": {"value": 1, "source": "x"}}},
        "conv.float32 is no class of operators",
    ),
    (
        {"compute_efficiency": {"conv.float8": {"value": 1, "source": "x"}}},
        "conv.float8 is no class of operators",
    ),
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


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: load_hardware("nothing.json"), "cannot be read"),
        (lambda: load_hardware("p100"), "there are a100x8, h100x8, h200x8, p40x8, v100x8"),
        (
            lambda: P40.seconds(Operator("matmul", "bfloat16", 1, 1)),
            "no peak rate for bfloat16; it has float32",
        ),
    ],
)
def test_refuses_what_is_unknown(ask: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ask()
