"""A job's certificate authority and what it issues, good and bad; made again for each run of the tests."""

from __future__ import annotations

import atexit
import datetime as dt
import functools
import ipaddress
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from zbmd.transport.secure.tls import Tls, TlsFiles

JOB_NAME = "training-7.job"
DAY = dt.timedelta(days=1)


def _now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


@dataclass(frozen=True, kw_only=True)
class Authority:
    """A certificate authority, whose files go to `folder`."""

    folder: Path
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    def issue(
        self,
        file: str,
        *,
        dns: tuple[str, ...] = ("localhost", JOB_NAME),
        addresses: tuple[str, ...] = ("127.0.0.1", "::1"),
        valid_from: dt.timedelta = -DAY,
        valid_to: dt.timedelta = DAY,
        name: str | None = None,
    ) -> TlsFiles:
        """A host's certificate and key, in files of this name."""
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [x509.DNSName(each) for each in dns]
        names += [x509.IPAddress(ipaddress.ip_address(each)) for each in addresses]
        builder = _builder(file, key, self.certificate.subject, _now() + valid_from, _now() + valid_to)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False
        )
        certificate = builder.sign(self.key, hashes.SHA256())
        cert_path, key_path = self.folder / f"{file}.pem", self.folder / f"{file}.key"
        cert_path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        key_path.write_bytes(_pem(key))
        return TlsFiles(cert=cert_path, key=key_path, ca=self.ca, name=name)


def make_authority(folder: Path, name: str = "job CA") -> Authority:
    """A new one."""
    folder.mkdir(exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = _builder(name, key, subject, _now() - DAY, _now() + DAY)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(
        x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
    )
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    certificate = builder.add_extension(usage, critical=True).sign(key, hashes.SHA256())
    (folder / "ca.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return Authority(folder=folder, key=key, certificate=certificate)


@functools.cache
def job_tls() -> Tls:
    """The files that a host of the job uses."""
    folder = Path(tempfile.mkdtemp(prefix="zbmd-test-tls-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Tls(make_authority(folder).issue("host"))


def _builder(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Name,
    valid_from: dt.datetime,
    valid_to: dt.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(valid_from)
        .not_valid_after(valid_to)
    )


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
