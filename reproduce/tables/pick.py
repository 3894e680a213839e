"""Pick rows by the fields of their configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from reproduce.error import USAGE, Error
from reproduce.numbers.match import Line, value
from reproduce.records.decode import Json

__all__ = ["parse_filters", "pick", "shown", "values_of"]


def parse_filters(filters: Sequence[str]) -> dict[str, list[str]]:
    """Return the values that are wanted of each field, given texts such as `n=2,4`.

    Raises:
        Error: a text is not of that form.
    """
    wanted: dict[str, list[str]] = {}
    for text in filters:
        name, equals, values = text.partition("=")
        if not (name and equals and values):
            raise Error(f"--filter {text}: give a field and its values, as in --filter n=2,4", USAGE)
        wanted.setdefault(name, []).extend(values.split(","))
    return wanted


def pick(lines: Sequence[Line], wanted: Mapping[str, Sequence[str]]) -> list[Line]:
    """Return the lines whose fields have one of the values that are wanted of them.

    Raises:
        Error: none has.
    """
    for name, values in wanted.items():
        there = values_of(name, lines, f"--filter {name}=...")
        lines = [line for line in lines if shown(value(line, name)) in values]
        if not lines:
            raise Error(f"--filter {name}={','.join(values)}: no row is left; {name} is {', '.join(there)}", USAGE)
    return list(lines)


def values_of(name: str, lines: Sequence[Line], option: str) -> list[str]:
    """Return all that the field of that name is in some line.

    Raises:
        Error: no line has it; the message names the fields that there are.
    """
    there = dict.fromkeys(shown(value(line, name)) for line in lines)
    there.pop("-", None)
    if not there:
        fields = dict.fromkeys(field for line in lines for field in line.first.result.config)
        raise Error(
            f"{option}: no row has {name}; there are experiment, row, scale, device, {', '.join(fields)}", USAGE
        )
    return list(there)


def shown(field: Json) -> str:
    """Write a field's value as one would type it."""
    return field if isinstance(field, str) else "-" if field is None else json.dumps(field, separators=(",", ":"))
