"""Write a plan for people: what was predicted for a setup, and for those that came next."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from torchgpipe.plan.amount import amount
from torchgpipe.plan.search import Candidate

__all__ = ["balance_text", "describe"]

GiB = 2**30
WIDTH = 78
RUNNERS_UP = 3
INDENT = " " * 12


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
            device.optimizer + device.update,
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
