/* Death notice between processes of one host, on the kernel's robust futexes.
 *
 * A life thread, which lives as long as its process, owns one futex word per peer in its own segment. When
 * it ends, however it ends, the kernel marks each word FUTEX_OWNER_DIED and wakes one waiter per word
 * (Documentation/locking/robust-futex-ABI.rst): hence a word per peer. The kernel does so before it frees
 * the process's memory and closes its files, so the notice comes well before a pidfd or an EOF.
 * A watcher only ever waits on a word; it never takes it over, so it can be stopped at any time.
 */
#ifndef ZBMD_LIFE_H
#define ZBMD_LIFE_H

#include "segment.h"
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <sys/prctl.h>

#define ZBMD_THREAD_STACK (256 * 1024)
#define ZBMD_RECHECK_NS 1000000000ULL    /* a parked native thread looks again at least this often */
#define ZBMD_STOP_WAIT_NS 1000000LL      /* one attempt at waking and joining a watcher */
#define ZBMD_STOP_TRIES 10000

/* The kernel finds word s at node[s] + futex_offset, so nodes and words have the same stride; the nodes
 * stay in private memory, where no peer can reach the list that the kernel will walk. */
struct zbmd_life_node {
    struct robust_list list;
};
_Static_assert(sizeof(struct zbmd_life_node) == ZBMD_LIFE_STRIDE, "nodes and words have one stride");
_Static_assert(ZBMD_MAX_SLOTS <= 2048, "the kernel walks no more words of a thread (ROBUST_LIST_LIMIT)");

enum { ZBMD_LIFE_STARTING = 0, ZBMD_LIFE_HELD = 1, ZBMD_LIFE_LEAVING = 2, ZBMD_LIFE_FAILED = 3 };

struct zbmd_life {
    struct robust_list_head head;
    struct zbmd_life_node node[ZBMD_MAX_SLOTS];
    zbmd_base own;
    uint32_t slots;
    _Atomic uint32_t state;
    pthread_t thread;
};

static inline _Atomic uint32_t *zbmd_life_word(zbmd_base base, uint32_t slot) {
    return zbmd_u32(base, ZBMD_OFF_MUTEX + (uint64_t)slot * ZBMD_LIFE_STRIDE);
}

/* The k-th word that is held: those of the job's ranks, behind the node's, which the kernel comes to first. A small job
 * has a short list, so that its last ranks need not wait for the kernel to walk past words that nobody watches. */
static inline uint32_t zbmd_life_slot(uint32_t k) { return k == 0 ? ZBMD_MAX_SLOTS - 1 : k - 1; }

