"""The thread that computes steps: one piece after the other, and each end told."""

from __future__ import annotations

import threading
from functools import partial

from zbmd.collectives.commit.driver import WorkThread


def test_pieces_are_done_one_after_the_other_and_their_ends_told() -> None:
    told: list[int | BaseException] = []
    thread = WorkThread[int]("work", told.append)

    def fail() -> int:
        raise KeyError("three")

    for number in (1, 2):
        thread.submit(partial(int, number))
    thread.submit(fail)
    thread.submit(threading.get_ident)
    thread.close()
    assert told[:2] == [1, 2] and str(told[2]) == "'three'"
    assert told[3] != threading.get_ident() and len(told) == 4


def test_there_is_no_thread_before_the_first_piece_nor_behind_the_end() -> None:
    before = threading.active_count()
    thread = WorkThread[int]("work", lambda _: None)
    thread.close()
    assert threading.active_count() == before
    begun, may_end = threading.Event(), threading.Event()

    def wait() -> int:
        begun.set()
        may_end.wait()
        return 0

    thread.submit(wait)
    begun.wait()
    assert threading.active_count() == before + 1
    may_end.set()
    thread.close()
    thread.close()
    assert threading.active_count() == before
