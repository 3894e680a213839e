"""Print what a gate (a program that checks speed) has found, as text, Markdown, CSV or JSON."""

from collections.abc import Iterable, Sequence

from reproduce.error import Worse
from reproduce.tables.layout import bullets
from reproduce.tables.output import Number, written


def answer(style: str, numbers: Iterable[Number], said: Sequence[str], lost: Sequence[str]) -> None:
    """Print what a gate (a program that checks speed) has found.

    If something has become worse, this function raises an error whose message says what. The
    program prints this message. So in the format "text", this function itself prints nothing then.

    Args:
        style: The format: "text", "markdown", "csv" or "json".
        numbers: The numbers for CSV and JSON.
        said: Lines that say what the gate has found, if nothing has become worse.
        lost: Lines that say what has become worse.

    Raises:
        Worse: `lost` has lines.
    """
    lines = lost or said
    if not lost or style != "text":
        conclusion = "\n".join(lines)
        markdown = bullets(lines, wrap=False)
        print(written(style, numbers, conclusion, markdown, conclusion=conclusion).rstrip())
    if lost:
        raise Worse("\n".join(lost))


def called(lost: bool) -> str:
    """Return the verdict about a version's number, such as its number of waits.

    This is "worse" if `lost` is true, and otherwise "~" (not worse), as in the tables of the
    command `regression`.
    """
    return "worse" if lost else "~"
