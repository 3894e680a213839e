"""Check the layers that `benchmarks.compiled` times."""

from typing import Any

import torch

from benchmarks.compiled import KINDS


def test_all_kinds_of_layers_compute_the_same() -> None:
    torch.manual_seed(0)
    formulas = KINDS["formulas"](16)
    x = torch.rand(2, 8, 16)
    expected: Any = formulas(x)
    expected.sum().backward()
    for kind in KINDS.values():
        block = kind(16)
        block.load_state_dict(formulas.state_dict())
        y = block(x)
        y.sum().backward()
        torch.testing.assert_close(y, expected)
        for (name, ours), theirs in zip(
            block.named_parameters(), formulas.parameters(), strict=True
        ):
            torch.testing.assert_close(ours.grad, theirs.grad, msg=name)
