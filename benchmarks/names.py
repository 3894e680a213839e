"""Check that pages name only what exists, and that git has the revisions that records name.

    python -m benchmarks.names            # `make lint` runs this

A page is a Markdown file of the docs. It may name a git revision only if a record in `results/` was
measured at that revision. Code in a page (in backticks, or in a block) may name only files,
modules, make targets and options that exist. CHANGELOG.md is not checked, because it also names
what has been removed.
"""

import functools
import importlib.util
import io
import pkgutil
import re
import runpy
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from torch.distributed.run import get_args_parser as torchrun_parser

from benchmarks.gates.losses import REVISIONS
from reproduce.cli.main import COMMANDS
from reproduce.cli.main import main as reproduce
from reproduce.error import Error, fail
from reproduce.machine.description import ROOT
from reproduce.machine.git import git
from reproduce.records.record import Record, load

FOLDERS = "torchgpipe|reproduce|benchmarks|tests|examples"
# A block of code with its language, or code between backticks. Neither begins in the other.
CODE = re.compile(r"```(?P<language>\w*)\n(?P<block>.*?)```|`(?P<inline>[^`]+)`", re.DOTALL)
REVISION = re.compile(r"\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7,40}\b")
MODULE = re.compile(r"python -m ([\w.]+)")
DOTTED = re.compile(rf"(?<![\w/.-])(?:{FOLDERS})(?:\.\w+)+(?![\w/-])")
FILE = re.compile(rf"(?<![\w/.-])(?:{FOLDERS}|docs|results)/[\w./*-]+")
TARGET = re.compile(r"(?:^|&& )make ([\w-]+)(?![\w=-])")
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
COMMAND = re.compile(r"(?:^|python -m )reproduce ([a-z][\w-]*)")
# A program of this project that has options: a command of `reproduce`, a module, or a script.
PROGRAM = re.compile(rf"{COMMAND.pattern}|python -m ((?:{FOLDERS})\.[\w.]+)|(examples/\w+\.py)")
# Programs of others, whose options are not checked.
OTHERS = re.compile(r"\b(?:pip|git|apt-get|pre-commit|pytest)\b")
PROGRAMS = (
    "benchmarks.any_model",
    "benchmarks.conformance",
    "benchmarks.gates.counts",
    "benchmarks.gates.machinery",
    "benchmarks.gates.meeting",
    "benchmarks.gpu",
    "benchmarks.league",
    "benchmarks.schedules",
    "benchmarks.which",
    "tests.planted",
    "tests.planted.losses",
)


class Code(NamedTuple):
    """A piece of code in a page, and the number of the line in which it begins."""

    line: int
    text: str


def main() -> int:
    """Print each file, option, revision and so on that a page names but that does not exist.

    Return 1 if anything was printed, and otherwise 0.
    """
    sys.excepthook = fail
    revisions, found = recorded_revisions(ROOT)
    for page in pages(ROOT):
        text = page.read_text(encoding="utf-8")
        for line, problem in problems(text, revisions):
            found.append(f"{page.relative_to(ROOT)}:{line}: {problem}")
    for each in found:
        print(each, file=sys.stderr)
    return 1 if found else 0


def pages(root: Path) -> list[Path]:
    """Return the pages that are checked."""
    top = [root / "README.md", root / "CONTRIBUTING.md", root / "results" / "README.md"]
    return top + sorted((root / "docs").rglob("*.md"))


def recorded_revisions(root: Path) -> tuple[list[str], list[str]]:
    """Return the git revisions of all records, and messages about revisions that git lacks.

    Raises:
        Error: If this folder is no git clone, or if the clone lacks a part of the history.
    """
    if git(root, "rev-parse", "--is-shallow-repository") == b"true":
        raise Error("this clone is shallow: run 'git fetch --unshallow' to get all of its commits")
    history = git(root, "rev-list", "HEAD").decode().split()
    known = frozenset(history)
    revisions, missing = [], []
    for path in sorted((root / "results").rglob("*.json")):
        for revision in _revisions_of(load(path)):
            revisions.append(revision)
            if not any(each.startswith(revision) for each in known):
                name = path.relative_to(root)
                missing.append(f"{name}: its revision {revision[:9]} is not in the history of HEAD")
    return revisions, missing


def _revisions_of(record: Record) -> Iterator[str]:
    """Yield the git revision of a record, and the revisions that its results name."""
    if record.run is not None and record.run.git is not None:
        yield record.run.git.revision
    for result in record.results:
        yield from result.config.get(REVISIONS, {})


