"""`@skippable`, `stash`, `pop`, `isolate`: the declared skips of a layer, the boundaries they cross, what is refused.

Whether skips reach their layers, in partitions and in a plain sequence, is tested in tests/behaviours.
"""

import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe import GPipe
from torchgpipe.skip import Namespace, pop, skippable, stash
from torchgpipe.skip.layout import skip_layout
from torchgpipe.skip.scope import SkipKey, skip_scope
from torchgpipe.skip.skippable import skips_of

from ..layers import Pop, Stash


@skippable(stash=["skip"])
class StashTenfold(Stash):
    def forward(self, x: Tensor) -> Any:
        yield stash("skip", x * 10)
        return x


class StashAndNegate(Stash):
    def forward(self, x: Tensor) -> Any:
        return -super().forward(x)


@skippable(stash=["b", "c"], pop=["a"])
class Several(nn.Identity):
    pass


X = torch.tensor([1.0, 2.0])


def test_a_subclass_stashes_by_itself_or_by_its_parent() -> None:
    with skip_scope({}) as scope:
        assert torch.equal(nn.Sequential(StashTenfold(), Pop(), Stash(), Pop())(X), 22 * X)
        assert torch.equal(nn.Sequential(StashAndNegate(), Pop())(X), 0 * X)
    assert scope == {}, "what was popped is not kept"


def test_isolate_returns_the_layer_and_can_take_some_names_only() -> None:
    """A copied layer still has the same skips as the original."""
    one, other, layer = Namespace(), Namespace(), Several()
    assert layer.isolate(one, only=["b"]).isolate(other, only=["c"]) is layer  # type: ignore[operator]
    for same in (layer, pickle.loads(pickle.dumps(layer))):
        assert skips_of(same) == ([SkipKey(one, "b"), SkipKey(other, "c")], [SkipKey(None, "a")])


def yielding(names: dict[str, list[str]], *steps: object) -> Callable[[], object]:
    """Return a function that runs a layer which declares these names and yields these objects."""

    def forward(self: nn.Module, x: Tensor) -> Any:
        yield from steps
        return x

    def run() -> None:
        with skip_scope({}):
            skippable(**names)(type("Layer", (nn.Module,), {"forward": forward}))()(X)

    return run


A = {"stash": ["a"]}

# The call, the error's type, its message.
REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "stash undeclared": (
        yielding(A, stash("z", X)),
        RuntimeError,
        r"tried to stash 'z'.*declared to stash \['a'\]",
    ),
    "pop undeclared": (
        yielding({"pop": ["a"]}, pop("z")),
        RuntimeError,
        r"tried to pop 'z'.*declared to pop \['a'\].*pop=\[",
    ),
    "pop what is stashed": (
        yielding(A, pop("a")),
        RuntimeError,
        r"tried to pop 'a'.*declared to pop \[\]",
    ),
    "not stashed": (
        yielding(A),
        RuntimeError,
        r"Layer declares skips \['a'\].*did not stash or pop",
    ),
    "no yield": (
        lambda: skippable(**A)(type("Plain", (nn.Identity,), {}))()(X),
        RuntimeError,
        r"Plain declares.*did not stash",
    ),
    "yields else": (yielding(A, X), TypeError, "may yield stash.*pop.*yielded Tensor"),
    "pop before stash": (
        yielding({"pop": ["a"]}, pop("a")),
        RuntimeError,
        "pops 'a', but no earlier layer stashed it",
    ),
    "no name": (lambda: skippable(), TypeError, "at least one name"),
    "stash str": (
        lambda: skippable(stash="abc"),
        TypeError,
        r"stash=\['abc'\] instead of stash='abc'",
    ),
    "both": (
        lambda: skippable(stash=["a", "b"], pop=["b"]),
        TypeError,
        r"stash and pop one name; got \['b'\]",
    ),
    "stash int": (lambda: stash("a", 1), TypeError, "takes a tensor or None, but got int"),  # type: ignore[arg-type]
    "isolate str": (lambda: Pop().isolate("ns"), TypeError, "Namespace, but got str"),  # type: ignore[operator]
    "only unknown": (
        lambda: Pop().isolate(Namespace(), only=["z"]),
        ValueError,
        r"skips \['skip'\].*\['z'\]",
    ),  # type: ignore[operator]
    "only str": (lambda: Pop().isolate(Namespace(), only="a"), TypeError, r"only=\['a'\]"),  # type: ignore[operator]
}


@pytest.mark.parametrize("do, error, message", REFUSED.values(), ids=REFUSED)
def test_refused(do: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        do()


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
@pytest.mark.parametrize(
    ("text", "straight", "through"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
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
