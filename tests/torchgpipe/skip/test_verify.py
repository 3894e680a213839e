"""`verify_skippables`: every fault is listed, with the layers' names and what to do."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
from torch import nn

from torchgpipe import GPipe
from torchgpipe.skip import Namespace, pop, skippable, stash, verify_skippables


@skippable(stash=["a"])
class S(nn.Module):
    def forward(self, x: Any) -> Any:
        yield stash("a", x)
        return x


@skippable(pop=["a"])
class P(nn.Module):
    def forward(self, x: Any) -> Any:
        yield pop("a")
        return x


def model(text: str) -> nn.Sequential:
    kinds = {"s": S, "p": P, "_": nn.Identity}
    return nn.Sequential(OrderedDict((f"{k}{c}", kinds[c]()) for k, c in enumerate(text)))


@pytest.mark.parametrize("text", ["", "__", "sp", "_s_p_"])
def test_accepted(text: str) -> None:
    verify_skippables(model(text))


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("s_", ["layer '0s' stashes 'a', which no later layer pops"]),
        ("_p", ["layer '1p' pops 'a', which no earlier layer stashes"]),
        ("ps", ["layer '0p' pops 'a', which no earlier layer stashes"]),
        ("ssp", ["layer '1s' stashes 'a', which layer '0s' stashed already"]),
        ("spp", ["layer '2p' pops 'a', which layer '1p' popped already"]),
        (
            "sspp",
            [
                "layer '1s' stashes 'a', which layer '0s' stashed already",
                "layer '3p' pops 'a', which layer '2p' popped already",
            ],
        ),
    ],
)
def test_faults_are_all_listed(text: str, faults: list[str]) -> None:
    with pytest.raises(TypeError) as caught:
        verify_skippables(model(text))
    for fault in faults:
        assert fault in str(caught.value)
    assert str(caught.value).count("\n- ") == len(faults)
    assert "isolate(Namespace())" in str(caught.value)


def test_isolation_makes_two_pairs_right() -> None:
    layers = model("sspp")
    for layer, namespace in zip(layers, [first := Namespace(), second := Namespace(), first, second], strict=True):
        layer.isolate(namespace)
    assert first != second
    verify_skippables(layers)


def test_gpipe_verifies() -> None:
    with pytest.raises(TypeError, match="skips do not match"):
        GPipe(model("s_"), [1, 1], devices=["cpu", "cpu"])
