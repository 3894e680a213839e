"""Choose rows of experiments by their names, and the scale that a machine can hold."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import replace

from reproduce.error import Error
from reproduce.experiments.row import Experiment, GiB, Row, Scale
from reproduce.machine.devices import Devices


def suggestion(name: str, known: Iterable[str]) -> str:
    """Say which of the known names was probably meant, or list all of them."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"did you mean {close[0]}"
    return f"there are {', '.join(names)}"


def choose_rows(
    experiments: Sequence[Experiment], names: Sequence[str], *, extra: bool = False
) -> list[Experiment]:
    """Return the experiments with only the rows of these names.

    Without names, keep all rows, but extra rows only with `extra`. An unknown name raises `Error`,
    and so does an experiment without any of the rows.
    """
    _check_names(experiments, names)

    def is_chosen(row: Row) -> bool:
        if names:
            return row.name in names
        return extra or not row.extra

    chosen = []
    for experiment in experiments:
        scales = []
        for scale in experiment.scales:
            rows = tuple(filter(is_chosen, scale.rows))
            if rows:
                scales.append(replace(scale, rows=rows))
        if not scales:
            raise Error(
                f"--row: {experiment.name} has none of the rows {', '.join(names)}; leave it out"
            )
        chosen.append(replace(experiment, scales=tuple(scales)))
    return chosen


def _check_names(experiments: Sequence[Experiment], names: Sequence[str]) -> None:
    """Raise `Error` if there is a name that no row has."""
    known: dict[str, Row] = {}  # in order, each name once
    for experiment in experiments:
        for scale in experiment.scales:
            for row in scale.rows:
                known.setdefault(row.name, row)
    for name in names:
        if name not in known:
            raise Error(f"--row {name!r}: no row is called so; {suggestion(name, known)}")


def choose_scale(experiments: Sequence[Experiment], devices: Devices, asked: str | None) -> str:
    """Return `asked`, or the first scale that all experiments have and that the machine can hold.

    Raise `Error` if there is no such scale, or the machine cannot hold it.
    """
    common = _common_scales(experiments)
    if not common:
        raise Error("the rows that were chosen have no scale in common; run them apart")
    if asked is not None and asked not in common:
        raise Error(
            f"--scale {asked}: no such scale of {experiments[0].name}; "
            f"there are {', '.join(common)}"
        )

    problem = ""
    for name in common if asked is None else [asked]:
        reason = _why_not_any(experiments, name, devices)
        if reason is None:
            return name
        problem = f"--scale {name}: {reason}"
    others = [name for name in common if name != asked]
    if asked is not None and others:
        problem = f"{problem}; use --scale {others[-1]}"
    raise Error(problem)


def _common_scales(experiments: Sequence[Experiment]) -> list[str]:
    """Return the names of the scales that all experiments have, in the order of the first."""
    first, *others = experiments
    common = [scale.name for scale in first.scales]
    for experiment in others:
        names = {scale.name for scale in experiment.scales}
        common = [name for name in common if name in names]
    return common


def _why_not_any(experiments: Sequence[Experiment], scale: str, devices: Devices) -> str | None:
    """Say why the scale of one of the experiments does not fit; None if the scale of all fits."""
    for experiment in experiments:
        reason = why_not(experiment.scale(scale), devices)
        if reason is not None:
            return reason
    return None


def why_not(scale: Scale, devices: Devices) -> str | None:
    """Say why the scale does not fit on the devices; None if it does.

    It may fit although some rows need more devices.
    """
    if devices.kind == "meta" and not scale.cuda:
        return "its balances are profiled, and devices that hold no data take no time"
    needed = f"{scale.memory / GiB:.0f} GiB of memory"
    have = devices.memory
    if scale.cuda and devices.kind == "cpu":
        return f"it needs CUDA devices with {needed} each, and this run is on {devices}"
    if have is not None and have < scale.memory:
        share = "each" if devices.kind == "cuda" else "in all"
        return f"it needs {needed} {share}, and {devices} have {have / GiB:.1f} GiB"
    return None
