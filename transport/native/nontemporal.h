/* memcpy past the caches. */
#ifndef ZBMD_STREAM_H
#define ZBMD_STREAM_H

#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#define ZBMD_STREAM_LINE 64

/* Stores of whole lines that leave no trace in the caches. `target` is at the beginning of one. Nothing orders them
 * until `zbmd_stream_fence`. */
static inline void zbmd_stream_lines(char *target, const char *source, uint64_t nbytes) {
#if defined(__SSE2__)
    for (uint64_t at = 0; at < nbytes; at += ZBMD_STREAM_LINE) {
        __m128i a = _mm_loadu_si128((const __m128i *)(source + at));
        __m128i b = _mm_loadu_si128((const __m128i *)(source + at + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(source + at + 32));
        __m128i d = _mm_loadu_si128((const __m128i *)(source + at + 48));
        _mm_stream_si128((__m128i *)(target + at), a);
        _mm_stream_si128((__m128i *)(target + at + 16), b);
        _mm_stream_si128((__m128i *)(target + at + 32), c);
        _mm_stream_si128((__m128i *)(target + at + 48), d);
    }
#else
    memcpy(target, source, nbytes);
#endif
}

/* These stores are ordered by nothing else, and a notification may follow. */
static inline void zbmd_stream_fence(void) {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

/* Bytes before the first beginning of a line, of `nbytes` at most. */
static inline uint64_t zbmd_stream_head(const char *target, uint64_t nbytes) {
    uint64_t head = -(uintptr_t)target % ZBMD_STREAM_LINE;
    return head < nbytes ? head : nbytes;
}

/* As memcpy, with such stores. A process that is notified behind it sees all of it. */
static inline void zbmd_stream(char *target, const char *source, uint64_t nbytes) {
    uint64_t head = zbmd_stream_head(target, nbytes);
    uint64_t lines = (nbytes - head) / ZBMD_STREAM_LINE * ZBMD_STREAM_LINE;
    memcpy(target, source, head);
    zbmd_stream_lines(target + head, source + head, lines);
    memcpy(target + head + lines, source + head + lines, nbytes - head - lines);
    zbmd_stream_fence();
}

#endif
