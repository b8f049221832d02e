"""How keys are made and known again.

A key is 256 random bits (160 in the form of E2B), so that nobody finds one by trying, however fast: SHA-256 is all that is kept of it. Slow
hashes are for passwords, which people choose, and would cost every request what they cost whoever tries.
"""

from __future__ import annotations

import re
import secrets
from hashlib import sha256
from typing import Final

from dsec.model.tenants import Coinage

_LETTERS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
_LENGTH: Final = 43  # of 62 each: 256 bits
_E2B_BYTES: Final = 20
_KEY: Final = re.compile(r"(?:dsec|dst)_[A-Za-z0-9]{43}|e2b_[0-9a-f]{40}")


def new_key(coinage: Coinage) -> str:
    """A key that nobody has."""
    if coinage is Coinage.E2B:
        return f"e2b_{secrets.token_hex(_E2B_BYTES)}"
    return f"dsec_{_random()}"


def new_token() -> str:
    """A key for one sandbox."""
    return f"dst_{_random()}"


def _random() -> str:
    return "".join([secrets.choice(_LETTERS) for _ in range(_LENGTH)])


def is_key(text: str) -> bool:
    """Whether it could be one; nothing is looked up for what could not."""
    return _KEY.fullmatch(text) is not None


def digest_of(key: str) -> bytes:
    """What is kept of it."""
    return sha256(key.encode("ascii")).digest()
