"""Start the program `python -m reproduce`.

The program first checks that the packages it needs are installed. If a package is missing, the
program says so in one line.
"""

import signal
import sys

from reproduce.error import CANNOT_TELL, fail, leave, missing
from reproduce.machine.allocator import keep_freed_memory


def main() -> int:
    """Run the program and return its exit code."""
    if sys.argv[1:2] == ["run"]:
        # Without this call, rows with smaller tensors are faster for a reason that is not
        # pipelining.
        keep_freed_memory()
    handler = signal.signal(signal.SIGINT, leave)
    problem = missing("click", "msgspec", "tabulate", "tqdm")
    if problem is not None:
        print(f"reproduce: {problem}", file=sys.stderr)
        return CANNOT_TELL
    from reproduce.cli.main import main

    signal.signal(signal.SIGINT, handler)
    return main()


if __name__ == "__main__":
    sys.excepthook = fail
    sys.exit(main())
