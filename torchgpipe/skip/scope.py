"""Names of skips, and where stashed tensors wait until a later layer pops them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import uuid4

from torch import Tensor


@dataclass(slots=True, unsafe_hash=True)
class Namespace:
    """Set skip names apart: the same name in two namespaces is two skips.

    Namespaces are compared by an identity of their own that copying and pickling keep, so that a copied model
    still finds its skips.
    """

    _id: str = field(default_factory=lambda: uuid4().hex, init=False)

    def __repr__(self) -> str:
        return f"<Namespace {self._id[:8]}>"


class SkipKey(NamedTuple):
    """Identify one skip of a model: a name, within a namespace (`None` where the layer was not isolated)."""

    namespace: Namespace | None
    name: str

    def __str__(self) -> str:
        return repr(self.name) if self.namespace is None else f"{self.name!r} in {self.namespace!r}"


Scope = dict[SkipKey, Tensor | None]


_local = threading.local()


def current_scope() -> Scope:
    """Return the scope that layers of the running thread stash into and pop from."""
    # At first that of a model that runs without GPipe, as a plain sequence of layers.
    scope: Scope = vars(_local).setdefault("scope", {})
    return scope


@contextmanager
def skip_scope(scope: Scope) -> Iterator[Scope]:
    """Make `scope` the current one of this thread."""
    outer, _local.scope = current_scope(), scope
    try:
        yield scope
    finally:
        _local.scope = outer
