"""The one place that touches PyTorch's table of floating-point operations, which it does not promise to keep.

`tests/library/plan/count/test_counter.py` fails, by name, when it moves.
"""

from collections.abc import Callable
from typing import Any

from torch.utils.flop_counter import flop_registry


def flop_formula(operator: Any) -> Callable[..., int] | None:
    """Return what counts the operator's floating-point operations, given its arguments and its result as `out_val`."""
    return flop_registry.get(getattr(operator, "overloadpacket", operator))
