"""Git repositories for tests."""

import subprocess
from pathlib import Path


def git(folder: Path, *arguments: str) -> str:
    """Run git with a made-up author, and return its output."""
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(folder), *who, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit(folder: Path, tag: str) -> None:
    """Commit all files in a folder and tag the commit. If the folder is not a repository, make it one."""
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--no-verify", "--allow-empty", "-m", tag)
    git(folder, "tag", tag)
