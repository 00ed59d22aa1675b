/* A byte ring in shared memory, one producer process and one consumer process.
 *
 * It carries a stream of frames, each a u32 length and that many bytes; a frame may be larger than the
 * ring. Positions only grow; each side keeps its own in private memory and reads the other's as untrusted
 * input. Either side may park; the other then writes its eventfd, and only then.
 *
 * A frame whose length has ZBMD_RING_MARK set carries, instead of its payload, where that lies in the writer's
 * arena (frame_loans.py): a block that is lent to the reader. A word a block says where it is: the writer lends
 * it, the reader takes it and brings it back.
 */
#ifndef ZBMD_RING_H
#define ZBMD_RING_H

#include "segment.h"
#include <poll.h>
#include <stdbool.h>

#define ZBMD_RING_OFF_HEAD 0           /* u64: bytes ever written */
#define ZBMD_RING_OFF_TAIL 64          /* u64: bytes ever read */
#define ZBMD_RING_OFF_READER_DONE 72   /* u32: 1 once the reader takes no further block */
#define ZBMD_RING_OFF_READER_PARKED 128 /* u32 */
#define ZBMD_RING_OFF_WRITER_PARKED 192 /* u32 */
#define ZBMD_RING_OFF_BLOCKS 256       /* u32 a block: enum zbmd_block */
#define ZBMD_RING_BLOCKS 16
#define ZBMD_RING_OFF_DATA 320
#define ZBMD_RING_MARK 0x80000000u     /* in a frame's length */

enum zbmd_block { ZBMD_BLOCK_FREE = 0, ZBMD_BLOCK_LENT = 1, ZBMD_BLOCK_TAKEN = 2 };

struct zbmd_ring_end {
    zbmd_base ring;
    uint64_t capacity; /* a power of two */
    uint64_t position; /* our own head or tail */
    int peer_event_fd;
};

static inline void zbmd_ring_copy_in(struct zbmd_ring_end *end, uint64_t at, const char *from, uint64_t n) {
    uint64_t start = at & (end->capacity - 1);
    uint64_t first = n < end->capacity - start ? n : end->capacity - start;
    memcpy(end->ring + ZBMD_RING_OFF_DATA + start, from, first);
    memcpy(end->ring + ZBMD_RING_OFF_DATA, from + first, n - first);
}

static inline void zbmd_ring_copy_out(struct zbmd_ring_end *end, uint64_t at, char *to, uint64_t n) {
    uint64_t start = at & (end->capacity - 1);
    uint64_t first = n < end->capacity - start ? n : end->capacity - start;
    memcpy(to, end->ring + ZBMD_RING_OFF_DATA + start, first);
    memcpy(to + first, end->ring + ZBMD_RING_OFF_DATA, n - first);
}

/* Bytes that may be written, or -1 if the reader's position is impossible. */
static inline int64_t zbmd_ring_free(struct zbmd_ring_end *writer) {
    uint64_t used = writer->position - zbmd_load64(writer->ring, ZBMD_RING_OFF_TAIL);
    return used > writer->capacity ? -1 : (int64_t)(writer->capacity - used);
}

/* Bytes that may be read, or -1 if the writer's position is impossible. */
static inline int64_t zbmd_ring_used(struct zbmd_ring_end *reader) {
    uint64_t used = zbmd_load64(reader->ring, ZBMD_RING_OFF_HEAD) - reader->position;
    return used > reader->capacity ? -1 : (int64_t)used;
}

static inline void zbmd_ring_wake(struct zbmd_ring_end *end, uint64_t parked_offset) {
    atomic_thread_fence(memory_order_seq_cst);
    _Atomic uint32_t *parked = zbmd_u32(end->ring, parked_offset);
    if (atomic_load_explicit(parked, memory_order_relaxed) && atomic_exchange(parked, 0)) {
        /* If it cannot be written, the counter is full: the peer has a wake-up pending anyway. We ask first, for
         * the peer has the same descriptor, and could make a write to it block. */
        struct pollfd ready = {.fd = end->peer_event_fd, .events = POLLOUT};
        uint64_t one = 1;
        if (poll(&ready, 1, 0) == 1 && ready.revents & POLLOUT) {
            ssize_t written = write(end->peer_event_fd, &one, sizeof one);
            (void)written;
        }
    }
}

/* Publish our new head; wake the reader if it has parked. */
static inline void zbmd_ring_publish_head(struct zbmd_ring_end *writer) {
    zbmd_store64(writer->ring, ZBMD_RING_OFF_HEAD, writer->position);
    zbmd_ring_wake(writer, ZBMD_RING_OFF_READER_PARKED);
}

/* Publish our new tail; wake a parked writer once half of the ring is free, so that it writes in bulk. */
static inline void zbmd_ring_publish_tail(struct zbmd_ring_end *reader) {
    zbmd_store64(reader->ring, ZBMD_RING_OFF_TAIL, reader->position);
    int64_t used = zbmd_ring_used(reader);
    if (used >= 0 && (uint64_t)used <= reader->capacity / 2)
        zbmd_ring_wake(reader, ZBMD_RING_OFF_WRITER_PARKED);
}

/* Ask the other side to wake us; whatever we wait for is to be looked at again after this. */
static inline void zbmd_ring_ask(struct zbmd_ring_end *end, uint64_t parked_offset) {
    atomic_store(zbmd_u32(end->ring, parked_offset), 1);
    atomic_thread_fence(memory_order_seq_cst);
}

/* Park our end; false, and not parked, if there is something to do after all. */
static inline bool zbmd_ring_park_reader(struct zbmd_ring_end *reader) {
    zbmd_ring_ask(reader, ZBMD_RING_OFF_READER_PARKED);
    if (zbmd_ring_used(reader) == 0) return true;
    atomic_store(zbmd_u32(reader->ring, ZBMD_RING_OFF_READER_PARKED), 0);
    return false;
}

static inline bool zbmd_ring_park_writer(struct zbmd_ring_end *writer) {
    zbmd_ring_ask(writer, ZBMD_RING_OFF_WRITER_PARKED);
    int64_t room = zbmd_ring_free(writer);
    if (room >= 0 && (uint64_t)room < writer->capacity / 2) return true;
    atomic_store(zbmd_u32(writer->ring, ZBMD_RING_OFF_WRITER_PARKED), 0);
    return false;
}

/* Whether a block is the writer's again: it was brought back, or it was never taken and never will be. */
static inline bool zbmd_block_is_back(struct zbmd_ring_end *writer, uint32_t block) {
    uint32_t reader_done = zbmd_load32(writer->ring, ZBMD_RING_OFF_READER_DONE); /* before the word: what was taken was so before */
    uint32_t word = zbmd_load32(writer->ring, ZBMD_RING_OFF_BLOCKS + 4 * block);
    return word == ZBMD_BLOCK_FREE || (word == ZBMD_BLOCK_LENT && reader_done);
}

static inline bool zbmd_block_is_unread(struct zbmd_ring_end *writer, uint32_t block) {
    return zbmd_load32(writer->ring, ZBMD_RING_OFF_BLOCKS + 4 * block) == ZBMD_BLOCK_LENT;
}

static inline void zbmd_block_set(zbmd_base ring, uint32_t block, enum zbmd_block state) {
    zbmd_store32(ring, ZBMD_RING_OFF_BLOCKS + 4 * block, state);
}

/* The reader takes no further block: what it has taken is marked so before this. */
static inline void zbmd_ring_reader_done(struct zbmd_ring_end *reader) {
    zbmd_store32(reader->ring, ZBMD_RING_OFF_READER_DONE, 1);
}

#endif
