/* Messages between ranks of a host: waits, and a message's bytes that its sender copies into its own segment while the
 * receiver copies them out of it.
 *
 * Both copies together take about as long as one: less than the kernel takes to copy out of the sender's memory, which it
 * has to pin page by page. The sender does not wait for its receiver, and never writes into the receiver's memory. */
#ifndef ZBMD_MESSAGES_H
#define ZBMD_MESSAGES_H

#include "collectives/native/peers.h"
#include <errno.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>

enum { ZBMD_STAGE_STEP_BYTES = 16 << 10, ZBMD_STAGE_LOOKS = 64, ZBMD_STAGE_YIELDS = 8 };

static inline void zbmd_park(zbmd_base own, int change) {
    atomic_fetch_add_explicit(zbmd_u32(own, ZBMD_OFF_PARKED), (uint32_t)change, memory_order_seq_cst);
}

static inline uint32_t zbmd_doorbell(zbmd_base own) {
    return atomic_load_explicit(zbmd_u32(own, ZBMD_OFF_DOORBELL), memory_order_seq_cst);
}

static inline void zbmd_sleep(zbmd_base own, uint32_t seen, uint64_t ns) {
    zbmd_futex_wait(zbmd_u32(own, ZBMD_OFF_DOORBELL), seen, ns);
}

static inline void zbmd_messages_fence(void) { atomic_thread_fence(memory_order_seq_cst); }

/* Whether two labels, `float32[4,3]`, name one dtype; so does one that is empty. */
static inline int zbmd_same_kind(const char *theirs, uint32_t length, const char *mine, uint32_t most) {
    uint32_t least = length < most ? length : most;
    for (uint32_t i = 0; i < least; i++) {
        if (theirs[i] != mine[i]) return 0;
        if (theirs[i] == '[') return 1;
    }
    return length == 0 || most == 0;
}

/* Whether a message may lie where its slot says: in its sender's segment of `end` bytes, or in its memory. */
static inline int zbmd_message_is_readable(uint64_t staged, uint64_t end, uint64_t address, uint64_t n) {
    if (staged) return ZBMD_OFF_END <= staged && staged <= end && n <= end - staged;
    return n <= ZBMD_ADDRESS_MAX && ZBMD_ADDRESS_MIN <= address && address <= ZBMD_ADDRESS_MAX - n;
}

/* Copy into our segment, and tell the receiver of each step. */
static inline void zbmd_stage(char *to, const char *from, uint64_t n, uint64_t *copied) {
    for (uint64_t at = 0; at < n; at += ZBMD_STAGE_STEP_BYTES) {
        uint64_t step = n - at < ZBMD_STAGE_STEP_BYTES ? n - at : ZBMD_STAGE_STEP_BYTES;
        memcpy(to + at, from + at, step);
        zbmd_store64((zbmd_base)copied, 0, at + step);
    }
}

/* Copy out of the sender's segment what it copies in. Returns 0; ESRCH once the sender has ended; ETIMEDOUT at the
 * deadline, if the sender was stopped in the midst. */
static inline int zbmd_unstage(char *to, const char *from, uint64_t n, const uint64_t *copied, zbmd_base peer,
                               uint32_t our_slot, uint64_t deadline_ns) {
    uint64_t done = 0, looks = 0;
    while (done < n) {
        uint64_t known = zbmd_load64((zbmd_base)(uintptr_t)copied, 0);
        if (known > n) known = n;
        if (known > done) {
            memcpy(to + done, from + done, known - done);
            done = known;
            looks = 0;
        } else if (++looks % ZBMD_STAGE_LOOKS) {
            zbmd_pause();
        } else {
            if (zbmd_life_ended(peer, our_slot)) return ESRCH;
            if (zbmd_now_ns() >= deadline_ns) return ETIMEDOUT;
            if (looks > ZBMD_STAGE_LOOKS * ZBMD_STAGE_YIELDS) sched_yield();
        }
    }
    return 0;
}

#endif
