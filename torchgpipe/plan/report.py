"""Write a plan for people: what was predicted for a setup, for each number of devices, and for training beside it."""

import textwrap
from collections.abc import Sequence

from torchgpipe.plan.amount import amount
from torchgpipe.plan.search.beside import DataParallel
from torchgpipe.plan.search.trial import Candidate

GiB = 2**30
WIDTH = 78
INDENT = " " * 12


def duration(seconds: float) -> str:
    """Return `1.23 s`, or milliseconds below one second."""
    return f"{figure(seconds, 3)} s" if seconds >= 1 else f"{figure(seconds * 1e3, 3)} ms"


def figure(value: float, digits: int = 4) -> str:
    """Return a number with so many significant digits, or from a thousand as an integer: 12.34, 10,540."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.{digits}g}"


def balance_text(balance: Sequence[int], width: int = WIDTH) -> str:
    """Return the balance as a list, cut in the middle where it is too long."""
    text = str(list(balance))
    return text if len(text) <= width else f"{text[: width // 2 - 2]} … {text[-width // 2 + 2 :]}"


def describe_setup(best: Candidate, bound: float, memory: float, room: float, source: str) -> str:
    """Return a setup, its time and how far that is from the bound, and its memory."""
    setup = best.setup
    gap = best.seconds / bound - 1
    lines = [
        f"balance     {balance_text(setup.balance, WIDTH - 12)}",
        f"chunks      {len(setup.sizes)}, each a micro-batch of {setup.sizes[0]}",
        f"checkpoint  {setup.checkpoint}",
        f"step        {duration(best.seconds)} predicted, {figure(setup.batch_size / best.seconds)} samples/s",
        f"{INDENT}no balance, chunks or checkpoint can be "
        + (f"more than {gap:.1%} faster" if gap >= 0.0005 else "faster"),
        f"bubble      {best.bubble:.1%} of the devices' time",
        f"memory      at most {amount(best.peak)} of {amount(memory)} on a device, allocated to tensors",
        *([f"{INDENT}{amount(memory - room)} are left to the allocator and to libraries"] if room < memory else []),
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
    return "\n".join(lines)


def describe_numbers(
    best: Sequence[tuple[int, Candidate | None]], beside: Sequence[DataParallel], batch_size: int, room: float
) -> str:
    """Return a table of the best setup for each number of devices, and of data parallel training on as many."""
    lines = ["devices  samples/s  chunks   checkpoint    GiB  bubble  | data parallel    GiB"]
    for (n, candidate), other in zip(best, beside, strict=True):
        cells = f"{'no room':>9}"
        if candidate is not None:
            setup = candidate.setup
            cells = (
                f"{figure(batch_size / candidate.seconds):>9}{len(setup.sizes):>8}{setup.checkpoint:>13}"
                f"{candidate.peak / GiB:>7.2f}{candidate.bubble:>8.1%}"
            )
        rate = figure(batch_size / other.seconds) if other.peak <= room else "no room"
        lines.append(f"{n:>7}  {cells:<45}  |{rate:>14}{other.peak / GiB:>7.2f}")
    lines += textwrap.wrap(
        "(GiB of the fullest device. Data parallel: the whole model and a share of the batch on each device, nothing "
        "recomputed; on one device that is plain training)",
        WIDTH,
    )
    return "\n".join(lines)
