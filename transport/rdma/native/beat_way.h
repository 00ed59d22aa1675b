/* A way for the newest heartbeat of each side, beside a stripe: written straight into the memory of who observes.
 *
 * The side that beats calls `write`, the observer reads `inbox`. Both are used by one thread at a time.
 */
#ifndef ZBMD_BEAT_WAY_H
#define ZBMD_BEAT_WAY_H

#include <stdint.h>

#define ZBMD_BEAT_WAY "zbmd.beat_way" /* of capsules that hold one */
#define ZBMD_WAY_BEAT_WORDS 4
#define ZBMD_WAY_BROKEN -1

struct zbmd_beat_way {
    /* Send a beat; how many before it have not arrived, as far as is known, or ZBMD_WAY_BROKEN: for good. */
    int (*write)(struct zbmd_beat_way *way, const uint64_t beat[ZBMD_WAY_BEAT_WORDS]);
    const uint64_t *inbox; /* ZBMD_WAY_BEAT_WORDS: the newest of the peer's, of which a part may be older */
};

#endif
