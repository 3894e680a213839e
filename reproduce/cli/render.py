"""Offer `python -m reproduce render`."""

from __future__ import annotations

import sys

import click

from reproduce.machine.description import ROOT
from reproduce.records.places import need_checkout
from reproduce.records.record import write_atomically
from reproduce.tables.render import render, stale


@click.command("render")
@click.option("--check", is_flag=True, help="Write nothing; fail if anything is stale.")
def render_command(check: bool) -> None:
    """Rewrite the tables that are made from records.

    These are the pages in results/, and the marked blocks of README.md and docs/.
    """
    need_checkout("render")
    sys.path.insert(0, str(ROOT))  # its benchmarks make blocks, wherever one stands
    files = render(ROOT)
    changed = stale(files)
    if check and changed:
        named = ", ".join(str(path.relative_to(ROOT)) for path in changed)
        raise click.ClickException(f"stale: {named}; run 'python -m reproduce render'")
    for path in changed:
        write_atomically(path, files[path])
        click.echo(str(path.relative_to(ROOT)))
    if not changed:
        click.echo(f"{len(files)} files are as their records say")
