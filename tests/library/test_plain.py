"""Plain values come back as they were, and nothing else is told."""

from collections import defaultdict
from math import inf, nan
from typing import Any

import pytest
import torch

from torchgpipe.plain import packed, unpacked

VALUES: dict[str, Any] = {
    "numbers": [0, -1, 10**30, True, -0.0, 1e-300, inf, -inf, nan, 1j, complex(nan, -0.0), None],
    "text": ["", "ü\n\x00", b"", b"\xff\x00", "tuple", '{"tuple": []}'],
    "within each other": {"tuple": ({1: [(), {}], (2, "a"): {b"4"}},), None: [set(), [[]]]},
}
ROUND: list[Any] = []
ROUND.append(ROUND)
OTHERS = [torch.ones(1), torch.Size([2]), torch.float, int, defaultdict(int), "a".join, ROUND, 10**5000, ..., object()]


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_values_come_back(value: Any) -> None:
    assert repr(unpacked(packed(value))) == repr(value)
    assert len({len(packed("a" * n)) for n in range(500)}) < 9


@pytest.mark.parametrize("value", OTHERS, ids=lambda value: type(value).__name__)
def test_others_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"ranks tell each other only .*, not a|cannot be told to other ranks"):
        packed([{"a": (value,)}])
