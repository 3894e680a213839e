"""What a benchmark's result was made under, to be kept with it."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from reproduce.machine.allocator import kept

__all__ = ["checkout", "circumstances", "keep", "told"]

ROOT = Path(__file__).resolve().parent.parent


def circumstances() -> dict[str, Any]:
    """Return when, on what, and from which revision a benchmark is run; call it before the machine gets busy."""
    from cpuinfo import get_cpu_info  # type: ignore[import-untyped]  # comes with pytest-benchmark

    return {
        "when": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": get_cpu_info().get("brand_raw", platform.machine()),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "freed memory": "kept" if kept() else "as the C library does",
        **_gpu(),
        **checkout(),
    }


def checkout() -> dict[str, Any]:
    """Return the revision that is checked out, None without one, and whether tracked files differ from it."""
    return {
        "revision": _git("rev-parse", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
    }


def keep(file: Path, benchmark: str, under: dict[str, Any], result: dict[str, Any]) -> None:
    """Write a result; whatever happens, the old file or the new one is there."""
    part = file.with_name(f".{file.name}.part")
    part.write_text(json.dumps({"benchmark": benchmark, "circumstances": under, **result}) + "\n")
    part.replace(file)


def told(under: dict[str, Any]) -> str:
    """Return the circumstances as a line."""
    changed = ", with changes" if under["dirty"] else ""
    gpu = f"{under['gpu']}, " if "gpu" in under else ""
    freed = ", freed memory kept" if under.get("freed memory") == "kept" else ""
    return (
        f"{under['when'][:10]}, torch {under['torch']}, Python {under['python']}, {gpu}{under['cpu']}, "
        f"{under['cores']} cores{freed}, load {under['load']} before the start, "
        f"revision {str(under['revision'])[:9]}{changed}"
    )


def _gpu() -> dict[str, Any]:
    """Return the GPU's name and its libraries' versions, nothing without one."""
    if not torch.cuda.is_available():
        return {}
    return {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
