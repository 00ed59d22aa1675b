/* SipHash-2-4: Aumasson and Bernstein, "SipHash: a fast short-input PRF" (INDOCRYPT 2012).
 *
 * A MAC of 64 bits under a key of 128, made for messages as short as a heartbeat.
 */
#ifndef ZBMD_SIPHASH_H
#define ZBMD_SIPHASH_H

#include <endian.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

static inline uint64_t zbmd_read_le64(const uint8_t *from) {
    uint64_t word;
    memcpy(&word, from, sizeof word);
    return le64toh(word);
}

static inline void zbmd_write_le64(uint8_t *to, uint64_t value) {
    uint64_t word = htole64(value);
    memcpy(to, &word, sizeof word);
}

static inline uint64_t zbmd_rotate(uint64_t x, int by) { return (x << by) | (x >> (64 - by)); }

static inline void zbmd_sip_rounds(uint64_t v[4], int rounds) {
    while (rounds--) {
        v[0] += v[1]; v[1] = zbmd_rotate(v[1], 13) ^ v[0]; v[0] = zbmd_rotate(v[0], 32);
        v[2] += v[3]; v[3] = zbmd_rotate(v[3], 16) ^ v[2];
        v[0] += v[3]; v[3] = zbmd_rotate(v[3], 21) ^ v[0];
        v[2] += v[1]; v[1] = zbmd_rotate(v[1], 17) ^ v[2]; v[2] = zbmd_rotate(v[2], 32);
    }
}

/* The tag of `nbytes` bytes under the key's two little-endian halves. */
static inline uint64_t zbmd_siphash(const uint64_t key[2], const uint8_t *data, size_t nbytes) {
    uint64_t v[4] = {key[0] ^ 0x736f6d6570736575ULL, key[1] ^ 0x646f72616e646f6dULL,
                     key[0] ^ 0x6c7967656e657261ULL, key[1] ^ 0x7465646279746573ULL};
    uint64_t last = (uint64_t)nbytes << 56;
    const uint8_t *end = data + (nbytes & ~(size_t)7);
    for (; data != end; data += 8) {
        uint64_t word = zbmd_read_le64(data);
        v[3] ^= word;
        zbmd_sip_rounds(v, 2);
        v[0] ^= word;
    }
    for (size_t i = 0; i < (nbytes & 7); i++) last |= (uint64_t)data[i] << (8 * i);
    v[3] ^= last;
    zbmd_sip_rounds(v, 2);
    v[0] ^= last;
    v[2] ^= 0xff;
    zbmd_sip_rounds(v, 4);
    return v[0] ^ v[1] ^ v[2] ^ v[3];
}

#endif
