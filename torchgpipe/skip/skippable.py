"""Skippable layers: one layer stashes a tensor, and a later layer pops the tensor.

Section 3.3 of the torchgpipe paper introduces skippable layers. A skippable layer works in a
`GPipe` and in a plain `nn.Sequential`.
"""

import functools
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from types import GeneratorType
from typing import Any, TypeVar

from torch import Tensor
from torch.nn import Module

from torchgpipe.skip.scope import Namespace, SkipKey, current_scope

Layer = TypeVar("Layer", bound=type[Module])


@dataclass(slots=True, eq=False)
class stash:
    """A request to stash a tensor for a later layer; a forward yields it: `yield stash(name, x)`.

    Args:
        name: The skip's name, as `skippable` declares it.
        tensor: The tensor that the later layer pops, or `None`.

    Raises:
        TypeError: If `tensor` is neither a tensor nor `None`.
    """

    name: str
    tensor: Tensor | None

    def __post_init__(self) -> None:
        if self.tensor is not None and not isinstance(self.tensor, Tensor):
            got = type(self.tensor).__name__
            raise TypeError(f"stash({self.name!r}, …) takes a tensor or None, but got {got}")


@dataclass(slots=True, eq=False)
class pop:
    """A request for a stashed tensor; a forward yields it: `tensor = yield pop(name)`.

    Args:
        name: The skip's name, as `skippable` declares it.
    """

    name: str


def skippable(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[Layer], Layer]:
    """Return a decorator that lets a module class stash and pop the named skips.

    The class's `forward` can then be a generator that yields `stash(name, tensor)` and `pop(name)`,
    and returns its output. Every call of `forward` has to use every declared name.

    The decorator adds a method `isolate(ns, *, only=None)` to the class. This method puts the
    layer's skips, or only those named in `only`, into the namespace `ns`, and returns the layer.

    Args:
        stash: The names of the skips that the layer stashes.
        pop: The names of the skips that the layer pops.

    Raises:
        TypeError: If there is no name, if a name is in `stash` and in `pop`, or if `stash` or `pop`
            is a single string.
    """
    stashes, pops = _names("stash", stash), _names("pop", pop)
    if not stashes and not pops:
        raise TypeError(
            "skippable needs at least one name to stash or pop: @skippable(stash=['name'])"
        )
    if both := stashes & pops:
        raise TypeError(
            f"a layer cannot both stash and pop a skip, but the names {sorted(both)} are in stash "
            "and in pop"
        )

    def decorate(layer: Layer) -> Layer:
        plain_forward = layer.forward

        @functools.wraps(plain_forward)
        def forward(self: Module, *args: Any, **kwargs: Any) -> Any:
            result = plain_forward(self, *args, **kwargs)
            used: set[str] = set()
            if isinstance(result, GeneratorType):
                result = _drive(self, result, used)
            if missing := (stashes | pops) - used:
                raise RuntimeError(
                    f"the class {type(self).__name__} declares skips {sorted(missing)}, "
                    "but its forward did not stash or pop them"
                )
            return result

        kind: Any = layer
        kind.forward = forward
        kind._skips = {"stash": stashes, "pop": pops}
        kind.isolate = _isolate
        return layer

    return decorate


def skips_of(module: Module) -> tuple[list[SkipKey], list[SkipKey]]:
    """Return two lists of skips: what `module` and its submodules stash, and what they pop.

    Both lists are in the order of the modules, and sorted by name within each module.
    """
    stashes: list[SkipKey] = []
    pops: list[SkipKey] = []
    layers = [m for m in module.modules() if hasattr(m, "_skips")]
    for layer in layers:
        declared = _declared(layer)
        stashes += [_key(layer, name) for name in sorted(declared["stash"])]
        pops += [_key(layer, name) for name in sorted(declared["pop"])]
    return stashes, pops


def _names(what: str, names: Iterable[str]) -> frozenset[str]:
    if isinstance(names, str):
        raise TypeError(
            f"skippable takes lists of names; write {what}=[{names!r}] instead of {what}={names!r}"
        )
    return frozenset(names)


def _declared(layer: Module) -> dict[str, frozenset[str]]:
    """Return the names that a layer declares, under the keys "stash" and "pop"."""
    return layer._skips  # type: ignore[return-value]


def _key(layer: Module, name: str) -> SkipKey:
    namespaces = layer.__dict__.get("_namespaces", {})
    return SkipKey(namespaces.get(name), name)


def _isolate(self: Module, ns: Namespace, *, only: Iterable[str] | None = None) -> Module:
    """Put this layer's skips, or only the skips named in `only`, into `ns`; return the layer."""
    if not isinstance(ns, Namespace):
        raise TypeError(f"isolate takes a torchgpipe.skip.Namespace, but got {type(ns).__name__}")
    declared = _declared(self)["stash"] | _declared(self)["pop"]
    names = declared if only is None else _names("only", only)
    if unknown := names - declared:
        raise ValueError(
            f"{type(self).__name__} has skips {sorted(declared)}, but isolate got {sorted(unknown)}"
        )
    namespaces = dict(self.__dict__.get("_namespaces", {}))
    namespaces.update(dict.fromkeys(names, ns))
    self.__dict__["_namespaces"] = namespaces
    return self


def _drive(layer: Module, steps: Generator[object, Tensor | None, Any], used: set[str]) -> Any:
    """Run a forward that is a generator, and return its output.

    When the generator yields a `pop`, send the stashed tensor to the generator. Add the names of
    stashed and popped skips to `used`.
    """
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
        verb = "stash" if isinstance(step, stash) else "pop"
        name = step.name
        declared = _declared(layer)[verb]
        if name not in declared:
            raise RuntimeError(
                f"the forward of {kind} tried to {verb} the skip {name!r}, but the class is "
                f"declared to {verb} only {sorted(declared)}; add the name to "
                f"@skippable({verb}=[…])"
            )
        key = _key(layer, name)
        if isinstance(step, pop) and key not in scope:
            raise RuntimeError(f"{kind} pops {key}, but no earlier layer stashed it")
        used.add(name)
        answer = None
        if isinstance(step, stash):
            scope[key] = step.tensor
        else:
            answer = scope.pop(key)
