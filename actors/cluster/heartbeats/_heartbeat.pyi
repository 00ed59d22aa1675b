from typing import Final

from zbmd.transport.secure.protection import Buffer

BEAT_BYTES: Final[int]
BEAT_KEY_BYTES: Final[int]
PEERS_MAX: Final[int]
"""Places in a table."""
ARRIVALS_MAX: Final[int]
"""Kept of a peer until they are taken, the newest."""
SPARED_MAX: Final[int]
"""Beats in a row that are not sent to a peer because something else was."""

def siphash(key: Buffer, data: Buffer) -> int:
    """SipHash-2-4 of `data`. key: `BEAT_KEY_BYTES` bytes."""

class BeatWriter:
    """Makes the beats of one direction of a stripe. key: `BEAT_KEY_BYTES` bytes."""

    def __init__(self, key: Buffer) -> None: ...
    def write(self, known: int, entered: int) -> bytes:
        """The next beat, `BEAT_BYTES` bytes; both arguments are u64."""

class BeatReader:
    """Reads the beats of one direction of a stripe, as the native thread does."""

    def __init__(self, key: Buffer) -> None: ...
    @property
    def beats(self) -> int:
        """The number of beats received."""

    @property
    def last(self) -> tuple[int, int]:
        """The fields of the last beat: known, entered."""

    def feed(self, data: Buffer) -> None:
        """Take bytes of the stripe, cut anywhere. Raises `RemoteProtocolError`: the stripe is to end then."""

class NativeHeartbeats:
    """A thread that beats every `period_ns`, reads peers' beats, and wakes who watches `fd` when needed.

    A peer has a *place*, a number. Beats cease `lease_ns` after the start, or the last `renew`: a node whose
    Python stands still is not to be taken for one that works. Raises OSError if there is no thread or
    descriptor to be had, and every method raises `LocalProtocolError` after `close`.
    """

    def __init__(self, *, period_ns: int, lease_ns: int) -> None: ...
    def close(self) -> None:
        """End the thread and all stripes. Idempotent."""

    @property
    def fd(self) -> int:
        """An eventfd, readable when somebody must look; read it, then `take`."""

    @property
    def beats_sent(self) -> int:
        """Since the start."""

    @property
    def beats_spared(self) -> int:
        """Not sent because other traffic told the same."""

    @property
    def sent_by_way(self) -> int:
        """Beats that went by a way alone, since the start."""

    @property
    def come_by_way(self) -> int:
        """Beats that have been read from ways, since the start."""

    def place(self) -> int:
        """A place for a peer. Raises `LocalProtocolError` if all are taken."""

    def vacate(self, place: int) -> None:
        """Give a place back, and end its stripe."""

    def adopt(self, place: int, fd: int, send_key: Buffer, receive_key: Buffer, surplus: Buffer) -> None:
        """Take over a stripe's socket in place of the one before. surplus: what has come on it already."""

    def drop_stripe(self, place: int) -> None:
        """End a peer's stripe, if it has one."""

    def add_way(self, place: int, way: object, send_key: Buffer, receive_key: Buffer) -> bool:
        """Read a peer's beats by this way, too, as long as its stripe stands; False if it has none.

        way: a capsule, as `BeatEnd.way`. It stays its maker's, who keeps it until the stripe or the way has
        ended and been taken, or `drop_way`, `drop_stripe`, `vacate` or `close`. Raises ValueError on another
        object.
        """

    def use_way(self, place: int) -> None:
        """The peer takes our beats by the way: send them so."""

    def drop_way(self, place: int) -> None:
        """Use a peer's way no more; its stripe stays."""

    def observe(self, place: int, limit_ns: int) -> None:
        """Look when a peer was not heard for so long, from now on if it is new; 0 for no more."""

    def beat_to(self, place: int, observes_us: bool) -> None:
        """Whether a peer is to hear us."""

    def say(self, on: bool, known: int, entered: int) -> None:
        """Set the fields of later beats; on: whether any are sent."""

    def set_period(self, period_ns: int) -> None:
        """Beat so often, from the next beat on."""

    def read_now(self) -> None:
        """Read all stripes, so that what has come by now can be taken."""

    def attend(self, attentive: bool) -> None:
        """Whether every beat is to be looked at; else those that say what we do not."""

    def sent(self, place: int) -> None:
        """Something else was just sent to a peer, in place of a beat."""

    def heard(self, place: int) -> bool:
        """Something else just came from a peer: it counts as a beat. Whether it was silent too long."""

    def renew(self, lease_ns: int) -> bool:
        """Beat for so much longer. Whether beats were withheld since the last call."""

    @property
    def judged_ns(self) -> int:
        """All that had come by then can be taken, and silence until then means something."""

    def take(self, place: int) -> tuple[tuple[int, ...], tuple[int, int] | None, str, str] | None:
        """Take a peer's news: arrivals in ns, its last beat's fields, why its stripe and its way ended.

        None if there is nothing. The texts are empty while stripe and way stand; a way ends with its stripe,
        and then nothing is said of it.
        """
