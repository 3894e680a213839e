"""Where stashed tensors wait, within one run of layers in one thread, until a later layer pops them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor

from torchgpipe.skip.namespace import Namespace


class SkipKey(NamedTuple):
    """Identify one skip of a model: a name, within a namespace (`None` where the layer was not isolated)."""

    namespace: Namespace | None
    name: str

    def __str__(self) -> str:
        return repr(self.name) if self.namespace is None else f"{self.name!r} in {self.namespace!r}"


Scope = dict[SkipKey, Tensor | None]


class _Local(threading.local):
    def __init__(self) -> None:
        # The scope of a model that runs without GPipe, as a plain sequence of layers.
        self.scope: Scope = {}


_local = _Local()


def current_scope() -> Scope:
    """Return the scope that layers of the running thread stash into and pop from."""
    return _local.scope


@contextmanager
def skip_scope(scope: Scope) -> Iterator[Scope]:
    """Make `scope` the current one of this thread."""
    outer, _local.scope = _local.scope, scope
    try:
        yield scope
    finally:
        _local.scope = outer
