"""The P40's efficiencies are what a Titan X of the same chip needs; each part of the model brings it closer to that."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean

import pytest

from reproduce.efficiencies import CONV_FROM, MEASURED, WINOGRAD_FROM, checked, derived, titan_x
from reproduce.prediction_effects import variants
from torchgpipe.plan.hardware import load_hardware

P40 = load_hardware("p40x8")
pytest.importorskip("torchvision", reason="the measured models are torchvision's")


def test_the_p40_efficiencies_are_what_a_titan_x_of_the_same_chip_needs() -> None:
    for kind, share in derived(P40).items():
        assert P40.compute_efficiency[kind] == pytest.approx(share, abs=0.005), kind


def test_they_give_the_totals_that_they_were_worked_out_from() -> None:
    errors = {
        model: sum(time * (1 + error) for time, error in zip(MEASURED[model], pair, strict=True)) / sum(MEASURED[model])
        for model, pair in checked(P40, derived(P40)).items()
    }
    assert errors[WINOGRAD_FROM] == pytest.approx(1, abs=0.01)
    assert mean(errors[model] for model in CONV_FROM) == pytest.approx(1, abs=0.02)
    # Of the models that were not used, as the docs show: none is off by more.
    assert all(abs(error - 1) < 0.07 for error in errors.values())


def test_each_part_of_the_model_earns_its_place() -> None:
    """By the published timings, not by the tables' rows."""
    squares = [
        mean(error**2 for pair in checked(node, dict(node.compute_efficiency)).values() for error in pair)
        for node in variants().values()
    ]
    assert squares == sorted(squares, reverse=True)


def test_a_titan_x_differs_from_a_p40_only_in_what_its_data_sheet_says() -> None:
    titan = titan_x(P40, {})
    assert titan.peak["float32"] == pytest.approx(10.97e12, rel=1e-3)
    assert (titan.processors, titan.memory_bandwidth) == (28, 480e9)
    same = replace(
        titan, peak=P40.peak, memory_bandwidth=P40.memory_bandwidth, processors=P40.processors, launch=P40.launch
    )
    assert same == P40
