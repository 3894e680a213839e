"""Convolutions timed by themselves: what they do, by hand, and what fused Winograd kernels need to be as published."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reproduce.p40.single_convolutions import FACES, FIGURES, SMALL, SPEECH, Figure, Shape, fused_share, predicted
from torchgpipe.plan.hardware import Hardware, load_hardware

P40 = load_hardware("p40x8")
OF_FUSED = [figure for figure in FIGURES if figure.shape == FACES]


def with_fused(share: float) -> Hardware:
    return replace(P40, compute_efficiency={**P40.compute_efficiency, "winograd_fused": share})


def name(figure: Figure) -> str:
    return f"{figure.card.name} {figure.shape.images} {figure.rate:.3g}"


@pytest.mark.parametrize(
    ("shape", "multiplications"),
    [
        (FACES, 8 * 64 * 54 * 54 * 64 * 9),
        (SMALL, 16 * 512 * 7 * 7 * 512 * 9),
        # The next layer's images, in DeepBench's list for inference, are of 79 x 341.
        (SPEECH, 32 * 32 * 79 * 341 * 5 * 20),
    ],
)
def test_each_is_one_operator_and_two_for_its_gradients(shape: Shape, multiplications: int) -> None:
    forward, backward = shape.operators()
    assert [x.flops for x in (forward, *backward)] == [2 * multiplications] * 3


@pytest.mark.parametrize("figure", FIGURES, ids=name)
def test_forward_is_less_than_half_of_what_was_published_in_all(figure: Figure) -> None:
    """As it would not be, were a shape another than the one that was timed."""
    assert 0.15 < figure.seconds / figure.total < 0.5


def test_the_description_has_the_share_that_the_figures_need() -> None:
    assert P40.compute_efficiency["winograd_fused"] == pytest.approx(fused_share(P40), abs=0.005)


@pytest.mark.parametrize("figure", OF_FUSED, ids=name)
def test_with_it_they_come_out_as_published(figure: Figure) -> None:
    """The two cards differ by a tenth in what they reach, so that each is half of it off."""
    assert predicted(figure, P40)[0] == pytest.approx(figure.seconds, rel=0.06)


@pytest.mark.parametrize("figure", FIGURES, ids=name)
def test_fused_kernels_decide_only_on_the_figures_from_which_they_are_worked_out(figure: Figure) -> None:
    now, faster = (predicted(figure, with_fused(share))[0] for share in (fused_share(P40), 1.1 * fused_share(P40)))
    assert (faster < now) == (figure in OF_FUSED)


@pytest.mark.parametrize("figure", OF_FUSED, ids=name)
def test_gradients_come_out_better_too_though_they_do_not_decide(figure: Figure) -> None:
    apart, alike = (predicted(figure, node)[1] for node in (P40, with_fused(P40.compute_efficiency["winograd"])))
    assert alike < apart < figure.total
