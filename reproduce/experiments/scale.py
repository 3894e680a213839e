"""Choose the scale that a machine can hold, and say in one line why another does not fit."""

from __future__ import annotations

from collections.abc import Sequence

from reproduce.error import USAGE, Error
from reproduce.experiments import Experiment, Scale
from reproduce.experiments.row import GiB
from reproduce.machine.devices import Devices


def choose_scale(experiments: Sequence[Experiment], devices: Devices, asked: str | None) -> str:
    """Return `asked`, or the first scale, in the experiments' order, that all of them have and the machine holds.

    Raises:
        Error: an experiment has no such scale, or the machine cannot hold it.
    """
    common = [
        scale.name
        for scale in experiments[0].scales
        if all(scale.name in [other.name for other in experiment.scales] for experiment in experiments)
    ]
    if not common:
        raise Error("the rows that were chosen have no scale in common; run them apart", USAGE)
    if asked is not None and asked not in common:
        raise Error(f"--scale {asked}: no such scale of {experiments[0].name}; there are {', '.join(common)}", USAGE)

    reasons = []
    for name in common if asked is None else [asked]:
        reason = next(filter(None, (why_not(experiment.scale(name), devices) for experiment in experiments)), None)
        if reason is None:
            return name
        reasons.append(f"--scale {name}: {reason}")
    others = [name for name in common if name != asked]
    advice = f"; use --scale {others[-1]}" if asked is not None and others else ""
    raise Error(reasons[-1] + advice, USAGE)


def why_not(scale: Scale, devices: Devices) -> str | None:
    """Say why the devices cannot hold the scale; None where they can, though rows may still need more of them."""
    if devices.kind == "meta" and not scale.cuda:
        return "its balances are profiled, and devices that hold no data take no time"
    needed, have = f"{scale.memory / GiB:.0f} GiB of memory", devices.memory
    if scale.cuda and devices.kind == "cpu":
        return f"it needs CUDA devices with {needed} each, and this run is on {devices}"
    if have is not None and have < scale.memory:
        share = "each" if devices.kind == "cuda" else "in all"
        return f"it needs {needed} {share}, and {devices} have {have / GiB:.1f} GiB"
    return None
