"""Wait for all ranks before they connect to each other: `wait_for_all_ranks`."""

import os
import platform
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from torchgpipe.distributed.liveness.liveness import RankFailed
from torchgpipe.patience import NOTICE, say


def wait_for_all_ranks(store: Store, own: int, others: Sequence[int]) -> None:
    """Wait until all ranks have called this function.

    The wait is at most as long as the timeout of `init_process_group`. After a minute, a line on
    standard error names the missing ranks.

    Args:
        store: The key-value store (of `torch.distributed`) that all ranks use.
        own: This rank.
        others: All other ranks.

    Raises:
        RankFailed: If a rank is still missing after the timeout, or if another process has the same
            rank as this process.
    """
    here = f"process {os.getpid()} on {platform.node()}"
    first = store.compare_set(_sign(own), "", here).decode()
    if first != here:
        raise RankFailed(
            f"rank {own} is already taken by {first}, but {here} has the same rank: start each "
            "rank only once"
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
        f"not all ranks have connected: {_absence(store, own, others, timeout)}; see whether the "
        "missing ranks have printed an error; if a rank only needs more time, give "
        "init_process_group() a longer timeout"
    )


def _sign(rank: int) -> str:
    """Return the key that a rank sets in the key-value store when it calls `wait_for_all_ranks`."""
    return f"rank {rank} is here"


def _all_come(store: Store, others: Sequence[int], timeout: timedelta) -> bool:
    """Wait until all other ranks have called `wait_for_all_ranks`.

    Return `False` if the timeout is over first.
    """
    signs = [_sign(peer) for peer in others]
    try:
        store.wait(signs, timeout)
    except RuntimeError:
        return False
    return True


def _absence(store: Store, own: int, others: Sequence[int], waited: timedelta) -> str:
    """Return an error text that names the ranks which have not called `wait_for_all_ranks` yet."""
    missing = [str(peer) for peer in others if not store.check([_sign(peer)])]
    return (
        f"rank {own} has waited for {waited.total_seconds():g} s for others to make their "
        "pipeline, or to call it after close(), but there is no sign of rank "
        f"{', '.join(missing)}"
    )
