"""Convolutions timed by themselves: what they do, by hand, and what fused Winograd kernels need to be as published."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reproduce.single_convolutions import FACES, FIGURES, SMALL, SPEECH, Figure, Shape, fused_share, predicted_rate
from torchgpipe.plan.hardware import Hardware, load_hardware

P40 = load_hardware("p40x8")
OF_FUSED = [figure for figure in FIGURES if figure.shape == FACES]


def with_fused(share: float) -> Hardware:
    return replace(P40, compute_efficiency={**P40.compute_efficiency, "winograd_fused": share})


@pytest.mark.parametrize(
    ("shape", "multiplications"),
    [
        (FACES, 8 * 64 * 54 * 54 * 64 * 9),
        (SMALL, 16 * 512 * 7 * 7 * 512 * 9),
        (SPEECH, 32 * 32 * 71 * 348 * 20 * 5),
    ],
)
def test_each_is_one_operator(shape: Shape, multiplications: int) -> None:
    assert shape.operator().flops == 2 * multiplications


def test_the_description_has_the_share_that_the_figures_need() -> None:
    assert P40.compute_efficiency["winograd_fused"] == pytest.approx(fused_share(P40), abs=0.005)


@pytest.mark.parametrize("figure", OF_FUSED, ids=lambda figure: figure.card.name)
def test_with_it_they_come_out_as_published(figure: Figure) -> None:
    """The two cards differ by a tenth in what they reach, so that each is half of it off."""
    assert predicted_rate(figure, P40) == pytest.approx(figure.rate, rel=0.06)


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: f"{figure.card.name} {figure.shape.images}")
def test_fused_kernels_decide_only_on_the_figures_from_which_they_are_worked_out(figure: Figure) -> None:
    now, faster = predicted_rate(figure, P40), predicted_rate(figure, with_fused(1.1 * fused_share(P40)))
    assert (faster > now) == (figure in OF_FUSED)
