/* memcpy past the caches. */
#ifndef ZBMD_STREAM_H
#define ZBMD_STREAM_H

#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#define ZBMD_STREAM_LINE 64

/* As memcpy, with stores that leave no trace in the caches. Whoever is notified behind it sees all of it. */
static inline void zbmd_stream(char *target, const char *source, uint64_t nbytes) {
#if defined(__SSE2__)
    uint64_t head = -(uintptr_t)target % ZBMD_STREAM_LINE;
    if (head > nbytes) head = nbytes;
    memcpy(target, source, head);
    uint64_t at = head;
    for (; at + ZBMD_STREAM_LINE <= nbytes; at += ZBMD_STREAM_LINE) {
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

#endif
