"""Format the tables of a plan's report as text."""

from collections.abc import Iterable, Mapping, Sequence
from textwrap import fill

from torchgpipe.plan.search.alternatives import Alternative
from torchgpipe.plan.search.search import Found
from torchgpipe.plan.search.trial import Candidate

GiB = 2**30
WIDTH = 78
COLUMNS = f"{'samples/s':>9}{'chunks':>8}{'checkpoint':>13}{'GiB':>7}{'bubble':>8}"
"""The headings of the columns about a setup."""
RECOMPUTED = "*"


def duration(seconds: float) -> str:
    """Format seconds as text such as `1.23 s`, or as `45.6 ms` if they are less than one second."""
    if seconds >= 1:
        return f"{figure(seconds, 3)} s"
    return f"{figure(seconds * 1e3, 3)} ms"


def figure(value: float, digits: int = 4) -> str:
    """Format a number: below 1,000 with `digits` significant digits, otherwise as an integer."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.{digits}g}"


def of_devices(best: Candidate) -> str:
    """Return a table with a row for each device: how many layers it has, and its memory in GiB."""
    setup = best.setup
    placement = setup.full_schedule.placement
    lines = ["device  layers  model+grads  optimizer  stashed  working  copies    total"]
    for j, device in enumerate(best.devices):
        stages = zip(setup.balance, placement, strict=True)
        layers = "+".join([str(layers) for layers, where in stages if where == j])
        cells = [
            f"{j:>6}  {layers:>6}",
            _gib(device.parameters + device.gradients, 13),
            _gib(device.optimizer + device.update, 11),
            _gib(device.stashed, 9),
            _gib(device.working, 9),
            _gib(device.copies + device.skips, 8),
            _gib(device.peak, 9),
        ]
        lines.append("".join(cells))
    lines.append("(GiB, at each device's fullest moment; model: parameters, buffers and, on device")
    lines.append("0, the mini-batch)")
    return "\n".join(lines)


def by_schedule(found: Iterable[tuple[str, Candidate | None]]) -> str:
    """Return a table with a row for each schedule: the schedule's best setup.

    `found` has pairs of a schedule's name and its best setup, which is `None` if no setup fits.
    """
    lines = [f"{'schedule':<18}  devices  {COLUMNS}"]
    for name, best in found:
        devices = f"{'':>7}" if best is None else f"{len(best.devices):>7}"
        lines.append(f"{name:<18}  {devices}  {_columns(best)}".rstrip())
    return "\n".join(lines)


def by_number(found: Mapping[int, Found], *, schedules: bool) -> str:
    """Return a table with a row for each number of devices: the best setup for this number.

    Args:
        found: The result of the search for each number of devices.
        schedules: Whether to add a column with the schedule's name.
    """
    heading = f"devices  {COLUMNS}"
    if schedules:
        heading += "  schedule"
    lines = [heading]
    for n, each in found.items():
        line = f"{n:>7}  {_columns(each.best)}"
        if schedules and each.best is not None:
            line += f"  {each.best.setup.full_schedule.name}"
        lines.append(line)
    return "\n".join(lines)


def without_pipeline(
    found: Mapping[int, Sequence[Alternative]], batch_size: int, room: float
) -> str:
    """Return a table of predictions without a pipeline, with a row for each number of devices.

    Args:
        found: For each number of devices, the predictions of data parallel training and, on several
            devices, of FSDP.
        batch_size: The number of samples in a batch, over all devices.
        room: How many bytes tensors may take on each device.
    """
    columns = f"{'samples/s':>9}{'GiB':>7}  {'micro-batches':<13}"
    lines = [
        f"         {'data parallel':<31}  |  FSDP (ZeRO-3)",
        f"devices  {columns}  |  {columns}".rstrip(),
    ]
    for n, ways in found.items():
        cells = [_alternative(each, batch_size, room) for each in ways]
        lines.append(f"{n:>7}  {'  |  '.join(cells)}".rstrip())
    note = (
        "(GiB of each device, which has an equal share of the batch, in so many micro-batches of "
        f"so many samples. {RECOMPUTED}: activations are recomputed. FSDP also shards parameters, "
        "gradients and optimizer state. On one device, data parallel is plain training)"
    )
    return "\n".join([*lines, fill(note, WIDTH)])


def _columns(best: Candidate | None) -> str:
    """Return the cells of `COLUMNS`."""
    if best is None:
        return f"{'no room':>9}"
    setup = best.setup
    rate = figure(setup.batch_size / best.seconds)
    cells = f"{rate:>9}{len(setup.sizes):>8}{setup.checkpoint:>13}"
    return f"{cells}{_gib(best.peak, 7)}{best.bubble:>8.1%}"


def _alternative(each: Alternative, batch_size: int, room: float) -> str:
    rate = "no room"
    if each.peak <= room:
        rate = figure(batch_size / each.seconds)
    mark = RECOMPUTED if each.recomputed else ""
    micro_batches = f"{each.micro_batches} x {each.size}{mark}"
    return f"{rate:>9}{_gib(each.peak, 7)}  {micro_batches:<13}"


def listed(balance: Iterable[int], width: int) -> str:
    """Return a balance as text of at most `width` characters. A long text loses its middle."""
    text = str(list(balance))
    if len(text) <= width:
        return text
    half = (width - 3) // 2
    return f"{text[:half]} … {text[-half:]}"


def _gib(nbytes: float, width: int) -> str:
    """Format bytes in GiB with two decimals, or as `<0.01` if these would be zeros."""
    number = nbytes / GiB
    return f"{number:>{width}.2f}" if number >= 0.005 or not number else f"{'<0.01':>{width}}"
