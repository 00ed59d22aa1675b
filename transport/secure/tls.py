"""TLS 1.3 with certificates of both sides, for networks that are hostile.

A job has a certificate authority of its own; each host has a certificate of it and the key to that. Both
sides verify the other's against the CA. Names: by default the dialer checks that the certificate is for the
host that it dialed (its name or address); where hosts have no lasting names, one job name stands in the
certificates of all, and both sides check that one (`name`, ZBMD_TLS_NAME).

The hello runs inside, and the keys of the session depend on both certificates (as `tls-server-end-point` of
RFC 5929, with the dialer's too), so that a holder of a certificate cannot relay somebody else's hello.
"""

from __future__ import annotations

import hashlib
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from zbmd.transport.errors import RemoteProtocolError, UserError
from zbmd.transport.identity import Side

CERT_VARIABLE: Final = "ZBMD_TLS_CERT"
KEY_VARIABLE: Final = "ZBMD_TLS_KEY"
CA_VARIABLE: Final = "ZBMD_TLS_CA"
NAME_VARIABLE: Final = "ZBMD_TLS_NAME"
PEM_BYTES_MAX: Final = 1 << 20


class TlsError(RemoteProtocolError):
    """A TLS handshake failed: the connection is ended."""


class UntrustedCertificate(TlsError):
    """A certificate is not of the job's CA, or not for this name."""


class ExpiredCertificate(TlsError):
    """A certificate is not valid at this time."""


class NoCertificate(TlsError):
    """A side has shown no certificate."""


class NotTls(TlsError):
    """The peer does not speak TLS 1.3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """The paths of the certificates, PEM. name: what must stand in each peer's certificate, if anything."""

    cert: Path
    key: Path
    ca: Path
    name: str | None = None


def tls_files(environ: Mapping[str, str] = os.environ) -> TlsFiles | None:
    """Read the paths from the environment; None if it has none. Raises `UserError` if it has only some."""
    names = (CERT_VARIABLE, KEY_VARIABLE, CA_VARIABLE)
    missing = [name for name in names if not environ.get(name)]
    if len(missing) == len(names):
        return None
    if missing:
        raise UserError(f"TLS needs {', '.join(names)}; {' and '.join(missing)} is not set.")
    cert, key, ca = (Path(environ[name]) for name in names)
    return TlsFiles(cert=cert, key=key, ca=ca, name=environ.get(NAME_VARIABLE) or None)


class Tls:
    """The two contexts of a process. Raises `UserError` if a file cannot be used."""

    def __init__(self, files: TlsFiles) -> None:
        self.name = files.name
        self.certificate_digest = hashlib.sha256(_certificate(files.cert)).digest()
        self._dialer = _context(ssl.PROTOCOL_TLS_CLIENT, files)
        self._listener = _context(ssl.PROTOCOL_TLS_SERVER, files)
        self._listener.num_tickets = 0

    def context(self, side: Side) -> ssl.SSLContext:
        """For one side of a connection; always with verification of the other."""
        return self._dialer if side is Side.DIALER else self._listener

    def binding(self, side: Side, sock: ssl.SSLSocket) -> bytes:
        """Return the name of this channel, the same on both sides: the digests of both certificates.

        After the handshake. Raises `UntrustedCertificate` if the job's name is not in the peer's.
        """
        theirs = sock.getpeercert(binary_form=True)
        if theirs is None:
            raise NoCertificate("the peer has shown no certificate")
        if self.name is not None:
            _check_name(self.name, sock.getpeercert())
        digests = (self.certificate_digest, hashlib.sha256(theirs).digest())
        dialer, listener = digests if side is Side.DIALER else digests[::-1]
        return b"tls" + dialer + listener


