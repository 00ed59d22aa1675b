/* Copies of bulk data between mappings. */
#ifndef ZBMD_COPY_H
#define ZBMD_COPY_H

#include "life.h"
#include <stddef.h>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

/* From here on a copy goes past the caches: measured on Zen 4, 64 MiB at 18 GB/s for memcpy's 7, 16 MiB at 27
 * for 20, 4 MiB at 28 for 48. (glibc has such a threshold too, but takes it from a cache size that
 * hypervisors make up.) */
#define ZBMD_STREAM_BYTES_MIN (16ULL << 20)
#define ZBMD_COPY_STEP_BYTES (4ULL << 20) /* between two looks at whether the peer is still there */
#define ZBMD_COPY_LINE 64

/* As memcpy, with stores that leave no trace in the caches. */
static inline void zbmd_stream(char *target, const char *source, uint64_t nbytes) {
#if defined(__x86_64__)
    uint64_t head = -(uintptr_t)target % ZBMD_COPY_LINE;
    if (head > nbytes) head = nbytes;
    memcpy(target, source, head);
    uint64_t at = head;
    for (; at + ZBMD_COPY_LINE <= nbytes; at += ZBMD_COPY_LINE) {
        __m128i a = _mm_loadu_si128((const __m128i *)(source + at));
        __m128i b = _mm_loadu_si128((const __m128i *)(source + at + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(source + at + 32));
        __m128i d = _mm_loadu_si128((const __m128i *)(source + at + 48));
        _mm_stream_si128((__m128i *)(target + at), a);
        _mm_stream_si128((__m128i *)(target + at + 16), b);
        _mm_stream_si128((__m128i *)(target + at + 32), c);
        _mm_stream_si128((__m128i *)(target + at + 48), d);
    }
    memcpy(target + at, source + at, nbytes - at);
    _mm_sfence(); /* these stores are ordered by nothing else, and a notification may follow */
#else
    memcpy(target, source, nbytes);
#endif
}

/* Copy, also between ranges that overlap, as a part of a message of `whole_bytes`. Returns 0, and gives up, once
 * the owner of `peer` has ended (NULL: nobody is asked). */
static inline int zbmd_copy(char *target, const char *source, uint64_t nbytes, uint64_t whole_bytes,
                            zbmd_base peer, uint32_t our_slot) {
    if (target < source + nbytes && source < target + nbytes) {
        memmove(target, source, nbytes);
        return 1;
    }
    for (uint64_t at = 0; at < nbytes; at += ZBMD_COPY_STEP_BYTES) {
        uint64_t n = nbytes - at < ZBMD_COPY_STEP_BYTES ? nbytes - at : ZBMD_COPY_STEP_BYTES;
        if (at && peer && zbmd_life_ended(peer, our_slot)) return 0;
        if (whole_bytes >= ZBMD_STREAM_BYTES_MIN) zbmd_stream(target + at, source + at, n);
        else memcpy(target + at, source + at, n);
    }
    return 1;
}

#endif
