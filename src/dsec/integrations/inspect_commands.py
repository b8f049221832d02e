"""Commands as Inspect asks for them, which DSec does not take as they are: other users, and very long ones. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dsec.model.execs import MAX_ARGUMENT_BYTES, MAX_ARGUMENTS

MAX_ID: Final = 65_535  # a sandbox has user ids 0 to this
_SETPRIV: Final = "/usr/bin/setpriv"  # by its whole path: root runs it, whatever PATH the user chose


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """A user of a sandbox, as its own /etc/passwd and /etc/group say."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str

    @property
    def env(self) -> dict[str, str]:
        """The variables that name the user."""
        return {"HOME": self.home, "USER": self.name, "LOGNAME": self.name}


def find_account(user: str, passwd: str, group: str) -> Account | None:
    """The account of a name or a number; None: there is none. A number without an account is a user without groups."""
    for line in passwd.splitlines():
        name, _, *rest = [*line.split(":"), "", ""]
        ids = _numbers(rest[:2])
        if ids is None or len(rest) < 4 or user not in (name, str(ids[0])):
            continue
        return Account(
            name=name, uid=ids[0], gid=ids[1], groups=_groups(name, ids[1], group), home=rest[3] or "/"
        )
    number = _numbers([user])
    if number is None:
        return None
    return Account(name=user, uid=number[0], gid=number[0], groups=(), home="/")


def _numbers(words: Sequence[str]) -> tuple[int, ...] | None:
    """Decimal numbers of users or groups, or None when one of them is not."""
    if not all(word.isascii() and word.isdecimal() and len(word) <= 5 for word in words):
        return None
    values = tuple(int(word) for word in words)
    return values if all(value <= MAX_ID for value in values) else None


def _groups(name: str, gid: int, group: str) -> tuple[int, ...]:
    found = {gid}
    for line in group.splitlines():
        words = line.split(":")
        number = _numbers(words[2:3])
        if len(words) >= 4 and number and name in words[3].split(","):
            found.add(number[0])
    return tuple(sorted(found))


def as_account(command: Sequence[str], account: Account) -> list[str]:
    """The command that root runs to run ``command`` as that user."""
    groups = (
        ["--groups", ",".join(str(group) for group in account.groups)]
        if account.groups
        else ["--clear-groups"]
    )
    ids = ["--reuid", str(account.uid), "--regid", str(account.gid)]
    return [_SETPRIV, *ids, *groups, "--", *command]


def is_long(command: Sequence[str], env: Mapping[str, str]) -> bool:
    """Perhaps more than one request can carry: half of the bound is left to the sandbox's own variables."""
    if len(command) > MAX_ARGUMENTS // 2:
        return True
    size = sum(len(word.encode("utf-8", "surrogateescape")) for word in command)
    size += sum(len(name) + len(value) + 1 for name, value in env.items())
    return size > MAX_ARGUMENT_BYTES // 2


def as_script(command: Sequence[str], path: str) -> bytes:
    """A shell script at ``path`` that removes itself and becomes the command, its standard input untouched."""
    words = " ".join(shlex.quote(word) for word in command)
    return f"/bin/rm -f -- {shlex.quote(path)}\nexec {words}\n".encode("utf-8", "surrogateescape")
