"""Read the rows of docs/works-with.md, and write its table anew: `python -m tests.works_with.page`.

A row is a heading (###), its code, and what follows it. These lines there have a meaning:

    Refused with workers, always: “…”    with that engine or that mode, an error that says so; without "with": always
    Up to rounding: …                    what the code leaves is the same but for rounding
    <!-- holds: … -->                    an expression that is true afterwards, with a pipeline
"""

import inspect
import re
from dataclasses import dataclass
from pathlib import Path

from . import given

ENGINES = ("graph", "workers")
MODES = ("always", "except_last", "never")
PAGE = Path(__file__).parents[2] / "docs" / "works-with.md"


@dataclass(frozen=True, eq=False)
class Row:
    """What is combined with a pipeline; `refused` are engines and modes with a part of the message."""

    name: str
    code: str
    refused: dict[str, str]
    rounded: bool
    holds: str
    ranks: bool

    def refusal(self, engine: str, mode: str) -> str | None:
        """Return part of the message of the error that is raised, or `None` where the answer is right."""
        return self.refused.get(engine, self.refused.get(mode))


def read(page: str) -> list[Row]:
    """Return the rows of the page."""
    one, many = page.split("## The rows for several ranks")
    return [_row(part, part in many) for half in (one, many) for part in re.split(r"^### ", half, flags=re.M)[1:]]


def _row(text: str, ranks: bool) -> Row:
    name, _, rest = text.partition("\n")
    code, _, after = rest.partition("```python\n")[2].partition("```\n")
    refused = {}
    for where, message in re.findall(r"^Refused(?: with ([^:]*))?: “(.*?)”$", after, flags=re.M | re.S):
        for word in where.split(", ") if where else ENGINES:
            assert word in (*ENGINES, *MODES), word
            refused[word] = " ".join(message.split())
    holds = re.search(r"^<!-- holds: (.*) -->$", after, flags=re.M)
    return Row(name, code, refused, "\nUp to rounding: " in after, holds[1] if holds else "True", ranks)


def render(page: str) -> str:
    """Return the page with its generated blocks as they should be."""
    heads = ["| | " + " | ".join(f"`{mode}`" for mode in MODES) + " |", "| --- |" + " --- |" * len(MODES)]
    lines = [f"| {_link(row.name)} | " + " | ".join(_answer(row, mode) for mode in MODES) + " |" for row in read(page)]
    shown = [inspect.getsource(x).rstrip() for x in (given.Block, given.LoRA, given.Checkpointed, given.train)]
    page = _block(page, "table", "\n".join([*heads, *lines]))
    return _block(page, "given", "```python\n" + "\n\n".join(shown) + "\n```")


def _answer(row: Row, mode: str) -> str:
    answers = ["right" if row.refusal(engine, mode) is None else "refused" for engine in ENGINES]
    return answers[0] if len(set(answers)) == 1 else f"{ENGINES[0]}: {answers[0]}; {ENGINES[1]}: {answers[1]}"


def _block(page: str, name: str, content: str) -> str:
    pattern = rf"(<!-- {name}: .*? -->\n).*?(<!-- end -->)"
    return re.sub(pattern, lambda found: f"{found[1]}{content}\n{found[2]}", page, count=1, flags=re.S)


def _link(heading: str) -> str:
    """Link to a heading, by the anchor that GitHub gives it."""
    return f"[{heading}](#{re.sub(r'[^a-z0-9_ -]', '', heading.lower()).replace(' ', '-')})"


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
