"""Test cases with PyTorch modes, such as a `TorchFunctionMode`, around forward or backward.

The modes change the results of tanh, count calls of tanh, or change the default dtype.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ...parts.layers import Do, linear
from ...row import Row
from .reports import seen

one_at_a_time = threading.Lock()


class Functions(TorchFunctionMode):
    """A `TorchFunctionMode` that multiplies each result of tanh by a factor.

    Args:
        by: A function that returns the factor, by default 2. Its argument is a list with one
            number, which it can increase to count its calls.
    """

    only_watches = False

    def __init__(self, by: Callable[[list[int]], int] = lambda calls: 2) -> None:
        self.by, self.calls = by, [0]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        if func is Tensor.tanh:
            y = y * self.by(self.calls)
        return y


def once(calls: list[int]) -> int:
    """Count a call, and return 1."""
    with one_at_a_time:
        calls[0] += 1
    return 1


def as_often_as_called(calls: list[int]) -> int:
    return once(calls) * calls[0]


class Operators(TorchDispatchMode):
    """A mode that doubles results of tanh."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.tanh.default:
            y = 2 * y
        return y


@contextmanager
def in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def meet(_: Any, x: Tensor) -> Tensor:
    """Return tanh of the input, times the number of bits of the default dtype.

    The result shows which modes of the test were active in this forward: one of them changes tanh,
    and another changes the default dtype.
    """
    bits = torch.finfo(torch.get_default_dtype()).bits
    return x.tanh() * bits


def met() -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [linear(), Do(meet)]
    return nn.Sequential(*layers)


def within(
    forward: Callable[[], Any], backward: Callable[[], Any] = nullcontext
) -> Callable[[nn.Module, Tensor], Any]:
    """Return a function that runs two steps of a model within context managers.

    Args:
        forward: Makes the context manager around each forward.
        backward: Makes the context manager around each backward.
    """

    def use(run: nn.Module, x: Tensor) -> Any:
        shown = []
        for _ in range(2):
            run.zero_grad()
            with forward():
                y = run(x)
            shown += [y.detach(), y.requires_grad, y.is_inference()]
            if y.requires_grad:
                with backward():
                    y.backward(torch.ones_like(y))
            shown.append(seen(run))
        return shown

    return use


def counted(run: nn.Module, x: Tensor, by: Any = once, *, safe: bool = False) -> list[int]:
    """Run a step, with a mode around its forward that counts calls of tanh. Return the count.

    Args:
        run: The model.
        x: The input.
        by: A function that counts a call, and returns the factor for the result of tanh (see
            `Functions`). The default factor is 1.
        safe: The value of the mode's attribute `only_watches`, which says whether several threads
            may use the mode at once.
    """
    mode = Functions(by)
    mode.only_watches = safe
    with mode:
        y = run(x)
    y.sum().backward()
    return mode.calls


TYPE = dict.fromkeys(("workers always", "workers except_last"), "default dtype was")
STATE = "has state, which"
APART = {"ranks": "each counts what its own layers call"}
NOTE = (
    "The mode may also be active only in forward, or only in backward. A recomputation runs with "
    "the modes that were active in its forward."
)
TWO_EACH: Any = {"layers": met, "balance": (2, 2, 2)}

ROWS: list[Row] = []
for what, mode, refused in (
    ("`TorchFunctionMode`", Functions, {}),
    ("`TorchDispatchMode`", Operators, {}),
    ("a default type", in_float64, TYPE),
):
    around_both = within(mode, mode)
    around_forward, around_backward = within(mode), within(nullcontext, mode)
    note = "" if refused else NOTE
    ROWS += [
        Row(f"{what} in forward", use=around_forward, refused=refused, **TWO_EACH),
        Row(f"{what} in backward", use=around_backward, refused=refused, **TWO_EACH),
        Row(f"{what} in forward and backward", use=around_both, note=note, **TWO_EACH),
    ]
ROWS += [
    Row(
        "a mode that counts, as `FlopCounterMode`",
        use=counted,
        refused={"workers": STATE},
        without=APART,
        note="Worker threads would change the count at the same time, so they refuse such a "
        "mode. They accept it if its class sets `only_watches = True`.",
        **TWO_EACH,
    ),
    Row(
        "a mode that counts, for threads",
        use=partial(counted, safe=True),
        without=APART,
        **TWO_EACH,
    ),
    Row(
        "a mode whose count matters",
        refused={"workers": STATE, "": "changes its own attributes"},
        use=partial(counted, by=as_often_as_called),
        without={"never": "of another order"},
        **TWO_EACH,
    ),
]
