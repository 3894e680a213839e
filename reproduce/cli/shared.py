"""Hold the commands of `python -m reproduce`, one file each. What only they need is imported when they run."""

from __future__ import annotations

import importlib.util

import click

__all__ = ["need"]


def need(*packages: str) -> None:
    """Refuse in one line to go on without a package.

    Raises:
        ClickException: it is not installed.
    """
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise click.ClickException(f"{package} is not installed: run 'make setup', or 'pip install {package}'")
