/* The layout of a process's shared segment and the few lock-free primitives over it.
 *
 * Every process incarnation owns one memfd segment; peers of the host map it. Control words and the inbox
 * are mapped writable by peers, the arena read-only (transport/memory/segment.py holds the same numbers).
 * A notify cell has exactly one writer (the peer whose slot it is) and only grows. A waiter spins, then
 * parks on its own doorbell; the notifier rings only if somebody is parked.
 */
#ifndef ZBMD_NATIVE_H
#define ZBMD_NATIVE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <linux/futex.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define ZBMD_MAX_SLOTS 1024 /* ranks of a job, one bit each in the lost mask, and the node's in the last */
#define ZBMD_LOST_WORDS (ZBMD_MAX_SLOTS / 64)
#define ZBMD_CHANNELS 80    /* groups a process can be in at once */
#define ZBMD_FAR_CHANNELS 32 /* the first ones, which groups over hosts use: peers on other hosts mirror their descriptors */
#define ZBMD_LINE 64
#define ZBMD_LOOKS_A_PAUSE 1
#define ZBMD_PARK_NS 50000000ULL /* a parked wait looks again at least this often */

/* Offsets into the segment's first page. */
#define ZBMD_OFF_MAGIC 0        /* u64 */
#define ZBMD_OFF_TOTAL 8        /* u64: bytes in the segment */
#define ZBMD_OFF_INBOX 16       /* u64: offset of the inbox */
#define ZBMD_OFF_ARENA 24       /* u64: offset of the arena */
#define ZBMD_OFF_PID 32         /* u64 */
#define ZBMD_OFF_INCARNATION 40 /* u64 */
#define ZBMD_OFF_GOODBYE 48     /* u32: 1 once the owner leaves cleanly */
#define ZBMD_OFF_SLOT 52        /* u32: the owner's slot */
#define ZBMD_OFF_DOORBELL 64    /* u32 futex word */
#define ZBMD_OFF_PARKED 68      /* u32: threads parked on the doorbell */
#define ZBMD_OFF_PATIENT 72     /* u64: monotonic time before which no wait of the owner times out (owner writes) */
#define ZBMD_OFF_ABORT 128      /* u64 per channel: operations up to this value are aborted (owner writes) */
#define ZBMD_OFF_LOST 1024      /* u64 per 64 slots: bit s % 64 of word s / 64 is set when the process in slot s is
                                 * known dead (owner writes) */
#define ZBMD_OFF_MUTEX 4096     /* robust futex word per slot, ZBMD_LIFE_STRIDE apart (life.h) */
#define ZBMD_OFF_NOTIFY 12288   /* u64 cell per (sender slot, channel): 640 bytes a slot, which one process writes */
#define ZBMD_OFF_DESCRIPTORS 667648 /* operation descriptors, written by the owner: 280 KiB */
#define ZBMD_OFF_END 954368     /* inbox starts here */
#define ZBMD_LIFE_STRIDE 8
#define ZBMD_MAGIC 0x32304d4744424d5aULL

_Static_assert(ZBMD_OFF_ABORT + 8 * ZBMD_CHANNELS <= ZBMD_OFF_LOST, "the abort words have room");
_Static_assert(ZBMD_OFF_LOST + 8 * ZBMD_LOST_WORDS <= ZBMD_OFF_MUTEX, "the lost mask has room");
_Static_assert(ZBMD_OFF_MUTEX + ZBMD_LIFE_STRIDE * ZBMD_MAX_SLOTS <= ZBMD_OFF_NOTIFY, "the life words have room");
_Static_assert(ZBMD_OFF_NOTIFY + 8 * ZBMD_CHANNELS * ZBMD_MAX_SLOTS <= ZBMD_OFF_DESCRIPTORS, "the cells have room");
_Static_assert(ZBMD_MAX_SLOTS % 64 == 0, "the lost mask has whole words");

typedef char *zbmd_base;

/* A set of slots. Only words [begin, end) of it are there to be read, and none of the slots is outside them: whoever is
 * in a group of neighbours looks at one word, however many ranks there are. */
typedef struct zbmd_slots {
    uint64_t words[ZBMD_LOST_WORDS];
    uint32_t begin, end;
} zbmd_slots;

static inline void zbmd_slots_none(zbmd_slots *slots) { memset(slots, 0, sizeof *slots); }
static inline void zbmd_slots_add(zbmd_slots *slots, uint32_t slot) {
    uint32_t word = slot / 64;
    if (slots->begin == slots->end) {
        slots->begin = word;
        slots->end = word + 1;
    }
    if (word < slots->begin) slots->begin = word;
    if (word >= slots->end) slots->end = word + 1;
    slots->words[word] |= 1ULL << slot % 64;
}

