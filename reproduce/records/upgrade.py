"""Turn a record's parsed file from one version of the format into the next, before it is decoded.

Version 2 (2026) moved the driver's version from each GPU to the run's other versions, renamed a GPU's `max_clock`
to `clock`, beside which there are `memory_clock` and `link` now, and gave results `hardware`.
"""

from __future__ import annotations

from collections.abc import Callable

from reproduce.records.decode import DecodeError, Json

__all__ = ["UPGRADES", "upgrade"]


def upgrade(data: dict[str, Json], version: int) -> dict[str, Json]:
    """Return the contents of a record's file of `version` as the newest version has them.

    Raises:
        DecodeError: the file is not as its version says.
    """
    while version in UPGRADES:
        data = UPGRADES[version](data)
        version += 1
    return data


def _from_1(data: dict[str, Json]) -> dict[str, Json]:
    run = data.get("run")
    if run is None:
        return data
    machine = _object(_object(run, "run").get("machine", {}), "run.machine")
    versions = _object(run.get("versions", {}), "run.versions")
    gpus, drivers = [], []
    for i, old in enumerate(_list(machine.get("gpus", []), "run.machine.gpus")):
        gpu = dict(_object(old, f"run.machine.gpus[{i}]"))
        drivers.append(gpu.pop("driver", None))
        if "max_clock" in gpu:
            gpu["clock"] = gpu.pop("max_clock")
        gpus.append(gpu)
    machine = {**machine, "gpus": gpus} if gpus else machine
    versions = {**versions, "driver": drivers[0]} if drivers else versions
    return {**data, "run": {**run, "machine": machine, "versions": versions}}


def _object(value: Json, where: str) -> dict[str, Json]:
    if not isinstance(value, dict):
        raise DecodeError(f"{where}: expected an object, got {value!r}")
    return value


def _list(value: Json, where: str) -> list[Json]:
    if not isinstance(value, list):
        raise DecodeError(f"{where}: expected a list, got {value!r}")
    return value


UPGRADES: dict[int, Callable[[dict[str, Json]], dict[str, Json]]] = {1: _from_1}
