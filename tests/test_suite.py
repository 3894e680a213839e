"""What the suite relies on: what differs is said."""

from typing import Any

import pytest
import torch

from .behaviours.compare import differences

ONE, OTHER = torch.ones(2), torch.tensor([1.0, 1.1])
CASES: list[tuple[Any, Any, float, list[str]]] = [
    (ONE, ONE, 0, []),
    ([ONE, None, 1, "a"], [ONE, None, 1, "a"], 0, []),
    ({"x": OTHER}, {"x": ONE}, 0, ["x differs by 0.1, where the largest value is 1"]),
    ({"x": ONE * (1 + 1e-6)}, {"x": ONE}, 1e-5, []),
    ({"x": ONE * (1 + 1e-6)}, {"x": ONE}, 0, ["x differs by 9.5e-07, where the largest value is 1"]),
    ({"x": None}, {"x": ONE}, 0, ["x missing"]),
    ({"x": ONE}, {}, 0, ["x there, but not in the model"]),
    ({"x": ONE[:1]}, {"x": ONE}, 1, ["x shape (1,) of torch.float32 for (2,) of torch.float32"]),
    ({"x": ONE.double()}, {"x": ONE}, 1, ["x shape (2,) of torch.float64 for (2,) of torch.float32"]),
    ({"x": ONE}, {"x": ONE.clone().requires_grad_() * 1}, 0, ["x takes no gradient"]),
    ({"x": 1}, {"x": True}, 0, ["x is 1 for True"]),
    ([1.0], [1.0, 2.0], 0, ["1 missing", "length is 1 for 2"]),
    (torch.full((2,), torch.nan), ONE, 1, ["differs by nan, where the largest value is 1"]),
]


@pytest.mark.parametrize("ours, plain, tolerance, said", CASES)
def test_differences(ours: Any, plain: Any, tolerance: float, said: list[str]) -> None:
    assert [line.strip() for line in differences(ours, plain, tolerance)] == said
