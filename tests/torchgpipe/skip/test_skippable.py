"""`@skippable`, `stash`, `pop`, `isolate`: in a plain sequence of layers, and what is refused."""

from __future__ import annotations

import pickle
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


X = torch.tensor([1.0, 2.0])


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([StashA(), PopA()], 3 * X),
        ([StashA(), nn.Identity(), PopA(), nn.Identity()], 3 * X),
        ([StashA(), Swap(), PopBC()], 12 * X),
        ([StashA(), PopA(), StashA(), PopA()], 9 * X),
    ],
    ids=["neighbours", "apart", "several, and None", "one name twice, one after the other"],
)
def test_runs_in_a_plain_sequential(layers: list[nn.Module], expected: Tensor) -> None:
    assert torch.equal(nn.Sequential(*layers)(X), expected)


def test_isolated_pairs_of_one_class_may_cross() -> None:
    outer, inner = Namespace(), Namespace()
    layers = [StashA().isolate(outer), StashA().isolate(inner), PopA().isolate(outer), PopA().isolate(inner)]
    # 2x, 4x, 4x + x, 5x + 2x
    assert torch.equal(nn.Sequential(*layers)(X), 7 * X)


def test_isolate_returns_the_layer_and_can_take_some_names_only() -> None:
    namespace = Namespace()
    layer = Swap()
    assert layer.isolate(namespace, only=["b"]) is layer
    stashes, pops = skips_of(layer)
    assert stashes == [SkipKey(namespace, "b"), SkipKey(None, "c")]
    assert pops == [SkipKey(None, "a")]
    other = Namespace()
    layer.isolate(other)
    assert set(skips_of(layer)[0]) == {SkipKey(other, "b"), SkipKey(other, "c")}


def test_a_scope_holds_a_tensor_from_stash_to_pop_only() -> None:
    with skip_scope({}) as scope:
        StashA()(X)
        assert list(scope) == [SkipKey(None, "a")]
        PopA()(X)
        assert scope == {}


def test_a_decorated_class_stays_itself() -> None:
    class Small(StashA):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

    layer = Small()
    assert isinstance(layer, StashA) and isinstance(layer, nn.Module)
    assert list(layer.state_dict()) == ["weight"]
    assert StashA.__name__ == "StashA"
    with skip_scope({}):
        assert torch.equal(layer(X), 2 * X)


@skippable(stash=["a"])
class StashTenfold(StashA):
    def forward(self, x: Tensor) -> Any:
        yield stash("a", x * 10)
        return x


class StashAndNegate(StashA):
    def forward(self, x: Tensor) -> Any:
        return -super().forward(x)


@skippable(stash=["a"], pop=["b"])
class Renamed(StashA):
    def forward(self, x: Tensor) -> Any:
        b = yield pop("b")
        yield stash("a", b)
        return x


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([StashTenfold(), PopA()], 11 * X),
        ([StashAndNegate(), PopA()], -X),
        ([StashA(), PopA()], 3 * X),
    ],
    ids=["decorated again", "around the parent's forward", "the parent is as before"],
)
def test_subclasses(layers: list[nn.Module], expected: Tensor) -> None:
    assert torch.equal(nn.Sequential(*layers)(X), expected)


def test_a_subclass_declares_its_own_skips() -> None:
    assert skips_of(Renamed()) == ([SkipKey(None, "a")], [SkipKey(None, "b")])
    assert skips_of(StashA()) == ([SkipKey(None, "a")], [])


def test_a_nested_skippable_is_found() -> None:
    assert skips_of(nn.Sequential(nn.Sequential(StashA()), nn.Identity())) == ([SkipKey(None, "a")], [])


def test_pickling_keeps_pairs_together() -> None:
    namespace = Namespace()
    model = nn.Sequential(StashA().isolate(namespace), PopA().isolate(namespace))
    copied = pickle.loads(pickle.dumps(model))
    assert torch.equal(copied(X), 3 * X)


def test_a_forward_without_yield_is_taken_as_it_is() -> None:
    @skippable(stash=["a"])
    class Delegating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = StashA()

        def forward(self, x: Tensor) -> Tensor:
            return torch.as_tensor(x)

    with pytest.raises(RuntimeError, match=r"Delegating declares skips \['a'\].*did not stash or pop"):
        Delegating()(X)


def _layer(body: Any, **names: list[str]) -> nn.Module:
    return skippable(**names)(type("Layer", (nn.Module,), {"forward": body}))()


def _stash_wrong_name(self: nn.Module, x: Tensor) -> Any:
    yield stash("z", x)
    return x


def _pop_wrong_name(self: nn.Module, x: Tensor) -> Any:
    yield pop("z")
    return x


def _stash_nothing(self: nn.Module, x: Tensor) -> Any:
    yield from ()
    return x


def _yield_something_else(self: nn.Module, x: Tensor) -> Any:
    yield x
    return x


def _pop_a(self: nn.Module, x: Tensor) -> Any:
    yield pop("a")
    return x


@pytest.mark.parametrize(
    ("body", "names", "error", "message"),
    [
        (_stash_wrong_name, {"stash": ["a"]}, RuntimeError, r"tried to stash 'z'.*declared to stash \['a'\]"),
        (_pop_wrong_name, {"pop": ["a"]}, RuntimeError, r"tried to pop 'z'.*declared to pop \['a'\].*pop=\["),
        (_stash_nothing, {"stash": ["a"]}, RuntimeError, r"declares skips \['a'\].*did not stash or pop"),
        (_yield_something_else, {"stash": ["a"]}, TypeError, "may yield stash.*pop.*yielded Tensor"),
        (_pop_a, {"pop": ["a"]}, RuntimeError, "pops 'a', but no earlier layer stashed it"),
    ],
    ids=["stash undeclared", "pop undeclared", "not stashed", "yields else", "pop before stash"],
)
def test_a_forward_that_does_not_keep_to_its_declaration(
    body: Any, names: dict[str, list[str]], error: type[Exception], message: str
) -> None:
    with skip_scope({}), pytest.raises(error, match=message):
        _layer(body, **names)(X)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: skippable(), TypeError, "at least one name"),
        (lambda: skippable(stash="abc"), TypeError, r"stash=\['abc'\] instead of stash='abc'"),
        (lambda: skippable(pop="abc"), TypeError, r"pop=\['abc'\] instead of pop='abc'"),
        (lambda: skippable(stash=["a", "b"], pop=["b"]), TypeError, r"stash and pop one name; got \['b'\]"),
        (lambda: stash("a", 1), TypeError, "takes a tensor or None, but got int"),
        (lambda: StashA().isolate("ns"), TypeError, "Namespace, but got str"),
        (lambda: StashA().isolate(Namespace(), only=["z"]), ValueError, r"has skips \['a'\].*\['z'\]"),
        (lambda: StashA().isolate(Namespace(), only="a"), TypeError, r"only=\['a'\]"),
    ],
    ids=["no name", "stash str", "pop str", "both", "stash int", "isolate str", "only unknown", "only str"],
)
def test_misuse(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
