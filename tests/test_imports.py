"""Imports go one way, also those within functions and for types: a reader may start at the bottom."""

import ast
import graphlib
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Each line may import from the lines below it, and from itself.
LAYERS = [
    {"benchmarks"},
    {"reproduce.cli"},
    {"reproduce.report", "reproduce.regression"},
    {"reproduce.tables"},
    {"reproduce.predict", "reproduce.run"},
    {"reproduce.numbers"},
    {"reproduce.experiments"},
    {"reproduce.records"},
    {"reproduce.machine", "reproduce.models"},
    {"reproduce.error"},
    # The library.
    {"torchgpipe.plan"},
    {"torchgpipe.distributed", "torchgpipe.state", "torchgpipe.timeline", "torchgpipe.gpipe"},
    {"torchgpipe.partitioned"},
    {"torchgpipe.step", "torchgpipe.layers"},
    {"torchgpipe.engine"},
    {"torchgpipe.task", "torchgpipe.balance"},
    {"torchgpipe.trace"},
    {"torchgpipe.skip", "torchgpipe.tensors", "torchgpipe.clipping"},
    {"torchgpipe.schedules", "torchgpipe.plain", "torchgpipe.caught", "torchgpipe.patience"},
]
# What they are, by other names: those that users of torchgpipe 0.0.7 import.
OLD_NAMES = {"batchnorm", "checkpoint", "microbatch", "saves", "schedule"}
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for folder in ("benchmarks", "reproduce", "torchgpipe")
    for path in (ROOT / folder).rglob("*.py")
}


def imported(path: Path) -> Iterator[str]:
    """Yield the modules that a file imports, also within functions and for type checkers alone."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else str(node.module)


def package(module: str) -> tuple[int, str] | None:
    """Return the line of a module's package, and its name."""
    return next(
        (
            (i, n)
            for i, names in enumerate(LAYERS)
            for n in names
            if f"{module}.".startswith(f"{n}.")
        ),
        None,
    )


def test_imports_go_down() -> None:
    arrows = [(module, other) for module, path in MODULES.items() for other in imported(path)]
    wrong = []
    for module, other in arrows:
        own, below = package(module), package(other)
        if own and below and own != below and own[0] >= below[0]:
            wrong.append(f"{module} imports {other}")
    assert arrows and not wrong


def test_each_part_of_the_library_has_its_line() -> None:
    parts = {
        path.stem
        for path in (ROOT / "torchgpipe").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    listed = {
        name.removeprefix("torchgpipe.")
        for names in LAYERS
        for name in names
        if name.startswith("torchgpipe.")
    }
    assert parts - {"__init__", "__version__"} == listed | OLD_NAMES


def test_no_circles() -> None:
    graph = {
        module: {other for other in imported(path) if other in MODULES}
        for module, path in MODULES.items()
    }
    bottom_up = list(
        graphlib.TopologicalSorter(graph).static_order()
    )  # an error here names the circle
    assert set(bottom_up) == set(MODULES)


def test_the_library_needs_torch_alone() -> None:
    needed = {
        other.partition(".")[0]
        for m in MODULES
        if m.startswith("torchgpipe")
        for other in imported(MODULES[m])
    }
    assert "torch" in needed and needed - {"torch", "torchgpipe"} <= sys.stdlib_module_names
    without = [
        m
        for m in MODULES
        if m == "torchgpipe.plan.replay" or f"{m}.".startswith("torchgpipe.schedules.")
    ]
    assert len(without) > 1
    assert not any(
        f"{other}.".startswith("torch.") for m in without for other in imported(MODULES[m])
    )
