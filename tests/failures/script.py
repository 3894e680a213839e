"""Run a script under torchrun, and cause at most one fault in each of its starts.

    FAULTS='[[1, "raises", 2], [0, "dies while it saves", 6], null]'
    torchrun ... -m tests.failures.script "$FAULTS" SCRIPT ...

The argument `$FAULTS` is a JSON list with a fault for each start. In this example:

1. In the first start, local rank 1 raises an error when it clips gradients for the second time.
2. In the second start, local rank 0 is killed when it flushes a file for the sixth time.
3. In the third start, nothing goes wrong.

Another fault, "node", kills all processes of the rank's node. This program turns off the default
dropout of the script's transformer layers, because dropout masks depend on the balance.
"""

import json
import os
import runpy
import signal
import sys
from collections.abc import Callable
from functools import partialmethod
from itertools import count
from typing import Any, cast

from torch import nn

from torchgpipe.partitioned import Partitioned

from . import faults


def at(when: int, act: Callable[[], object], called: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `called`, and in its call number `when` first calls `act`."""
    number = count(1)

    def counted(*args: Any) -> Any:
        if next(number) == when:
            act()
        return called(*args)

    return counted


def node_dies() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    faults.dies()


def main() -> None:
    """Run the script with the fault that is planned for this start."""
    starts, script, *arguments = sys.argv[1:]
    fault = json.loads(starts)[int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))]
    if fault is not None and fault[0] == int(os.environ["LOCAL_RANK"]):
        _, what, when = fault
        if what == "dies while it saves":
            os.fsync = at(when, faults.dies, os.fsync)
        else:
            act = {"raises": faults.raises, "node": node_dies}[what]
            pipeline = cast(Any, Partitioned)
            pipeline.clip_grad_norm_ = at(when, act, pipeline.clip_grad_norm_)
    # Turn dropout off, because dropout masks depend on the balance.
    made: Any = nn.TransformerEncoderLayer
    made.__init__ = partialmethod(made.__init__, dropout=0.0)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
