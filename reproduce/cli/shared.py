"""Hold what several commands need."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import click


def need(*packages: str) -> None:
    """Refuse in one line to go on without a package.

    Raises:
        ClickException: it is not installed.
    """
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise click.ClickException(f"{package} is not installed: run 'make setup', or 'pip install {package}'")


def shown(path: Path) -> str:
    """Return the path as one would type it here, where it lies below the current folder."""
    path = path.absolute()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
