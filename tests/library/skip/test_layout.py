"""The skip layout, as a table: layers and partitions in, crossings out."""

from __future__ import annotations

import pytest
from torch import nn

from torchgpipe.skip import skippable
from torchgpipe.skip.layout import skip_layout


def layer(word: str) -> nn.Module:
    """Make a layer that stashes or pops skips of one letter: "+ab", "-a", or neither: "."."""
    if word == ".":
        return nn.Identity()
    verb = {"+": "stash", "-": "pop"}[word[0]]
    made: nn.Module = skippable(**{verb: list(word[1:])})(type("Layer", (nn.Module,), {}))()
    return made


# Each partition is a string of layers. Then the crossings, with portals and without: the skip, from where, to where.
CASES = [
    ("no skip", [". .", "."], [], []),
    ("inside a partition", ["+a -a", "."], [], []),
    ("to the next", ["+a", "-a"], ["a01"], ["a01"]),
    ("past one", ["+a", ".", "-a"], ["a02"], ["a01", "a12"]),
    ("past two", ["+a", ".", ".", "-a"], ["a03"], ["a01", "a12", "a23"]),
    ("several over one boundary", ["+a +b", "-b -a"], ["b01", "a01"], ["b01", "a01"]),
    ("crossing each other", ["+a", "+b", "-a", "-b"], ["a02", "b13"], ["a01", "a12", "b12", "b23"]),
    ("nested", ["+a +b", "-b", "-a"], ["b01", "a02"], ["b01", "a01", "a12"]),
    ("in and across", ["+a -a +b", "-b +c -c"], ["b01"], ["b01"]),
]


@pytest.mark.parametrize("portals", [True, False], ids=["portals", "no portals"])
@pytest.mark.parametrize(("text", "straight", "through"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_crossings(text: list[str], straight: list[str], through: list[str], portals: bool) -> None:
    partitions = [nn.Sequential(*map(layer, words.split())) for words in text]
    crossings = skip_layout(partitions, portals=portals)
    found = [f"{key.name}{source}{target}" for key, source, target in crossings]
    assert sorted(found) == sorted(straight if portals else through)
