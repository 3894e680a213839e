"""Tests of the words in docs, code and docstrings.

Docs and code must use the words of the glossary. Docstrings must describe parameters and errors.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
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


@cache
def library() -> list[ast.Module]:
    return [ast.parse(path.read_text()) for path in (ROOT / "torchgpipe").rglob("*.py")]


@cache
def classes() -> dict[str, ast.ClassDef]:
    """Return all classes of the library by name, as nodes of syntax trees."""
    found = {}
    for tree in library():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found[node.name] = node
    return found


def first_cells(text: str) -> list[str]:
    """Return the first cells of the lines of Markdown tables, without markup and symbols."""
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
    words: list[str] = []
    for cell in first_cells(INSTEAD):
        words += cell.split(", ")
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


def public(
    body: list[ast.stmt], owner: ast.ClassDef | None = None
) -> Iterator[tuple[ast.ClassDef | None, ast.FunctionDef]]:
    """Yield all public functions and methods in the body of a module or of a class.

    Each item is a pair: the class or `None`, and the syntax tree of the function. Overloads are
    left out.
    """
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public(node.body, node)
        elif isinstance(node, ast.FunctionDef):
            shown = node.name == "__init__" or not node.name.startswith("_")
            decorators = [ast.unparse(each) for each in node.decorator_list]
            if shown and "overload" not in decorators:
                yield owner, node


def overrides(owner: ast.ClassDef | None, name: str) -> bool:
    """Return whether a base class in the library has a method with this name."""
    if owner is None:
        return False
    for base in owner.bases:
        parent = classes().get(ast.unparse(base))
        if parent is not None:
            names = [node.name for node in parent.body if isinstance(node, ast.FunctionDef)]
            if name in names or overrides(parent, name):
                return True
    return False


def parameters(function: ast.FunctionDef) -> list[str]:
    given = function.args
    every = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg]
    names = [each.arg for each in every if each is not None]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def listed(docstring: str) -> set[str]:
    """Return the names of the parameters that a docstring describes in its section `Args:`.

    A line of this section can describe several parameters.
    """
    section = docstring.partition("\nArgs:\n")[2].partition("\n\n")[0]
    names: list[str] = []
    for before_colon in re.findall(r"^    (\S[^:]*):", section, flags=re.MULTILINE):
        names += before_colon.replace("*", "").split(", ")
    return set(names)


def test_docstrings_list_parameters_and_name_errors() -> None:
    checked = 0
    for tree in library():
        for owner, function in public(tree.body):
            if function.name != "__init__" and overrides(owner, function.name):
                continue
            # A constructor is described by its class.
            described = owner if function.name == "__init__" else function
            assert described is not None
            docstring = ast.get_docstring(described) or ""
            name = f"{owner.name}.{function.name}" if owner else function.name
            names = parameters(function)
            if len(names) > 2:
                checked += 1
                missing = set(names) - listed(docstring)
                assert not missing, f"{name} has no {missing} under `Args:`"
            raises = any(isinstance(each, ast.Raise) and each.exc for each in ast.walk(function))
            assert not raises or "raise" in docstring.lower(), f"{name} does not say what it raises"
    assert checked > 100
