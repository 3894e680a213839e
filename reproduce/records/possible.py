"""Raise errors for rounds and values that no run can have, such as a bubble above 1."""

from collections.abc import Mapping, Sequence

from reproduce.error import Error
from reproduce.records.places import Json


def check_rounds(row: str, samples: Mapping[str, Sequence[float]], where: str) -> None:
    """Raise `Error` if the steps of a row do not each have a round of their own.

    Args:
        row: The name of the row.
        samples: The row's lists of samples, by their names, such as `step_time`.
        where: The file and the place of the row in it, such as `FILE: results[3]`.
    """
    steps = samples.get("step_time")
    rounds = samples.get("round")
    if steps is not None and rounds is not None and len(steps) != len(rounds):
        raise Error(
            f"{where}.samples.round: {len(rounds)} rounds for {len(steps)} steps of {row!r}"
        )
    if rounds is not None and len(set(rounds)) < len(rounds):
        raise Error(f"{where}.samples.round: two steps of {row!r} have the same round")


def check_values(row: str, config: Json, values: Json, where: str) -> None:
    """Raise `Error` if a row has an impossible batch size, bubble or utilization.

    Args:
        row: The name of the row.
        config: The configuration of the row.
        values: The row's single values, by their names.
        where: The file and the place of the row in it, such as `FILE: results[3]`.
    """
    batch_size = config.get("batch_size")
    if batch_size is not None and (not isinstance(batch_size, int) or batch_size < 1):
        raise Error(
            f"{where}.config.batch_size: the batch size of {row!r} is {batch_size!r}, but it must "
            "be a whole number, at least 1"
        )
    bubble = values.get("bubble")
    if isinstance(bubble, (int, float)) and not 0 <= bubble <= 1:
        raise Error(
            f"{where}.values.bubble: the bubble of {row!r} is {bubble:g}, but it is a share of the "
            "devices' time, from 0 to 1"
        )
    shares = values.get("utilization")
    # Papers publish one number for all devices, in percent.
    for share in shares if isinstance(shares, list) else []:
        if not isinstance(share, (int, float)) or not 0 <= share <= 1:
            raise Error(
                f"{where}.values.utilization: a device of {row!r} has the utilization {share}, but "
                "it is a share of the device's time, from 0 to 1"
            )
