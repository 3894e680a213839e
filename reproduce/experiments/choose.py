"""Choose rows of experiments by their names, and the scale that a machine can hold."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import replace

from reproduce.error import Error
from reproduce.experiments.row import Experiment, GiB, Scale
from reproduce.machine.devices import Devices


def suggestion(name: str, known: Iterable[str]) -> str:
    """Say which of the known names was probably meant, or all of them."""
    close = difflib.get_close_matches(name, known := list(known), n=1)
    return f"did you mean {close[0]}" if close else f"there are {', '.join(known)}"


def choose_rows(
    experiments: Sequence[Experiment], names: Sequence[str], *, extra: bool = False
) -> list[Experiment]:
    """Return the experiments with only the rows of these names; an experiment without any raises `Error`.

    Without names, they have all rows, the extra ones only if asked.
    """
    known = {row.name: None for each in experiments for scale in each.scales for row in scale.rows}
    for name in names:
        if name not in known:
            raise Error(f"--row {name!r}: no row is called so; {suggestion(name, known)}")

    chosen = []
    for each in experiments:
        scales = tuple(
            replace(
                at,
                rows=tuple(
                    row
                    for row in at.rows
                    if (row.name in names if names else extra or not row.extra)
                ),
            )
            for at in each.scales
        )
        if not any(scale.rows for scale in scales):
            raise Error(f"--row: {each.name} has none of the rows {', '.join(names)}; leave it out")
        chosen.append(replace(each, scales=tuple(scale for scale in scales if scale.rows)))
    return chosen


def choose_scale(experiments: Sequence[Experiment], devices: Devices, asked: str | None) -> str:
    """Return `asked`, or the first scale that all experiments have; raise `Error` if the machine cannot hold it."""
    names = [[scale.name for scale in experiment.scales] for experiment in experiments]
    common = [name for name in names[0] if all(name in others for others in names)]
    if not common:
        raise Error("the rows that were chosen have no scale in common; run them apart")
    if asked is not None and asked not in common:
        raise Error(
            f"--scale {asked}: no such scale of {experiments[0].name}; there are {', '.join(common)}"
        )

    reasons = []
    for name in common if asked is None else [asked]:
        reason = next(
            filter(None, (why_not(experiment.scale(name), devices) for experiment in experiments)),
            None,
        )
        if reason is None:
            return name
        reasons.append(f"--scale {name}: {reason}")
    others = [name for name in common if name != asked]
    advice = f"; use --scale {others[-1]}" if asked is not None and others else ""
    raise Error(reasons[-1] + advice)


def why_not(scale: Scale, devices: Devices) -> str | None:
    """Say why the scale does not fit on the devices; None if it does, although some rows may need more devices."""
    if devices.kind == "meta" and not scale.cuda:
        return "its balances are profiled, and devices that hold no data take no time"
    needed, have = f"{scale.memory / GiB:.0f} GiB of memory", devices.memory
    if scale.cuda and devices.kind == "cpu":
        return f"it needs CUDA devices with {needed} each, and this run is on {devices}"
    if have is not None and have < scale.memory:
        share = "each" if devices.kind == "cuda" else "in all"
        return f"it needs {needed} {share}, and {devices} have {have / GiB:.1f} GiB"
    return None
