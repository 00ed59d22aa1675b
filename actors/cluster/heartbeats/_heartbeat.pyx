"""Heartbeats between nodes by a native thread: gives types to heartbeat.h. See _heartbeat.pyi."""

from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free

import os

from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError

cdef extern from "actors/cluster/heartbeats/siphash.h" nogil:
    uint64_t zbmd_siphash(const uint64_t *key, const uint8_t *data, size_t nbytes)
    uint64_t zbmd_read_le64(const uint8_t *source)

cdef extern from "transport/rdma/native/beat_way.h" nogil:
    const char *ZBMD_BEAT_WAY
    struct zbmd_beat_way:
        pass

cdef extern from "actors/cluster/heartbeats/heartbeat.h" nogil:
    enum:
        ZBMD_BEAT_BYTES
        ZBMD_BEAT_PEERS
        ZBMD_BEAT_ARRIVALS
        ZBMD_BEAT_SPARED_MAX
        ZBMD_STRIPE_OPEN
        ZBMD_STRIPE_CLOSED
        ZBMD_STRIPE_BROKEN
        ZBMD_STRIPE_FORGED
        ZBMD_STRIPE_OUT_OF_TURN
        ZBMD_STRIPE_FULL
        ZBMD_WAY_FAILED
    struct zbmd_beat_writer:
        uint64_t key[2]
        uint64_t number
    struct zbmd_beat_reader:
        uint64_t key[2]
        uint64_t number
        uint64_t known
        uint64_t entered
    struct zbmd_beats:
        int tell_fd
        uint64_t beats_sent
        uint64_t beats_spared
        uint64_t way_alone
        uint64_t way_come
    struct zbmd_beat_news:
        uint32_t fresh
        uint32_t end
        uint32_t way_end
        uint32_t count
        int error
        uint64_t known
        uint64_t entered
        uint64_t arrivals[ZBMD_BEAT_ARRIVALS]
    void zbmd_beat_write(const zbmd_beat_writer *writer, uint64_t known, uint64_t entered, uint8_t *to)
    int zbmd_beat_read(zbmd_beat_reader *reader, const uint8_t *data, size_t nbytes)
    int zbmd_beats_init(zbmd_beats *beats, uint64_t period_ns, uint64_t lease_ns)
    void zbmd_beats_close(zbmd_beats *beats)
    int zbmd_beats_place(zbmd_beats *beats)
    void zbmd_beats_vacate(zbmd_beats *beats, int place)
    void zbmd_beats_adopt(zbmd_beats *beats, int place, int fd, const uint8_t *send_key,
                          const uint8_t *receive_key, const uint8_t *surplus, size_t nbytes)
    void zbmd_beats_drop_stripe(zbmd_beats *beats, int place)
    int zbmd_beats_add_way(zbmd_beats *beats, int place, zbmd_beat_way *way, const uint64_t *send_key,
                           const uint64_t *receive_key)
    void zbmd_beats_use_way(zbmd_beats *beats, int place)
    void zbmd_beats_drop_way(zbmd_beats *beats, int place)
    void zbmd_beats_observe(zbmd_beats *beats, int place, uint64_t limit_ns)
    void zbmd_beats_beat_to(zbmd_beats *beats, int place, uint32_t observes_us)
    void zbmd_beats_say(zbmd_beats *beats, uint32_t on, uint64_t known, uint64_t entered)
    void zbmd_beats_set_period(zbmd_beats *beats, uint64_t period_ns)
    void zbmd_beats_read_now(zbmd_beats *beats)
    void zbmd_beats_attend(zbmd_beats *beats, uint32_t attentive)
    void zbmd_beats_sent(zbmd_beats *beats, int place)
    int zbmd_beats_heard(zbmd_beats *beats, int place)
    int zbmd_beats_renew(zbmd_beats *beats, uint64_t lease_ns)
    uint64_t zbmd_beats_judged_ns(zbmd_beats *beats)
    int zbmd_beats_take(zbmd_beats *beats, int place, zbmd_beat_news *news)

BEAT_BYTES = ZBMD_BEAT_BYTES
BEAT_KEY_BYTES = 16
PEERS_MAX = ZBMD_BEAT_PEERS
ARRIVALS_MAX = ZBMD_BEAT_ARRIVALS
SPARED_MAX = ZBMD_BEAT_SPARED_MAX