static inline _Atomic uint64_t *zbmd_u64(zbmd_base base, uint64_t off) {
    return (_Atomic uint64_t *)(base + off);
}
static inline _Atomic uint32_t *zbmd_u32(zbmd_base base, uint64_t off) {
    return (_Atomic uint32_t *)(base + off);
}
static inline uint64_t zbmd_load64(zbmd_base base, uint64_t off) {
    return atomic_load_explicit(zbmd_u64(base, off), memory_order_acquire);
}
static inline void zbmd_store64(zbmd_base base, uint64_t off, uint64_t v) {
    atomic_store_explicit(zbmd_u64(base, off), v, memory_order_release);
}
static inline uint32_t zbmd_load32(zbmd_base base, uint64_t off) {
    return atomic_load_explicit(zbmd_u32(base, off), memory_order_acquire);
}
static inline void zbmd_store32(zbmd_base base, uint64_t off, uint32_t v) {
    atomic_store_explicit(zbmd_u32(base, off), v, memory_order_release);
}
static inline uint64_t zbmd_cell_offset(uint32_t slot, uint32_t channel) {
    return ZBMD_OFF_NOTIFY + (uint64_t)(slot * ZBMD_CHANNELS + channel) * 8;
}
static inline uint64_t zbmd_abort_offset(uint32_t channel) { return ZBMD_OFF_ABORT + channel * 8ULL; }

static inline void zbmd_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

static inline uint64_t zbmd_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ULL + (uint64_t)t.tv_nsec;
}

static inline long zbmd_futex_wait(_Atomic uint32_t *word, uint32_t seen, uint64_t timeout_ns) {
    struct timespec t = {(time_t)(timeout_ns / 1000000000ULL), (long)(timeout_ns % 1000000000ULL)};
    return syscall(SYS_futex, word, FUTEX_WAIT, seen, &t, NULL, 0);
}
static inline long zbmd_futex_wake(_Atomic uint32_t *word) {
    return syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* Wake every thread of the owner of `base` that is parked on its doorbell. */
static inline void zbmd_ring(zbmd_base base) {
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(zbmd_u32(base, ZBMD_OFF_PARKED), memory_order_relaxed) != 0) {
        atomic_fetch_add_explicit(zbmd_u32(base, ZBMD_OFF_DOORBELL), 1, memory_order_seq_cst);
        zbmd_futex_wake(zbmd_u32(base, ZBMD_OFF_DOORBELL));
    }
}

static inline _Atomic uint64_t *zbmd_lost_word(zbmd_base own, uint32_t slot) {
    return zbmd_u64(own, ZBMD_OFF_LOST + slot / 64 * 8ULL);
}
static inline int zbmd_is_lost(zbmd_base own, uint32_t slot) {
    return atomic_load_explicit(zbmd_lost_word(own, slot), memory_order_acquire) >> slot % 64 & 1;
}

/* The owner marks the process in `slot` as dead, or as replaced, in its own segment.
 *
 * A slot's bit is one bit of one word and nothing sums the words up, so no order between words matters and no loss can
 * pass for another's. None is missed: the bit is set before the ring's fence and its look at `parked`; a waiter has
 * raised `parked` and read the doorbell before it looks at the words. Either it sees the bit, or the ring sees it parked
 * and changes the doorbell, on which it then does not sleep. */
static inline void zbmd_set_lost(zbmd_base own, uint32_t slot) {
    atomic_fetch_or(zbmd_lost_word(own, slot), 1ULL << slot % 64);
    zbmd_ring(own);
}
static inline void zbmd_clear_lost(zbmd_base own, uint32_t slot) {
    atomic_fetch_and(zbmd_lost_word(own, slot), ~(1ULL << slot % 64));
}

/* End every wait of the owner on `channel` for a value of `epoch` or an earlier one. */
static inline void zbmd_abort_channel(zbmd_base own, uint32_t channel, uint32_t epoch) {
    _Atomic uint64_t *word = zbmd_u64(own, zbmd_abort_offset(channel));
    uint64_t upto = (uint64_t)epoch << 32 | 0xffffffffULL;
    uint64_t seen = atomic_load(word);
    while (seen < upto && !atomic_compare_exchange_weak(word, &seen, upto)) {}
    zbmd_ring(own);
}

/* Publish `value` in the peer's cell for (our slot, channel): everything written before it is visible to
 * the peer once it has seen the value. */
static inline void zbmd_notify(zbmd_base peer, uint32_t our_slot, uint32_t channel, uint64_t value) {
    zbmd_store64(peer, zbmd_cell_offset(our_slot, channel), value);
    zbmd_ring(peer);
}

/* As zbmd_notify, for a cell that several of our threads set: a lower value never replaces a higher one.
 * `*hint` is what the cell may hold, for the price of one cache miss instead of two; it is updated. */
static inline void zbmd_notify_max(zbmd_base peer, uint32_t our_slot, uint32_t channel, uint64_t value,
                                   _Atomic uint64_t *hint) {
    _Atomic uint64_t *cell = zbmd_u64(peer, zbmd_cell_offset(our_slot, channel));
    uint64_t seen = atomic_load_explicit(hint, memory_order_relaxed);
    if (seen > value) seen = atomic_load(cell);
    while (seen < value && !atomic_compare_exchange_weak(cell, &seen, value)) {}
    atomic_store_explicit(hint, seen < value ? value : seen, memory_order_relaxed);
    zbmd_ring(peer);
}

