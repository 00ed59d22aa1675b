"""Hangs in words: who, what, where, for how long."""

from __future__ import annotations

from collections.abc import Iterable

from zbmd.actors.hangs.wire import Frame, Place, PlaceKind, Position


def headline(frames: Iterable[Frame]) -> Frame | None:
    """The frame that tells most: the innermost of the user's own, else of a package, else the innermost."""
    chosen: Frame | None = None
    for frame in frames:
        if chosen is None or frame.weight >= chosen.weight:
            chosen = frame
    return chosen


def where(frames: Iterable[Frame]) -> str:
    """`data.py:88 in load_batch`; nothing if there is no frame."""
    frame = headline(frames)
    return "" if frame is None else f"{frame.file}:{frame.line} in {frame.function}"


def stack(frames: Iterable[Frame]) -> tuple[str, ...]:
    """Return a line a frame, outermost first."""
    return tuple(f"{frame.file}:{frame.line} in {frame.function}" for frame in frames)


def duration(ns: int) -> str:
    """`12 s`, or `0.4 s` below ten."""
    return f"{ns / 1e9:.0f} s" if ns >= 10_000_000_000 else f"{ns / 1e9:.1f} s"


def ranks(numbers: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-2`, `ranks 0, 2 and 5-7`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    text = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"rank {text}" if len(runs) == 1 and len(runs[0]) == 1 else f"ranks {text}"


def name_operation(position: Position) -> str:
    """`all_reduce #17 of epoch 3`, with the channel where it is not the first."""
    channel = f" on channel {position.channel}" if position.channel else ""
    return f"{position.operation} #{position.sequence} of epoch {position.epoch}{channel}"


def describe_place(place: Place) -> str:
    """`rank2/trainer has made no progress for 12 s: handler Train.step, at data.py:88 in load_batch`."""
    at = where(place.frames)
    waits = f", waiting for {place.waits_for}" if place.waits_for else ""
    return (
        f"{place.who} has made no progress for {duration(place.still_ns)}: {place.what}"
        f"{f', at {at}' if at else ''}{waits}"
    )


def stands(place: Place) -> str:
    """`rank3 is at data.py:88 in load_batch (step 41: forward)`."""
    at = where(place.frames)
    what = "" if place.kind is PlaceKind.MAIN else f" ({place.what})"
    still = f", for {duration(place.still_ns)}" if place.still_ns else ""
    return f"{place.who} is at {at}{what}{still}" if at else f"{place.who} is in {place.what}{still}"
