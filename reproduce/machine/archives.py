"""Unpack archives of files."""

import tarfile
from pathlib import Path
from typing import Literal


def unpack(archive: Path, folder: Path, members: Literal["data", "tar"]) -> None:
    """Unpack a tar archive that this program has made.

    The first releases of Python 3.10 and 3.11 have no filters, and unpack everything.

    Args:
        archive: The path of the archive.
        folder: The folder in which the files are written.
        members: Which files are refused, as the argument `filter` of `tarfile` says. "tar" allows
            links to files outside of the folder.
    """
    with tarfile.open(archive) as files:
        if hasattr(tarfile, "data_filter"):
            files.extractall(folder, filter=members)
        else:
            files.extractall(folder)
