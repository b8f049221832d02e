"""Identifiers: a kind prefix and 130 random bits in lower-case base32. Parsed once, at the edge."""

from __future__ import annotations

import os
import re
from typing import Final, NewType

from dsec.errors import BadRequest
from dsec.model.checks import shown

SandboxId = NewType("SandboxId", str)
ExecId = NewType("ExecId", str)
EngineId = NewType("EngineId", str)
SnapshotId = NewType("SnapshotId", str)
VolumeId = NewType("VolumeId", str)
KeyId = NewType("KeyId", str)

_LENGTH: Final = 26
_CHARACTERS: Final = b"abcdefghijklmnopqrstuvwxyz234567" * 8  # a byte chooses evenly: five bits a character
_SANDBOX: Final = re.compile(r"sb-[a-z2-7]{26}")
_EXEC: Final = re.compile(r"ex-[a-z2-7]{26}")
_SNAPSHOT: Final = re.compile(r"sn-[a-z2-7]{26}")
_VOLUME: Final = re.compile(r"vo-[a-z2-7]{26}")
_KEY: Final = re.compile(r"ky-[a-z2-7]{26}")


def _fresh(prefix: str) -> str:
    """``prefix`` and 26 random characters (130 bits)."""
    return prefix + os.urandom(_LENGTH).translate(_CHARACTERS).decode("ascii")


def new_sandbox_id() -> SandboxId:
    """A new, unguessable sandbox id."""
    return SandboxId(_fresh("sb-"))


def new_exec_id() -> ExecId:
    """A new exec id."""
    return ExecId(_fresh("ex-"))


def new_engine_id() -> EngineId:
    """A new engine id (one per start of an engine)."""
    return EngineId(_fresh("en-"))


def new_snapshot_id() -> SnapshotId:
    """A new snapshot id."""
    return SnapshotId(_fresh("sn-"))


def new_volume_id() -> VolumeId:
    """A new volume id."""
    return VolumeId(_fresh("vo-"))


def new_key_id() -> KeyId:
    """A new id of a key: what it is called by, and not the key."""
    return KeyId(_fresh("ky-"))


def new_session_id() -> str:
    """The ``SESSION_ID`` of one run of a sandbox."""
    return _fresh("se-")


def parse_sandbox_id(text: str) -> SandboxId:
    """Raises: BadRequest: not the form of a sandbox id."""
    given: object = text
    if not isinstance(given, str) or not _SANDBOX.fullmatch(given):
        raise BadRequest(f"id: {shown(text)} is not a sandbox id", hint="an id is 'sb-' and 26 of a-z2-7")
    return SandboxId(text)


def parse_exec_id(text: str) -> ExecId:
    """Raises: BadRequest: not the form of an exec id."""
    given: object = text
    if not isinstance(given, str) or not _EXEC.fullmatch(given):
        raise BadRequest(f"exec id: {shown(text)} is not an exec id", hint="an id is 'ex-' and 26 of a-z2-7")
    return ExecId(text)


def is_snapshot(text: str) -> bool:
    """Whether this is meant as the id of a snapshot, rather than as that of a sandbox or as a name."""
    return text.startswith("sn-")


def parse_snapshot_id(text: str) -> SnapshotId:
    """Raises: BadRequest: not the form of a snapshot id."""
    given: object = text
    if not isinstance(given, str) or not _SNAPSHOT.fullmatch(given):
        raise BadRequest(
            f"snapshot id: {shown(text)} is not a snapshot id", hint="an id is 'sn-' and 26 of a-z2-7"
        )
    return SnapshotId(text)


def parse_volume_id(text: str) -> VolumeId:
    """Raises: BadRequest: not the form of a volume id."""
    given: object = text
    if not isinstance(given, str) or not _VOLUME.fullmatch(given):
        raise BadRequest(
            f"volume id: {shown(text)} is not a volume id", hint="an id is 'vo-' and 26 of a-z2-7"
        )
    return VolumeId(text)


def parse_key_id(text: str) -> KeyId:
    """Raises: BadRequest: not the form of a key's id."""
    given: object = text
    if not isinstance(given, str) or not _KEY.fullmatch(given):
        raise BadRequest(
            "key: this is not the id of a key",
            hint="an id is 'ky-' and 26 of a-z2-7; it is not the key itself",
        )
    return KeyId(text)