/* Publish in the peer's cell for (our slot, channel) that nothing more of `epoch` will come from us: every
 * wait of the peer for us ends, and finds by the operation's descriptors that we are not in it. The cell only
 * grows, also while another thread of ours notifies for a later epoch. */
static inline void zbmd_end_channel(zbmd_base peer, uint32_t our_slot, uint32_t channel, uint32_t epoch) {
    _Atomic uint64_t *cell = zbmd_u64(peer, zbmd_cell_offset(our_slot, channel));
    uint64_t last = (uint64_t)epoch << 32 | 0xffffffffULL;
    uint64_t seen = atomic_load(cell);
    while (seen < last && !atomic_compare_exchange_weak(cell, &seen, last)) {}
    zbmd_ring(peer);
}

/* Whether a process of `group` is lost that had not ended the channel. A process that has ended it at `last` is owed no
 * wait: what it took part in it has finished, or given up, and then the descriptors tell. */
static inline int zbmd_lost_in(zbmd_base own, uint32_t channel, uint64_t last, const zbmd_slots *group) {
    for (uint32_t word = group->begin; word < group->end; word++) {
        uint64_t lost = zbmd_load64(own, ZBMD_OFF_LOST + word * 8ULL) & group->words[word];
        for (; lost; lost &= lost - 1) {
            uint32_t slot = word * 64 + (uint32_t)__builtin_ctzll(lost);
            if (zbmd_load64(own, zbmd_cell_offset(slot, channel)) != last) return 1;
        }
    }
    return 0;
}

enum { ZBMD_WAIT_OK = 0, ZBMD_WAIT_LOST = 1, ZBMD_WAIT_ABORTED = 2, ZBMD_WAIT_DEADLINE = 3 };

/* What a cell that may hold a notification at or behind `value` says of it. Epochs are the high 32 bits: a
 * cell of a later epoch was written by a member of another group (a replacement in the same slot, say),
 * so it ends the operation and can never be mistaken for the value that was waited for. */
static inline int zbmd_arrived(uint64_t cell, uint64_t value) {
    if (cell < value) return -1;
    return (cell >> 32) == (value >> 32) ? ZBMD_WAIT_OK : ZBMD_WAIT_ABORTED;
}

/* Look at our cell for (slot, channel) up to `looks` times, with a pause behind each, which leaves the line to
 * its writer; -1 if nothing ends the wait, else as zbmd_arrived. `*used` is how many looks were in vain. */
static inline int zbmd_spin(zbmd_base own, uint32_t slot, uint32_t channel, uint64_t value, uint32_t looks,
                            uint32_t *used) {
    uint64_t cell = zbmd_cell_offset(slot, channel);
    int result = -1;
    for (*used = 0; *used < looks; ++*used) {
        if ((result = zbmd_arrived(zbmd_load64(own, cell), value)) >= 0) break;
        zbmd_pause();
    }
    return result;
}

/* Wait until our cell for (slot, channel) holds at least `value` of the same epoch.
 * Ends early: LOST when a slot of `group` is lost that had not ended the channel, ABORTED when our abort word for
 * the channel has reached `value` or the cell is of a later epoch, DEADLINE when monotonic time has passed
 * `deadline_ns` (0: none) and the time up to which the owner is patient. A value that has already arrived wins over the others. */
static inline int zbmd_wait(zbmd_base own, uint32_t slot, uint32_t channel, uint64_t value,
                            const zbmd_slots *group, uint64_t deadline_ns, uint32_t spins) {
    uint64_t cell = zbmd_cell_offset(slot, channel);
    uint32_t used;
    int result = zbmd_spin(own, slot, channel, value, spins, &used);
    if (result >= 0) return result;
    atomic_fetch_add_explicit(zbmd_u32(own, ZBMD_OFF_PARKED), 1, memory_order_seq_cst);
    while (result < 0) {
        uint32_t seen = atomic_load_explicit(zbmd_u32(own, ZBMD_OFF_DOORBELL), memory_order_seq_cst);
        result = zbmd_arrived(zbmd_load64(own, cell), value);
        if (result >= 0) break;
        if (zbmd_lost_in(own, channel, value | 0xffffffffULL, group)) result = ZBMD_WAIT_LOST;
        else if (zbmd_load64(own, zbmd_abort_offset(channel)) >= value) result = ZBMD_WAIT_ABORTED;
        else {
            uint64_t park_ns = ZBMD_PARK_NS;
            if (deadline_ns) {
                uint64_t now_ns = zbmd_now_ns();
                uint64_t end_ns = deadline_ns;
                if (now_ns >= end_ns) end_ns = zbmd_load64(own, ZBMD_OFF_PATIENT);
                if (now_ns >= end_ns) {
                    result = ZBMD_WAIT_DEADLINE;
                    break;
                }
                if (end_ns - now_ns < park_ns) park_ns = end_ns - now_ns;
            }
            zbmd_futex_wait(zbmd_u32(own, ZBMD_OFF_DOORBELL), seen, park_ns);
        }
    }
    atomic_fetch_sub_explicit(zbmd_u32(own, ZBMD_OFF_PARKED), 1, memory_order_seq_cst);
    return result;
}

#endif
