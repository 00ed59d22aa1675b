/* One heartbeat as bytes, as they are made and checked.
 *
 * A beat is 32 bytes, little-endian: its number in its direction of its stripe (u64, from 1), the newest view
 * that the sender knows (u64), the view that it acts on (u64), and the tag of these (siphash.h) under the key
 * of that direction. Numbers have no gaps, for a stripe is a TCP connection.
 */
#ifndef ZBMD_BEAT_H
#define ZBMD_BEAT_H

#include "siphash.h"
#include <stddef.h>
#include <string.h>

#define ZBMD_BEAT_BYTES 32
#define ZBMD_BEAT_TAGGED 24

/* Why a stripe has ended. */
enum {
    ZBMD_STRIPE_OPEN = 0,
    ZBMD_STRIPE_CLOSED = 1,
    ZBMD_STRIPE_BROKEN = 2,     /* `error` is the errno */
    ZBMD_STRIPE_FORGED = 3,
    ZBMD_STRIPE_OUT_OF_TURN = 4,
    ZBMD_STRIPE_FULL = 5,
    ZBMD_WAY_FAILED = 6       /* of a way alone */
};

struct zbmd_beat_writer {
    uint64_t key[2];
    uint64_t number;   /* of the next beat */
};

struct zbmd_beat_reader {
    uint64_t key[2];
    uint64_t number;   /* of the next beat */
    uint64_t known, entered;   /* of the last one */
    uint32_t filled;
    uint8_t partial[ZBMD_BEAT_BYTES];
};

static inline void zbmd_beat_write(const struct zbmd_beat_writer *writer, uint64_t known, uint64_t entered,
                                   uint8_t to[ZBMD_BEAT_BYTES]) {
    zbmd_write_le64(to, writer->number);
    zbmd_write_le64(to + 8, known);
    zbmd_write_le64(to + 16, entered);
    zbmd_write_le64(to + 24, zbmd_siphash(writer->key, to, ZBMD_BEAT_TAGGED));
}

/* Take bytes of a stripe, cut anywhere. Returns ZBMD_STRIPE_OPEN, or what is wrong with it. */
static inline int zbmd_beat_read(struct zbmd_beat_reader *reader, const uint8_t *data, size_t nbytes) {
    while (nbytes) {
        size_t step = ZBMD_BEAT_BYTES - reader->filled;
        if (step > nbytes) step = nbytes;
        memcpy(reader->partial + reader->filled, data, step);
        reader->filled += (uint32_t)step;
        data += step;
        nbytes -= step;
        if (reader->filled < ZBMD_BEAT_BYTES) break;
        reader->filled = 0;
        const uint8_t *beat = reader->partial;
        if (zbmd_siphash(reader->key, beat, ZBMD_BEAT_TAGGED) != zbmd_read_le64(beat + 24))
            return ZBMD_STRIPE_FORGED;
        if (zbmd_read_le64(beat) != reader->number) return ZBMD_STRIPE_OUT_OF_TURN;
        reader->number++;
        reader->known = zbmd_read_le64(beat + 8);
        reader->entered = zbmd_read_le64(beat + 16);
    }
    return ZBMD_STRIPE_OPEN;
}

#endif
