"""A thread that waits takes the data plane's turns itself, and the plane's own thread when it does not."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from support.bulk.bulk_host import BulkHost, deadline, join

from zbmd.transport.bulk.peer import BulkPeer, BulkRegion
from zbmd.transport.bulk.plane import DataPlane
from zbmd.transport.native import _native


def drive_until_told(host: BulkHost, slot: int, value: int) -> None:
    """Turns of our own, until the peer's notification is here."""
    while _native.load_cell(host.segment.base, slot, 0) < value:
        host.plane.drive()
        assert _native.now_ns() < deadline()


def region_of(
    to: BulkPeer, owner: BulkHost, nbytes: int
) -> tuple[BulkRegion, np.ndarray[tuple[int], np.dtype[np.uint8]]]:
    inbox = owner.segment.inbox.empty(nbytes, np.uint8)
    return to.open_region(owner.regions.register(inbox)), inbox


def test_both_sides_drive() -> None:
    with BulkHost(0) as a, BulkHost(1) as b:
        to_b, to_a = join(a, b)
        there, at_b = region_of(to_b, b, 300_000)
        back, at_a = region_of(to_a, a, 300_000)
        sent = np.arange(300_000).astype(np.uint8)

        def answer() -> None:
            with b.plane.driving():
                for value in range(1, 21):
                    drive_until_told(b, 0, value)
                    back.put(at_b, channel=0, value=value)

        other = threading.Thread(target=answer)
        other.start()
        with a.plane.driving():
            for value in range(1, 21):
                there.put(sent, channel=0, value=value)
                drive_until_told(a, 1, value)
                assert (at_a == sent).all()
                sent = sent + np.uint8(value)
        other.join()


def test_the_thread_is_back_when_nobody_drives() -> None:
    """Also for what has been asked for, and not performed, when the driver leaves."""
    with BulkHost(0) as a, BulkHost(1) as b:
        there, inbox = region_of(join(a, b)[0], b, 4)
        with a.plane.driving():
            a.plane.drive()
            last = there.put(b"1234", channel=0, value=1)
        last.wait(deadline())
        assert b.wait(0, 0, 1) == _native.WAIT_OK and bytes(inbox) == b"1234"
        there.put(b"5678", channel=0, value=2).wait(deadline())
        with a.plane.driving():
            waits = there.put(b"9abc", channel=0, value=3)
            a.plane.hand_over()
            waits.wait(deadline())


def test_what_another_thread_asks_for_does_not_wait_for_the_driver() -> None:
    with BulkHost(0) as a, BulkHost(1) as b:
        there, _ = region_of(join(a, b)[0], b, 4)
        with a.plane.driving():
            a.plane.drive()
            other = threading.Thread(target=lambda: there.put(b"1234", channel=0, value=1).wait(deadline()))
            other.start()
            other.join()  # and drive no more


def test_an_end_is_no_harm_to_who_drives() -> None:
    with BulkHost(0) as a:
        plane: DataPlane = a.plane
        with plane.driving():
            plane.drive()
            plane.close()
            assert not plane.drive()
            plane.hand_over()
        with pytest.raises(Exception, match="closed"):
            a.connect(1)


def test_who_drives_may_sleep() -> None:
    """Arriving bytes, requests of other threads and `wake` end the sleep; else it ends by itself."""
    with BulkHost(0) as a, BulkHost(1) as b:
        to_b, to_a = join(a, b)
        there, at_b = region_of(to_b, b, 4)
        back, at_a = region_of(to_a, a, 4)
        with a.plane.driving():
            a.plane.drive()
            a.plane.wake()
            back.put(b"1234", channel=0, value=1)
            while _native.load_cell(a.segment.base, 1, 0) < 1:
                a.plane.park()
                a.plane.drive()
                assert _native.now_ns() < deadline()
            other = threading.Thread(target=lambda: there.put(b"5678", channel=0, value=1).wait(deadline()))
            other.start()
            while other.is_alive():
                a.plane.park()
                a.plane.drive()
            a.plane.close()
            a.plane.park()
            a.plane.wake()
        assert bytes(at_a) == b"1234" and bytes(at_b) == b"5678"


def test_an_acknowledgement_may_wait_for_what_follows_but_not_for_ever() -> None:
    with BulkHost(0) as a, BulkHost(1) as b:
        to_b, to_a = join(a, b)
        there, _ = region_of(to_b, b, 4)
        back, _ = region_of(to_a, a, 4)
        with a.plane.driving():
            sent = back.put(b"1234", channel=0, value=1)
            drive_until_told(a, 1, 1)
            while not sent.done:  # it leaves before a sleep
                a.plane.park()
                a.plane.drive()
                assert _native.now_ns() < deadline()
            sent = back.put(b"1234", channel=0, value=2)
            drive_until_told(a, 1, 2)
            there.put(b"5678", channel=0, value=1)
            while not sent.done:  # or with the put
                a.plane.drive()
                assert _native.now_ns() < deadline()
            sent = back.put(b"1234", channel=0, value=3)
            drive_until_told(a, 1, 3)
            sent.wait(deadline())  # or when the driver does something else
            sent = back.put(b"1234", channel=0, value=4)
            drive_until_told(a, 1, 4)
        sent.wait(deadline())  # or when it has left
