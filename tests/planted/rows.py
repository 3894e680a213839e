"""The faults: file, old text, new text, and whether a test found it. Copies of the tree; the tests of a file."""

import ast
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
ROWS = Path(__file__).with_name("rows.json")
SOME = 16  # test files per run: to collect all of them would take longer than to find the fault


@dataclass
class Row:
    """A fault. Results: `found`, whether a test finds it, and `by`, the test, or why there is none."""

    file: str
    kind: str
    old: str
    new: str
    found: bool | None = None
    by: str = ""

    def planted(self, tree: Path = ROOT) -> str:
        """Return the file's text with the fault in it."""
        path = tree / self.file
        text = path.read_text() if path.exists() else ""
        if text.count(self.old) != 1:
            raise SystemExit(
                f"planted: {self.file} has {self.old!r} {text.count(self.old)} times, but a fault needs it once; "
                "moves of files change the rows' paths, and new text their old text (tests/planted/rows.json)"
            )
        return text.replace(self.old, self.new)


def read() -> list[Row]:
    return [Row(**row) for row in json.loads(ROWS.read_text())]


def write(rows: list[Row]) -> None:
    ROWS.write_text("[\n" + ",\n".join(json.dumps(asdict(row), ensure_ascii=False) for row in rows) + "\n]\n")


@contextmanager
def copied(source: Path = ROOT) -> Iterator[Path]:
    """Copy the working tree, without what git ignores, into a temporary clone: some tests ask git."""
    with TemporaryDirectory(prefix="planted-") as folder:
        tree = Path(folder, "tree")
        subprocess.run(["git", "clone", "--quiet", "--shared", "--no-checkout", ".", str(tree)], cwd=source, check=True)
        subprocess.run(["git", "reset", "--quiet"], cwd=tree, check=True)
        listed = subprocess.check_output(["git", "ls-files", "-zco", "--exclude-standard"], cwd=source, text=True)
        for name in filter(None, listed.split("\0")):
            if (source / name).is_file():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source / name, tree / name)
        yield tree


@cache
def imported(tree: Path, file: str) -> set[str]:
    """Return the files of the tree that a file imports, also within functions."""
    found = []
    for node in ast.walk(ast.parse((tree / file).read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # A relative import starts from the file's path without its last `level` parts.
            start = [*Path(file).parts[: -node.level or -99], *filter(None, (node.module or "").split("."))]
            found += [start, *([*start, alias.name] for alias in node.names)]
    files = {each for parts in found for each in ("/".join(parts) + ".py", "/".join([*parts, "__init__.py"]))}
    return {each for each in files if (tree / each).is_file()}


def importers(tree: Path, file: str) -> list[list[str]]:
    """Return test files that import a file, in groups: direct importers, then others, nearest first."""
    files = [path.relative_to(tree).as_posix() for path in tree.rglob("*.py")]
    distance = {file: 0}
    for at in (reached := [file]):  # grows during the loop
        new = sorted(each for each in files if each not in distance and at in imported(tree, each))
        distance |= dict.fromkeys(new, distance[at] + (not at.startswith("tests/")))  # not for test helpers
        reached += new
    tests = sorted(each for each in reached if re.match(r"tests/(?!planted).*\btest_", each))
    others = re.compile(rf"tests/(?!{file.partition('/')[0]})(reproduce|benchmarks|research)")

    def order(test: str) -> tuple[bool, bool, int, int]:
        before = [each for each in tests[: tests.index(test)] if Path(each).parent == Path(test).parent]
        return distance[test] > 1, bool(others.match(test)), distance[test], len(before)  # mix folders

    direct = [test for test in sorted(tests, key=order) if distance[test] == 1]
    rest = [test for test in sorted(tests, key=order) if distance[test] > 1]
    return [direct] * bool(direct) + [rest[k : k + SOME] for k in range(0, len(rest), SOME)]
