"""Print what a gate (a program that checks speed) has found, as text, Markdown, CSV or JSON."""

from collections.abc import Iterable, Sequence

from reproduce.error import Worse
from reproduce.tables.layout import bullets
from reproduce.tables.output import Number, written


def answer(style: str, numbers: Iterable[Number], said: Sequence[str], lost: Sequence[str]) -> None:
    """Print what a gate (a program that checks speed) has found.

    If something has become worse, this function raises an error whose message says what. The
    program prints this message. So if the format is "text", this function prints nothing before it
    raises the error.

    Args:
        style: The format: "text", "markdown", "csv" or "json".
        numbers: The numbers for CSV and JSON.
        said: Lines that say what the gate has found. They are used if nothing has become worse.
        lost: Lines that say what has become worse.

    Raises:
        Worse: If `lost` has lines.
    """
    lines = lost or said
    if not lost or style != "text":
        conclusion = "\n".join(lines)
        markdown = bullets(lines, wrap=False)
        text = written(style, numbers, conclusion, markdown, conclusion=conclusion)
        print(text.rstrip(), flush=True)  # an error, as of a full disk, is raised here
    if lost:
        raise Worse("\n".join(lost))


def called(lost: bool) -> str:
    """Return the verdict on one measured value, such as how often threads wait in a step.

    The verdict is "worse" if `lost` is true. Otherwise it is "~", which means "not worse". The
    tables of the command `regression` have the same verdicts.
    """
    return "worse" if lost else "~"
