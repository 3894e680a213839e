"""The skip layout, as a table: layers and partitions in, crossings out."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from torchgpipe.skip import Namespace, pop, skippable, stash
from torchgpipe.skip.layout import Crossing, skip_layout
from torchgpipe.skip.scope import SkipKey


def layer(stashes: str = "", pops: str = "") -> nn.Module:
    """Make a layer that stashes and pops the skips named by single letters."""
    if not stashes and not pops:
        return nn.Identity()

    def forward(self: nn.Module, x: Any) -> Any:
        for name in pops:
            yield pop(name)
        for name in stashes:
            yield stash(name, x)
        return x

    cls = skippable(stash=list(stashes), pop=list(pops))(type("Layer", (nn.Module,), {"forward": forward}))
    made: nn.Module = cls()
    return made


# Each partition is a string of layers; "+a" stashes a, "-a" pops a, "." does neither. The crossings are
# (skip, from, to).
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


def partitions(text: list[str]) -> list[nn.Sequential]:
    def one(word: str) -> nn.Module:
        return layer(stashes=word[1:] if word[0] == "+" else "", pops=word[1:] if word[0] == "-" else "")

    return [nn.Sequential(*(one(word) for word in words.split())) for words in text]


@pytest.mark.parametrize("portals", [True, False], ids=["portals", "no portals"])
@pytest.mark.parametrize(("text", "straight", "through"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_crossings(text: list[str], straight: list[str], through: list[str], portals: bool) -> None:
    crossings = skip_layout(partitions(text), portals=portals)
    found = [f"{key.name}{source}{target}" for key, source, target in crossings]
    assert sorted(found) == sorted(straight if portals else through)


def test_namespaces_keep_equal_names_apart() -> None:
    one, two = Namespace(), Namespace()
    stash_a, pop_a = layer(stashes="a"), layer(pops="a")
    outer = [type(stash_a)().isolate(one), type(pop_a)().isolate(one)]
    inner = [type(stash_a)().isolate(two), type(pop_a)().isolate(two)]
    crossings = skip_layout([nn.Sequential(outer[0]), nn.Sequential(inner[0], inner[1]), nn.Sequential(outer[1])])
    assert crossings == [Crossing(SkipKey(one, "a"), 0, 2)]
