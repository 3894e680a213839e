"""Skips over partitions: which boundaries they cross, and which models are refused."""

from collections import OrderedDict

import pytest
from torch import nn

from torchgpipe import GPipe
from torchgpipe.skip import skippable
from torchgpipe.skip.layout import skip_layout


def layer(word: str) -> nn.Module:
    """Make a layer that stashes or pops skips of one letter: "+ab", "-a", or neither: "."."""
    if word == ".":
        return nn.Identity()
    verb = {"+": "stash", "-": "pop"}[word[0]]
    made: nn.Module = skippable(**{verb: list(word[1:])})(type("Layer", (nn.Module,), {}))()
    return made


# Partitions, as strings of layers; the copies with portals, and without: name of the skip, source, target.
CASES = [
    ("inside a partition", ["+a -a", "."], [], []),
    ("past two", ["+a", ".", ".", "-a"], ["a03"], ["a01", "a12", "a23"]),
    ("several over one boundary", ["+a +b", "-b -a"], ["b01", "a01"], ["b01", "a01"]),
    ("crossing each other", ["+a", "+b", "-a", "-b"], ["a02", "b13"], ["a01", "a12", "b12", "b23"]),
    ("nested", ["+a +b", "-b", "-a"], ["b01", "a02"], ["b01", "a01", "a12"]),
]


@pytest.mark.parametrize("portals", [True, False], ids=["portals", "no portals"])
@pytest.mark.parametrize(("text", "straight", "through"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_crossings(text: list[str], straight: list[str], through: list[str], portals: bool) -> None:
    partitions = [nn.Sequential(*map(layer, words.split())) for words in text]
    crossings = skip_layout(partitions, portals=portals)
    found = [f"{key.name}{source}{target}" for key, source, target in crossings]
    assert sorted(found) == sorted(straight if portals else through)


# The layers of a model, named by their index, and the faults reported.
FAULTS = {
    "+a .": ["layer '0' stashes 'a', which no later layer pops"],
    ". -a": ["layer '1' pops 'a', which no earlier layer stashes"],
    "-a +a": ["layer '0' pops 'a', which no earlier layer stashes"],
    "+a +a -a -a": [
        "layer '1' stashes 'a', which layer '0' stashed already",
        "layer '3' pops 'a', which layer '2' popped already",
    ],
}


@pytest.mark.parametrize("text, faults", FAULTS.items(), ids=FAULTS)
def test_faults_are_all_listed(text: str, faults: list[str]) -> None:
    model = nn.Sequential(OrderedDict((str(k), layer(word)) for k, word in enumerate(text.split())))
    with pytest.raises(TypeError, match="skips do not match") as caught:
        GPipe(model, [1] * len(model), devices=["cpu"] * len(model))
    assert all(f"- {fault}\n" in str(caught.value) for fault in faults)
    assert str(caught.value).count("\n- ") == len(faults)
    assert "isolate(Namespace())" in str(caught.value)
