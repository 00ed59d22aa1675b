/* Arrays in a peer's ordinary memory: the kernel copies out of them (process_vm_readv), once and straight to their place.
 *
 * A process is named by its number, which another one may have after its end. Its end is reported before that (life.h): a
 * reader looks at that last, and what it read counts only if the peer still lived. */
#ifndef ZBMD_PEERS_H
#define ZBMD_PEERS_H

#include "transport/native/life.h"
#include <errno.h>
#include <stdint.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define ZBMD_ADDRESS_MIN 4096ULL         /* what a peer may say of its own memory */
#define ZBMD_ADDRESS_MAX (1ULL << 47)
enum { ZBMD_BOUNCE_BYTES = 128 << 10 }; /* read at a time to be reduced: it is still in the cache then */

/* Read all of it. Returns 0, or errno. */
static inline int zbmd_read_peer(int32_t pid, uint64_t from, char *to, uint64_t n) {
    while (n) {
        struct iovec here = {to, n}, there = {(void *)(uintptr_t)from, n};
        long got = syscall(SYS_process_vm_readv, (pid_t)pid, &here, 1UL, &there, 1UL, 0UL);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return got < 0 ? errno : EFAULT;
        to += got;
        from += (uint64_t)got;
        n -= (uint64_t)got;
    }
    return 0;
}

/* What of this process's memory the kernel has been seen to let others read, a place each by address. */
enum { ZBMD_READABLE_KNOWN = 16 };
typedef struct {
    uint64_t from[ZBMD_READABLE_KNOWN], n[ZBMD_READABLE_KNOWN];
} zbmd_readable;

/* Whether peers can read these bytes of ours. Some that we use like any others nobody else can, as those that a device
 * maps and memfd_secret(2); such a mapping is so from its first byte to its last. */
static inline int zbmd_is_readable(zbmd_readable *known, uint64_t from, uint64_t n) {
    unsigned k = (unsigned)((from >> 6 ^ from >> 12 ^ from >> 21) % ZBMD_READABLE_KNOWN);
    char byte;
    if (!n || (known->from[k] == from && n <= known->n[k])) return 1;
    if (zbmd_read_peer(getpid(), from, &byte, 1) || zbmd_read_peer(getpid(), from + n - 1, &byte, 1)) return 0;
    known->from[k] = from;
    known->n[k] = n;
    return 1;
}

enum { ZBMD_TWO_READ_BYTES_MIN = 1 << 20, ZBMD_READ_STEP_BYTES = 256 << 10 };

/* A read that several threads take steps of. */
struct zbmd_reading {
    int32_t pid;
    uint64_t from, nbytes;
    char *to;
    _Atomic uint64_t next;
    _Atomic int error;
};

static inline void *zbmd_read_steps(void *given) {
    struct zbmd_reading *reading = given;
    while (!atomic_load(&reading->error)) {
        uint64_t at = atomic_fetch_add(&reading->next, ZBMD_READ_STEP_BYTES);
        if (at >= reading->nbytes) break;
        uint64_t left = reading->nbytes - at, n = left < ZBMD_READ_STEP_BYTES ? left : ZBMD_READ_STEP_BYTES;
        int error = zbmd_read_peer(reading->pid, reading->from + at, reading->to + at, n);
        if (error) atomic_store(&reading->error, error);
    }
    return NULL;
}

/* Read all of it, much of it by a second thread: the owner waits meanwhile, and leaves a core free. No thread reads any
 * more when this returns. Returns 0, or errno. */
static inline int zbmd_read_peer_by_two(int32_t pid, uint64_t from, char *to, uint64_t n) {
    struct zbmd_reading reading = {pid, from, n, to, 0, 0};
    pthread_t second;
    int alone = n < ZBMD_TWO_READ_BYTES_MIN || zbmd_start_thread(&second, zbmd_read_steps, &reading);
    if (alone) return zbmd_read_peer(pid, from, to, n);
    zbmd_read_steps(&reading);
    pthread_join(second, NULL);
    return atomic_load(&reading.error);
}

/* Where the kernel's Yama lets nobody but ancestors look: let what descends from our parent, as our peers do. */
static inline int zbmd_let_siblings_read(void) {
#ifdef PR_SET_PTRACER
    pid_t parent = getppid();
    if (parent > 1) return prctl(PR_SET_PTRACER, (unsigned long)parent, 0, 0, 0) ? errno : 0;
#endif
    return ESRCH;
}

#endif
