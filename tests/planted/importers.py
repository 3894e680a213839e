"""Which test files import a module, the nearest first: directly, or through other modules and helpers."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

SOME = 16  # files at a time: to collect all tests takes longer than to run those that find a fault


@cache
def imported(tree: Path, file: str) -> frozenset[str]:
    """Return the files of the tree that a file imports, within functions, too."""
    found = set()
    for node in ast.walk(ast.parse((tree / file).read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # Without its last `level` parts, a file's path is the folder that a relative import starts from.
            start = (
                [*Path(file).parts[: -node.level], *filter(None, [node.module])] if node.level else [str(node.module)]
            )
            names = [".".join(start), *(".".join([*start, alias.name]) for alias in node.names)]
        else:
            continue
        for name in names:
            path = name.replace(".", "/")
            found |= {each for each in (f"{path}.py", f"{path}/__init__.py") if (tree / each).is_file()}
    return frozenset(found)


def importers(tree: Path, file: str) -> list[list[str]]:
    """Return the test files that import a file: those that do directly, then some at a time, the nearest first."""
    files = [path.relative_to(tree).as_posix() for path in tree.rglob("*.py")]
    distance = {file: 0}
    reached = [file]
    for at in reached:  # grows
        for other in sorted(each for each in files if each not in distance and at in imported(tree, each)):
            distance[other] = distance[at] + 1
            reached.append(other)
    own = file.partition("/")[0]

    def order(test: str) -> tuple[bool, bool, int, bool, str]:
        of_others = re.match(rf"tests/(?!{own})(reproduce|benchmarks|research)", test) is not None
        return distance[test] > 1, of_others, distance[test], Path(file).stem not in Path(test).stem, test

    tests = sorted((each for each in reached if re.match(r"tests/(?!planted).*\btest_", each)), key=order)
    direct = sum(distance[test] == 1 for test in tests)
    return [tests[:direct]] * bool(direct) + [tests[k : k + SOME] for k in range(direct, len(tests), SOME)]
