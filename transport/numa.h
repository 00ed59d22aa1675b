/* Where pages come from: what libc has no wrappers for. */
#ifndef ZBMD_NUMA_H
#define ZBMD_NUMA_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <limits.h>
#include <linux/mempolicy.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

/* linux/mman.h; the headers of an older libc do not know the second. */
#define ZBMD_MADV_HUGEPAGE 14
#define ZBMD_MADV_POPULATE_WRITE 23
#define ZBMD_NODES_MAX 1024

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
