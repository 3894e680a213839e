"""Amounts of memory, as people write them."""

import re

UNITS = {
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}


def parse_amount(text: str | float) -> float:
    """Return bytes from a number of them, or from text with a unit, such as `24GiB`.

    Raises:
        ValueError: it is neither.
    """
    units = {unit.lower(): size for unit, size in UNITS.items()}
    match = re.fullmatch(r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*([A-Za-z]*)\s*", str(text))
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        nbytes = float(text)
    elif match is not None and match[2].lower() in units:
        nbytes = float(match[1]) * units[match[2].lower()]
    else:
        raise ValueError(
            f"memory must be bytes, or text with a unit such as '24GiB' or '80GB', got {text!r}"
        )
    if not 0 < nbytes < float("inf"):
        raise ValueError(f"memory must be more than nothing, got {text!r}")
    return nbytes


def amount(nbytes: float) -> str:
    """Return `31.2 GiB`, or a smaller unit where that would show next to nothing."""
    for unit in ("GiB", "MiB", "KiB"):
        if nbytes >= UNITS[unit]:
            return f"{nbytes / UNITS[unit]:.1f} {unit}"
    return f"{nbytes:.0f} B"
