"""Say of every source what is behind its numbers: machine, software and run; publication; hardware description."""

from __future__ import annotations

from collections.abc import Mapping

from reproduce.machine.description import Gpu
from reproduce.numbers.metrics import BYTES
from reproduce.records.decode import Json
from reproduce.records.record import FREED_MEMORY, Record, Run
from reproduce.tables.layout import many

GiB = BYTES["GiB"]


def provenance(record: Record) -> dict[str, str]:
    """Return what there is to know, by name."""
    if record.run is not None:
        return _run(record.run, record)
    found = {}
    for name, value in (("source", record.source), ("hardware", record.hardware), ("software", record.software)):
        if value:
            found[name] = _listed(value)
    if record.notes:
        found["notes"] = " ".join(record.notes)
    if record.discrepancies:
        found["disagreements"] = "; ".join(f"{each.row}: {each.values.get('verdict')}" for each in record.discrepancies)
    return found


def _run(run: Run, record: Record) -> dict[str, str]:
    machine = run.machine
    threads = f" of {many(run.threads_per_device, 'thread')}" if run.threads_per_device else ""
    memory = f", {machine.memory / GiB:.0f} GiB of memory" if machine.memory else ""
    found = {
        "devices": f"{run.devices} {run.device.upper()}{threads}",
        "machine": f"{machine.cpu}, {many(machine.cores, 'core')} of {machine.cores_installed}{memory}",
        "system": machine.system,
    }
    for gpu, count in _counted(machine.gpus).items():
        found["GPUs"] = "; ".join(filter(None, [found.get("GPUs"), f"{count} x {gpu}"]))
    found["versions"] = ", ".join(f"{name} {version}" for name, version in run.versions.items() if version)
    if run.git is not None:
        found["git revision"] = run.git.revision[:12] + (", with changes" if run.git.dirty else "")
    if FREED_MEMORY in run.settings:
        found["freed memory"] = str(run.settings[FREED_MEMORY])
    if run.load is not None:
        found["load at start"] = ", ".join(f"{value:.2f}" for value in run.load)
    found["run"] = f"{run.started} to {run.ended or 'unknown'}, {run.state}; seed {run.seed}"
    found["command"] = " ".join(run.command)
    found["record"] = f"{record.name}.json"
    return found


def _counted(gpus: list[Gpu]) -> dict[str, int]:
    found: dict[str, int] = {}
    for gpu in gpus:
        clocks = [f"{clock:.0f} MHz{of}" for clock, of in ((gpu.clock, ""), (gpu.memory_clock, " memory")) if clock]
        power = [f"{gpu.power_limit:.0f} W"] if gpu.power_limit else []
        said = ", ".join(filter(None, [gpu.name, f"{gpu.memory / GiB:.0f} GiB", *clocks, *power, gpu.link]))
        found[said] = found.get(said, 0) + 1
    return found


def _listed(value: Mapping[str, Json]) -> str:
    parts = []
    for name, item in value.items():
        if item is not None:
            said = ", ".join(map(_text, item)) if isinstance(item, list) else _text(item)
            parts.append(f"{name.replace('_', ' ')}: {said}")
    return "; ".join(parts)


def _text(value: Json) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
