"""Choose the rows of experiments by name, and the scale at which the experiments run.

A scale is a named set of sizes for all rows of an experiment, such as `paper` or `small`.
"""

from collections.abc import Sequence
from dataclasses import replace

from reproduce.error import Error, suggestion
from reproduce.experiments.row import Experiment, GiB, Row, Scale
from reproduce.machine.devices import Devices


def choose_rows(
    experiments: Sequence[Experiment], names: Sequence[str], *, extra: bool = False
) -> list[Experiment]:
    """Return the experiments, each with only the chosen rows.

    Args:
        experiments: The experiments with all of their rows.
        names: The names of the rows to choose. If there are no names, all rows that run by default
            are chosen.
        extra: If there are no names, whether to choose also the rows that do not run by default,
            whose field `extra` is true.

    Raises:
        Error: A name is unknown, or an experiment has none of the chosen rows.
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
                f"--row: the experiment {experiment.name} has none of the rows "
                f"{', '.join(names)}; do not name this experiment"
            )
        chosen.append(replace(experiment, scales=tuple(scales)))
    return chosen


def _check_names(experiments: Sequence[Experiment], names: Sequence[str]) -> None:
    """Raise `Error` if one of `names` is not the name of any row (configuration) to choose from."""
    known: dict[str, Row] = {}  # in order, each name once
    for experiment in experiments:
        for scale in experiment.scales:
            for row in scale.rows:
                known.setdefault(row.name, row)
    for name in names:
        if name not in known:
            named = " ".join(each.name for each in experiments)
            listing = f"python -m reproduce list {named}"
            raise Error(f"--row {name!r}: no row is called so; {suggestion(name, known, listing)}")


def choose_scale(experiments: Sequence[Experiment], devices: Devices, asked: str | None) -> str:
    """Return the name of a scale (a set of sizes) that all experiments have and that fits.

    A scale fits if the devices have the kind and the memory that the scale needs. The result is
    `asked` or, if `asked` is None, the first scale that fits. If there is no such scale, raise
    `Error`.
    """
    common = _common_scales(experiments)
    if not common:
        raise Error(
            "there is no scale, such as paper or small, that has all the chosen rows; run these "
            "rows separately"
        )
    if asked is not None and asked not in common:
        raise Error(
            f"--scale {asked}: no such scale of {experiments[0].name}; choose {' or '.join(common)}"
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
    """Return the names of the scales (sets of sizes) that all experiments have.

    The names are in the order of the first experiment.
    """
    first, *others = experiments
    common = [scale.name for scale in first.scales]
    for experiment in others:
        names = {scale.name for scale in experiment.scales}
        common = [name for name in common if name in names]
    return common


def _why_not_any(experiments: Sequence[Experiment], scale: str, devices: Devices) -> str | None:
    """Return why an experiment does not fit on the devices, or None if all experiments fit.

    `scale` is the name of the scale (the set of sizes) at which the experiments would run.
    """
    for experiment in experiments:
        reason = why_not(experiment.scale(scale), devices)
        if reason is not None:
            return reason
    return None


def why_not(scale: Scale, devices: Devices) -> str | None:
    """Return why a scale (a set of sizes) does not fit on the devices, or None if it fits.

    Only the kind and the memory of the devices count, not their number.
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
