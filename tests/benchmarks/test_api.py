"""Tests of docs/api.md, which has all public names with their docstrings, made into Markdown."""

import re
from collections.abc import Callable
from functools import cached_property
from importlib import import_module
from typing import Any, NamedTuple

import pytest

from benchmarks.api import PUBLIC, entry, header, markdown, members_of, reference

PACKAGES = (
    "torchgpipe",
    "torchgpipe.balance",
    "torchgpipe.batchnorm",
    "torchgpipe.distributed",
    "torchgpipe.plan",
    "torchgpipe.saves",
    "torchgpipe.schedules",
    "torchgpipe.skip",
    "torchgpipe.timeline",
    "torchgpipe.trace",
)
# The version has nothing to describe. Types of arguments stand in the text of the arguments.
NOT_DESCRIBED = {"torchgpipe.__version__", "torchgpipe.schedules.Kind"}


def test_all_that_packages_export_is_on_the_page() -> None:
    listed = []
    for names in PUBLIC.values():
        for path in names:
            module, _, name = path.rpartition(".")
            listed.append(getattr(import_module(module), name))
    missing = set()
    for path in PACKAGES:
        package = import_module(path)
        for name in package.__all__:
            if getattr(package, name) not in listed:
                missing.add(f"{path}.{name}")
    assert missing == NOT_DESCRIBED


def test_no_section_of_a_docstring_is_shown_as_text() -> None:
    text = reference()
    assert "#### `GPipe.predict`" in text
    assert "\n- `logs`: What the criterion returned beside the loss" in text
    assert not re.findall(r"^[A-Z]\w+:$", text, flags=re.MULTILINE)
    headings = re.findall(r"^#+ .*", text, flags=re.MULTILINE)
    assert len(headings) == len(set(headings))


DOCSTRING = """Add numbers.

    total = add(1, 2)
    print(total)

They are added in order:

- first,
- then.

Args:
    first, second: The numbers, which
        are added.
    third: Another: one.

Returns:
    The sum, in
    one number.

Raises:
    ValueError: If there is none.
"""
MARKDOWN = """Add numbers.

```python
total = add(1, 2)
print(total)
```

They are added in order:

- first,
- then.

**Arguments**

- `first`, `second`: The numbers, which
  are added.
- `third`: Another: one.

**Returns**

The sum, in
one number.

**Raises**

- `ValueError`: If there is none."""


def test_a_docstring_becomes_markdown() -> None:
    assert markdown(DOCSTRING) == MARKDOWN


def added(first: int, second: int = 1) -> int:
    """Return the sum."""
    return first + second


class Point(NamedTuple):
    """A point."""

    x: int
    y: int = 0


class Base:
    """Something with a method."""

    def move(self, by: Point, *, twice: bool = False) -> Point:
        """Move it."""
        return by if twice else Point(0)

    def stay(self) -> None:
        """Leave it."""

    @classmethod
    def load(
        cls,
        file: str,  # a comment
    ) -> "Base":
        """Read it."""
        return cls()


class Derived(Base):
    """Something with fields."""

    colour: str
    """The colour, which
    has a name.
    """
    weight: float

    def __init__(self, colour: str = "red") -> None:
        self.colour = colour

    @cached_property
    def size(self) -> int:
        """How large it is."""
        return 1


class Documented:
    """Only fields."""

    colour: str
    """The colour, which
    has a name.
    """
    weight: float


@pytest.mark.parametrize(
    "public, shown",
    [
        (Point, ["```python\nPoint(x: int, y: int = 0)\n```", "A point."]),
        (Derived, ['```python\nDerived(colour: str = "red")\n```', "Something with fields."]),
        (
            Documented,
            [
                "Only fields.",
                "**Attributes**",
                "- `colour: str`: The colour, which\n  has a name.\n- `weight: float`",
            ],
        ),
        (added, ["```python\nadded(first: int, second: int = 1) -> int\n```", "Return the sum."]),
    ],
)
def test_a_class_or_function_is_described(public: Any, shown: list[str]) -> None:
    assert list(entry("package.Name", public)) == ["### `package.Name`", *shown]


@pytest.mark.parametrize(
    "function, shown",
    [
        (Base.move, "move(by: Point, *, twice: bool = False) -> Point"),
        (Base.stay, "stay() -> None"),
        (Base.load, 'load(\n    file: str,\n) -> "Base"'),
    ],
)
def test_signatures_are_those_of_the_code(function: Callable[..., Any], shown: str) -> None:
    assert header(function, function.__name__) == shown


def test_a_method_is_described_once() -> None:
    described: dict[Callable[..., Any], str] = {}
    first = list(members_of(Base, ["move"], described))
    assert first[0] == "#### `Base.move`"
    assert list(members_of(Derived, ["move", "size"], described)) == [
        "It also has [`Base.move`](#basemove).",
        "**Properties of `Derived`**",
        "- `size`: How large it is.",
    ]
