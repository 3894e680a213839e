"""Check that the needed packages are installed, and start the command."""

import sys
from importlib.util import find_spec

NEEDED = ("torch", "msgspec", "tabulate", "tqdm", "click")


def main() -> None:
    """Run the command, or say in one line which needed packages are not installed."""
    absent = " ".join(package for package in NEEDED if find_spec(package) is None)
    if absent:
        sys.exit(f"python -m benchmarks.gpu: not installed: {absent} (pip install {absent})")
    from benchmarks.gpu.frame.command import main as command

    command()


if __name__ == "__main__":
    main()
