"""Run each case (work to time) once, to see if `python -m reproduce regression` can measure it."""

import contextlib
import tempfile
from collections.abc import Iterable
from pathlib import Path

from reproduce.regression.job import in_turn
from reproduce.regression.trees import Project, snapshot


def unable(project: Project, cases: Iterable[str]) -> dict[str, str]:
    """Run each case (piece of work to time) once; return which cases cannot run, and why.

    The package is copied from the working tree, without files that git ignores, and is imported
    from the copy. `python -m reproduce regression` measures the package in the same way.

    Args:
        project: The package.
        cases: The names of the cases, which are pieces of work to time.

    Returns:
        A dictionary from the name of each case that cannot run to the reason.

    Raises:
        Error: The package cannot be copied or built, or the process that runs the cases dies.
    """
    ways = {}
    for case in cases:
        ways[case] = {"head": (0, (str(project.cases), case, None, 0.0))}
    found = {}
    with tempfile.TemporaryDirectory(prefix="regression-") as name:
        tree = snapshot(project, Path(name) / "head")
        job = {
            "folders": [str(tree.folder)],
            "package": project.package,
            "maker": "reproduce.regression.timed:Timed",
            "cases": ways,
            "restarts": 1,
            "rounds": 1,
            "least": 1,
        }
        with contextlib.closing(in_turn(job, {})) as lines:
            for line in lines:
                if "unable" in line:
                    found[line["case"]] = line["unable"]["head"]
    return found
