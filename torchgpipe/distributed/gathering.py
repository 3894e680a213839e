"""Ranks wait for each other before they connect: `gather`."""

import os
import platform
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from torchgpipe.distributed.liveness.liveness import RankFailed
from torchgpipe.patience import NOTICE, say


def gather(store: Store, own: int, others: Sequence[int]) -> None:
    """Wait until all ranks are about to connect.

    The longest wait is the timeout that `init_process_group` was given. After a minute, a line on
    standard error names the ranks that are missing.

    Args:
        store: The store at which ranks meet.
        own: This rank.
        others: All other ranks.

    Raises:
        RankFailed: If a rank does not come in time, or another process is the same rank.
    """
    here = f"process {os.getpid()} on {platform.node()}"
    first = store.compare_set(_sign(own), "", here).decode()
    if first != here:
        raise RankFailed(
            f"rank {own} is {first}, and {here} says the same: start each rank only once"
        )
    timeout: timedelta = store.timeout  # type: ignore[attr-defined]
    notice = min(timedelta(seconds=NOTICE), timeout)
    if _all_come(store, others, notice):
        return
    if notice < timeout:
        say(_absence(store, own, others, notice))
        if _all_come(store, others, timeout - notice):
            return
    raise RankFailed(
        f"{_absence(store, own, others, timeout)}; has it failed before? If it only takes longer, "
        "give init_process_group() a longer timeout"
    )


def _sign(rank: int) -> str:
    """Return the key by which a rank shows that it is here."""
    return f"rank {rank} is here"


def _all_come(store: Store, others: Sequence[int], timeout: timedelta) -> bool:
    """Wait for all other ranks, and return whether they came in time."""
    signs = [_sign(peer) for peer in others]
    try:
        store.wait(signs, timeout)
    except RuntimeError:
        return False
    return True


def _absence(store: Store, own: int, others: Sequence[int], waited: timedelta) -> str:
    """Say for which ranks this one has waited in vain."""
    missing = [str(peer) for peer in others if not store.check([_sign(peer)])]
    return (
        f"rank {own} has waited for {waited.total_seconds():g} s for others to make their "
        "pipeline, or to call it after close(), but there is no sign of rank "
        f"{', '.join(missing)}"
    )
