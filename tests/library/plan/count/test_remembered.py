"""Operators from memory look as if they had run; what may not be remembered runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from reproduce.models import amoebanetd, resnet101, unet
from torchgpipe.plan.count.count import count
from torchgpipe.plan.count.remembered import Remembered


class Ran(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func).split(".")[1])
        return func(*args, **(kwargs or {}))


def meta(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


@pytest.mark.parametrize(
    ("work", "ran"),
    [
        (lambda: meta(2, 3) + meta(3), ["add"]),
        (lambda: meta(2, 3).add_(meta(3)), ["add_", "add_"]),
        (lambda: meta(2, 3).view(6), ["view", "view"]),
        (lambda: torch.max(meta(2, 3), 1), ["max"]),
        (lambda: torch.cat([meta(2, 3), meta(1, 3)]), ["cat"]),
        (lambda: torch.ones(3) + 1, ["ones", "ones", "add", "add"]),
    ],
)
def test_runs_once(work: Callable[[], Any], ran: list[str]) -> None:
    with Ran() as inner, Remembered():
        first, second = work(), work()
    assert sorted(name for name in inner.names if not name.startswith("empty")) == sorted(ran)
    pairs = [(first, second)] if isinstance(first, Tensor) else list(zip(first, second, strict=True))
    for a, b in pairs:
        assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)
        assert a.untyped_storage() is not b.untyped_storage()


def test_element_by_element_any_shape_is_known() -> None:
    with Ran() as inner, Remembered():
        _ = meta(2, 3) * 2.5
        more = [x * 2.5 for x in (meta(4, 5), meta(4, 5, 6).half(), meta(5, 4).t(), meta(3).int())]
    assert inner.names.count("mul") == 4  # of the five, the second has the first one's type and is contiguous, too
    plain = [x * 2.5 for x in (meta(4, 5), meta(4, 5, 6).half(), meta(5, 4).t(), meta(3).int())]
    assert [(x.shape, x.stride(), x.dtype) for x in more] == [(x.shape, x.stride(), x.dtype) for x in plain]


@pytest.mark.parametrize("other", [lambda: meta(2, 1) + 1, lambda: meta(2, 3).t() + 1, lambda: meta(2, 3) + 1.5])
def test_tells_operators_apart(other: Callable[[], Tensor]) -> None:
    with Ran() as inner, Remembered():
        _ = meta(2, 3) + 1
        _ = other()
    assert inner.names.count("add") == 2


MODELS: list[tuple[Callable[[], nn.Sequential], tuple[int, ...]]] = [
    (lambda: unet(2, 1, 4), (3, 16, 16)),
    (lambda: amoebanetd(3, 32), (3, 224, 224)),
    (resnet101, (3, 64, 64)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("build", "shape"), MODELS, ids=["unet", "amoebanetd", "resnet101"])
def test_counts_the_same(
    build: Callable[[], nn.Sequential], shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operators, bytes and footprints of whole models."""
    with torch.device("meta"):
        model = build()
        fast = count(model, meta(1, *shape))
        monkeypatch.setattr(Remembered, "__torch_dispatch__", lambda _, func, __, a=(), k=None: func(*a, **(k or {})))
        assert count(model, meta(1, *shape)) == fast
