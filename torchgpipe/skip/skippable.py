"""Skippable layers: `stash` a tensor in one layer, `pop` it in a later one (torchgpipe paper, section 3.3).

    @skippable(stash=["skip"])
    class Down(nn.Module):
        def forward(self, x):
            yield stash("skip", x)
            return pool(x)

    @skippable(pop=["skip"])
    class Up(nn.Module):
        def forward(self, x):
            skip = yield pop("skip")
            return upsample(x) + skip

A skippable layer works in a `GPipe` and in a plain `nn.Sequential` alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable, Iterator
from types import GeneratorType
from typing import Any, TypeVar

from torch import Tensor, nn

from torchgpipe.skip.namespace import Namespace
from torchgpipe.skip.scope import SkipKey, current_scope

Layer = TypeVar("Layer", bound=type[nn.Module])


class stash:
    """Say, by `yield stash(name, tensor)`, that a later layer will pop `tensor` (or `None`) under `name`."""

    __slots__ = ("name", "tensor")

    def __init__(self, name: str, tensor: Tensor | None) -> None:
        if not (tensor is None or isinstance(tensor, Tensor)):
            raise TypeError(f"stash({name!r}, …) takes a tensor or None, but got {type(tensor).__name__}")
        self.name = name
        self.tensor = tensor


class pop:
    """Ask, by `tensor = yield pop(name)`, for what an earlier layer stashed under `name`."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


def skippable(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[Layer], Layer]:
    """Make a module class able to stash and pop the named skips; decorate the class with it.

    The class's `forward` may then be a generator that yields `stash(name, tensor)` and `pop(name)`, and returns
    its output. Every declared name has to be used in every forward. Instances gain
    `isolate(ns, *, only=None)`, which puts their skips (or those named in `only`) into a namespace and
    returns the instance.

    Raises:
        TypeError: no name is declared, `stash` or `pop` is a single string, or one name is in both.
    """
    stashes, pops = _names("stash", stash), _names("pop", pop)
    if not stashes and not pops:
        raise TypeError("skippable needs at least one name to stash or pop: @skippable(stash=['name'])")
    if both := stashes & pops:
        raise TypeError(f"a layer cannot stash and pop one name; got {sorted(both)} in both")

    def decorate(layer: Layer) -> Layer:
        plain_forward = layer.forward

        @functools.wraps(plain_forward)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            result = plain_forward(self, *args, **kwargs)
            if isinstance(result, GeneratorType):
                return _drive(self, result)
            _check_all_used(self, set())
            return result

        for name, value in (
            ("forward", forward),
            ("_stashes", stashes),
            ("_pops", pops),
            ("isolate", _isolate),
        ):
            setattr(layer, name, value)
        return layer

    return decorate


def skips_of(module: nn.Module) -> tuple[list[SkipKey], list[SkipKey]]:
    """Return the skips that `module` and its submodules stash, and those that they pop, in module order."""
    stashes: list[SkipKey] = []
    pops: list[SkipKey] = []
    for layer in _skippable_modules(module):
        stashes += [_key(layer, name) for name in sorted(_declared(layer, "_stashes"))]
        pops += [_key(layer, name) for name in sorted(_declared(layer, "_pops"))]
    return stashes, pops


def _names(what: str, names: Iterable[str]) -> frozenset[str]:
    if isinstance(names, str):
        raise TypeError(f"skippable takes lists of names; write {what}=[{names!r}] instead of {what}={names!r}")
    return frozenset(names)


def _skippable_modules(module: nn.Module) -> Iterator[nn.Module]:
    return (m for m in module.modules() if hasattr(type(m), "_stashes"))


def _declared(layer: nn.Module, which: str) -> frozenset[str]:
    names: frozenset[str] = getattr(type(layer), which)
    return names


def _key(layer: nn.Module, name: str) -> SkipKey:
    return SkipKey(layer.__dict__.get("_namespaces", {}).get(name), name)


def _isolate(self: nn.Module, ns: Namespace, *, only: Iterable[str] | None = None) -> nn.Module:
    """Put this layer's skips, or only those named in `only`, into namespace `ns`; return the layer."""
    if not isinstance(ns, Namespace):
        raise TypeError(f"isolate takes a torchgpipe.skip.Namespace, but got {type(ns).__name__}")
    declared = _declared(self, "_stashes") | _declared(self, "_pops")
    names = declared if only is None else _names("only", only)
    if unknown := names - declared:
        raise ValueError(f"{type(self).__name__} has skips {sorted(declared)}, but isolate got {sorted(unknown)}")
    self.__dict__["_namespaces"] = {**self.__dict__.get("_namespaces", {}), **dict.fromkeys(names, ns)}
    return self


def _drive(layer: nn.Module, steps: Generator[object, Tensor | None, Any]) -> Any:
    """Run a generator forward to its end, answering what it yields."""
    scope = current_scope()
    used: set[str] = set()
    answer: Tensor | None = None
    while True:
        try:
            step = steps.send(answer)
        except StopIteration as end:
            _check_all_used(layer, used)
            return end.value
        answer = None
        if isinstance(step, stash):
            _check_declared(layer, "_stashes", step.name)
            scope[_key(layer, step.name)] = step.tensor
        elif isinstance(step, pop):
            _check_declared(layer, "_pops", step.name)
            try:
                answer = scope.pop(_key(layer, step.name))
            except KeyError:
                raise RuntimeError(
                    f"{type(layer).__name__} pops {_key(layer, step.name)}, but no earlier layer stashed it"
                ) from None
        else:
            raise TypeError(
                f"{type(layer).__name__}.forward may yield stash(…) or pop(…), but it yielded {type(step).__name__}"
            )
        used.add(step.name)


def _check_declared(layer: nn.Module, which: str, name: str) -> None:
    if name not in _declared(layer, which):
        verb = "stash" if which == "_stashes" else "pop"
        raise RuntimeError(
            f"{type(layer).__name__} tried to {verb} {name!r}, but is declared to {verb} "
            f"{sorted(_declared(layer, which))}; add it to @skippable({verb}=[…])"
        )


def _check_all_used(layer: nn.Module, used: set[str]) -> None:
    if missing := (_declared(layer, "_stashes") | _declared(layer, "_pops")) - used:
        raise RuntimeError(
            f"{type(layer).__name__} declares skips {sorted(missing)}, but its forward did not stash or pop them"
        )
