/* Where pages come from and go to: what libc has no wrappers for. */
#ifndef ZBMD_NUMA_H
#define ZBMD_NUMA_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "life.h"
#include <errno.h>
#include <limits.h>
#include <linux/mempolicy.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

/* linux/mman.h; the headers of an older libc do not know the last two. */
#define ZBMD_MADV_HUGEPAGE 14
#define ZBMD_MADV_POPULATE_WRITE 23
#define ZBMD_NODES_MAX 1024
#define ZBMD_UNMAP_APART_BYTES (128UL << 20)
#define ZBMD_HUGE_BYTES (2UL << 20) /* the smallest huge page of x86-64, and of arm64 with pages of 4 KiB */

/* Map `fd` for reading. Memory of that size begins where a huge page may: at an address that is one's multiple, as
 * its offset in the file is. Returns MAP_FAILED, and errno. */
static inline void *zbmd_map(int fd, size_t nbytes) {
    if (nbytes < ZBMD_HUGE_BYTES) return mmap(NULL, nbytes, PROT_READ, MAP_SHARED, fd, 0);
    size_t room = nbytes + ZBMD_HUGE_BYTES;
    char *held = mmap(NULL, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (held == MAP_FAILED) return MAP_FAILED;
    char *start = held + (-(uintptr_t)held & (ZBMD_HUGE_BYTES - 1));
    void *mapped = mmap(start, nbytes, PROT_READ, MAP_SHARED | MAP_FIXED, fd, 0);
    if (mapped == MAP_FAILED) {
        int error = errno;
        munmap(held, room);
        errno = error;
        return MAP_FAILED;
    }
    size_t page = (size_t)sysconf(_SC_PAGESIZE), head = (size_t)(start - held);
    size_t used = (nbytes + page - 1) / page * page; /* behind the last page of the file is nothing of ours */
    if (head) munmap(held, head);
    if (room - head > used) munmap(start + used, room - head - used);
    return mapped;
}

/* Put the first `nbytes` of another file in the place of what `zbmd_map` has at `start`, a multiple of a page. Returns
 * 0, or -1 and errno. */
static inline int zbmd_map_over(void *start, int fd, size_t nbytes) {
    return mmap(start, nbytes, PROT_READ, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED ? -1 : 0;
}

struct zbmd_unmapped {
    void *start;
    size_t nbytes;
};

static inline void *zbmd_unmap_run(void *argument) {
    struct zbmd_unmapped *all = argument;
    munmap(all->start, all->nbytes);
    free(all);
    return NULL;
}

/* Unmap what `zbmd_map` returned. The last process to unmap memory frees its pages, in a fifth of a second a GiB: too
 * long for an event loop, so a thread of its own does it for much memory. */
static inline void zbmd_unmap(void *start, size_t nbytes) {
    struct zbmd_unmapped *all = nbytes < ZBMD_UNMAP_APART_BYTES ? NULL : malloc(sizeof *all);
    pthread_t thread;
    if (all != NULL) {
        *all = (struct zbmd_unmapped){start, nbytes};
        if (zbmd_start_thread(&thread, zbmd_unmap_run, all) == 0) {
            pthread_detach(thread);
            return;
        }
        free(all);
    }
    munmap(start, nbytes);
}

/* The NUMA node that this thread runs on now; 0 if the kernel does not say. */
static inline int zbmd_current_node(void) {
    unsigned cpu = 0, node = 0;
    return syscall(SYS_getcpu, &cpu, &node, NULL) == 0 ? (int)node : 0;
}

/* Take pages from `node` while it has any. Returns 0, or -1 and errno. */
static inline int zbmd_prefer_node(void *start, size_t nbytes, uint32_t node) {
    enum { WORD_BITS = sizeof(unsigned long) * CHAR_BIT };
    unsigned long mask[ZBMD_NODES_MAX / WORD_BITS] = {0};
    if (node >= ZBMD_NODES_MAX) {
        errno = EINVAL;
        return -1;
    }
    mask[node / WORD_BITS] = 1UL << node % WORD_BITS;
    return (int)syscall(SYS_mbind, start, nbytes, MPOL_PREFERRED, mask, (unsigned long)ZBMD_NODES_MAX + 1, 0);
}

#endif
