"""Say of every source what is behind its numbers: machine, software and run; publication; hardware description."""

from __future__ import annotations

from collections import Counter
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
        about = {**_run(record.run), "record": f"{record.name}.json"}
    else:
        about = {
            "source": _listed(record.source),
            "hardware": _listed(record.hardware),
            "software": _listed(record.software),
            "notes": " ".join(record.notes),
            "disagreements": "; ".join(f"{each.row}: {each.values.get('verdict')}" for each in record.discrepancies),
        }
    return {name: text for name, text in about.items() if text}


def _run(run: Run) -> dict[str, str]:
    machine, git = run.machine, run.git
    threads = f" of {many(run.threads_per_device, 'thread')}" if run.threads_per_device else ""
    memory = f", {machine.memory / GiB:.0f} GiB of memory" if machine.memory else ""
    return {
        "devices": f"{run.devices} {run.device.upper()}{threads}",
        "machine": f"{machine.cpu}, {many(machine.cores, 'core')} of {machine.cores_installed}{memory}",
        "system": machine.system,
        "GPUs": "; ".join(f"{count} x {gpu}" for gpu, count in Counter(map(_gpu, machine.gpus)).items()),
        "versions": ", ".join(f"{name} {version}" for name, version in run.versions.items() if version),
        "git revision": git.revision[:12] + (", with changes" if git.dirty else "") if git else "",
        "freed memory": str(run.settings.get(FREED_MEMORY, "")),
        "load at start": ", ".join(f"{value:.2f}" for value in run.load or []),
        "run": f"{run.started} to {run.ended or 'unknown'}, {run.state}; seed {run.seed}",
        "command": " ".join(run.command),
    }


def _gpu(gpu: Gpu) -> str:
    parts = [
        gpu.name,
        f"{gpu.memory / GiB:.0f} GiB",
        f"{gpu.clock:.0f} MHz" if gpu.clock else None,
        f"{gpu.memory_clock:.0f} MHz memory" if gpu.memory_clock else None,
        f"{gpu.power_limit:.0f} W" if gpu.power_limit else None,
        gpu.link,
    ]
    return ", ".join(filter(None, parts))


def _listed(fields: Mapping[str, Json] | None) -> str:
    return "; ".join(
        f"{name.replace('_', ' ')}: {', '.join(map(_text, value)) if isinstance(value, list) else _text(value)}"
        for name, value in (fields or {}).items()
        if value is not None
    )


def _text(value: Json) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
