"""Upgrade the content of a record's file from older versions of the format.

Version 2 (2026):

- The driver's version moved from each GPU to the run's `versions`.
- A GPU's `max_clock` was renamed to `clock`. GPUs also have `memory_clock` and `link`.
- Results have `hardware`.

Version 3 (2026):

- Results can be emulated.
- Results no longer have `over_published`.
"""

from collections.abc import Callable

from reproduce.records.places import Json

Fields = dict[str, Json]


def upgrade(data: Fields, version: int) -> Fields:
    """Return a record's content in the newest version of the format.

    Content that does not have the form of its version is returned unchanged. Decoding it raises an
    error later.
    """
    while version in UPGRADES:
        step = UPGRADES[version]
        data = step(data)
        version += 1
    return data


def _from_1(data: Fields) -> Fields:
    match data:
        case {
            "run": {
                "machine": {"gpus": [dict() as first, *_] as gpus} as host,
                "versions": dict() as old,
            } as run
        }:
            machine = {**host, "gpus": list(map(_gpu_from_1, gpus))}
            versions = {**old, "driver": first.get("driver")}
            return {**data, "run": {**run, "machine": machine, "versions": versions}}
    return data


def _gpu_from_1(gpu: Json) -> Json:
    if not isinstance(gpu, dict):
        return gpu
    fields = {}
    for name, value in gpu.items():
        if name == "max_clock":
            name = "clock"
        if name != "driver":
            fields[name] = value
    return fields


def _from_2(data: Fields) -> Fields:
    results = data.get("results")
    if isinstance(results, list):
        for result in results:
            if isinstance(result, dict):
                result.pop("over_published", None)
    return data


UPGRADES: dict[int, Callable[[Fields], Fields]] = {1: _from_1, 2: _from_2}
