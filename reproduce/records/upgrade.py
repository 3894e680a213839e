"""Upgrade the contents of a record's file from older versions of the format.

Version 2 (2026) moved the driver's version from each GPU to the run's other versions, renamed a GPU's `max_clock`
to `clock`, and added `memory_clock` and `link` to GPUs and `hardware` to results. Version 3 (2026) added emulated
results and removed `over_published`.
"""

from collections.abc import Callable

from reproduce.records.places import Json


def upgrade(data: dict[str, Json], version: int) -> dict[str, Json]:
    """Return the contents in the newest version of the format.

    Contents that do not match their version are left alone: decoding reports them.
    """
    while version in UPGRADES:
        data = UPGRADES[version](data)
        version += 1
    return data


def _from_1(data: dict[str, Json]) -> dict[str, Json]:
    match data:
        case {
            "run": {
                "machine": {"gpus": [dict() as first, *_] as gpus} as host,
                "versions": dict() as old,
            } as run
        }:
            new = {"max_clock": "clock"}
            known = [
                {new.get(name, name): x for name, x in gpu.items() if name != "driver"}
                if isinstance(gpu, dict)
                else gpu
                for gpu in gpus
            ]
            machine = {**host, "gpus": known}
            versions = {**old, "driver": first.get("driver")}
            return {**data, "run": {**run, "machine": machine, "versions": versions}}
    return data


def _from_2(data: dict[str, Json]) -> dict[str, Json]:
    results = data.get("results")
    for result in results if isinstance(results, list) else ():
        if isinstance(result, dict):
            result.pop("over_published", None)
    return data


UPGRADES: dict[int, Callable[[dict[str, Json]], dict[str, Json]]] = {1: _from_1, 2: _from_2}
