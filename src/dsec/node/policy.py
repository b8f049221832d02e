"""Who runs a command, where, and with which variables. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from dsec.errors import BadRequest, Unsupported
from dsec.model.checks import check_path
from dsec.model.execs import Command, ExecRequest
from dsec.model.files import Identity
from dsec.model.ids import ExecId
from dsec.model.sandbox import ROOT_UID, Flag, Place, SandboxInfo

PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ROOT: Final = Place(home="/root", user="root", uid=ROOT_UID, gid=ROOT_UID)
SHELL: Final = "/bin/sh"


def actor(info: SandboxInfo, place: Place, user: str) -> Place:
    """The place of ``user``, "" = whom the sandbox's specification names.

    Raises:
        Unsupported: the level has no users to choose from.
        BadRequest: no such user.
    """
    user = user or info.spec.user
    if not user:
        return place
    if Flag.USERS not in info.flags:
        raise Unsupported(
            f"user: level {info.spec.level} runs every command as one user", hint="leave `user` out"
        )
    if user == place.user:
        return place
    if user == ROOT.user:
        return ROOT
    raise BadRequest(f"user: there is no user {user!r}", hint=f"choose 'root' or {place.user!r}")


def identity(info: SandboxInfo, place: Place, user: str) -> Identity:
    """Whose permissions a file operation has.  Raises: as :func:`actor`."""
    who = actor(info, place, user)
    return Identity(who.uid, who.gid)


def absolute(info: SandboxInfo, path: str, field: str = "path") -> str:
    """``path`` below the working directory unless it is absolute; it is resolved by the guest.  Raises: BadRequest."""
    check_path(field, path)
    if path.startswith("/"):
        return path
    if path == ".":
        return info.workdir
    joined = f"{info.workdir.rstrip('/')}/{path}"
    check_path(field, joined)
    return joined


def base_env(info: SandboxInfo, who: Place) -> dict[str, str]:
    """The variables that every command of this user gets."""
    env = {
        "PATH": PATH,
        "HOME": who.home,
        "USER": who.user,
        "LOGNAME": who.user,
        "SHELL": SHELL,
        "LANG": "C.UTF-8",
        "SESSION_ID": info.session_id,
    }
    if who.tmp != "/tmp":
        env["TMPDIR"] = who.tmp
    env.update(info.spec.env)
    return env


def resolve(
    info: SandboxInfo,
    place: Place,
    request: ExecRequest,
    exec_id: ExecId,
    ready: Mapping[str, str],
    *,
    late: bool = False,
) -> Command:
    """The command that the guest is asked to run.

    Args:
        ready: :func:`base_env` of the level's ordinary user. late: nobody waits for its start alone.

    Raises:
        Unsupported, BadRequest: as :func:`actor`; a terminal or a scratch copy that the level does not have.
    """
    if request.scratch:
        raise Unsupported("scratch: a command in a throw-away copy is not available at this level")
    if request.pty is not None and Flag.PTY not in info.flags:
        raise Unsupported(f"terminal: level {info.spec.level} has no terminals")
    who = actor(info, place, request.user) if request.user or info.spec.user else place
    env = ready if who is place else base_env(info, who)
    if request.env:
        env = {**env, **request.env}
    if request.pty is not None:
        env = {"TERM": "xterm-256color", **env}
    return Command(
        id=exec_id,
        argv=request.argv,
        env=env,
        cwd=absolute(info, request.cwd, "cwd") if request.cwd else info.workdir,
        uid=who.uid,
        gid=who.gid,
        pty=request.pty,
        stdin=request.stdin_open or request.stdin is not None,
        timeout=request.timeout,
        open_files=info.spec.limits.open_files,
        late=late,
    )
