"""`@skippable`, `stash`, `pop`, `isolate`: in a plain sequence of layers, and what is refused."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchgpipe.skip import Namespace, pop, skippable, stash
from torchgpipe.skip.scope import SkipKey, skip_scope
from torchgpipe.skip.skippable import skips_of


@skippable(stash=["a"])
class StashA(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("a", x)
        return x * 2


@skippable(pop=["a"])
class PopA(nn.Module):
    def forward(self, x: Tensor) -> Any:
        a = yield pop("a")
        return x + a


@skippable(stash=["b", "c"], pop=["a"])
class Swap(nn.Module):
    def forward(self, x: Tensor) -> Any:
        a = yield pop("a")
        yield stash("b", a * 10)
        yield stash("c", None)
        return x


@skippable(pop=["b", "c"])
class PopBC(nn.Module):
    def forward(self, x: Tensor) -> Any:
        c = yield pop("c")
        b = yield pop("b")
        assert c is None
        return x + b


@skippable(stash=["a"])
class StashTenfold(StashA):
    def forward(self, x: Tensor) -> Any:
        yield stash("a", x * 10)
        return x


class StashAndNegate(StashA):
    def forward(self, x: Tensor) -> Any:
        return -super().forward(x)


X = torch.tensor([1.0, 2.0])
PLAIN: dict[str, tuple[list[nn.Module], Tensor]] = {
    "neighbours": ([StashA(), PopA()], 3 * X),
    "apart": ([StashA(), nn.Identity(), PopA(), nn.Identity()], 3 * X),
    "several, and None": ([StashA(), Swap(), PopBC()], 12 * X),
    "one name twice, one after the other": ([StashA(), PopA(), StashA(), PopA()], 9 * X),
    "a subclass, decorated again": ([StashTenfold(), PopA()], 11 * X),
    "a subclass around its parent's forward": ([StashAndNegate(), PopA()], -X),
}


@pytest.mark.parametrize("layers, expected", PLAIN.values(), ids=PLAIN)
def test_runs_in_a_plain_sequential(layers: list[nn.Module], expected: Tensor) -> None:
    assert torch.equal(nn.Sequential(*layers)(X), expected)


def test_isolated_pairs_of_one_class_may_cross() -> None:
    outer, inner = Namespace(), Namespace()
    layers = [StashA().isolate(outer), StashA().isolate(inner), PopA().isolate(outer), PopA().isolate(inner)]  # type: ignore[operator]
    model = nn.Sequential(*layers)
    for same in (model, pickle.loads(pickle.dumps(model))):
        # 2x, 4x, 4x + x, 5x + 2x
        assert torch.equal(same(X), 7 * X)


def test_isolate_returns_the_layer_and_can_take_some_names_only() -> None:
    one, other, layer = Namespace(), Namespace(), Swap()
    assert layer.isolate(one, only=["b"]).isolate(other, only=["c"]) is layer  # type: ignore[operator]
    assert skips_of(layer) == ([SkipKey(one, "b"), SkipKey(other, "c")], [SkipKey(None, "a")])


def test_a_scope_holds_a_tensor_from_stash_to_pop_only() -> None:
    with skip_scope({}) as scope:
        StashA()(X)
        assert list(scope) == [SkipKey(None, "a")]
        PopA()(X)
        assert scope == {}


def test_skips_of_subclasses_and_of_layers_within_layers() -> None:
    @skippable(stash=["a"], pop=["b"])
    class Renamed(StashA):
        pass

    assert StashA.__name__ == "StashA"
    assert skips_of(Renamed()) == ([SkipKey(None, "a")], [SkipKey(None, "b")])
    assert skips_of(nn.Sequential(nn.Sequential(StashA()), nn.Identity())) == ([SkipKey(None, "a")], [])


def yielding(*steps: object) -> Callable[[nn.Module, Tensor], Any]:
    def forward(self: nn.Module, x: Tensor) -> Any:
        yield from steps
        return x

    return forward


# What is declared, the forward, the error, and what it says.
UNDECLARED: dict[str, tuple[dict[str, list[str]], Callable[..., Any], type[Exception], str]] = {
    "stash undeclared": (
        {"stash": ["a"]}, yielding(stash("z", X)), RuntimeError, r"tried to stash 'z'.*declared to stash \['a'\]"
    ),
    "pop undeclared": (
        {"pop": ["a"]}, yielding(pop("z")), RuntimeError, r"tried to pop 'z'.*declared to pop \['a'\].*pop=\["
    ),
    "pop what is stashed": (
        {"stash": ["a"]}, yielding(pop("a")), RuntimeError, r"tried to pop 'a'.*declared to pop \[\]"
    ),
    "not stashed": ({"stash": ["a"]}, yielding(), RuntimeError, r"Layer declares skips \['a'\].*did not stash or pop"),
    "no yield": ({"stash": ["a"]}, lambda self, x: x, RuntimeError, r"declares skips \['a'\].*did not stash or pop"),
    "yields else": ({"stash": ["a"]}, yielding(X), TypeError, "may yield stash.*pop.*yielded Tensor"),
    "pop before stash": ({"pop": ["a"]}, yielding(pop("a")), RuntimeError, "pops 'a', but no earlier layer stashed it"),
}  # fmt: skip


@pytest.mark.parametrize("names, forward, error, message", UNDECLARED.values(), ids=UNDECLARED)
def test_a_forward_that_does_not_keep_to_its_declaration(
    names: dict[str, list[str]], forward: Any, error: type[Exception], message: str
) -> None:
    layer = skippable(**names)(type("Layer", (nn.Module,), {"forward": forward}))()
    with skip_scope({}), pytest.raises(error, match=message):
        layer(X)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: skippable(), TypeError, "at least one name"),
        (lambda: skippable(stash="abc"), TypeError, r"stash=\['abc'\] instead of stash='abc'"),
        (lambda: skippable(pop="abc"), TypeError, r"pop=\['abc'\] instead of pop='abc'"),
        (lambda: skippable(stash=["a", "b"], pop=["b"]), TypeError, r"stash and pop one name; got \['b'\]"),
        (lambda: stash("a", 1), TypeError, "takes a tensor or None, but got int"),  # type: ignore[arg-type]
        (lambda: StashA().isolate("ns"), TypeError, "Namespace, but got str"),  # type: ignore[operator]
        (lambda: StashA().isolate(Namespace(), only=["z"]), ValueError, r"has skips \['a'\].*\['z'\]"),  # type: ignore[operator]
        (lambda: StashA().isolate(Namespace(), only="a"), TypeError, r"only=\['a'\]"),  # type: ignore[operator]
    ],
    ids=["no name", "stash str", "pop str", "both", "stash int", "isolate str", "only unknown", "only str"],
)
def test_misuse(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
