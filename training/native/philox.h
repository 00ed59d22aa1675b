/* Philox4x32-10 (J. K. Salmon and others, "Parallel random numbers: as easy as 1, 2, 3", SC 2011): word i of a
 * stream is word i % 4 of the block with counter (i / 4, second, third, fourth). `out` begins with block `block`. */
#ifndef ZBMD_PHILOX_H
#define ZBMD_PHILOX_H

#include <stddef.h>
#include <stdint.h>

#define PHILOX_ROUNDS 10
#define PHILOX_BLOCKS 16

ZBMD_CLONES void zbmd_random_words(uint32_t *out, size_t n, uint32_t block, const uint32_t *rest, uint64_t key) {
    for (size_t first = 0; first < n; first += 4 * PHILOX_BLOCKS) {
        uint32_t a[PHILOX_BLOCKS], b[PHILOX_BLOCKS], c[PHILOX_BLOCKS], d[PHILOX_BLOCKS];
        uint32_t low = (uint32_t)key, high = (uint32_t)(key >> 32);
        for (uint32_t i = 0; i < PHILOX_BLOCKS; i++)
            a[i] = block + (uint32_t)(first / 4) + i, b[i] = rest[0], c[i] = rest[1], d[i] = rest[2];
        for (int round = 0; round < PHILOX_ROUNDS; round++) {
            for (int i = 0; i < PHILOX_BLOCKS; i++) {
                uint64_t left = (uint64_t)a[i] * 0xD2511F53u, right = (uint64_t)c[i] * 0xCD9E8D57u;
                a[i] = (uint32_t)(right >> 32) ^ b[i] ^ low;
                b[i] = (uint32_t)right;
                c[i] = (uint32_t)(left >> 32) ^ d[i] ^ high;
                d[i] = (uint32_t)left;
            }
            low += 0x9E3779B9u;
            high += 0xBB67AE85u;
        }
        for (size_t i = 0; i < 4 * PHILOX_BLOCKS && first + i < n; i++) {
            const uint32_t *words[] = {a, b, c, d};
            out[first + i] = words[i % 4][i / 4];
        }
    }
}

#endif
