"""The P40's efficiencies are what cards of the same chip need; each part of the model brings it closer to these."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean

import pytest

from reproduce.p40.cards import TITAN_X
from reproduce.p40.efficiencies import MEMORY, errors, fitted, on_card
from reproduce.p40.timings import SOURCES
from reproduce.tables.prediction_effects import FUSED_BY_TIMINGS, variants
from torchgpipe.plan.hardware import Hardware, load_hardware

P40 = load_hardware("p40x8")
pytest.importorskip("torchvision", reason="the measured models are torchvision's")


def square(node: Hardware) -> float:
    """The mean square of the errors."""
    return mean(error**2 for error in errors(node).values())


def test_the_p40_efficiencies_are_what_cards_of_the_same_chip_need() -> None:
    found = fitted(P40)
    for kind, share in found.compute_efficiency.items():
        assert P40.compute_efficiency[kind] == pytest.approx(share, abs=0.005), kind
    for kind, share in found.memory_efficiency.items():
        assert P40.memory_efficiency[kind] == pytest.approx(share, abs=0.005), kind


@pytest.mark.parametrize("kinds", [("matmul", "conv", "conv3x3"), ("winograd",)])
@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_no_other_compute_efficiency_comes_closer(kinds: tuple[str, ...], factor: float) -> None:
    other = {kind: share * (factor if kind in kinds else 1) for kind, share in P40.compute_efficiency.items()}
    assert square(replace(P40, compute_efficiency=other)) > square(P40)


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_no_other_share_of_memory_comes_closer(factor: float) -> None:
    other = {kind: share * (factor if kind in MEMORY else 1) for kind, share in P40.memory_efficiency.items()}
    assert square(replace(P40, memory_efficiency=other)) > square(P40)


def test_the_timings_come_out_as_the_docs_say() -> None:
    found = errors(P40)
    assert len(found) == sum(len(steps) for source in SOURCES.values() for steps in source.steps.values())
    assert f"{len(found)} published timings" in P40.sources["compute_efficiency.conv"]
    assert square(P40) ** 0.5 < 0.05
    # The worst is ResNet-34 on one of two machines that differ by 8%.
    assert max(abs(error) for error in found.values()) < 0.17


def test_each_part_of_the_model_earns_its_place() -> None:
    """By the published timings, not by the tables' rows."""
    squares = [square(node) for node in variants().values()]
    assert squares == sorted(squares, reverse=True)


def test_the_timings_would_give_fused_winograd_kernels_even_less() -> None:
    found = fitted(P40, compute=FUSED_BY_TIMINGS)
    assert found.compute_efficiency["winograd_fused"] < P40.compute_efficiency["winograd_fused"]
    assert square(found) < square(P40)


def test_a_card_differs_from_a_p40_only_in_what_its_data_sheet_says() -> None:
    card = on_card(P40, TITAN_X, linear=0.3)
    assert card.peak["float32"] == pytest.approx(10.97e12, rel=1e-3)
    assert (card.processors, card.memory_bandwidth, card.memory_efficiency["matmul"]) == (28, 480e9, 0.3)
    kept = {name: getattr(P40, name) for name in ("peak", "memory_bandwidth", "processors", "launch")}
    assert replace(card, **kept, memory_efficiency=P40.memory_efficiency) == P40
