"""One backward says what others would be, where gradients are held or there already; or the others are run, too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from torchgpipe.plan.count.count import count
from torchgpipe.plan.count.live import Live


class Weighted(nn.Module):
    """A function of a parameter and the input."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.weight, x)


# A layer, and whether its first backward is enough.
CASES: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "product": (lambda: nn.Linear(8, 8), True),
    "no parameters": (nn.GELU, True),
    "several layers": (lambda: nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 8)), True),
    "gradient handed on": (lambda: Weighted(lambda w, x: x + w.sum()), False),
    "gradient copied for a parameter": (lambda: Weighted(lambda w, x: (x.sin().sum(0) + w).cos() + x), False),
    "gradient shared as a view": (lambda: Weighted(lambda w, x: (x.sum(0).cos() + w.view(2, 4).view(8)) * x), False),
}


@pytest.mark.parametrize("name", CASES)
def test_one_backward_or_four(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, enough = CASES[name]
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), build(), nn.Linear(8, 8))
    asked: list[bool] = []
    only_read, taken_over = Live.given_only_read, Live.taken_over

    def noted(live: Live, answer: bool) -> bool:
        asked.append(answer)
        return answer

    monkeypatch.setattr(Live, "given_only_read", lambda live: noted(live, only_read(live)))
    monkeypatch.setattr(Live, "taken_over", lambda live, grad: noted(live, taken_over(live, grad)))
    found = count(model, torch.empty(2, 8))
    assert all(asked) == enough
    monkeypatch.setattr(Live, "given_only_read", lambda live: False)
    assert count(model, torch.empty(2, 8)) == found
