"""The MAC of a record between hosts: AES-256-GMAC, with a 16-byte tag.

GMAC is AES-GCM without a plaintext (NIST SP 800-38D). The nonce is `MAC_NONCE_PREFIX` and the record's
sequence number, u64 big-endian: a key belongs to one direction of one connection, so no nonce is used twice.
The tag covers every byte of the record before it.

Measured from Python on one core of a VM (AMD EPYC with VAES, OpenSSL 3), one tag, in us:

    bytes      AES-256-GMAC   keyed BLAKE2b   HMAC-SHA256 (SHA-NI, copied context)
    64             0.8            0.7             2.2
    4,096          1.2            5.2             3.9
    1 MiB         70           1,140            580
"""

from __future__ import annotations

from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from zbmd.transport.session import KEY_BYTES

TAG_BYTES: Final = 16
MAC_NONCE_PREFIX: Final = b"zbmd"
SEQUENCE_MAX: Final = (1 << 64) - 1
_JOIN_BYTES_MAX: Final = 1 << 16
"""Up to here joining the parts costs less than setting up a cipher that takes them one by one."""

Buffer = bytes | bytearray | memoryview


class RecordMac:
    """Makes and checks the tags of one direction. key: `KEY_BYTES` bytes. Keeps no state between calls."""

    __slots__ = ("_aead", "_algorithm")

    def __init__(self, key: bytes) -> None:
        assert len(key) == KEY_BYTES, len(key)
        self._aead = AESGCM(key)
        self._algorithm = algorithms.AES(key)

    def tag(self, sequence: int, parts: tuple[Buffer, ...]) -> bytes:
        """The tag of the record `sequence` (u64), which is its `parts` one after the other."""
        nonce = _nonce(sequence)
        if sum(len(part) for part in parts) <= _JOIN_BYTES_MAX:
            return self._aead.encrypt(nonce, b"", b"".join(parts))
        encryptor = Cipher(self._algorithm, modes.GCM(nonce)).encryptor()
        for part in parts:
            encryptor.authenticate_additional_data(part)
        encryptor.finalize()
        return encryptor.tag

    def holds(self, sequence: int, record: Buffer, tag: Buffer) -> bool:
        """Whether `tag` is that of the record `sequence`; compared in constant time."""
        try:
            self._aead.decrypt(_nonce(sequence), tag, record)
        except InvalidTag:
            return False
        return True


def _nonce(sequence: int) -> bytes:
    return MAC_NONCE_PREFIX + sequence.to_bytes(8, "big")
