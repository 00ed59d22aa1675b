/* The ways of an array's bytes from one rank of a host to another: puts through the cache, puts past it, or reads.
 *
 * What a rank writes through its cache lies there, modified, when its peer reads it. Where both cores share a
 * cache that is the quickest way; where they do not (another part of the same chip, another socket), each line is
 * fetched from the other core, at a tenth of memory's speed. A streaming store leaves the line in memory. Arrays that
 * peers can read are read instead, which moves less than puts do, if it is not the other core's cache that they are
 * read from; those outside of the arena by the kernel, which has a price for each page. Which of these a virtual
 * machine's cores do best changes while it runs, so the choice is made by trial, for each operation and size, by the
 * rank that is done last: what is chosen is timed, and the others are tried in turn now and then, more and more seldom
 * while nothing changes. A trial is two runs, of which the second counts: the first finds in the caches what another
 * way has left. */
#ifndef ZBMD_STORES_H
#define ZBMD_STORES_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { ZBMD_STORE_CACHED, ZBMD_STORE_STREAMED, ZBMD_STORE_WAYS, ZBMD_READ = ZBMD_STORE_WAYS, ZBMD_WAYS };
/* Whence ranks can take the bytes of all others: from slots that they were put to, through the kernel, from the arena. */
enum { ZBMD_FROM_SLOTS, ZBMD_FROM_KERNEL, ZBMD_FROM_ARENA, ZBMD_REACHES };
enum { ZBMD_STORE_BYTES_MIN = 1 << 12, ZBMD_STORE_CLASSES = 16, ZBMD_STORE_OPERATIONS = 16 };
enum { ZBMD_TRIAL_FIRST = 8, ZBMD_TRIAL_MAX = 128, ZBMD_SLOW_MAX = 2 };

typedef struct {
    double cost[ZBMD_WAYS];   /* of each way, ns a byte; 0: not known */
    uint32_t since, interval; /* runs since the last trial, and until the next */
    uint8_t chosen, tried, slow; /* tried: the way of the latest trial */
    uint8_t warm;                /* the first run of a trial is done */
} zbmd_store_choice;

/* The way of a trial, among the first `ways`: one that is not known, else the one after the last. */
static inline int zbmd_store_other(const zbmd_store_choice *c, int ways) {
    int next = c->tried;
    for (int way = 0; way < ways; way++)
        if (way != c->chosen && c->cost[way] == 0) return way;
    do next = (next + 1) % ways;
    while (next == c->chosen);
    return next;
}

/* The way of the run that begins, among the first `ways`. Asked again before a note, it says the same. */
static inline int zbmd_store_next(zbmd_store_choice *c, int ways) {
    int other = zbmd_store_other(c, ways);
    if (!c->interval) c->interval = ZBMD_TRIAL_FIRST;
    if (c->cost[c->chosen] > 0 && (c->cost[other] == 0 || c->since >= c->interval)) return other;
    return c->chosen;
}

/* What the run by `way` took. A run that was held up is no reason; two that took half as long again are. */
static inline void zbmd_store_note(zbmd_store_choice *c, int way, double cost) {
    double usual = c->cost[c->chosen];
    if (way != c->chosen) {
        c->warm = !c->warm;
        if (c->warm) return;
        c->cost[way] = cost;
        c->tried = (uint8_t)way;
        c->since = c->slow = 0;
        if (cost < 0.9 * usual) {
            c->chosen = (uint8_t)way;
            c->interval = ZBMD_TRIAL_FIRST;
        } else if (c->interval < ZBMD_TRIAL_MAX) {
            c->interval *= 2;
        }
        return;
    }
    c->since++;
    if (usual == 0) {
        c->cost[way] = cost;
    } else if (cost <= 1.5 * usual) {
        c->cost[way] = usual + (cost - usual) / 4;
        c->slow = 0;
    } else if (++c->slow >= ZBMD_SLOW_MAX) {
        memset(c->cost, 0, sizeof c->cost); /* the next runs try the others */
        c->cost[way] = cost;
        c->slow = 0;
        c->interval = ZBMD_TRIAL_FIRST;
    }
}

/* The choices of a group: for each operation that it has had, by reach, and by powers of two of a run's bytes. */
typedef struct {
    zbmd_store_choice (*of[ZBMD_STORE_OPERATIONS])[ZBMD_STORE_CLASSES];
} zbmd_store_choices;

/* NULL for a run of so little that the clock would cost more than the choice saves. */
static inline zbmd_store_choice *zbmd_store_choice_of(zbmd_store_choices *all, unsigned operation, unsigned reach,
                                                      uint64_t nbytes) {
    int k = 0;
    if (nbytes < ZBMD_STORE_BYTES_MIN || operation >= ZBMD_STORE_OPERATIONS || reach >= ZBMD_REACHES) return NULL;
    if (!all->of[operation]) all->of[operation] = calloc(ZBMD_REACHES, sizeof *all->of[operation]);
    if (!all->of[operation]) return NULL;
    for (; nbytes >= 2 * ZBMD_STORE_BYTES_MIN && k < ZBMD_STORE_CLASSES - 1; nbytes >>= 1) k++;
    return &all->of[operation][reach][k];
}

static inline void zbmd_store_close(zbmd_store_choices *all) {
    for (int i = 0; i < ZBMD_STORE_OPERATIONS; i++) free(all->of[i]);
}

#endif
