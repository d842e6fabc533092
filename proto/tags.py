"""Tags: short names for sessions and broker lives in logs and reports. Who knows a session's number may speak for it;
a tag tells nothing about it, and is the same on both sides."""

from __future__ import annotations

import hashlib


def session_tag(boot: bytes, session: int) -> str:
    """Eight hexadecimal digits."""
    return hashlib.blake2b(session.to_bytes(8, "big", signed=True), digest_size=4, key=boot).hexdigest()


def boot_tag(boot: bytes) -> str:
    """Eight hexadecimal digits, for one life of a broker."""
    return hashlib.blake2b(boot, digest_size=4).hexdigest()
