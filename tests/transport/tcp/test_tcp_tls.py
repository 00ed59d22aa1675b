"""TLS between hosts: who may enter, and the error of each who may not."""

from __future__ import annotations

import asyncio
import os
import ssl
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from support.links.link_harness import COOKIE, Ear
from support.tcp.tcp_certificates import DAY, JOB_NAME, Authority, make_authority

from zbmd.transport.errors import UserError, ZbmdError
from zbmd.transport.handshake.hello import HelloError, HungUp, WrongCookie
from zbmd.transport.identity import Identity
from zbmd.transport.link.interface import Endpoint
from zbmd.transport.secure.protection import Protection
from zbmd.transport.secure.tls import (
    ExpiredCertificate,
    NoCertificate,
    Tls,
    TlsError,
    TlsFiles,
    UntrustedCertificate,
    tls_files,
)
from zbmd.transport.tcp.address import TcpSettings, tcp_settings
from zbmd.transport.tcp.connect import dial, listen
from zbmd.transport.tcp.link import TcpLink


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("other"), "another CA")


def endpoint(name: str, cookie: bytes = COOKIE) -> Endpoint:
    identity = Identity(name=name, pid=os.getpid(), uid=os.getuid(), incarnation=1, job=7)
    return Endpoint(identity=identity, cookie=cookie)


def tls(files: TlsFiles) -> TcpSettings:
    return TcpSettings(protection=Protection.TLS, tls=Tls(files))


async def meet(
    ours: TcpSettings, theirs: TcpSettings, *, host: str = "127.0.0.1", cookie: bytes = COOKIE
) -> tuple[bytes | ZbmdError, list[str]]:
    """The frame as it arrived, or the dialer's error, and the listener's refusals by kind."""
    links: asyncio.Queue[TcpLink] = asyncio.Queue()
    with capture_logs() as logs:
        listener = await listen("127.0.0.1:0", links.put_nowait, endpoint("b"), settings=theirs)
        try:
            where = replace(listener.address, host=host)
            link = await dial(where, endpoint("a", cookie), settings=ours)
            other = await links.get()
            ear, our_ear = Ear(other), Ear(link)
            link.send(bytes(100_000))
            (frame,) = await ear.frames(1)
            link.close()
            assert await ear.end() is await our_ear.end() is None
            result: bytes | ZbmdError = frame
        except ZbmdError as error:
            result = error
        while listener.half_open:
            await asyncio.wait(set(listener._tasks))
        listener.close()
        await listener.wait_closed()
    return result, [entry["kind"] for entry in logs if entry["event"] == "connection refused"]


async def test_hosts_of_one_job_meet(authority: Authority) -> None:
    ours, theirs = authority.issue("a"), authority.issue("b")
    assert await meet(tls(ours), tls(theirs)) == (bytes(100_000), [])
    assert await meet(tls(ours), tls(theirs), host="localhost") == (bytes(100_000), [])


async def test_the_cookie_is_still_needed(authority: Authority) -> None:
    settings = tls(authority.issue("a"))
    error, refused = await meet(settings, settings, cookie=b"x" * 32)
    assert isinstance(error, WrongCookie)
    assert refused == ["WrongCookie"]


async def test_a_listener_of_another_ca(authority: Authority, stranger: Authority) -> None:
    error, refused = await meet(tls(authority.issue("a")), tls(stranger.issue("b")))
    assert isinstance(error, UntrustedCertificate)
    assert "ZBMD_TLS_CA" in str(error)
    assert len(refused) == 1


async def test_a_dialer_of_another_ca(authority: Authority, stranger: Authority) -> None:
    theirs = authority.issue("b")
    ours = replace(stranger.issue("a"), ca=authority.ca)
    error, refused = await meet(tls(ours), tls(theirs))
    assert isinstance(error, TlsError | HelloError)
    assert refused == ["UntrustedCertificate"]


async def test_an_expired_certificate(authority: Authority) -> None:
    good = authority.issue("a")
    for bad in (
        authority.issue("old", valid_from=-3 * DAY, valid_to=-DAY),
        authority.issue("early", valid_from=DAY, valid_to=3 * DAY),
    ):
        error, _ = await meet(tls(good), tls(bad))
        assert isinstance(error, ExpiredCertificate)
        assert "clocks" in str(error)
        _, refused = await meet(tls(bad), tls(good))
        assert refused == ["ExpiredCertificate"]


