"""Decoding: what fits is typed, what does not is told by its place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from reproduce.records.decode import DecodeError, decode


@dataclass
class Inner:
    x: float


@dataclass
class Outer:
    kind: Literal["a", "b"]
    inner: Inner | None
    many: list[Inner] = field(default_factory=list)
    free: dict[str, Any] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("value", "decoded"),
    [
        ({"kind": "a", "inner": None}, Outer("a", None)),
        ({"kind": "b", "inner": {"x": 1}}, Outer("b", Inner(1.0))),
        ({"kind": "a", "inner": None, "many": [{"x": 2.5}]}, Outer("a", None, [Inner(2.5)])),
        ({"kind": "a", "inner": None, "free": {"k": [1, None]}}, Outer("a", None, free={"k": [1, None]})),
    ],
)
def test_decodes(value: Any, decoded: Outer) -> None:
    assert decode(Outer, value) == decoded


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "the whole file: expected an object, got None"),
        ([], "the whole file: expected an object, got []"),
        ({}, "kind: missing"),
        ({"kind": "a"}, "inner: missing"),
        ({"kind": "c", "inner": None}, "kind: expected one of 'a', 'b', got 'c'"),
        ({"kind": "a", "inner": None, "color": 1}, "color: unknown; known are kind, inner, many, free"),
        ({"kind": "a", "inner": {"x": "1"}}, "inner.x: expected a number, got '1'"),
        ({"kind": "a", "inner": {"x": True}}, "inner.x: expected a number, got True"),
        ({"kind": "a", "inner": {"x": None}}, "inner.x: expected a number, got None"),
        ({"kind": "a", "inner": None, "many": {}}, "many: expected a list, got {}"),
        ({"kind": "a", "inner": None, "many": [{"x": 1}, 2]}, "many[1]: expected an object, got 2"),
        ({"kind": "a", "inner": None, "many": [{"x": 1, "y": 2}]}, "many[0].y: unknown; known are x"),
        ({"kind": "a", "inner": None, "free": []}, "free: expected an object, got []"),
        ({"kind": "a" * 99, "inner": None}, "kind: expected one of 'a', 'b', got '" + "a" * 36 + "..."),
    ],
)
def test_refuses(value: Any, message: str) -> None:
    with pytest.raises(DecodeError) as caught:
        decode(Outer, value)
    assert str(caught.value) == message
