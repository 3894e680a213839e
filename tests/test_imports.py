"""Tests that imports between packages go in one direction only.

The tests look at all imports, also at imports within functions and imports only for type checkers.
"""

import ast
import graphlib
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Each line of this table names packages. A package may import only packages that are named in the
# lines below its own line. So packages in the same line may not import each other.
LAYERS = [
    {"benchmarks"},
    {"reproduce"},
    {"reproduce.cli"},
    {"reproduce.report", "reproduce.regression"},
    {"reproduce.tables", "reproduce.run"},
    {"reproduce.predict", "reproduce.run.engines"},
    {"reproduce.numbers"},
    {"reproduce.experiments"},
    {"reproduce.records"},
    {"reproduce.machine", "reproduce.models"},
    {"reproduce.error"},
    # The library.
    {"torchgpipe"},
    {"torchgpipe.plan"},
    {"torchgpipe.plan.search"},
    {"torchgpipe.plan.predict"},
    {"torchgpipe.plan.count"},
    {"torchgpipe.plan.hardware"},
    {"torchgpipe.distributed", "torchgpipe.state", "torchgpipe.timeline", "torchgpipe.gpipe"},
    {"torchgpipe.distributed.liveness"},
    {"torchgpipe.distributed.channels"},
    {"torchgpipe.partitioned"},
    {"torchgpipe.step", "torchgpipe.layers", "torchgpipe.uncompiled"},
    {"torchgpipe.engine"},
    {"torchgpipe.task", "torchgpipe.balance"},
    {"torchgpipe.task.guards"},
    {"torchgpipe.trace", "torchgpipe.random", "torchgpipe.clipping"},
    {"torchgpipe.trace.code"},
    {"torchgpipe.skip", "torchgpipe.tensors"},
    {
        "torchgpipe.schedules",
        "torchgpipe.modules",
        "torchgpipe.setting",
        "torchgpipe.plain",
        "torchgpipe.caught",
        "torchgpipe.patience",
        "torchgpipe.__version__",
    },
]
# Modules that exist only because users of torchgpipe 0.0.7 import these names.
OLD_NAMES = {"batchnorm", "checkpoint", "microbatch", "saves", "schedule"}


def modules() -> dict[str, Path]:
    """Map the name of each module of this project to the module's file."""
    found = {}
    for folder in ("benchmarks", "reproduce", "torchgpipe"):
        for path in (ROOT / folder).rglob("*.py"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


MODULES = modules()


def imported(path: Path) -> Iterator[str]:
    """Yield the names of all modules that a file imports.

    Imports within functions, and imports for type checkers only, are included.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else str(node.module)


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def package(module: str) -> tuple[int, str] | None:
    """Return the innermost package in the table `LAYERS` that contains a module.

    Returns:
        The index of the line of `LAYERS` that names the package, and the name of the package. The
        result is `None` if no package contains the module.
    """
    found = None
    for line, names in enumerate(LAYERS):
        for name in names:
            if is_within(module, name) and (found is None or len(name) > len(found[1])):
                found = line, name
    return found


def test_imports_go_down() -> None:
    wrong = []
    count = 0
    for module, path in MODULES.items():
        own = package(module)
        assert own, module
        for other in imported(path):
            count += 1
            below = package(other)
            if below and own != below and own[0] >= below[0]:
                wrong.append(f"{module} imports {other}")
    assert count
    assert not wrong


def test_each_folder_has_its_line() -> None:
    """Check that the table `LAYERS` names all packages of the library and of `reproduce`.

    It must also name each module in the library's top folder, except modules that exist only for
    their old names.
    """
    parts = {"torchgpipe", "reproduce", "benchmarks", "reproduce.error"}
    for top in ("torchgpipe", "reproduce"):
        for path in (ROOT / top).rglob("__init__.py"):
            parts.add(".".join(path.parent.relative_to(ROOT).parts))
    for path in (ROOT / "torchgpipe").glob("*.py"):
        if path.stem not in {"__init__", *OLD_NAMES}:
            parts.add(f"torchgpipe.{path.stem}")
    listed: list[str] = []
    for names in LAYERS:
        listed += names
    assert sorted(parts) == sorted(listed)


def test_no_circles() -> None:
    graph = {}
    for module, path in MODULES.items():
        graph[module] = {other for other in imported(path) if other in MODULES}
    order = graphlib.TopologicalSorter(graph).static_order()
    # If imports are circular, the error names the circle.
    assert set(order) == set(MODULES)


def test_the_library_needs_torch_alone() -> None:
    needed = set()
    for module, path in MODULES.items():
        if is_within(module, "torchgpipe"):
            needed |= {other.partition(".")[0] for other in imported(path)}
    assert "torch" in needed
    assert needed - {"torch", "torchgpipe"} <= sys.stdlib_module_names

    # Schedules and the replay do not even import torch.
    count = 0
    for module, path in MODULES.items():
        if module == "torchgpipe.plan.predict.replay" or is_within(module, "torchgpipe.schedules"):
            count += 1
            assert not any(is_within(other, "torch") for other in imported(path)), module
    assert count > 1