async def test_a_certificate_for_another_host(authority: Authority) -> None:
    elsewhere = authority.issue("c", dns=("other.host",), addresses=("10.1.2.3",))
    error, _ = await meet(tls(authority.issue("a")), tls(elsewhere))
    assert isinstance(error, UntrustedCertificate)


async def test_the_jobs_name_in_place_of_hosts(authority: Authority) -> None:
    ours = authority.issue("a", dns=(JOB_NAME,), addresses=(), name=JOB_NAME)
    theirs = authority.issue("b", dns=(JOB_NAME,), addresses=(), name=JOB_NAME)
    assert await meet(tls(ours), tls(theirs)) == (bytes(100_000), [])
    of_another_job = authority.issue("c", dns=("training-8.job",), addresses=(), name=JOB_NAME)
    error, _ = await meet(tls(ours), tls(of_another_job))
    assert isinstance(error, UntrustedCertificate)
    assert "training-8.job" in str(error)
    _, refused = await meet(tls(of_another_job), tls(ours))
    assert set(refused) == {"UntrustedCertificate"}


async def test_a_dialer_without_a_certificate(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = tls(authority.issue("b")), tls(authority.issue("a"))
    assert ours.tls is not None
    bare = ssl.create_default_context(cafile=str(authority.ca))
    monkeypatch.setattr(ours.tls, "_dialer", bare)
    error, refused = await meet(ours, theirs)
    assert isinstance(error, NoCertificate | HelloError)
    assert refused == ["NoCertificate"]


async def test_an_older_tls_is_refused(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = tls(authority.issue("b")), tls(authority.issue("a"))
    assert ours.tls is not None
    old = ssl.create_default_context(cafile=str(authority.ca))
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    monkeypatch.setattr(ours.tls, "_dialer", old)
    error, refused = await meet(ours, theirs)
    assert isinstance(error, TlsError)
    assert refused == ["NotTls"]


async def test_sides_that_ask_for_different_protection(authority: Authority) -> None:
    secure, mac = tls(authority.issue("a")), TcpSettings()
    error, refused = await meet(secure, mac)
    assert isinstance(error, HungUp)
    assert "ZBMD_PROTECTION" in str(error)
    assert set(refused) == {"Garbage"}
    error, refused = await meet(mac, secure)
    assert isinstance(error, HelloError)
    assert set(refused) == {"NotTls"}


# --- settings -------------------------------------------------------------------------------------------


def test_files_that_cannot_be_used(authority: Authority, stranger: Authority, tmp_path: Path) -> None:
    good, other = authority.issue("a"), stranger.issue("a")
    empty = tmp_path / "empty.pem"
    empty.write_bytes(b"")
    for files, words in (
        (replace(good, cert=tmp_path / "none.pem"), "ZBMD_TLS_CERT"),
        (replace(good, cert=empty), "ZBMD_TLS_CERT"),
        (replace(good, key=tmp_path / "none.key"), "ZBMD_TLS_KEY"),
        (replace(good, key=other.key), "key values mismatch"),
        (replace(good, ca=empty), "ZBMD_TLS_CA"),
    ):
        with pytest.raises(UserError, match=words):
            Tls(files)


def test_the_environment(authority: Authority) -> None:
    files = authority.issue("a")
    environ = {"ZBMD_TLS_CERT": str(files.cert), "ZBMD_TLS_KEY": str(files.key), "ZBMD_TLS_CA": str(files.ca)}
    assert tls_files({}) is None
    assert tls_files(environ) == files
    assert tcp_settings({}).protection is Protection.MAC
    assert tcp_settings(environ).protection is Protection.TLS
    assert tcp_settings({**environ, "ZBMD_PROTECTION": "mac"}).tls is None
    assert tcp_settings({"ZBMD_PROTECTION": "none"}).protection is Protection.NONE
    assert str(tcp_settings({"ZBMD_SOCKET_IFNAME": "^=lo"}).interfaces) == "^=lo"
    for bad, words in (
        ({"ZBMD_PROTECTION": "tls"}, "ZBMD_TLS_CERT"),
        ({"ZBMD_PROTECTION": "strong"}, "none of mac, tls, none"),
        ({**environ, "ZBMD_TLS_KEY": ""}, "ZBMD_TLS_KEY is not set"),
    ):
        with pytest.raises(UserError, match=words):
            tcp_settings(bad)
