"""Write a plan for people: amounts of memory, and what was predicted for a setup and for those that came next."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from torchgpipe.plan.search import Candidate

__all__ = ["amount", "balance_text", "describe", "parse_amount"]

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "kB": 10**3, "MB": 10**6, "GB": 10**9,
         "TB": 10**12}  # fmt: skip
GiB = 2**30
WIDTH = 78
RUNNERS_UP = 3
INDENT = " " * 12


def parse_amount(text: str | float) -> float:
    """Return bytes from a number of them, or from text such as `24GiB`.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        number, unit = float(text), "B"
    else:
        match = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", str(text))
        units = {unit.lower(): size for unit, size in UNITS.items()}
        try:
            assert match is not None
            number, unit = float(match[1]), match[2] or "B"
            units[unit.lower()]
        except (AssertionError, ValueError, KeyError):
            raise ValueError(f"memory must be bytes, or text such as '24GiB' or '80GB', got {text!r}") from None
    nbytes = number * {unit.lower(): size for unit, size in UNITS.items()}[unit.lower()]
    if not 0 < nbytes < float("inf"):
        raise ValueError(f"memory must be more than nothing, got {text!r}")
    return nbytes


def amount(nbytes: float) -> str:
    """Return `31.2 GiB`, or a smaller unit where that would show next to nothing."""
    for unit in ("GiB", "MiB", "KiB"):
        if nbytes >= UNITS[unit]:
            return f"{nbytes / UNITS[unit]:.1f} {unit}"
    return f"{nbytes:.0f} B"


def duration(seconds: float) -> str:
    """Return `1.23 s`, or milliseconds below one second."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def balance_text(balance: Sequence[int], width: int = WIDTH) -> str:
    """Return the balance as a list, cut in the middle where it is too long."""
    text = str(list(balance))
    return text if len(text) <= width else f"{text[: width // 2 - 2]} … {text[-width // 2 + 2 :]}"


def describe(candidates: Sequence[Candidate], memory: float, source: str) -> str:
    """Return the best candidate's setup, time and memory, and the runners-up."""
    best, *others = candidates
    setup = best.setup
    lines = [
        f"balance     {balance_text(setup.balance, WIDTH - 12)}",
        f"chunks      {len(setup.sizes)} micro-batches of {setup.sizes[0]}",
        f"checkpoint  {setup.checkpoint}",
        f"step        {duration(best.seconds)} predicted, {setup.batch_size / best.seconds:.4g} samples/s",
        f"bubble      {best.bubble:.1%} of the devices' time",
        f"memory      at most {amount(best.peak)} of {amount(memory)} on a device, allocated to tensors",
        *textwrap.wrap(f"predicted, not measured: {source}", WIDTH, initial_indent=INDENT, subsequent_indent=INDENT),
        "",
        "device  layers  model+grads  optimizer  stashed  working  copies    total",
    ]
    for j, (layers, device) in enumerate(zip(setup.balance, best.devices, strict=True)):
        cells = (
            device.parameters + device.gradients,
            device.optimizer,
            device.stashed,
            device.working,
            device.copies + device.skips,
            device.peak,
        )
        widths = (13, 11, 9, 9, 8, 9)
        lines.append(
            f"{j:>6}  {layers:>6}" + "".join(f"{cell / GiB:>{w}.2f}" for cell, w in zip(cells, widths, strict=True))
        )
    lines.append("(GiB, at each device's fullest moment)")
    if others:
        lines += ["", "next best"]
        for other in others[:RUNNERS_UP]:
            s = other.setup
            lines.append(
                f"  {duration(other.seconds):>8}  n={len(s.balance)} m={len(s.sizes)} {s.checkpoint}, "
                f"{amount(other.peak)}, bubble {other.bubble:.1%}"
            )
    return "\n".join(lines)
