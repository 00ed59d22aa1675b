# cython: boundscheck=False, wraparound=False
"""Small puts and what comes of them as bytes, while nothing else is under way. See _fast_path.pyi."""

cimport cython
from cpython.buffer cimport PyBUF_READ, PyBUF_SIMPLE, PyBUF_WRITABLE, PyBUF_WRITE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.memoryview cimport PyMemoryView_FromMemory
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp, memcpy, memmove, memset

from zbmd.transport.native._slots cimport zbmd_base, zbmd_load64

cdef extern from "transport/native/segment.h" nogil:
    int ZBMD_CHANNELS
    uint64_t zbmd_cell_offset(uint32_t slot, uint32_t channel)
    void zbmd_notify(zbmd_base peer, uint32_t our_slot, uint32_t channel, uint64_t value)

QUICK_BYTES_MAX = PAYLOAD_MAX

cdef enum:
    TAG = 16
    HEADER = 96
    PAYLOAD_MAX = 1 << 20         # whose tag is one (payload_tag.TAG_CHUNK_BYTES)
    COPIED_MAX = 1 << 13          # a payload so short is sent behind its header, as one piece of memory
    LANDS_MIN = 1 << 14           # one so long, that is not here whole with its header, is received in its region
    ROOM = 1 << 16                # of what has come, and is not received there
    FRAGMENT_MAX = 1 << 24
    AHEAD_MAX = 1 << 10           # bulk_records.PUTS_AHEAD_MAX
    # The kinds of bulk_records and, of tags, those of bulk_stream and payload_tag.
    K_PUT = 1
    K_NOTIFY = 2
    K_ACK = 6
    TAG_OF_HEADER = 1
    TAG_OF_PAYLOAD = 2


cdef packed struct Head:          # bulk_records._HEADER, little-endian as is the machine
    uint8_t kind
    uint8_t writable
    uint16_t channel
    uint32_t fragment_bytes
    uint64_t sequence
    uint64_t transfer
    uint64_t nbytes
    uint64_t total
    uint64_t offset
    uint64_t value
    uint64_t at
    uint64_t region_offset
    uint64_t region_nbytes
    uint64_t incarnation
    uint32_t slot
    uint32_t zero


cdef inline bytes nonce_of(uint32_t kind, uint64_t sequence):
    """As record_mac has it: both big-endian."""
    cdef uint8_t nonce[12]
    cdef int i
    for i in range(4):
        nonce[i] = <uint8_t>(kind >> 8 * (3 - i))
    for i in range(8):
        nonce[4 + i] = <uint8_t>(sequence >> 8 * (7 - i))
    return PyBytes_FromStringAndSize(<char *>nonce, 12)


cdef inline bint holds(object seal, uint32_t kind, uint64_t sequence, char *body, uint64_t nbytes, const char *tag):
    """Whether that is its tag; looked at in constant time."""
    cdef bytes right = seal(nonce_of(kind, sequence), b"", PyMemoryView_FromMemory(body, nbytes, PyBUF_READ))
    cdef const uint8_t *at = <const uint8_t *>PyBytes_AS_STRING(right)
    cdef uint8_t differs = 0
    cdef int i
    for i in range(TAG):
        differs |= at[i] ^ <uint8_t>tag[i]
    return differs == 0


