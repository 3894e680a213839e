"""Start the program `python -m reproduce`.

If a package that all commands need is missing, the program prints one line that says how to install
the package, and ends.
"""

import sys

from reproduce.error import CANNOT_TELL, fail, handling, leave, missing
from reproduce.machine.allocator import keep_freed_memory


def main() -> int:
    """Run the program; return the exit code."""
    if sys.argv[1:2] == ["run"]:
        # Otherwise every step allocates large tensors slowly, and small micro-batches look faster.
        keep_freed_memory()
    with handling(leave):
        problem = missing("click", "msgspec", "tabulate", "tqdm")
        if problem is not None:
            print(f"reproduce: {problem}", file=sys.stderr)
            return CANNOT_TELL
        from reproduce.cli.main import main
    return main()


if __name__ == "__main__":
    sys.excepthook = fail
    sys.exit(main())
