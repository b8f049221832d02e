"""Rows of the journal as values, and values as what is stored."""

from __future__ import annotations

from typing import Any, Final

from dsec.errors import BadRequest, NotFound, StoreDamaged
from dsec.model.ids import SandboxId
from dsec.model.journal import Draft, Phase, Record
from dsec.ports.journal import Receipt
from dsec.stores.chain import Prepared, decode, prepare
from dsec.stores.ledger import Head

MAX_READ: Final = 10_000


def of_chain(sandbox: SandboxId, draft: Draft) -> Prepared:
    """A draft that must be of the sandbox's own chain.  Raises: BadRequest."""
    if draft.chain != sandbox:
        raise BadRequest(f"chain: {draft.chain!r} is not that of {sandbox}")
    return prepare(draft)


def check_read(limit: int) -> None:
    if not 0 <= limit <= MAX_READ:
        raise BadRequest(f"limit: {limit} is not from 0 to {MAX_READ}")


def receipt(head: Head) -> Receipt:
    return Receipt(head.seq, head.at / 1_000_000, head.digest.hex())


def record_of(chain: str, row: tuple[Any, ...]) -> Record:
    seq, at, act, phase, ref, actor, payload, digest = row
    try:
        return Record(
            chain=chain,
            seq=seq,
            at=at / 1_000_000,
            act=act,
            phase=Phase(phase),
            ref=ref,
            actor=actor,
            payload={} if payload is None else decode(payload),
            digest=digest.hex(),
        )
    except (TypeError, ValueError, AttributeError) as exc:
        raise StoreDamaged(
            f"record {seq!r} of {chain} cannot be read: {exc}", hint="run `dsec audit verify`"
        ) from exc


def no_sandbox(sandbox: SandboxId) -> NotFound:
    return NotFound(f"there is no sandbox {sandbox}", hint="`dsec ls` shows those there are", id=sandbox)
