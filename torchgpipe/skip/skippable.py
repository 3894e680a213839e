"""Skippable layers: `stash` a tensor in one layer, `pop` it in a later one (torchgpipe paper, section 3.3).

A skippable layer works in a `GPipe` and in a plain `nn.Sequential` alike.
"""

import functools
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from types import GeneratorType
from typing import Any, TypeVar

from torch import Tensor, nn

from torchgpipe.skip.scope import Namespace, SkipKey, current_scope

Layer = TypeVar("Layer", bound=type[nn.Module])


@dataclass(slots=True, eq=False)
class stash:
    """Say, by `yield stash(name, tensor)`, that a later layer will pop `tensor` (or `None`) under `name`."""

    name: str
    tensor: Tensor | None

    def __post_init__(self) -> None:
        if not (self.tensor is None or isinstance(self.tensor, Tensor)):
            raise TypeError(
                f"stash({self.name!r}, …) takes a tensor or None, but got {type(self.tensor).__name__}"
            )


@dataclass(slots=True, eq=False)
class pop:
    """Ask, by `tensor = yield pop(name)`, for what an earlier layer stashed under `name`."""

    name: str


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
        raise TypeError(
            "skippable needs at least one name to stash or pop: @skippable(stash=['name'])"
        )
    if both := stashes & pops:
        raise TypeError(f"a layer cannot stash and pop one name; got {sorted(both)} in both")

    def decorate(layer: Layer) -> Layer:
        plain_forward = layer.forward

        @functools.wraps(plain_forward)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            result = plain_forward(self, *args, **kwargs)
            used: set[str] = set()
            if isinstance(result, GeneratorType):
                result = _drive(self, result, used)
            if missing := (stashes | pops) - used:
                raise RuntimeError(
                    f"{type(self).__name__} declares skips {sorted(missing)}, but its forward did not stash or pop them"
                )
            return result

        kind: Any = layer
        kind.forward, kind._skips, kind.isolate = forward, {"stash": stashes, "pop": pops}, _isolate
        return layer

    return decorate


def skips_of(module: nn.Module) -> tuple[list[SkipKey], list[SkipKey]]:
    """Return the skips that `module` and its submodules stash, and those that they pop, in module order."""
    layers = [m for m in module.modules() if hasattr(m, "_skips")]
    stashes, pops = (
        [_key(m, n) for m in layers for n in sorted(_declared(m)[verb])]
        for verb in ("stash", "pop")
    )
    return stashes, pops


def _names(what: str, names: Iterable[str]) -> frozenset[str]:
    if isinstance(names, str):
        raise TypeError(
            f"skippable takes lists of names; write {what}=[{names!r}] instead of {what}={names!r}"
        )
    return frozenset(names)


def _declared(layer: nn.Module) -> dict[str, frozenset[str]]:
    return layer._skips  # type: ignore[return-value]  # the class's, or the layer's own


def _key(layer: nn.Module, name: str) -> SkipKey:
    return SkipKey(layer.__dict__.get("_namespaces", {}).get(name), name)


def _isolate(self: nn.Module, ns: Namespace, *, only: Iterable[str] | None = None) -> nn.Module:
    """Put this layer's skips, or only those named in `only`, into namespace `ns`; return the layer."""
    if not isinstance(ns, Namespace):
        raise TypeError(f"isolate takes a torchgpipe.skip.Namespace, but got {type(ns).__name__}")
    declared = _declared(self)["stash"] | _declared(self)["pop"]
    names = declared if only is None else _names("only", only)
    if unknown := names - declared:
        raise ValueError(
            f"{type(self).__name__} has skips {sorted(declared)}, but isolate got {sorted(unknown)}"
        )
    self.__dict__["_namespaces"] = {
        **self.__dict__.get("_namespaces", {}),
        **dict.fromkeys(names, ns),
    }
    return self


def _drive(layer: nn.Module, steps: Generator[object, Tensor | None, Any], used: set[str]) -> Any:
    """Run a generator forward to its end, answering what it yields; note the names that it has used."""
    scope = current_scope()
    kind = type(layer).__name__
    answer: Tensor | None = None
    while True:
        try:
            step = steps.send(answer)
        except StopIteration as end:
            return end.value
        if not isinstance(step, stash | pop):
            raise TypeError(
                f"{kind}.forward may yield stash(…) or pop(…), but it yielded {type(step).__name__}"
            )
        verb, name, key = (
            "stash" if isinstance(step, stash) else "pop",
            step.name,
            _key(layer, step.name),
        )
        if name not in _declared(layer)[verb]:
            raise RuntimeError(
                f"{kind} tried to {verb} {name!r}, but is declared to {verb} {sorted(_declared(layer)[verb])}; "
                f"add it to @skippable({verb}=[…])"
            )
        if isinstance(step, pop) and key not in scope:
            raise RuntimeError(f"{kind} pops {key}, but no earlier layer stashed it")
        used.add(name)
        answer = None
        if isinstance(step, stash):
            scope[key] = step.tensor
        else:
            answer = scope.pop(key)