def tls_error(error: ssl.SSLError, *, peer: str) -> TlsError:
    """Convert the error of a handshake, or of the first read after it."""
    reason = error.reason or str(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        expired = error.verify_code in _EXPIRED_CODES
        kind: type[TlsError] = ExpiredCertificate if expired else UntrustedCertificate
        advice = _DATE_ADVICE if expired else _CA_ADVICE
        return kind(f"the certificate of {peer} is refused: {error.verify_message} ({advice})")
    for words, kind, text in _REASONS:
        if any(word in reason for word in words):
            return kind(text.format(peer=peer))
    return TlsError(f"TLS with {peer} failed: {reason}")


_EXPIRED_CODES: Final = {9, 10}
"""X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED."""
_CA_ADVICE: Final = f"give both sides certificates of one CA and name it in {CA_VARIABLE}"
_DATE_ADVICE: Final = "renew it, or set the clocks of the hosts"
_REASONS: Final[tuple[tuple[tuple[str, ...], type[TlsError], str], ...]] = (
    (
        ("CERTIFICATE_REQUIRED", "PEER_DID_NOT_RETURN_A_CERTIFICATE"),
        NoCertificate,
        f"no certificate was shown to {{peer}}, or by it: set {CERT_VARIABLE} and {KEY_VARIABLE} on both",
    ),
    (
        ("CERTIFICATE_EXPIRED",),
        ExpiredCertificate,
        f"{{peer}} refuses our certificate: expired ({_DATE_ADVICE})",
    ),
    (
        ("UNKNOWN_CA", "BAD_CERTIFICATE", "CERTIFICATE_UNKNOWN", "UNSUPPORTED_CERTIFICATE", "REVOKED"),
        UntrustedCertificate,
        f"{{peer}} refuses our certificate ({_CA_ADVICE})",
    ),
    (
        (
            "WRONG_VERSION_NUMBER",
            "HTTP_REQUEST",
            "PROTOCOL_VERSION",
            "UNSUPPORTED_PROTOCOL",
            "RECORD_LAYER_FAILURE",
            "UNEXPECTED_MESSAGE",
            "UNEXPECTED_EOF",
            "PACKET_LENGTH_TOO_LONG",
            "RECORD_TOO_LARGE",
        ),
        NotTls,
        "{peer} does not speak TLS 1.3: set the same ZBMD_PROTECTION on both sides",
    ),
)


def _context(protocol: int, files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    # With a job's name that one is checked instead, in the certificates of both sides.
    context.check_hostname = protocol == ssl.PROTOCOL_TLS_CLIENT and files.name is None
    try:
        context.load_verify_locations(cafile=files.ca)
    except (OSError, ssl.SSLError) as error:
        raise UserError(f"{CA_VARIABLE}={files.ca} cannot be used: {_why(error)}.") from None
    try:
        context.load_cert_chain(files.cert, files.key, password=_no_password)
    except (OSError, ssl.SSLError) as error:
        raise UserError(
            f"{CERT_VARIABLE}={files.cert} with {KEY_VARIABLE}={files.key} cannot be used: {_why(error)}."
        ) from None
    return context


def _no_password() -> str:
    raise UserError(
        f"the key in {KEY_VARIABLE} is encrypted: nobody is there to type a password. Decrypt it."
    )


def _certificate(path: Path) -> bytes:
    """The first certificate of a PEM file, in DER: that of the host, by TLS's rule."""
    try:
        with path.open("rb") as file:
            text = file.read(PEM_BYTES_MAX).decode("ascii", "replace")
        begin = text.index(ssl.PEM_HEADER)
        end = text.index(ssl.PEM_FOOTER, begin) + len(ssl.PEM_FOOTER)
        return ssl.PEM_cert_to_DER_cert(text[begin:end])
    except (OSError, ValueError) as error:
        raise UserError(f"{CERT_VARIABLE}={path} holds no certificate: {_why(error)}.") from None


def _check_name(name: str, certificate: Mapping[str, object] | None) -> None:
    names = (certificate or {}).get("subjectAltName", ())
    assert isinstance(names, tuple)
    if ("DNS", name) not in names:
        shown = ", ".join(str(value) for _, value in names) or "nothing"
        raise UntrustedCertificate(
            f"the peer's certificate is for {shown}, not for {name!r} ({NAME_VARIABLE})"
        )


def _why(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or str(error)).replace("_", " ").lower()
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