/* Start a native thread that no signal handler runs on. */
static inline int zbmd_start_thread(pthread_t *thread, void *(*run)(void *), void *argument) {
    pthread_attr_t attributes;
    sigset_t all, before;
    int error = pthread_attr_init(&attributes);
    if (error) return error;
    pthread_attr_setstacksize(&attributes, ZBMD_THREAD_STACK);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    error = pthread_create(thread, &attributes, run, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return error;
}

/* sched_setattr(2); glibc has no wrapper for it. */
struct zbmd_sched_attr {
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime_ns, deadline_ns, period_ns;
};

/* A thread that sleeps for hours and then has microseconds of work must not queue behind compute threads:
 * real-time priority where we may have it, else the shortest slice, with which EEVDF lets a waking thread
 * preempt (Linux 6.12 on; older kernels ignore it). Neither is needed for correctness. */
static inline void zbmd_wake_promptly(void) {
    struct sched_param realtime = {.sched_priority = 1};
    if (sched_setscheduler(0, SCHED_FIFO | SCHED_RESET_ON_FORK, &realtime) == 0) return;
    struct zbmd_sched_attr attr = {.size = sizeof attr, .policy = SCHED_OTHER, .runtime_ns = 100000};
    syscall(SYS_sched_setattr, 0, &attr, 0);
}

static void *zbmd_life_run(void *argument) {
    struct zbmd_life *life = argument;
    uint32_t tid = (uint32_t)syscall(SYS_gettid);
    prctl(PR_SET_NAME, "zbmd-life");
    zbmd_wake_promptly();
    life->head.futex_offset = (char *)zbmd_life_word(life->own, 0) - (char *)&life->node[0].list;
    life->head.list_op_pending = NULL;
    struct robust_list *last = &life->head.list;
    for (uint32_t k = 0; k <= life->slots; k++) {
        last->next = &life->node[zbmd_life_slot(k)].list;
        last = last->next;
    }
    last->next = &life->head.list;
    if (syscall(SYS_set_robust_list, &life->head, sizeof life->head) != 0) {
        atomic_store(&life->state, ZBMD_LIFE_FAILED);
        zbmd_futex_wake(&life->state);
        return NULL;
    }
    for (uint32_t k = 0; k <= life->slots; k++) atomic_store(zbmd_life_word(life->own, zbmd_life_slot(k)), tid);
    atomic_store(&life->state, ZBMD_LIFE_HELD);
    zbmd_futex_wake(&life->state);
    while (atomic_load(&life->state) == ZBMD_LIFE_HELD)
        zbmd_futex_wait(&life->state, ZBMD_LIFE_HELD, ZBMD_RECHECK_NS);
    atomic_store(zbmd_u32(life->own, ZBMD_OFF_GOODBYE), 1);
    for (uint32_t k = 0; k <= life->slots; k++) {
        _Atomic uint32_t *word = zbmd_life_word(life->own, zbmd_life_slot(k));
        atomic_store(word, 0);
        zbmd_futex_wake(word);
    }
    life->head.list.next = &life->head.list;
    return NULL;
}

/* Hold the words of slots 0 to `slots` - 1, fewer than all, and the node's. Returns 0 once they are, else an errno. */
static inline int zbmd_life_start(struct zbmd_life *life, zbmd_base own, uint32_t slots) {
    life->own = own;
    life->slots = slots;
    atomic_store(&life->state, ZBMD_LIFE_STARTING);
    int error = zbmd_start_thread(&life->thread, zbmd_life_run, life);
    if (error) return error;
    while (atomic_load(&life->state) == ZBMD_LIFE_STARTING)
        zbmd_futex_wait(&life->state, ZBMD_LIFE_STARTING, ZBMD_RECHECK_NS);
    if (atomic_load(&life->state) == ZBMD_LIFE_HELD) return 0;
    pthread_join(life->thread, NULL);
    return ENOSYS;
}

/* Leave cleanly: the goodbye flag first, then every word; returns when the thread has ended. */
static inline void zbmd_life_leave(struct zbmd_life *life) {
    atomic_store(&life->state, ZBMD_LIFE_LEAVING);
    zbmd_futex_wake(&life->state);
    pthread_join(life->thread, NULL);
}

enum { ZBMD_WATCHING = 0, ZBMD_WATCH_STOP = 1, ZBMD_WATCH_NOTICED = 2 };

struct zbmd_watch {
    zbmd_base own;
    zbmd_base peer;
    uint32_t own_slot;
    uint32_t peer_slot;
    int event_fd;
    uint32_t clean;   /* valid once NOTICED, as is at_ns */
    uint64_t at_ns;
    _Atomic uint32_t state;
    pthread_t thread;
};

static void *zbmd_watch_run(void *argument) {
    struct zbmd_watch *watch = argument;
    _Atomic uint32_t *word = zbmd_life_word(watch->peer, watch->own_slot);
    prctl(PR_SET_NAME, "zbmd-watch");
    zbmd_wake_promptly();
    for (;;) {
        if (atomic_load(&watch->state) == ZBMD_WATCH_STOP) return NULL;
        uint32_t seen = atomic_load(word);
        if ((seen & FUTEX_TID_MASK) == 0 || (seen & FUTEX_OWNER_DIED)) break;
        if (!(seen & FUTEX_WAITERS)) {
            if (!atomic_compare_exchange_strong(word, &seen, seen | FUTEX_WAITERS)) continue;
            seen |= FUTEX_WAITERS;
        }
        zbmd_futex_wait(word, seen, ZBMD_RECHECK_NS);
    }
    watch->at_ns = zbmd_now_ns();
    watch->clean = atomic_load(zbmd_u32(watch->peer, ZBMD_OFF_GOODBYE));
    zbmd_set_lost(watch->own, watch->peer_slot);
    uint32_t watching = ZBMD_WATCHING;
    if (atomic_compare_exchange_strong(&watch->state, &watching, ZBMD_WATCH_NOTICED)) {
        uint64_t one = 1;
        /* The counter of an eventfd cannot overflow here: one increment per watch. */
        ssize_t written = write(watch->event_fd, &one, sizeof one);
        (void)written;
    }
    return NULL;
}

static inline int zbmd_watch_noticed(struct zbmd_watch *watch) {
    return atomic_load(&watch->state) == ZBMD_WATCH_NOTICED;
}

/* Whether the owner of `peer` holds our word, or held it before it died or left. */
static inline int zbmd_life_held(zbmd_base peer, uint32_t our_slot) {
    return atomic_load(zbmd_life_word(peer, our_slot)) != 0 || zbmd_load32(peer, ZBMD_OFF_GOODBYE) != 0;
}

/* Whether the owner of `peer` is known to have ended: how its life thread left our word. False if it never
 * started one. */
static inline int zbmd_life_ended(zbmd_base peer, uint32_t our_slot) {
    uint32_t word = atomic_load_explicit(zbmd_life_word(peer, our_slot), memory_order_acquire);
    if (word & FUTEX_OWNER_DIED) return 1;
    return (word & FUTEX_TID_MASK) == 0 && zbmd_load32(peer, ZBMD_OFF_GOODBYE) != 0;
}

static inline int zbmd_watch_start(struct zbmd_watch *watch) {
    atomic_store(&watch->state, ZBMD_WATCHING);
    return zbmd_start_thread(&watch->thread, zbmd_watch_run, watch);
}

/* Wake the watcher and join it. It may be about to park when the wake comes, hence the loop. */
static inline int zbmd_watch_stop(struct zbmd_watch *watch) {
    uint32_t watching = ZBMD_WATCHING;
    atomic_compare_exchange_strong(&watch->state, &watching, ZBMD_WATCH_STOP);
    for (int i = 0; i < ZBMD_STOP_TRIES; i++) {
        struct timespec until;
        zbmd_futex_wake(zbmd_life_word(watch->peer, watch->own_slot));
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_nsec += ZBMD_STOP_WAIT_NS;
        if (until.tv_nsec >= 1000000000L) {
            until.tv_sec += 1;
            until.tv_nsec -= 1000000000L;
        }
        if (pthread_clockjoin_np(watch->thread, NULL, CLOCK_MONOTONIC, &until) == 0) return 0;
    }
    return ETIMEDOUT;
}

#endif
