"""Read and write amounts of memory."""

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
    """Return the number of bytes that an argument such as `memory` names.

    Args:
        text: A number of bytes, or text with a unit, such as "24GiB".

    Raises:
        ValueError: If `text` cannot be read as an amount, or if the amount is not above zero.
    """
    sizes = {unit.lower(): size for unit, size in UNITS.items()}
    match = re.fullmatch(r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*([A-Za-z]*)\s*", str(text))
    unit = "" if match is None else match[2].lower()
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        nbytes = float(text)
    elif match is not None and unit in sizes:
        nbytes = float(match[1]) * sizes[unit]
    else:
        without = ", which has no unit" if match is not None and not unit else ""
        raise ValueError(
            f"memory must be a number of bytes, or text with a unit such as '24GiB' or '80GB', "
            f"but got {text!r}{without}"
        )
    if not 0 < nbytes < float("inf"):
        raise ValueError(f"memory must be more than nothing, got {text!r}")
    return nbytes


def amount(nbytes: float) -> str:
    """Format a number of bytes as text such as "31.2 GiB".

    The unit is the largest one of which there is at least 1.
    """
    for unit in ("GiB", "MiB", "KiB"):
        size = UNITS[unit]
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes:.0f} B"
