"""Choose rows of experiments by their names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import replace

from reproduce.error import USAGE, Error
from reproduce.experiments.row import Experiment


def suggestion(name: str, known: Iterable[str]) -> str:
    """Say which of the known names was probably meant, or all of them."""
    close = difflib.get_close_matches(name, known := list(known), n=1)
    return f"did you mean {close[0]}" if close else f"there are {', '.join(known)}"


def choose_rows(experiments: Sequence[Experiment], names: Sequence[str]) -> list[Experiment]:
    """Return the experiments with the rows so called only, or as they are where no name is given.

    Raises:
        Error: none of them has a row of that name, or one has no row of these names.
    """
    if not names:
        return list(experiments)
    known = {row.name: None for each in experiments for scale in each.scales for row in scale.rows}
    for name in names:
        if name not in known:
            raise Error(f"--row {name!r}: no row is called so; {suggestion(name, known)}", USAGE)

    chosen = []
    for each in experiments:
        scales = tuple(
            replace(scale, rows=tuple(row for row in scale.rows if row.name in names)) for scale in each.scales
        )
        if not any(scale.rows for scale in scales):
            raise Error(f"--row: {each.name} has none of the rows {', '.join(names)}; leave it out", USAGE)
        chosen.append(replace(each, scales=tuple(scale for scale in scales if scale.rows)))
    return chosen
