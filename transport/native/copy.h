/* Copies of bulk data between mappings. */
#ifndef ZBMD_COPY_H
#define ZBMD_COPY_H

#include "life.h"
#include "nontemporal.h"
#include <stddef.h>

/* From here on a copy goes past the caches: measured on Zen 4, 64 MiB at 18 GB/s for memcpy's 7, 16 MiB at 27
 * for 20, 4 MiB at 28 for 48. (glibc has such a threshold too, but takes it from a cache size that
 * hypervisors make up.) */
#define ZBMD_STREAM_BYTES_MIN (16ULL << 20)
#define ZBMD_COPY_STEP_BYTES (4ULL << 20) /* between two looks at whether the peer is still there */

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
