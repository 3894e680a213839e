"""The one place that touches PyTorch's table of floating-point operations, which it does not promise to keep.

`tests/library/plan/count/test_counter.py` fails, by name, when it moves.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.flop_counter import flop_registry


def flops_of(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> float:
    """Return the floating-point operations of an operator that was called, by its formula; 0 where it has none."""
    formula = flop_registry.get(getattr(operator, "overloadpacket", operator))
    return 0.0 if formula is None else float(formula(*args, **kwargs, out_val=result))
