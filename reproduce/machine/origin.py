"""Find out from which git repository another machine can install this program."""

import json
import re
from importlib import metadata
from pathlib import Path

from reproduce.error import Error
from reproduce.machine.description import ROOT
from reproduce.machine.git import checkout, git

PACKAGE = "torchgpipe-today"
"""The name of this program's package. No package index has it, so it is installed from git."""
REMOTE = "origin"


def own_address() -> str:
    """Return an address from which pip can install this version of the program.

    The result is the address from which pip installed this program, or the address of this
    checkout's remote repository. An example is `git+https://HOST/OWNER/REPOSITORY@v0.1.0`.

    Raises:
        Error: There is no such address, or the checked out commit was not pushed to it.
    """
    installed = _installed_from()
    if installed is not None:
        if is_folder(installed):
            raise Error(
                "this program was installed from a folder of this machine, not from a repository"
            )
        return installed
    here = checkout()
    if here is None:
        raise Error("this program was not installed from a git repository")
    try:
        remote = git(ROOT, "remote", "get-url", REMOTE).decode()
    except Error:
        raise Error(f"the checkout {ROOT} has no remote repository {REMOTE}") from None
    if is_folder(remote):
        raise Error(f"{REMOTE} of the checkout {ROOT} is a folder of this machine")
    if not git(ROOT, "branch", "--remotes", "--contains", here.revision):
        raise Error(f"the commit {here.name(9)} of this program was not pushed to {REMOTE}")
    tags = git(ROOT, "tag", "--points-at", here.revision).decode().split()
    return f"{pip_address(remote)}@{tags[0] if tags else here.revision}"


def is_folder(address: str) -> bool:
    """Return whether a git address is a folder of this machine, which other machines cannot read.

    All other addresses have a colon: `https://HOST/OWNER/NAME`, or `git@HOST:OWNER/NAME`.
    """
    address = address.removeprefix("git+")
    return address.startswith("file:") or ":" not in address


def pip_address(address: str) -> str:
    """Return the address of a git repository in the form that pip takes, without any password.

    Examples are `git+https://HOST/OWNER/REPOSITORY` and `git+ssh://git@HOST/OWNER/REPOSITORY`. A
    revision at the end, such as `@v0.1.0`, is kept.
    """
    address = address.removeprefix("git+")
    address = re.sub(r"^(https?://)[^/@]*@", r"\1", address)
    if "://" not in address:  # git's short form of an address for ssh, such as git@HOST:OWNER/NAME
        address = "ssh://" + address.replace(":", "/", 1)
    return f"git+{address}"


def check_repository(address: str) -> None:
    """Raise `Error` if git cannot read the repository at `address`, or does not find its revision.

    `address` is a result of `pip_address`. If its revision is a commit's hash, the revision is not
    checked, because git lists only the branches and tags of another repository.
    """
    url, revision = split_revision(address)
    try:
        listed = git(Path(), "ls-remote", "--heads", "--tags", url).decode()
    except Error as error:
        raise Error(f"'git ls-remote {url}' fails") from error
    names = re.findall(r"\trefs/(?:heads|tags)/(.+)", listed)
    is_hash = re.fullmatch(r"[0-9a-f]{7,40}", revision or "")
    if revision and not is_hash and revision not in names:
        raise Error(f"{url} has no branch and no tag {revision}")


def split_revision(address: str) -> tuple[str, str | None]:
    """Split an address that pip takes into the repository's URL and the revision at its end.

    An address with a revision ends, for example, with `@v0.1.0`. If the address has no revision,
    the second item of the result is None.
    """
    url = address.removeprefix("git+")
    path = url.partition("://")[2].partition("/")[2]  # the host may have a user before an @
    if "@" not in path:
        return url, None
    url, _, revision = url.rpartition("@")
    return url, revision


def _installed_from() -> str | None:
    """Return the git address, with the commit, from which pip installed this program.

    Return None if pip did not install it from a git repository.
    """
    try:
        written = metadata.distribution(PACKAGE).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    source = json.loads(written or "{}")
    if source.get("vcs_info", {}).get("vcs") != "git":
        return None
    return f"{pip_address(source['url'])}@{source['vcs_info']['commit_id']}"