cdef str _why(uint32_t end, int error):
    """Why a stripe has ended; empty if it has not."""
    if end == ZBMD_STRIPE_OPEN:
        return ""
    if end == ZBMD_STRIPE_CLOSED:
        return "it closed the stripe"
    if end == ZBMD_STRIPE_FORGED:
        return "the tag of a beat is wrong: it was changed on its way, or injected"
    if end == ZBMD_STRIPE_OUT_OF_TURN:
        return "a beat came out of its turn: it was repeated, or others were left out"
    if end == ZBMD_STRIPE_FULL:
        return "it has not read the stripe for so long that a beat found no room"
    if end == ZBMD_WAY_FAILED:
        return "a beat was not acknowledged"
    return f"the connection broke: {os.strerror(error)}"


cdef _key_of(const uint8_t[::1] key, uint64_t *halves):
    if key.shape[0] != BEAT_KEY_BYTES:
        raise LocalProtocolError(f"a key of heartbeats has {BEAT_KEY_BYTES} bytes, not {key.shape[0]}")
    halves[0] = zbmd_read_le64(&key[0])
    halves[1] = zbmd_read_le64(&key[8])


def siphash(const uint8_t[::1] key, const uint8_t[::1] data):
    cdef uint64_t halves[2]
    _key_of(key, halves)
    return zbmd_siphash(halves, &data[0] if data.shape[0] else NULL, data.shape[0])


cdef class BeatWriter:
    cdef zbmd_beat_writer _writer

    def __init__(self, const uint8_t[::1] key):
        _key_of(key, self._writer.key)
        self._writer.number = 1

    def write(self, uint64_t known, uint64_t entered):
        cdef uint8_t beat[ZBMD_BEAT_BYTES]
        zbmd_beat_write(&self._writer, known, entered, beat)
        self._writer.number += 1
        return <bytes>(<char *>beat)[:ZBMD_BEAT_BYTES]


cdef class BeatReader:
    cdef zbmd_beat_reader _reader

    def __init__(self, const uint8_t[::1] key):
        _key_of(key, self._reader.key)
        self._reader.number = 1

    @property
    def beats(self):
        return self._reader.number - 1

    @property
    def last(self):
        return self._reader.known, self._reader.entered

    def feed(self, const uint8_t[::1] data):
        if not data.shape[0]:
            return
        cdef int end = zbmd_beat_read(&self._reader, &data[0], data.shape[0])
        if end != ZBMD_STRIPE_OPEN:
            raise RemoteProtocolError(_why(end, 0))


