"""The docs use the words of the glossary, and no words that the glossary replaces."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
GLOSSARY = (ROOT / "docs/glossary.md").read_text()
TABLE, INSTEAD = GLOSSARY.split("## Not these")
CODE = [
    path
    for folder in ("torchgpipe", "reproduce", "benchmarks", "examples", "tests")
    for path in (ROOT / folder).rglob("*.py")
]
PAGES = [path for path in (ROOT / "docs").glob("*.md") if path.name != "glossary.md"]
PAGES += [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
# Where each word of the glossary has to be used, in one file at least.
USING = [path for path in CODE if path.relative_to(ROOT).parts[0] not in ("examples", "tests")]
USING += [path for path in PAGES if path.name != "CONTRIBUTING.md"]
# Names that a user of PyTorch does not know, or names with two meanings.
OLD_NAMES = {"Goal", "Ends", "InUse", "Passing", "carried_out", "carry_out", "Ambient"}


def first_cells(text: str) -> list[str]:
    """Return the first cell of each row of Markdown tables, without markup and symbols."""
    cells = re.findall(r"^\| ([^|]+) \|", text, flags=re.MULTILINE)
    plain = [re.sub(r",? \*[^|]*$", "", cell) for cell in cells]
    return [cell for cell in plain if cell not in ("word", "not", "---")]


@pytest.mark.parametrize("word", first_cells(TABLE))
def test_each_word_of_the_glossary_is_used(word: str) -> None:
    word = re.sub(r" (\(.*|\*.*)$", "", word)
    # A line may end within the word.
    words = r"\s+".join(re.escape(part) for part in word.split())
    pattern = re.compile(rf"\b{words}s?\b", flags=re.IGNORECASE)
    assert any(pattern.search(path.read_text()) for path in USING)


def test_words_that_the_glossary_replaces_are_not_used() -> None:
    words = [word for cell in first_cells(INSTEAD) for word in cell.split(", ")]
    pattern = re.compile(rf"\b({'|'.join(words)})\b", flags=re.IGNORECASE)
    found = []
    for path in PAGES + CODE:
        if path != Path(__file__).resolve():
            found += [f"{path.name}: {match}" for match in pattern.findall(path.read_text())]
    assert len(words) > 5 and not found


def test_old_names_are_not_used() -> None:
    found = []
    for path in CODE:
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node, "id", getattr(node, "name", getattr(node, "attr", None)))
            if isinstance(name, str) and name.lstrip("_") in OLD_NAMES:
                found.append(f"{path.name}:{getattr(node, 'lineno', 0)} {name}")
    assert not found


def test_no_two_classes_of_the_library_have_the_same_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in (ROOT / "torchgpipe").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(ROOT)))
    twice = {name: where for name, where in places.items() if len(where) > 1}
    assert len(places) > 100 and not twice
