/* Threads that wait for what comes over RDMA, without the GIL and without another thread.
 *
 * A waiter takes completions itself for a few times what it costs to be woken (Karlin et al., "Empirical studies of
 * competitive spinning", SOSP 1991: the cost stays within a constant of the best choice's). Then it has the device wake
 * it, and after a while in vain it leaves the device to the plane's own thread.
 */
#ifndef ZBMD_RDMA_WAIT_H
#define ZBMD_RDMA_WAIT_H

#include "rdma.h"
#include <sys/prctl.h>

#define ZBMD_RDMA_NAP_MS 1           /* what a waiter waits for may also end where nobody wakes it */
#define ZBMD_RDMA_NAPS_NS 20000000ULL /* so long in vain: the plane's own thread may do it */
#define ZBMD_RDMA_WAKES 9             /* that are timed, of sleeps of so long */
#define ZBMD_RDMA_SLEEP_NS 300000
#define ZBMD_RDMA_SPIN_LEAST_NS 20000ULL
#define ZBMD_RDMA_SPIN_MOST_NS 1000000ULL

/* Sleep until something completes, but not for long. What wakes the plane's own thread is not taken from it. */
static void zbmd_rdma_nap(zbmd_rdma_plane *plane) {
    struct pollfd fd = {plane->channel->fd, POLLIN, 0};
    struct ibv_cq *queue;
    void *cookie;
    ibv_req_notify_cq(plane->queue, 0);
    if (zbmd_rdma_poll_only(plane)) return; /* what came before it was armed is not told */
    if (poll(&fd, 1, ZBMD_RDMA_NAP_MS) > 0 && ibv_get_cq_event(plane->channel, &queue, &cookie) == 0)
        ibv_ack_cq_events(queue, 1);
}

/* How a thread that polls goes on while what it waits for is missing. */
typedef struct zbmd_rdma_patience {
    uint64_t spin_ns, deadline_ns, last_ns;
} zbmd_rdma_patience;

/* Look once, or sleep; 0 if it is to poll no more. */
static int zbmd_rdma_look(zbmd_rdma_plane *plane, zbmd_rdma_patience *patience) {
    int found = zbmd_rdma_poll_only(plane);
    uint64_t now_ns = zbmd_now_ns();
    if (found) {
        patience->last_ns = now_ns;
        return 1;
    }
    if (patience->deadline_ns && now_ns >= patience->deadline_ns) return 0;
    if (now_ns - patience->last_ns < patience->spin_ns) {
        zbmd_pause();
        return 1;
    }
    if (now_ns - patience->last_ns >= patience->spin_ns + ZBMD_RDMA_NAPS_NS) return 0;
    zbmd_rdma_nap(plane);
    return 1;
}

/* As zbmd_wait; this thread takes completions itself, as long as some come. */
static int zbmd_rdma_wait(zbmd_rdma_plane *plane, zbmd_base own, uint32_t slot, uint32_t channel, uint64_t value,
                          const zbmd_slots *group, uint64_t deadline_ns, uint64_t spin_ns) {
    zbmd_rdma_patience patience = {spin_ns, deadline_ns, zbmd_now_ns()};
    uint64_t cell = zbmd_cell_offset(slot, channel);
    int result;
    zbmd_rdma_enter(plane);
    do result = zbmd_arrived(zbmd_load64(own, cell), value);
    while (result < 0 && !zbmd_lost_in(own, channel, value | 0xffffffffULL, group) &&
           zbmd_load64(own, zbmd_abort_offset(channel)) < value && zbmd_rdma_look(plane, &patience));
    zbmd_rdma_leave(plane, result < 0 || zbmd_load32(own, ZBMD_OFF_PARKED));
    return result >= 0 ? result : zbmd_wait(own, slot, channel, value, group, deadline_ns, 0);
}

/* Until the peer has acknowledged `number` work requests; 0 if nobody here can say: wait otherwise then. */
static int zbmd_rdma_wait_acked(zbmd_rdma_end *end, uint64_t number, uint64_t deadline_ns, uint64_t spin_ns) {
    zbmd_rdma_patience patience = {spin_ns, deadline_ns, zbmd_now_ns()};
    zbmd_rdma_plane *plane = end->plane;
    int come;
    zbmd_rdma_enter(plane);
    do come = end->acked >= number;
    while (!come && end->state == ZBMD_RDMA_OPEN && zbmd_rdma_look(plane, &patience));
    zbmd_rdma_leave(plane, !come);
    return come;
}

