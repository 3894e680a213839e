"""Upgrade records (JSON files with results) that an older version of this program has written.

Version 2 of the format (2026) differs from version 1 as follows:

- The version of the GPU driver moved from each GPU to the run's field `versions`.
- The field `max_clock` of a GPU was renamed to `clock`. GPUs got `memory_clock` and `link`.
- Results got the field `hardware`, the name of a hardware description.

Version 3 (2026) differs from version 2 as follows:

- Results can be emulated.
- Results no longer have the field `over_published`.
"""

from collections.abc import Callable

from reproduce.records.places import Json

Fields = dict[str, Json]


def upgrade(data: Fields, version: int) -> Fields:
    """Convert the content of a record to the newest version of the format.

    If the content does not fit its version, it is returned unchanged. The error is then raised
    later, when the content is decoded.

    Args:
        data: The fields of the record.
        version: The version of the format in which the record was written.
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
