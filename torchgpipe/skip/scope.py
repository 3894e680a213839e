"""Names of skips, and the dictionaries that hold stashed tensors until later layers pop them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import uuid4

from torch import Tensor


@dataclass(slots=True, unsafe_hash=True)
class Namespace:
    """A namespace for names of skips: equal names in two namespaces are different skips.

    A copied or unpickled namespace equals the original one, so the skips of a copied model still
    match.
    """

    _id: str = field(default_factory=lambda: uuid4().hex, init=False)

    def __repr__(self) -> str:
        return f"<Namespace {self._id[:8]}>"


class SkipKey(NamedTuple):
    """The key of one skip of a model: a namespace and a name.

    The namespace is `None` if `isolate` was not called for the layer.
    """

    namespace: Namespace | None
    name: str

    def __str__(self) -> str:
        if self.namespace is None:
            return repr(self.name)
        return f"{self.name!r} in {self.namespace!r}"


Scope = dict[SkipKey, Tensor | None]
"""Maps skips to the tensors that layers have stashed and not popped yet."""

_local = threading.local()


def current_scope() -> Scope:
    """Return the scope (a dictionary) in which layers stash and pop tensors in this thread."""
    # Layers that run without a pipeline, in a plain nn.Sequential, use the thread's first scope.
    scope: Scope = vars(_local).setdefault("scope", {})
    return scope


@contextmanager
def skip_scope(scope: Scope) -> Iterator[Scope]:
    """Within this context, let the layers in this thread stash into `scope`, and pop from it."""
    outer = current_scope()
    _local.scope = scope
    try:
        yield scope
    finally:
        _local.scope = outer
