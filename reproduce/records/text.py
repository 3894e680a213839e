"""Format JSON so that people can read it, and so that `diff` shows what has changed."""

import json

from reproduce.records.places import Json

WIDTH = 120  # the number of columns of a line in a record's file


def rounded(value: Json, digits: int) -> Json:
    """Return a copy of a JSON value, with all floats rounded to `digits` significant digits."""
    if isinstance(value, dict):
        return {name: rounded(item, digits) for name, item in value.items()}
    if isinstance(value, list):
        return [rounded(item, digits) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    return value


def format_json(value: Json, indent: str = "") -> str:
    """Return a JSON value as text.

    A value is written in one line if the line is at most `WIDTH` characters long. A list that
    contains no lists or objects is always written in one line. Any other value is split: each of
    its items begins a new line.

    Args:
        value: The JSON value.
        indent: The spaces before the closing bracket of a split value.

    Raises:
        ValueError: A number is NaN or infinite, which JSON cannot express.
    """
    line = json.dumps(value, allow_nan=False)
    if not _nested(value) or len(indent + line) <= WIDTH:
        return line
    deeper = indent + " "
    lines = []
    if isinstance(value, dict):
        for key, item in value.items():
            lines.append(f"{deeper}{json.dumps(key)}: {format_json(item, deeper)}")
        opening, closing = "{", "}"
    else:
        lines += [deeper + format_json(item, deeper) for item in value]
        opening, closing = "[", "]"
    content = ",\n".join(lines)
    return f"{opening}\n{content}\n{indent}{closing}"


def _nested(value: Json) -> bool:
    """Return whether a value is a JSON object, or a list that contains JSON objects or lists."""
    if isinstance(value, list):
        return any(isinstance(item, (dict, list)) for item in value)
    return isinstance(value, dict)
