"""Put the records of results/ into the wheel, as reproduce/results; all else is in setup.cfg."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildPy(build_py):
    """Copy the packages, then the records. An editable install reads them where they are."""

    def run(self) -> None:
        """Build."""
        super().run()
        if not self.editable_mode:
            for folder in ("paper", "measured", "predicted"):
                to = Path(self.build_lib, "reproduce", "results", folder)
                shutil.copytree(
                    Path("results", folder),
                    to,
                    ignore=shutil.ignore_patterns("*.md"),
                    dirs_exist_ok=True,
                )


setup(cmdclass={"build_py": BuildPy})
