"""The P40's efficiencies are what cards of the same chip need, and what is committed is what the fit gives."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torchvision", reason="the timed models are torchvision's")

from research.p40.__main__ import RECORD
from research.p40.cards import TITAN_X
from research.p40.compared import root_mean_square
from research.p40.fit import COMPUTE, LAUNCH, MEMORY, fitted, on_card
from research.p40.timings import SOURCES
from torchgpipe.plan.hardware import Hardware, load_hardware

pytestmark = pytest.mark.slow

P40 = load_hardware("p40x8")


def shares(node: Hardware) -> dict[str, float]:
    return {"compute": node.compute_efficiency["conv"], "memory": node.memory_efficiency["norm"]}


def test_what_is_committed_is_what_the_fit_gives() -> None:
    record = json.loads(RECORD.read_text())
    assert record["efficiencies"] == shares(P40) == pytest.approx(shares(fitted(P40)), abs=0.005)
    assert record["models"]["this model"]["timings"] == pytest.approx(root_mean_square(P40), abs=0.002)
    assert sum(len(x["errors"]) for x in record["timings"]) == sum(
        len(steps) for source in SOURCES.values() for steps in source.steps.values()
    )


def test_classes_share_an_efficiency() -> None:
    assert {P40.compute_efficiency[kind] for kinds in COMPUTE for kind in kinds} == {shares(P40)["compute"]}
    assert {P40.memory_efficiency[kind] for kind in MEMORY} == {shares(P40)["memory"]}


@pytest.mark.parametrize("factor", [0.9, 1.1])
@pytest.mark.parametrize("name", ["compute", "memory"])
def test_no_other_efficiency_comes_closer(name: str, factor: float) -> None:
    kinds = COMPUTE[0] if name == "compute" else MEMORY
    table = getattr(P40, f"{name}_efficiency")
    changed = {kind: share * (factor if kind in kinds else 1) for kind, share in table.items()}
    options: dict[str, Any] = {f"{name}_efficiency": changed}
    other = replace(P40, **options)
    assert root_mean_square(other) > root_mean_square(P40)


def test_a_card_differs_from_a_p40_only_in_what_its_data_sheet_says() -> None:
    card = on_card(P40, TITAN_X, linear=0.3)
    assert card.peak["float32"] == pytest.approx(10.97e12, rel=1e-3)
    assert (card.processors, card.memory_bandwidth, card.memory_efficiency["matmul"]) == (28, 480e9, 0.3)
    assert card.launch == LAUNCH
    kept = {name: getattr(P40, name) for name in ("peak", "memory_bandwidth", "processors", "launch")}
    assert replace(card, **kept, memory_efficiency=P40.memory_efficiency) == P40