/* Post all of `op`, however long there is no room; a ZBMD_WAIT. Nothing else may wait for room. */
static int zbmd_rdma_post_whole(zbmd_rdma_end *end, zbmd_rdma_op *op, uint64_t deadline_ns) {
    for (;;) {
        int whole;
        pthread_mutex_lock(&end->plane->lock);
        whole = zbmd_rdma_post(end, op);
        pthread_mutex_unlock(&end->plane->lock);
        if (whole) return ZBMD_WAIT_OK;
        if (end->state != ZBMD_RDMA_OPEN) return ZBMD_WAIT_LOST;
        zbmd_rdma_poll_only(end->plane);
        if (deadline_ns && zbmd_now_ns() >= deadline_ns) return ZBMD_WAIT_DEADLINE;
    }
}

/* `rounds` puts, each with its answer, which the peer puts likewise; those who are `first` begin. The values of both
 * sides' cells grow by one each time. samples_ns: what each round took here. A ZBMD_WAIT. */
static int zbmd_rdma_ping(zbmd_rdma_end *end, const zbmd_rdma_op *what, int first, uint32_t rounds,
                          uint64_t deadline_ns, uint64_t spin_ns, uint64_t *samples_ns) {
    zbmd_slots peer;
    zbmd_slots_none(&peer);
    zbmd_slots_add(&peer, end->slot);
    for (uint32_t round = 0; round < rounds; ++round) {
        uint64_t began_ns = zbmd_now_ns();
        for (int step = 0; step < 2; ++step) {
            zbmd_rdma_op op = *what;
            int result;
            op.value += round;
            result = (step == 0) == (first != 0)
                         ? zbmd_rdma_post_whole(end, &op, deadline_ns)
                         : zbmd_rdma_wait(end->plane, end->own, end->slot, op.channel, op.value,
                                          &peer, deadline_ns, spin_ns);
            if (result != ZBMD_WAIT_OK) return result;
        }
        samples_ns[round] = zbmd_now_ns() - began_ns;
    }
    return ZBMD_WAIT_OK;
}

/* -- what it costs to be woken --------------------------------------------------------------------------------- */

static int zbmd_rdma_order(const void *a, const void *b) {
    uint64_t left = *(const uint64_t *)a, right = *(const uint64_t *)b;
    return (left > right) - (left < right);
}

/* By how much a sleep is longer than it was meant to be, the median of some: an interrupt, a processor that wakes, and
 * this thread. Not by a message of another thread, which would be as quick as it is near. */
static uint64_t zbmd_rdma_wake_ns(void) {
    uint64_t late_ns[ZBMD_RDMA_WAKES];
    int slack_ns = prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0);
    prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
    for (int turn = 0; turn < ZBMD_RDMA_WAKES; ++turn) {
        struct timespec sleep = {0, ZBMD_RDMA_SLEEP_NS};
        uint64_t began_ns = zbmd_now_ns(), took_ns;
        nanosleep(&sleep, NULL);
        took_ns = zbmd_now_ns() - began_ns;
        late_ns[turn] = took_ns > ZBMD_RDMA_SLEEP_NS ? took_ns - ZBMD_RDMA_SLEEP_NS : 0;
    }
    if (slack_ns > 0) prctl(PR_SET_TIMERSLACK, slack_ns, 0, 0, 0);
    qsort(late_ns, ZBMD_RDMA_WAKES, sizeof late_ns[0], zbmd_rdma_order);
    return late_ns[ZBMD_RDMA_WAKES / 2];
}

/* How long to poll. Where the peer sleeps too, its wake-up is a part of what we wait for: with less than two, and what
 * the network takes, two that have both slept once would do so each time. */
static uint64_t zbmd_rdma_spin_ns(void) {
    uint64_t spin_ns = 3 * zbmd_rdma_wake_ns();
    if (spin_ns < ZBMD_RDMA_SPIN_LEAST_NS) return ZBMD_RDMA_SPIN_LEAST_NS;
    return spin_ns > ZBMD_RDMA_SPIN_MOST_NS ? ZBMD_RDMA_SPIN_MOST_NS : spin_ns;
}

#endif
