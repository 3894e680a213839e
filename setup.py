"""Put the records of results/ into the wheel, as reproduce/results; setup.cfg has all the rest."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildPy(build_py):
    """The build command that copies the packages, and then the records.

    An editable install reads the records in results/, so it copies none.
    """

    def run(self) -> None:
        """Build."""
        super().run()
        if self.editable_mode:
            return
        pages = shutil.ignore_patterns("*.md")
        for folder in ("paper", "measured", "predicted"):
            source = Path("results", folder)
            target = Path(self.build_lib, "reproduce", "results", folder)
            shutil.copytree(source, target, ignore=pages, dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildPy})
