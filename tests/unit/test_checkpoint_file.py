"""The file of signed heads when the disk under it fails."""

from __future__ import annotations

import errno
import os
from contextlib import closing
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dsec.errors import StorageFull
from dsec.stores.checkpoints import CheckpointFile, Place, last
from dsec.stores.ledger import Head

HEADS = {"engine": Head(1, 1, b"\1" * 32)}


def test_what_is_left_of_a_line_goes_before_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the disk does not even let it be taken away at once."""
    key, path = Ed25519PrivateKey.generate(), tmp_path / "checkpoints.jsonl"
    write = os.write

    def fails(descriptor: int, data: object = b"") -> int:
        del descriptor, data
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with closing(CheckpointFile(path, key, "en-test", Place())) as file:
        first = file.append(HEADS, 1.0)
        with monkeypatch.context() as broken:
            broken.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:10]))
            broken.setattr(os, "ftruncate", fails)
            for _ in range(2):
                with pytest.raises(StorageFull):
                    file.append(HEADS, 2.0)
        assert last(path, key.public_key()) == (first, 10)
        second = file.append(HEADS, 3.0)
    assert last(path, key.public_key()) == (second, 0)
    assert second.n == 2
