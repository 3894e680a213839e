"""Start `python -m reproduce`. First check the packages that it needs; report a missing one in one line."""

import importlib
import os
import signal
import sys
from types import FrameType

from reproduce.machine.allocator import keep_freed_memory

LEAST_TORCH = (2, 11)


def missing() -> str | None:
    """Return which needed package is missing, broken or too old, and what to do; None if all are fine."""
    for package in ("torch", "click", "msgspec", "tabulate", "tqdm"):
        try:
            importlib.import_module(package)
        except (ImportError, OSError, RuntimeError) as error:
            if isinstance(error, ModuleNotFoundError) and error.name == package:
                return f"{package} is not installed: run 'make', or 'pip install {package}'"
            return f"{package} is broken ({' '.join(str(error).split())}): reinstall it"

    version = sys.modules["torch"].__version__
    if tuple(int(part) for part in version.split(".")[:2]) < LEAST_TORCH:
        return f"torch {version} is too old: install torch {'.'.join(map(str, LEAST_TORCH))} or newer"
    return None


def main() -> int:
    """Run the program and return its exit code."""
    if sys.argv[1:2] == ["run"]:
        keep_freed_memory()  # else rows with smaller tensors look faster, for a reason that is not pipelining
    # `import torch` can swallow a KeyboardInterrupt. Until it is done, Ctrl-C ends the process without raising one.
    handler = signal.signal(signal.SIGINT, leave)
    problem = missing()
    if problem is not None:
        print(f"reproduce: {problem}", file=sys.stderr)
        return 1
    from reproduce.cli.main import main

    signal.signal(signal.SIGINT, handler)
    return main()


def leave(signum: int, frame: FrameType | None) -> None:
    """End the program at once. It has done nothing yet that could be lost."""
    os.write(2, b"reproduce: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
