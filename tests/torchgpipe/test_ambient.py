"""Ambient: the caller's modes, entered later. That they reach other threads is in tests/behaviours."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

from torchgpipe.ambient import Ambient
from torchgpipe.checkpoint import checkpointing, is_checkpointing, is_recomputing, recomputing

DEVICES = [torch.device("cpu"), torch.device("meta"), torch.device("cuda")]  # looked at, not used
Contexts = list[Callable[[], Any]]


def modes() -> dict[str, Any]:
    """Return the modes of this thread."""
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
        "device": torch.get_default_device().type,
        "passing": (is_checkpointing(), is_recomputing()),
    }


def autocast(dtype: torch.dtype = torch.bfloat16, enabled: bool = True) -> Callable[[], Any]:
    return lambda: torch.autocast("cpu", dtype=dtype, enabled=enabled)


# The contexts around the call, and what they change.
USUAL = modes()
MODES: dict[str, tuple[Contexts, dict[str, Any]]] = {
    "none": ([], {}),
    "no grad": ([torch.no_grad], {"grad": False}),
    "grad within no grad": ([torch.no_grad, torch.enable_grad], {}),
    "inference mode": ([torch.inference_mode], {"grad": False, "inference": True}),
    "bfloat16": ([autocast()], {"autocast": torch.bfloat16}),
    "float16": ([autocast(torch.float16)], {"autocast": torch.float16}),
    "autocast off within on": ([autocast(), autocast(enabled=False)], {}),
    "bfloat16 without grad": ([autocast(), torch.no_grad], {"autocast": torch.bfloat16, "grad": False}),
    "default device": ([lambda: torch.device("meta")], {"device": "meta"}),
    "an outer pipeline's first pass": ([checkpointing], {"passing": (True, False)}),
    "an outer pipeline's second pass": ([recomputing], {"passing": (False, True)}),
}


def remembered(contexts: Contexts) -> Ambient:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        return Ambient(DEVICES)


AGAIN = ("autocast", "device")


@pytest.mark.parametrize("around", MODES.values(), ids=MODES)
@pytest.mark.parametrize("contexts, changes", MODES.values(), ids=MODES)
def test_entered_later_within_others(
    contexts: Contexts, changes: dict[str, Any], around: tuple[Contexts, dict[str, Any]]
) -> None:
    ambient, outer, inner = remembered(contexts), USUAL | around[1], USUAL | changes
    with ExitStack() as stack:
        for context in around[0]:
            stack.enter_context(context())
        with pytest.raises(ArithmeticError), ambient.entered():
            assert modes() == inner
            raise ArithmeticError
        assert modes() == outer
        # Those that a recomputation enters; the others are the engine's own.
        with ambient.again():
            assert modes() == outer | {name: inner[name] for name in AGAIN}
        assert modes() == outer


def test_a_weight_cast_without_a_graph_does_not_serve_one_with_a_graph() -> None:
    linear, x = nn.Linear(3, 3), torch.randn(2, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ambient = Ambient(DEVICES)
        with torch.no_grad(), ambient.for_first_pass():
            linear(x)
        linear(x).sum().backward()
        assert linear.weight.grad is not None
        for context in (ambient.for_first_pass, ambient.again, ambient.entered):
            with context():
                assert not torch.is_autocast_cache_enabled()
            assert torch.is_autocast_cache_enabled()
