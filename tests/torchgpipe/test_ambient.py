"""Ambient: the caller's modes, entered in another thread or later."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

from torchgpipe.ambient import Ambient

CPU = [torch.device("cpu")]


def modes() -> tuple[Any, ...]:
    """Return grad mode, inference mode, and autocast's type for the CPU or `None`."""
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast


def autocast(dtype: torch.dtype = torch.bfloat16, enabled: bool = True) -> Callable[[], Any]:
    return lambda: torch.autocast("cpu", dtype=dtype, enabled=enabled)


# The contexts around the call, and the modes that they make.
MODES: dict[str, tuple[list[Callable[[], Any]], tuple[Any, ...]]] = {
    "none": ([], (True, False, None)),
    "no grad": ([torch.no_grad], (False, False, None)),
    "grad within no grad": ([torch.no_grad, torch.enable_grad], (True, False, None)),
    "inference mode": ([torch.inference_mode], (False, True, None)),
    "bfloat16": ([autocast()], (True, False, torch.bfloat16)),
    "float16": ([autocast(torch.float16)], (True, False, torch.float16)),
    "autocast off": ([autocast(enabled=False)], (True, False, None)),
    "autocast off within on": ([autocast(), autocast(enabled=False)], (True, False, None)),
    "bfloat16 without grad": ([autocast(), torch.no_grad], (False, False, torch.bfloat16)),
}


def remembered(contexts: list[Callable[[], Any]]) -> Ambient:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        return Ambient(CPU)


@pytest.mark.parametrize("contexts, expected", MODES.values(), ids=MODES)
def test_entered_in_another_thread(contexts: list[Callable[[], Any]], expected: tuple[Any, ...]) -> None:
    ambient = remembered(contexts)
    seen: list[Any] = []

    def other() -> None:
        with ambient.entered():
            seen.append(modes())
        seen.append(modes())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join(10)
    assert seen == [expected, MODES["none"][1]]


@pytest.mark.parametrize("around", MODES.values(), ids=MODES)
@pytest.mark.parametrize("contexts, expected", MODES.values(), ids=MODES)
def test_entered_later_within_others(
    contexts: list[Callable[[], Any]],
    expected: tuple[Any, ...],
    around: tuple[list[Callable[[], Any]], tuple[Any, ...]],
) -> None:
    ambient = remembered(contexts)
    with ExitStack() as stack:
        for context in around[0]:
            stack.enter_context(context())
        with ambient.entered():
            assert modes() == expected
        assert modes() == around[1]
        with ambient.autocast():
            assert modes() == (*around[1][:2], expected[2])
        assert modes() == around[1]


@pytest.mark.parametrize("contexts, expected", MODES.values(), ids=MODES)
def test_put_back_after_an_exception(contexts: list[Callable[[], Any]], expected: tuple[Any, ...]) -> None:
    ambient = remembered(contexts)
    with pytest.raises(ArithmeticError), ambient.entered():
        assert modes() == expected
        raise ArithmeticError
    assert modes() == MODES["none"][1]


def test_a_weight_cast_without_a_graph_does_not_serve_one_with_a_graph() -> None:
    linear, x = nn.Linear(3, 3), torch.randn(2, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ambient = Ambient(CPU)
        with torch.no_grad(), ambient.autocast():
            linear(x)
        linear(x).sum().backward()
    assert linear.weight.grad is not None


def test_the_cache_of_weights_is_off_inside_and_the_callers_outside() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=True):
        ambient = Ambient(CPU)
        for context in (ambient.autocast, ambient.entered):
            with context():
                assert not torch.is_autocast_cache_enabled()
            assert torch.is_autocast_cache_enabled()


@pytest.mark.parametrize("device", ["cpu", "meta", "cuda"])
def test_of_devices_that_are_not_there(device: str) -> None:
    # Only the state is looked at, so that this needs no such device.
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ambient = Ambient([torch.device(device)])
    with ambient.entered():
        assert modes() == (True, False, torch.bfloat16)
