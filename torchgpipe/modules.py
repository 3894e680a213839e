"""List the modules of a model, look up attributes of several modules, and replace attributes."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import nn


def modules_of(root: nn.Module) -> list[nn.Module]:
    """Return a list of `root` and all modules inside it; this is faster than `root.modules()`."""
    found: dict[nn.Module, None] = {}
    unseen = [root]
    while unseen:
        module = unseen.pop()
        if module not in found:
            found[module] = None
            unseen.extend([child for child in module._modules.values() if child is not None])
    return list(found)


def modules_of_pipelines(modules: Iterable[nn.Module]) -> set[nn.Module]:
    """Return the pipelines among `modules`, and all modules inside these pipelines."""
    found: set[nn.Module] = set()
    for module in modules:
        if "_stages" in module.__dict__:
            found.update(modules_of(module))
    return found


class SeveralParts:
    """Several modules that are parts of one module. Together, they have all of its attributes.

    For example, if a layer has `model.embed`, and another layer has `model.blocks.0`, each of them
    has a module `model`. These two modules are parts of the traced module's `model`.

    Args:
        parts: The modules.
    """

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        # The two underscores make the name private, so that no part has an attribute of this name.
        self.__parts = parts

    def __getattr__(self, name: str) -> Any:
        found: list[nn.Module] = []
        for part in self.__parts:
            for registered in (part._parameters, part._buffers):
                if name in registered:
                    return registered[name]
            child = part._modules.get(name)
            if child is not None:
                found.append(child)
        if not found:
            raise AttributeError(f"none of the modules has {name!r}")
        return found[0] if len(found) == 1 else SeveralParts(found)


class Swap(NamedTuple):
    """A temporary new value for one entry of a dictionary, such as a module's `__dict__`.

    `Swapped` sets such a value, and later restores the old value. For example, to replace the
    parameters of a module, it replaces the dictionary `_parameters` in the module's `__dict__` by
    another dictionary. If a layer then adds a parameter in its forward, the module's own dictionary
    stays unchanged.

    Attributes:
        place: The dictionary.
        key: The key of the entry.
        value: The temporary value.
        may_stay: What happens at the end if a layer has set the entry to a third value. `True`
            keeps the layer's value, and `False` restores the old value.
    """

    place: dict[str, Any]
    key: str
    value: Any
    may_stay: bool = False


class Swapped:
    """A context that replaces entries of dictionaries, such as attributes of modules.

    At its end, the context restores the old values. An interrupt by Ctrl-C can skip `__exit__`.
    Then `__del__` restores the old values.
    """

    __slots__ = ("_before", "_swaps")

    def __init__(self, swaps: Sequence[Swap]) -> None:
        self._before: list[Any] | None = None
        self._swaps = swaps

    def __enter__(self) -> None:
        self._before = [place[key] for place, key, _, _ in self._swaps]
        for place, key, value, _ in self._swaps:
            place[key] = value

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            return
        replaced = zip(self._swaps, self._before, strict=True)
        for (place, key, value, may_stay), before in replaced:
            if not may_stay or place.get(key) is value:
                place[key] = before
        self._before = None

    def __del__(self) -> None:
        # There is no `_before` if Ctrl-C came at the begin of `__init__`.
        if getattr(self, "_before", None) is not None:
            Swapped.__exit__(self)
