"""Namespaces: let two layers of one class use the same skip name without meeting."""

from __future__ import annotations

from uuid import uuid4


class Namespace:
    """Set skip names apart: the same name in two namespaces is two skips.

    Namespaces are compared by an identity of their own that copying and pickling keep, so that a copied model
    still finds its skips.
    """

    __slots__ = ("_id",)

    def __init__(self) -> None:
        self._id = uuid4().hex

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Namespace) and self._id == other._id

    def __hash__(self) -> int:
        return hash(self._id)

    def __repr__(self) -> str:
        return f"<Namespace {self._id[:8]}>"