@cython.final
cdef class QuickPuts:
    cdef object seal_sent, seal_come, resolve, versions
    cdef zbmd_base own
    cdef uint32_t slot
    cdef uint64_t tag_bytes, filled, begun_at, awaited
    cdef bint authentic                # the header at the beginning of what has come
    cdef char *out                     # a header with what is to be acknowledged, a short payload, a tag
    cdef char *come
    # The put whose payload comes straight into the region.
    cdef bint lands
    cdef uint64_t landed               # bytes of it that have
    cdef Head landing
    cdef char landing_tag[TAG]
    cdef readonly uint64_t sent_records, come_records, acked, published, told
    cdef uint64_t puts
    # The region of the last put that came, for the next one there.
    cdef Py_buffer region
    cdef bint has_region
    cdef Head region_head
    cdef object region_version

    def __cinit__(self, *_, **__):
        self.has_region = self.lands = False
        self.out = <char *>malloc(2 * (HEADER + TAG) + COPIED_MAX + TAG)
        self.come = <char *>malloc(ROOM)
        if self.out == NULL or self.come == NULL:
            raise MemoryError

    def __dealloc__(self):
        self._forget()
        free(self.out)
        free(self.come)

    def __init__(self, *, seal_sent, seal_come, resolve not None, versions not None, uintptr_t own, uint32_t slot):
        if (seal_sent is None) != (seal_come is None):
            raise ValueError("both directions of a stripe have tags, or none has")
        self.seal_sent, self.seal_come = seal_sent, seal_come
        self.tag_bytes = 0 if seal_sent is None else TAG
        self.resolve, self.versions = resolve, versions
        self.own, self.slot = <char *>own, slot
        self.filled, self.authentic = 0, False

    def begin(self, uint64_t sent_records, uint64_t come_records, uint64_t puts, uint64_t acked, uint64_t awaited,
              uint64_t published, uint64_t told):
        self.sent_records, self.come_records = sent_records, come_records
        self.begun_at = self.puts = puts
        self.acked, self.awaited, self.published, self.told = acked, awaited, published, told

    def end(self):
        cdef bytes rest = self.come[:self.filled]
        if self.lands:
            rest = (<char *>&self.landing)[:HEADER] + self.landing_tag[:self.tag_bytes] + self._place()[:self.landed] + rest
        self.filled, self.authentic, self.lands = 0, False, False
        self._forget()
        return rest

    @property
    def new_puts(self):
        return self.puts - self.begun_at

    cdef void _forget(self):
        if self.has_region:
            self.has_region = False
            PyBuffer_Release(&self.region)

    # -- what goes -----------------------------------------------------------------------------------

    cdef uint64_t _write(self, uint64_t at, Head *head) except? 0:
        """A header and its tag behind what is to be sent already; where they end."""
        cdef char *to = self.out + at
        head.sequence = self.sent_records
        memcpy(to, head, HEADER)
        at = self._tag(at + HEADER, TAG_OF_HEADER, to, HEADER)
        self.sent_records += 1
        return at

    cdef uint64_t _tag(self, uint64_t at, uint32_t kind, char *body, uint64_t nbytes) except? 0:
        cdef bytes tag
        if self.tag_bytes:
            tag = self.seal_sent(nonce_of(kind, self.sent_records), b"", PyMemoryView_FromMemory(body, nbytes, PyBUF_READ))
            memcpy(self.out + at, PyBytes_AS_STRING(tag), TAG)
        return at + self.tag_bytes

    cdef uint64_t _write_ack(self) except? 0:
        cdef Head head
        if self.told == self.published:
            return 0
        memset(&head, 0, HEADER)
        head.kind, head.value = K_ACK, self.published
        self.told = self.published
        return self._write(0, &head)

    def acknowledge(self):
        return PyMemoryView_FromMemory(self.out, self._write_ack(), PyBUF_READ)

    def put(self, handle, const uint8_t[::1] data not None, uint64_t at, uint32_t channel, uint64_t value):
        cdef Head head
        cdef uint64_t nbytes = data.shape[0], end, tag_end
        if not 0 < nbytes <= PAYLOAD_MAX or self.puts - self.acked >= AHEAD_MAX:
            return None
        memset(&head, 0, HEADER)
        head.kind, head.writable, head.channel, head.value = K_PUT, handle.writable, channel, value
        head.fragment_bytes, head.nbytes, head.total, head.at = FRAGMENT_MAX, nbytes, nbytes, at
        head.region_offset, head.region_nbytes = handle.offset, handle.nbytes
        head.incarnation, head.slot, head.transfer = handle.incarnation, handle.slot, self.puts
        end = self._write(self._write_ack(), &head)
        self.puts += 1
        self.sent_records -= 1  # a payload's tag has its header's number
        if nbytes <= COPIED_MAX:
            memcpy(self.out + end, &data[0], nbytes)
            end = self._tag(end + nbytes, TAG_OF_PAYLOAD, self.out + end, nbytes)
            self.sent_records += 1
            return (PyMemoryView_FromMemory(self.out, end, PyBUF_READ),)
        tag_end = self._tag(end, TAG_OF_PAYLOAD, <char *>&data[0], nbytes)
        self.sent_records += 1
        return (PyMemoryView_FromMemory(self.out, end, PyBUF_READ), PyMemoryView_FromMemory(<char *>&data[0], nbytes, PyBUF_READ),
                PyMemoryView_FromMemory(self.out + end, tag_end - end, PyBUF_READ))

    def notify(self, uint32_t channel, uint64_t value):
        cdef Head head
        if self.puts - self.acked >= AHEAD_MAX:
            return None
        memset(&head, 0, HEADER)
        head.kind, head.channel, head.value, head.transfer = K_NOTIFY, channel, value, self.puts
        self.puts += 1
        return PyMemoryView_FromMemory(self.out, self._write(self._write_ack(), &head), PyBUF_READ)

    # -- what comes ----------------------------------------------------------------------------------

    cdef char *_place(self) noexcept:
        """The beginning of the payload that lands."""
        return <char *>self.region.buf + self.landing.at

    @property
    def room(self):
        cdef object rest = PyMemoryView_FromMemory(self.come + self.filled, ROOM - self.filled, PyBUF_WRITE)
        if self.lands and self.landed < self.landing.nbytes:
            return (PyMemoryView_FromMemory(self._place() + self.landed, self.landing.nbytes - self.landed, PyBUF_WRITE), rest)
        return (rest,)

    def came(self, uint64_t nbytes):
        """`nbytes` of `room` are filled."""
        cdef uint64_t at = 0, taken = min(nbytes, self.landing.nbytes - self.landed) if self.lands else 0
        cdef bint mine = True
        if nbytes - taken > ROOM - self.filled:
            raise ValueError(f"{nbytes} bytes in room for {ROOM - self.filled + taken}")
        self.landed += taken
        self.filled += nbytes - taken
        if self.lands:
            at = self._end_landing(&mine)
        while mine and not self.lands and self.filled - at >= HEADER + self.tag_bytes:
            taken = self._take(self.come + at, self.filled - at, &mine)
            if taken == 0:
                break
            at += taken
        if at:
            memmove(self.come, self.come + at, self.filled - at)
            self.filled -= at
        return mine

    cdef uint64_t _end_landing(self, bint *mine) except? 0:
        """Publish the put whose payload lands, if it is here whole; the bytes of its tag, or 0 if not, or not ours."""
        cdef Head *head = &self.landing
        if self.landed < head.nbytes or self.filled < self.tag_bytes:
            return 0
        if self.tag_bytes and not holds(self.seal_come, TAG_OF_PAYLOAD, head.sequence, self._place(), head.nbytes, self.come):
            mine[0] = False
            return 0
        self.lands = False
        self._publish(head)
        self.come_records += 1
        return self.tag_bytes

    cdef uint64_t _take(self, char *at, uint64_t filled, bint *mine) except? 0:
        """Perform one record; its bytes, or 0 if it is not whole, or (`mine` is set to False) not ours to judge."""
        cdef Head head
        cdef uint64_t begin = HEADER + self.tag_bytes
        memcpy(&head, at, HEADER)
        mine[0] = False
        if self.tag_bytes and not self.authentic:
            if not holds(self.seal_come, TAG_OF_HEADER, self.come_records, at, HEADER, at + HEADER):
                return 0
            self.authentic = True
        if head.sequence != self.come_records or not self._is_plain(&head):
            return 0
        if head.kind == K_PUT and filled < begin + head.nbytes + self.tag_bytes:
            if head.nbytes < LANDS_MIN:
                mine[0] = True
                return 0
            if not self._find(&head):
                return 0
            # Data behind a wrong tag is of no account there, as in `stream`: nobody hears of it.
            memcpy(&self.landing, at, HEADER)
            memcpy(self.landing_tag, at + HEADER, self.tag_bytes)
            self.landed = min(filled - begin, head.nbytes)
            memcpy(self._place(), at + begin, self.landed)
            mine[0], self.lands, self.authentic = True, True, False
            return begin + self.landed
        if head.kind == K_ACK:
            if self.acked < self.awaited and head.value > self.acked:
                return 0  # a transfer of the machine may end by it
            self.acked = head.value
        elif head.kind == K_NOTIFY:
            self._publish(&head)
        else:
            if self.tag_bytes and not holds(self.seal_come, TAG_OF_PAYLOAD, head.sequence, at + begin, head.nbytes,
                                            at + begin + head.nbytes):
                return 0
            if not self._find(&head):
                return 0
            memcpy(<char *>self.region.buf + head.at, at + begin, head.nbytes)
            self._publish(&head)
            begin += head.nbytes + self.tag_bytes
        mine[0], self.authentic = True, False
        self.come_records += 1
        return begin

    cdef bint _is_plain(self, Head *head) noexcept:
        """Whether it is a record that this object understands, with nothing about it that is not usual."""
        cdef Head usual
        memset(&usual, 0, HEADER)
        usual.kind, usual.sequence, usual.value = head.kind, head.sequence, head.value
        if head.kind == K_ACK:
            return memcmp(head, &usual, HEADER) == 0 and self.acked <= head.value <= self.puts
        if head.transfer != self.published or head.channel >= ZBMD_CHANNELS:
            return False
        usual.transfer, usual.channel = head.transfer, head.channel
        if head.kind == K_NOTIFY:
            return memcmp(head, &usual, HEADER) == 0
        return (head.kind == K_PUT and head.writable == 1 and head.zero == 0 and head.offset == 0
                and 0 < head.nbytes <= PAYLOAD_MAX and head.total == head.nbytes
                and head.nbytes <= head.fragment_bytes <= FRAGMENT_MAX
                and head.nbytes <= head.region_nbytes and head.at <= head.region_nbytes - head.nbytes)

    cdef bint _find(self, Head *head) except? False:
        """Whether peers may write the region that the head names; then `region` is it."""
        cdef Head *known = &self.region_head
        version = self.versions.version
        if (self.has_region and version == self.region_version and known.region_offset == head.region_offset
                and known.region_nbytes == head.region_nbytes and known.incarnation == head.incarnation and known.slot == head.slot):
            return True
        self._forget()
        view = self.resolve(head.slot, head.incarnation, head.region_offset, head.region_nbytes)
        if view is None:
            return False
        PyObject_GetBuffer(view, &self.region, PyBUF_SIMPLE | PyBUF_WRITABLE)
        self.has_region, self.region_version = True, version
        memcpy(known, head, HEADER)
        return <uint64_t>self.region.len == head.region_nbytes

    cdef void _publish(self, Head *head) noexcept:
        # A cell only grows. We alone write those of this slot.
        if head.value > zbmd_load64(self.own, zbmd_cell_offset(self.slot, head.channel)):
            zbmd_notify(self.own, self.slot, head.channel, head.value)
        self.published += 1
