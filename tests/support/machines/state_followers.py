"""Machines that are restored from the states of a recorded one, and must go on as it did."""

from __future__ import annotations

import random
from typing import Any

import msgspec

from zbmd.transport import capture
from zbmd.transport.capture.records import EventTaken, StreamDeclared
from zbmd.transport.capture.registry import find
from zbmd.transport.errors import ProtocolError

FOLLOWERS_MAX = 6
"""Of each machine."""


def follow_all(log: capture.ProcessLog, rng: random.Random) -> set[str]:
    """Play all machines of a log, with followers restored at random events; returns their kinds.

    Asserts that a follower answers each later event as the machine that it follows.
    """
    found: set[str] = set()
    for declared, events in _events_of(log).values():
        kind = find(declared.machine, declared.version)
        assert kind.states is not None, kind.name
        config = msgspec.msgpack.decode(declared.config)
        at = rng.sample(range(len(events)), min(FOLLOWERS_MAX, len(events)))
        machine, followers = kind.build(config), list[Any]()
        for number, record in enumerate(events):
            if number in at:
                followers.append(kind.build(config))
                kind.states.restore(followers[-1], kind.states.encode(machine))
            event = kind.events.decode(record.tag, record.fields)
            answer = _answer(machine, event, record.at_ns)
            for follower in followers:
                assert _answer(follower, event, record.at_ns) == answer, (kind.name, number)
                follower.check_invariants()
        found.add(kind.name)
    return found


def _answer(machine: Any, event: Any, now_ns: int) -> object:
    try:
        return machine.handle(event, now_ns=now_ns)
    except ProtocolError as error:
        return type(error), str(error)


def _events_of(log: capture.ProcessLog) -> dict[int, tuple[StreamDeclared, list[EventTaken]]]:
    found: dict[int, tuple[StreamDeclared, list[EventTaken]]] = {}
    for entry in log.entries():
        record = entry.record
        if isinstance(record, StreamDeclared) and record.machine:
            found[record.stream] = (record, [])
        if isinstance(record, EventTaken) and record.stream in found:
            found[record.stream][1].append(record)
    return found
