"""`verify_skippables`: every fault is listed, with the layers' names and what to do."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from torch import nn

from torchgpipe import GPipe
from torchgpipe.skip import verify_skippables

from ..layers import Pop, Stash


def model(text: str) -> nn.Sequential:
    kinds = {"s": Stash, "p": Pop, "_": nn.Identity}
    return nn.Sequential(OrderedDict((f"{k}{c}", kinds[c]()) for k, c in enumerate(text)))


@pytest.mark.parametrize("text", ["", "__", "sp", "_s_p_"])
def test_accepted(text: str) -> None:
    layers = model(text)
    verify_skippables(layers)
    assert len(GPipe(layers, [1] * len(layers), devices=["cpu"] * len(layers))) == len(text)


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("s_", ["layer '0s' stashes 'skip', which no later layer pops"]),
        ("_p", ["layer '1p' pops 'skip', which no earlier layer stashes"]),
        ("ps", ["layer '0p' pops 'skip', which no earlier layer stashes"]),
        ("ssp", ["layer '1s' stashes 'skip', which layer '0s' stashed already"]),
        ("spp", ["layer '2p' pops 'skip', which layer '1p' popped already"]),
        (
            "sspp",
            [
                "layer '1s' stashes 'skip', which layer '0s' stashed already",
                "layer '3p' pops 'skip', which layer '2p' popped already",
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


def test_gpipe_verifies() -> None:
    with pytest.raises(TypeError, match="skips do not match"):
        GPipe(model("s_"), [1, 1], devices=["cpu", "cpu"])
