"""Test the functions for skips: `@skippable`, `stash`, `pop` and `isolate`.

A skip is a tensor that one layer stashes and a later layer pops. The tests check which skips a
layer has, how skips are copied to other partitions, and that misuse raises errors. Whole models
with skips are tested in tests/behaviours.
"""

import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Identity, Module, Sequential

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
class Several(Identity):
    pass


X = torch.tensor([1.0, 2.0])


def test_a_subclass_stashes_by_itself_or_by_its_parent() -> None:
    tenfold_and_once = Sequential(StashTenfold(), Pop(), Stash(), Pop())
    negated = Sequential(StashAndNegate(), Pop())
    with skip_scope({}) as scope:
        assert torch.equal(tenfold_and_once(X), 22 * X)
        assert torch.equal(negated(X), 0 * X)
    assert scope == {}, "what was popped is not kept"


def test_isolate_returns_the_layer_and_can_take_some_names_only() -> None:
    """Check that two skips of a layer get two namespaces, and that a pickled copy keeps these."""
    one, other = Namespace(), Namespace()
    layer = Several()
    isolated = layer.isolate(one, only=["b"])  # type: ignore[operator]
    assert isolated.isolate(other, only=["c"]) is layer
    stashed = [SkipKey(one, "b"), SkipKey(other, "c")]
    popped = [SkipKey(None, "a")]
    copied = pickle.loads(pickle.dumps(layer))
    assert skips_of(layer) == (stashed, popped)
    assert skips_of(copied) == (stashed, popped)


def yielding(names: dict[str, list[str]], *steps: object) -> Callable[[], object]:
    """Return a function that makes a layer with the skips `names`, and runs its forward.

    The forward of the layer yields `steps` one after another. Usually, a layer yields `stash` and
    `pop`.
    """

    def forward(self: Module, x: Tensor) -> Any:
        yield from steps
        return x

    def run() -> None:
        kind = skippable(**names)(type("Layer", (Module,), {"forward": forward}))
        with skip_scope({}):
            kind()(X)

    return run


def without_a_yield() -> None:
    kind = skippable(stash=["a"])(type("Plain", (Identity,), {}))
    kind()(X)


def stash_a_number() -> None:
    stash("a", 1)  # type: ignore[arg-type]


def isolated_by_a_name() -> None:
    Pop().isolate("ns")  # type: ignore[operator]


def isolated_in_part(only: object) -> None:
    Pop().isolate(Namespace(), only=only)  # type: ignore[operator]


A = {"stash": ["a"]}
POP_A = {"pop": ["a"]}

# A call, the error's type, and a part of the error's message.
REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "stash undeclared": (
        yielding(A, stash("z", X)),
        RuntimeError,
        r"tried to stash the skip 'z'.*declared to stash only \['a'\]",
    ),
    "pop undeclared": (
        yielding(POP_A, pop("z")),
        RuntimeError,
        r"tried to pop the skip 'z'.*declared to pop only \['a'\].*pop=\[",
    ),
    "pop what is stashed": (
        yielding(A, pop("a")),
        RuntimeError,
        r"tried to pop the skip 'a'.*declared to pop only \[\]",
    ),
    "not stashed": (
        yielding(A),
        RuntimeError,
        r"Layer declares skips \['a'\].*did not stash or pop",
    ),
    "no yield": (without_a_yield, RuntimeError, r"Plain declares.*did not stash"),
    "yields else": (yielding(A, X), TypeError, "may yield stash.*pop.*yielded Tensor"),
    "pop before stash": (
        yielding(POP_A, pop("a")),
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
        r"the names \['b'\] are in stash and in pop",
    ),
    "stash int": (stash_a_number, TypeError, "takes a tensor or None, but got int"),
    "isolate str": (isolated_by_a_name, TypeError, "Namespace, but got str"),
    "only unknown": (
        lambda: isolated_in_part(["z"]),
        ValueError,
        r"skips \['skip'\].*\['z'\]",
    ),
    "only str": (lambda: isolated_in_part("a"), TypeError, r"only=\['a'\]"),
}


@pytest.mark.parametrize("do, error, message", REFUSED.values(), ids=REFUSED)
def test_refused(do: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        do()


def layer(word: str) -> Module:
    """Make a layer with skips from a word, such as "+ab", "-a" or ".".

    The layer of "+ab" stashes the skips a and b, that of "-a" pops a, and that of "." has no skips.
    """
    if word == ".":
        return Identity()
    verb = {"+": "stash", "-": "pop"}[word[0]]
    names = {verb: list(word[1:])}
    kind = skippable(**names)(type("Layer", (Module,), {}))
    made: Module = kind()
    return made


# Each value has three lists:
# 1. The partitions. Each is a string with a word for each layer (see the function `layer`).
# 2. The expected copies with portals, which copy a skip straight to the partition that pops it.
#    "a03" is a copy of the skip a from partition 0 to partition 3.
# 3. The expected copies without portals: each goes from a partition to the next one.
CASES = {
    "inside a partition": (["+a -a", "."], [], []),
    "past two": (["+a", ".", ".", "-a"], ["a03"], ["a01", "a12", "a23"]),
    "several over one boundary": (["+a +b", "-b -a"], ["b01", "a01"], ["b01", "a01"]),
    "crossing each other": (
        ["+a", "+b", "-a", "-b"],
        ["a02", "b13"],
        ["a01", "a12", "b12", "b23"],
    ),
    "nested": (["+a +b", "-b", "-a"], ["b01", "a02"], ["b01", "a01", "a12"]),
}


@pytest.mark.parametrize("portals", [True, False], ids=["portals", "no portals"])
@pytest.mark.parametrize(("text", "straight", "through"), CASES.values(), ids=CASES)
def test_crossings(text: list[str], straight: list[str], through: list[str], portals: bool) -> None:
    partitions = [Sequential(*map(layer, words.split())) for words in text]
    crossings = skip_layout(partitions, portals=portals)
    found = [f"{key.name}{source}{target}" for key, source, target in crossings]
    assert sorted(found) == sorted(straight if portals else through)


# Each value lists the faults that the error must report for a model. The key has a word for each
# layer: "+a" stashes the skip `a`, "-a" pops it, and "." does neither. The index of a layer is its
# name.
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
    words = text.split()
    layers = OrderedDict((str(k), layer(word)) for k, word in enumerate(words))
    n = len(words)
    with pytest.raises(TypeError, match="skips do not match") as caught:
        GPipe(Sequential(layers), [1] * n, devices=["cpu"] * n)
    message = str(caught.value)
    assert message.startswith(f"skips do not match: {'; '.join(faults)}; if a class")
    assert message.endswith("isolate(ns)")