def problems(text: str, revisions: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Check the names in a page; yield a line number and a message for each that names nothing.

    Args:
        text: The text of the page.
        revisions: The git revisions that the page may name.
    """
    for number, line in enumerate(text.splitlines(), 1):
        for match in REVISION.finditer(line):
            if not any(revision.startswith(match[0]) for revision in revisions):
                yield number, f"{match[0]} is the revision of no record in results/"
    for line_number, code in pieces(text):
        for problem in _in_code(code):
            yield line_number, problem


def pieces(text: str) -> Iterator[Code]:
    """Yield all pieces of code in a page.

    In a block of shell commands, each line is a piece. Any other block is one piece, and so is code
    in backticks. Blocks of the languages `text` and `output` are left out, because they show
    pictures and what programs print.
    """
    for match in CODE.finditer(text):
        number = text.count("\n", 0, match.start()) + 1
        if match["inline"] is not None:
            words = match["inline"].split()
            yield Code(number, " ".join(words))
        elif match["language"] == "sh":
            for offset, line in enumerate(match["block"].splitlines(), 1):
                command = re.split(r"\s# ", line)[0]
                yield Code(number + offset, command.strip())
        elif match["language"] not in ("text", "output"):
            yield Code(number, match["block"])


def _in_code(code: str) -> list[str]:
    """Return a message for each file, module, command or option in code that does not exist."""
    found = []
    for pattern, exists, what in (
        (MODULE, _module_exists, "there is no module {}"),
        (DOTTED, _resolves, "there is no {}"),
        (FILE, _file_exists, "there is no file {}"),
        (TARGET, _is_target, "the Makefile has no target {}"),
        (COMMAND, _is_command, "reproduce has no command {}"),
    ):
        found += [what.format(name) for name in pattern.findall(code) if not exists(name)]
    if not found and not OTHERS.search(code):
        found += _unknown_options(code)
    return found


def _module_exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _resolves(name: str) -> bool:
    """Return whether a dotted name, such as `a.b`, names a module or what a module defines."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def _file_exists(path: str) -> bool:
    """Return whether a page may name this file or folder.

    A page may name a file that exists, or a file that git ignores, because a command may write it.
    It may also name a file in capitals, such as `tests/FILE`, which stands for any file.
    """
    path = path.rstrip("./")
    if Path(path).name.isupper() or any(ROOT.glob(path)):
        return True
    ignored = (ROOT / ".gitignore").read_text().split()
    return f"/{path}" in ignored


@functools.cache
def _is_target(name: str) -> bool:
    makefile = (ROOT / "Makefile").read_text()
    return re.search(rf"^{name}:", makefile, re.MULTILINE) is not None


def _is_command(name: str) -> bool:
    return name in [command.name for command in COMMANDS]


def _unknown_options(code: str) -> Iterator[str]:
    """Yield a message for each option in a piece of code that the named program does not have.

    If the code names no program, the options of all programs are allowed. Options after ` -- ` are
    not checked, because the program passes them to another program.
    """
    own, _, _ = code.partition(" -- ")
    options = OPTION.findall(own)
    if not options:
        return
    program = PROGRAM.search(code)
    if program is None or "torchrun" in code:
        name, known = "any program", _all_options()
    else:
        name = next(filter(None, program.groups()))
        known = _options_of(name)
    for option in options:
        if option not in known:
            yield f"{option} is no option of {name}"


@functools.cache
def _all_options() -> frozenset[str]:
    """Return the command-line options of all this project's programs, torchrun and the tests."""
    commands = [str(command.name) for command in COMMANDS]
    known = {"--all", "--help", "--slow", "--version"}
    known.update(OPTION.findall(torchrun_parser().format_help()))
    for name in [*commands, *PROGRAMS, "examples/train.py"]:
        known |= _options_of(name)
    return frozenset(known)


@functools.cache
def _options_of(name: str) -> frozenset[str]:
    """Return the command-line options that a program's `--help` names.

    Args:
        name: A command of `reproduce`, a module, or the path of a script.
    """
    printed = io.StringIO()
    hook = sys.excepthook
    with redirect_stdout(printed), patch.object(sys, "argv", [name, "--help"]):
        try:
            _show_help(name)
        except SystemExit:
            pass
        finally:
            sys.excepthook = hook
    return frozenset(OPTION.findall(printed.getvalue()))


def _show_help(name: str) -> None:
    if name.endswith(".py"):
        runpy.run_path(str(ROOT / name), run_name="__main__")
    elif name == "benchmarks.render":
        reproduce(["render", "--help"])
    elif "." in name:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the module may have been imported before
            runpy.run_module(name, run_name="__main__")
    else:
        reproduce([name, "--help"])


if __name__ == "__main__":
    sys.exit(main())
