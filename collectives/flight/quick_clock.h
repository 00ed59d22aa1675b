/* Monotonic time for who reads it twice in half a microsecond: the kernel's clock takes 27 ns a reading, the
 * processor's counter 10 (an EPYC; in a virtual machine).
 *
 * The clock is read once a millisecond at most, and in between the counter's ticks since then are added, at the rate
 * that they had over the last seconds. So a time is wrong by what the clock is slewed in a millisecond, under 1 us. It
 * never goes back. Where the kernel does not go by the counter itself, since it stops or differs by core, or where
 * there is none, every reading is the clock's. */
#ifndef ZBMD_QUICK_CLOCK_H
#define ZBMD_QUICK_CLOCK_H

#include "transport/native/segment.h"

#if defined(__x86_64__)
#include <x86intrin.h>
static inline uint64_t zbmd_ticks(void) { return __rdtsc(); }
#else
static inline uint64_t zbmd_ticks(void) { return 0; }
#endif

enum { ZBMD_FRESH_NS = 1000000, ZBMD_RATE_NS_MIN = 10000000, ZBMD_READING_TICKS_MAX = 1000 };
#define ZBMD_RATE_NS_MAX 4000000000ULL

typedef struct {
    int trusted;                  /* whether the counter may be gone by at all */
    uint64_t ticks, ns;           /* at the last reading of the clock */
    uint64_t rate_ticks, rate_ns; /* where the rate is measured from */
    uint64_t rate;                /* ns a tick, times 2^32; 0: not known yet */
    uint64_t fresh_ticks;         /* ZBMD_FRESH_NS of them */
    uint64_t last_ns;             /* told last */
} zbmd_quick_clock;

static inline uint64_t zbmd_quick_told(zbmd_quick_clock *clock, uint64_t ns) {
    if (ns > clock->last_ns) clock->last_ns = ns;
    return clock->last_ns;
}

/* Read the clock, and measure the rate if some time has gone by since it was begun to be. A reading in which the thread
 * was interrupted tells no tick's time: it is an answer, and nothing is counted from it. */
static uint64_t zbmd_quick_read(zbmd_quick_clock *clock) {
    uint64_t ticks = zbmd_ticks(), ns = zbmd_now_ns(), gone_ns = ns - clock->rate_ns;
    uint64_t took = zbmd_ticks() - ticks, gone_ticks = ticks - clock->rate_ticks;
    if (took > ZBMD_READING_TICKS_MAX) return zbmd_quick_told(clock, ns);
    if (!clock->rate_ns || ticks <= clock->rate_ticks || ns <= clock->rate_ns) {
        clock->rate_ticks = ticks, clock->rate_ns = ns, clock->rate = 0;
    } else if (gone_ns >= ZBMD_RATE_NS_MIN) {
        clock->rate = (uint64_t)(((unsigned __int128)gone_ns << 32) / gone_ticks);
        clock->fresh_ticks = clock->rate ? ((uint64_t)ZBMD_FRESH_NS << 32) / clock->rate : 0;
        if (gone_ns >= ZBMD_RATE_NS_MAX) clock->rate_ticks = ticks, clock->rate_ns = ns;
    }
    clock->ticks = ticks, clock->ns = ns;
    return zbmd_quick_told(clock, ns);
}

/* Monotonic ns. One thread at a time. */
static inline uint64_t zbmd_quick_ns(zbmd_quick_clock *clock) {
    if (!clock->trusted) return zbmd_now_ns();
    uint64_t since = zbmd_ticks() - clock->ticks;
    if (clock->rate && since < clock->fresh_ticks)
        return zbmd_quick_told(clock, clock->ns + (since * clock->rate >> 32));
    return zbmd_quick_read(clock);
}

#endif
