"""`benchmarks.any_model`: a few of its models, what it would say of a wrong one, and its page."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.any_model import compared, ours
from benchmarks.any_model_lists import Case, torchvision_models
from benchmarks.any_model_page import PAGE, render, result


# A residual network, auxiliary outputs, a class token, windows with masks, a dictionary of outputs, concatenation.
@pytest.mark.parametrize(
    "name",
    [
        "resnet18",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("googlenet", "vit_b_32", "swin_t", "lraspp_mobilenet_v3_large", "squeezenet1_0")
        ),
    ],
)
def test_torchvision(name: str) -> None:
    pytest.importorskip("torchvision")
    found = ours(torchvision_models()[name]())
    assert found["skips"] > 0 or name == "squeezenet1_0"
    assert result(found) == "equal"


class Pairwise(nn.Module):
    """Whose outputs depend on the other samples of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) - x.mean())


def test_a_batch_is_compared_by_micro_batches() -> None:
    assert result(ours(Case(Pairwise(), torch.randn(5, 3)))) == "equal"


ONE, OTHER = torch.ones(2), torch.tensor([1.0, 1.1])
DIFFERENT: list[tuple[Any, Any, str]] = [
    (ONE, ONE, "equal"),
    (None, None, "equal"),
    (ONE, ONE * (1 + 1e-6), "equal"),
    (OTHER, ONE, "x: differs by 0.1, where the largest value is 1"),
    (None, ONE, "x: missing"),
    (ONE, None, "x: there, but not in the model"),
    (ONE[:1], ONE, "x: shape (1,) for (2,)"),
]


@pytest.mark.parametrize("found, plain, said", DIFFERENT)
def test_compared(found: Any, plain: Any, said: str) -> None:
    assert compared({"x": found}, {"x": plain}) == said


def test_the_page_is_current() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == render(page), "write it anew: python -m benchmarks.any_model_page"