cdef class NativeHeartbeats:
    cdef zbmd_beats *_beats

    def __init__(self, *, uint64_t period_ns, uint64_t lease_ns):
        if self._beats != NULL:
            raise LocalProtocolError("these heartbeats have been started already")
        self._beats = <zbmd_beats *>calloc(1, sizeof(zbmd_beats))
        if self._beats == NULL:
            raise MemoryError()
        cdef int error = zbmd_beats_init(self._beats, period_ns, lease_ns)
        if error:
            self.close()
            raise OSError(error, os.strerror(error))

    def __dealloc__(self):
        self._end()

    cdef _end(self):
        if self._beats != NULL:
            with nogil:
                zbmd_beats_close(self._beats)
            free(self._beats)
            self._beats = NULL

    cdef zbmd_beats *_live(self, int place) except NULL:
        if self._beats == NULL:
            raise LocalProtocolError("these heartbeats have ended")
        if not 0 <= place < ZBMD_BEAT_PEERS:
            raise LocalProtocolError(f"there is no place {place} for a peer")
        return self._beats

    def close(self):
        self._end()

    @property
    def fd(self):
        return self._live(0).tell_fd

    @property
    def beats_sent(self):
        return self._live(0).beats_sent

    @property
    def beats_spared(self):
        return self._live(0).beats_spared

    @property
    def sent_by_way(self):
        return self._live(0).way_alone

    @property
    def come_by_way(self):
        return self._live(0).way_come

    def place(self):
        cdef zbmd_beats *beats = self._live(0)
        cdef int found
        with nogil:
            found = zbmd_beats_place(beats)
        if found < 0:
            raise LocalProtocolError(f"all {PEERS_MAX} places for peers are taken")
        return found

    def vacate(self, int place):
        cdef zbmd_beats *beats = self._live(place)
        with nogil:
            zbmd_beats_vacate(beats, place)

    def adopt(self, int place, int fd, const uint8_t[::1] send_key, const uint8_t[::1] receive_key,
              const uint8_t[::1] surplus):
        cdef zbmd_beats *beats = self._live(place)
        cdef uint64_t halves[2]
        cdef const uint8_t *rest = &surplus[0] if surplus.shape[0] else NULL
        cdef size_t nbytes = surplus.shape[0]
        _key_of(send_key, halves)
        _key_of(receive_key, halves)
        with nogil:
            zbmd_beats_adopt(beats, place, fd, &send_key[0], &receive_key[0], rest, nbytes)

    def drop_stripe(self, int place):
        cdef zbmd_beats *beats = self._live(place)
        with nogil:
            zbmd_beats_drop_stripe(beats, place)

    def add_way(self, int place, object way, const uint8_t[::1] send_key, const uint8_t[::1] receive_key):
        cdef zbmd_beats *beats = self._live(place)
        cdef zbmd_beat_way *found = <zbmd_beat_way *>PyCapsule_GetPointer(way, ZBMD_BEAT_WAY)
        cdef uint64_t send_halves[2]
        cdef uint64_t receive_halves[2]
        cdef bint added
        _key_of(send_key, send_halves)
        _key_of(receive_key, receive_halves)
        with nogil:
            added = zbmd_beats_add_way(beats, place, found, send_halves, receive_halves)
        return added

    def use_way(self, int place):
        cdef zbmd_beats *beats = self._live(place)
        with nogil:
            zbmd_beats_use_way(beats, place)

    def drop_way(self, int place):
        cdef zbmd_beats *beats = self._live(place)
        with nogil:
            zbmd_beats_drop_way(beats, place)

    def observe(self, int place, uint64_t limit_ns):
        cdef zbmd_beats *beats = self._live(place)
        with nogil:
            zbmd_beats_observe(beats, place, limit_ns)

    def beat_to(self, int place, bint observes_us):
        cdef zbmd_beats *beats = self._live(place)
        with nogil:
            zbmd_beats_beat_to(beats, place, observes_us)

    def say(self, bint on, uint64_t known, uint64_t entered):
        cdef zbmd_beats *beats = self._live(0)
        with nogil:
            zbmd_beats_say(beats, on, known, entered)

    def set_period(self, uint64_t period_ns):
        cdef zbmd_beats *beats = self._live(0)
        with nogil:
            zbmd_beats_set_period(beats, period_ns)

    def read_now(self):
        cdef zbmd_beats *beats = self._live(0)
        with nogil:
            zbmd_beats_read_now(beats)

    def attend(self, bint attentive):
        cdef zbmd_beats *beats = self._live(0)
        with nogil:
            zbmd_beats_attend(beats, attentive)

    def sent(self, int place):
        cdef zbmd_beats *beats = self._live(place)
        with nogil:
            zbmd_beats_sent(beats, place)

    def heard(self, int place):
        cdef zbmd_beats *beats = self._live(place)
        cdef bint silent
        with nogil:
            silent = zbmd_beats_heard(beats, place)
        return silent

    def renew(self, uint64_t lease_ns):
        cdef zbmd_beats *beats = self._live(0)
        cdef bint lapsed
        with nogil:
            lapsed = zbmd_beats_renew(beats, lease_ns)
        return lapsed

    @property
    def judged_ns(self):
        cdef zbmd_beats *beats = self._live(0)
        cdef uint64_t judged_ns
        with nogil:
            judged_ns = zbmd_beats_judged_ns(beats)
        return judged_ns

    def take(self, int place):
        cdef zbmd_beats *beats = self._live(place)
        cdef zbmd_beat_news news
        cdef bint anything
        cdef uint32_t i
        with nogil:
            anything = zbmd_beats_take(beats, place, &news)
        if not anything:
            return None
        arrivals = tuple([news.arrivals[i] for i in range(news.count)])
        said = (news.known, news.entered) if news.fresh else None
        return arrivals, said, _why(news.end, news.error), _why(news.way_end, 0)
