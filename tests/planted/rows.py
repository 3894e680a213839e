"""The rows, each a fault: a file, its old text, its new text; and what tests made of it."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
ROWS = Path(__file__).with_name("rows.json")


@dataclass
class Row:
    """A fault. `found` and `by` are results: whether tests find it, and which, or why they do not."""

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
            raise ValueError(
                f"{self.file} has {self.old!r} {text.count(self.old)} times, but a fault needs it once; "
                "moves of files change the rows' paths, and new text their old text (tests/planted/rows.json)"
            )
        return text.replace(self.old, self.new)


def read(path: Path = ROWS) -> list[Row]:
    return [Row(**row) for row in json.loads(path.read_text())]


def write(rows: list[Row], path: Path = ROWS) -> None:
    path.write_text("[\n" + ",\n".join(json.dumps(asdict(row), ensure_ascii=False) for row in rows) + "\n]\n")


@contextmanager
def copied(source: Path = ROOT) -> Iterator[Path]:
    """Copy the working tree, without what git ignores, into a temporary clone: some tests ask git."""
    with TemporaryDirectory(prefix="planted-") as folder:
        tree = Path(folder, "tree")
        git = ["git", "-C", str(source)]
        subprocess.run([*git, "clone", "--quiet", "--shared", "--no-checkout", str(source), str(tree)], check=True)
        subprocess.run(["git", "-C", str(tree), "reset", "--quiet"], check=True)
        listed = subprocess.check_output([*git, "ls-files", "-z", "-co", "--exclude-standard"], text=True)
        for name in filter(None, listed.split("\0")):
            if (source / name).is_file():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source / name, tree / name)
        yield tree
