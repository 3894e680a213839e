"""Namespaces: equal to themselves and to their copies, to nothing else."""

from __future__ import annotations

import copy
import pickle

import pytest

from torchgpipe.skip import Namespace


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda n: pickle.loads(pickle.dumps(n))], ids=["copy", "deepcopy", "pickle"]
)
def test_a_copy_is_equal(copied) -> None:  # type: ignore[no-untyped-def]
    namespace = Namespace()
    twin = copied(namespace)
    assert twin == namespace and hash(twin) == hash(namespace)
    assert {namespace: "found"}[twin] == "found"


def test_two_are_different() -> None:
    assert Namespace() != Namespace()
    assert Namespace() != "Namespace"
    assert len({Namespace() for _ in range(10)}) == 10


def test_shows_a_name_that_tells_two_apart() -> None:
    assert repr(Namespace()) != repr(Namespace())
    assert repr(Namespace()).startswith("<Namespace ")
