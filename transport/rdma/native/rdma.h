/* Puts, gets and notifications over RDMA: what runs without the GIL.
 *
 * A plane is one device with one completion queue; an end is one queue pair, to one peer. A put is written
 * straight into the peer's memory; the last write of it carries a notification in its immediate data, so that
 * whoever sees the completion at the peer sees the bytes, too:
 *
 *     bit     0..4   channel
 *     bit     5..31  by how much the cell grows
 *
 * Both ends know the last value of each cell, for nothing is lost or overtaken on a reliable connection. A
 * value that is too far ahead, or not a cell's at all, is a message of its own, a note of 16 bytes. Each takes
 * a receive of the peer, so there are credits for them, which come back by notes once half of them are owed.
 * A note of credits needs none: two can be on their way at most, and the goodbye.
 *
 * All of a plane is done under its lock, which is never held while somebody waits for the GIL.
 */
#ifndef ZBMD_RDMA_H
#define ZBMD_RDMA_H

#include "transport/native/segment.h"
#include "rdma_path.h"
#include <arpa/inet.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/eventfd.h>

#define ZBMD_RDMA_ENDS 1024      /* of a plane, at most */
#define ZBMD_RDMA_SENDS 128      /* work requests of an end that are not acknowledged */
#define ZBMD_RDMA_CONTROL 4      /* and those for notes without credit */
#define ZBMD_RDMA_CREDITS 256    /* notifications that the peer has not taken off its queue */
#define ZBMD_RDMA_RECEIVES (ZBMD_RDMA_CREDITS + ZBMD_RDMA_CONTROL)
#define ZBMD_RDMA_NOTE_BYTES 16
#define ZBMD_RDMA_INLINE_BYTES 220 /* up to so many bytes travel in the work request */
#define ZBMD_RDMA_POLL 32        /* completions that are taken at once */
#define ZBMD_RDMA_LAST_POLLS 64  /* of a queue pair that ends: others complete meanwhile */
#define ZBMD_RDMA_CHANNEL_BITS 7 /* of immediate data; the others are ZBMD_RDMA_GROW_BITS */
#define ZBMD_RDMA_GROW_BITS 25
#define ZBMD_RDMA_CHAIN 8        /* work requests that are posted at once */
#define ZBMD_RDMA_SIGNALLED 16   /* of so many work requests one tells that it is done, also if nobody asks */
#define ZBMD_RDMA_STAND_BY_MS 2  /* how long the thread sleeps at once while somebody else polls */
#define ZBMD_RDMA_LEASE_NS 500000 /* who has just polled comes back soon: the thread stands by for it */
#define ZBMD_RDMA_IDLE_MS 60000
#define ZBMD_RDMA_NOBODY UINT64_MAX

/* What has been found. Attention: something that somebody waits for; later: buffers that may go. */
enum { ZBMD_RDMA_SOME = 1, ZBMD_RDMA_ATTENTION = 2, ZBMD_RDMA_LATER = 4 };
enum { ZBMD_RDMA_MADE = 0, ZBMD_RDMA_OPEN = 1, ZBMD_RDMA_FAILED = 2, ZBMD_RDMA_CLOSED = 3 };
/* A settling has no bytes: it is done when all before it is. */
enum { ZBMD_RDMA_PUT = 0, ZBMD_RDMA_GET = 1, ZBMD_RDMA_NOTE = 2, ZBMD_RDMA_SETTLE = 3 };
/* Notes that are for no channel. */
enum { ZBMD_RDMA_CREDIT_NOTE = ZBMD_CHANNELS, ZBMD_RDMA_GOODBYE_NOTE };
_Static_assert(ZBMD_CHANNELS <= 1 << ZBMD_RDMA_CHANNEL_BITS, "immediate data has room for a channel");
#define ZBMD_RDMA_MALFORMED -1 /* in place of a status of ibv_wc_status: the peer sent what no peer of ours does */

typedef struct zbmd_rdma_plane zbmd_rdma_plane;

typedef struct zbmd_rdma_end {
    zbmd_rdma_plane *plane;
    struct ibv_qp *qp;
    struct ibv_mr *notes_mr;
    uint64_t *notes;            /* where those of the peer land */
    zbmd_base own;              /* our segment: its cells tell of the peer */
    uint32_t slot;              /* the peer's */
    uint32_t index, generation; /* of its place in the plane */
    uint64_t message_bytes_max;
    uint64_t posted, acked;     /* work requests */
    uint64_t unsignalled;       /* the last so many of them do not tell when they are done */
    uint64_t awaited;           /* buffers are held until `acked` reaches it */
    int asked;                  /* and somebody waits for that */
    int room_wanted;            /* and when there is room */
    uint64_t told, returned;    /* notifications sent; those for which credit came back */
    uint64_t taken, given_back; /* the same for the peer's */
    uint64_t last_told[ZBMD_CHANNELS], last_come[ZBMD_CHANNELS];
    int state, status, goodbye;
} zbmd_rdma_end;

struct zbmd_rdma_plane {
    struct ibv_context *context;
    struct ibv_pd *domain;
    struct ibv_comp_channel *channel;
    struct ibv_cq *queue;
    pthread_mutex_t lock;
    zbmd_rdma_end *ends[ZBMD_RDMA_ENDS];
    uint16_t generations[ZBMD_RDMA_ENDS];
    uint32_t ends_max;        /* of this plane: the completions of so many have room */
    int wake_fd;
    _Atomic int drivers;      /* threads that poll in place of the plane's own */
    _Atomic uint64_t left_ns; /* when the last of them left */
    _Atomic int standing_by;  /* the plane's own thread does, and does not look */
    _Atomic int parked;       /* it sleeps until the device tells that something completes */
    _Atomic int asked;        /* ends with `asked`; changed under the lock */
    _Atomic int attention;    /* something is for Python to do */
    _Atomic int stopping;
};

/* A put, get or note, as far as it has been posted. */
typedef struct zbmd_rdma_op {
    uint64_t local, remote, nbytes, done, value;
    uint32_t lkey, rkey, channel;
    int kind;
    int quiet;       /* nobody asks when it is done */
    uint64_t number; /* else it is, when so many work requests are: another's may not tell, and be posted by now */
} zbmd_rdma_op;

/* Work requests that are posted together: one ring of the device's doorbell. */
typedef struct zbmd_rdma_chain {
    struct ibv_send_wr requests[ZBMD_RDMA_CHAIN];
    struct ibv_sge places[ZBMD_RDMA_CHAIN];
    uint64_t note[2]; /* one at most: it ends an operation */
    int count;
} zbmd_rdma_chain;

static inline uint64_t zbmd_rdma_id(const zbmd_rdma_end *end, uint64_t number) {
    return (uint64_t)end->index << 48 | (uint64_t)(uint16_t)end->generation << 32 | (uint32_t)number;
}
#define ZBMD_RDMA_RECEIVE_BIT (1ULL << 63)

static int zbmd_rdma_receive(zbmd_rdma_end *end, uint32_t buffer) {
    struct ibv_sge place = {(uintptr_t)(end->notes + 2 * buffer), ZBMD_RDMA_NOTE_BYTES, end->notes_mr->lkey};
    struct ibv_recv_wr request = {.wr_id = zbmd_rdma_id(end, buffer) | ZBMD_RDMA_RECEIVE_BIT,
                                  .sg_list = &place,
                                  .num_sge = 1};
    struct ibv_recv_wr *bad;
    return ibv_post_recv(end->qp, &request, &bad);
}

/* Add one. Of those that nobody asks about, some are signalled nevertheless, or the room would not come back. */
static struct ibv_send_wr *zbmd_rdma_add(zbmd_rdma_end *end, zbmd_rdma_chain *chain, enum ibv_wr_opcode opcode,
                                         uint64_t address, uint64_t nbytes, uint32_t lkey, int signalled) {
    struct ibv_send_wr *request = &chain->requests[chain->count];
    struct ibv_sge *place = &chain->places[chain->count];
    *place = (struct ibv_sge){address, (uint32_t)nbytes, lkey};
    *request = (struct ibv_send_wr){.wr_id = zbmd_rdma_id(end, end->posted + (uint64_t)chain->count),
                                    .opcode = opcode,
                                    .sg_list = place,
                                    .num_sge = nbytes ? 1 : 0};
    if (signalled || ++end->unsignalled >= ZBMD_RDMA_SIGNALLED) {
        request->send_flags = IBV_SEND_SIGNALED;
        end->unsignalled = 0;
    }
    if (nbytes <= ZBMD_RDMA_INLINE_BYTES && opcode != IBV_WR_RDMA_READ) request->send_flags |= IBV_SEND_INLINE;
    if (chain->count) chain->requests[chain->count - 1].next = request;
    ++chain->count;
    return request;
}

static void zbmd_rdma_add_note(zbmd_rdma_end *end, zbmd_rdma_chain *chain, uint64_t kind, uint64_t value,
                               int signalled) {
    chain->note[0] = kind;
    chain->note[1] = value;
    zbmd_rdma_add(end, chain, IBV_WR_SEND, (uintptr_t)chain->note, sizeof chain->note, 0, signalled);
}

static int zbmd_rdma_ring(zbmd_rdma_end *end, zbmd_rdma_chain *chain) {
    struct ibv_send_wr *bad;
    int error = chain->count ? ibv_post_send(end->qp, chain->requests, &bad) : 0;
    if (error == 0) end->posted += (uint64_t)chain->count;
    chain->count = 0;
    return error;
}

static inline int zbmd_rdma_has_room(const zbmd_rdma_end *end, const zbmd_rdma_chain *chain) {
    return end->posted - end->acked + (chain ? (uint64_t)chain->count : 0) < ZBMD_RDMA_SENDS;
}
static inline int zbmd_rdma_has_credit(const zbmd_rdma_end *end) {
    return end->told - end->returned < ZBMD_RDMA_CREDITS;
}

static int zbmd_rdma_may_post(const zbmd_rdma_end *end) {
    return end->state == ZBMD_RDMA_OPEN && zbmd_rdma_has_room(end, NULL) && zbmd_rdma_has_credit(end);
}

static void zbmd_rdma_failed(zbmd_rdma_end *end, int status) {
    if (end->state <= ZBMD_RDMA_OPEN) {
        end->state = ZBMD_RDMA_FAILED;
        end->status = status;
    }
}

/* Add the next work request of a put or get; whether it was the last (1), or there is no room for it now (-1). */
static int zbmd_rdma_add_part(zbmd_rdma_end *end, zbmd_rdma_op *op, zbmd_rdma_chain *chain) {
    uint64_t nbytes = op->nbytes - op->done, grows = 0;
    enum ibv_wr_opcode opcode = op->kind == ZBMD_RDMA_GET ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE;
    int last, far;
    if (nbytes > end->message_bytes_max) nbytes = end->message_bytes_max;
    last = op->done + nbytes == op->nbytes;
    if (op->kind == ZBMD_RDMA_PUT && last && op->value > end->last_told[op->channel])
        grows = op->value - end->last_told[op->channel];
    far = grows >> ZBMD_RDMA_GROW_BITS != 0;
    if (!nbytes && !grows) return 1;
    if (!zbmd_rdma_has_room(end, chain) || (grows && !zbmd_rdma_has_credit(end))) return -1;
    if (far && !nbytes) zbmd_rdma_add_note(end, chain, op->channel, op->value, !op->quiet);
    else {
        struct ibv_send_wr *request;
        if (grows && !far) opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
        request = zbmd_rdma_add(end, chain, opcode, op->local + op->done, nbytes, op->lkey,
                                last && !far && !op->quiet);
        request->imm_data = htonl((uint32_t)grows << ZBMD_RDMA_CHANNEL_BITS | op->channel);
        request->wr.rdma.remote_addr = op->remote + op->done;
        request->wr.rdma.rkey = op->rkey;
        op->done += nbytes;
        if (far) return 0; /* the note comes next */
    }
    if (grows) {
        end->last_told[op->channel] = op->value;
        ++end->told;
    }
    return last;
}

static int zbmd_rdma_add_next(zbmd_rdma_end *end, zbmd_rdma_op *op, zbmd_rdma_chain *chain) {
    if (op->kind < ZBMD_RDMA_NOTE) return zbmd_rdma_add_part(end, op, chain);
    if (op->kind == ZBMD_RDMA_SETTLE && !end->unsignalled) return 1;
    if (!zbmd_rdma_has_room(end, chain)) return -1;
    if (op->kind == ZBMD_RDMA_NOTE) zbmd_rdma_add_note(end, chain, op->channel, op->value, 1);
    else zbmd_rdma_add(end, chain, IBV_WR_RDMA_WRITE, 0, 0, 0, 1);
    return 1;
}

/* Post what there is room for; whether all of it is. What a queue pair that has failed is given stays. */
static int zbmd_rdma_post(zbmd_rdma_end *end, zbmd_rdma_op *op) {
    zbmd_rdma_chain chain;
    int whole = 0;
    chain.count = 0;
    while (end->state == ZBMD_RDMA_OPEN && whole == 0) {
        while (chain.count < ZBMD_RDMA_CHAIN && whole == 0) whole = zbmd_rdma_add_next(end, op, &chain);
        if (zbmd_rdma_ring(end, &chain)) zbmd_rdma_failed(end, IBV_WC_GENERAL_ERR);
    }
    op->number = end->posted;
    return whole == 1 && end->state == ZBMD_RDMA_OPEN;
}

static int zbmd_rdma_send_credit(zbmd_rdma_end *end) {
    zbmd_rdma_chain chain;
    chain.count = 0;
    zbmd_rdma_add_note(end, &chain, ZBMD_RDMA_CREDIT_NOTE, end->taken, 0);
    end->given_back = end->taken;
    return zbmd_rdma_ring(end, &chain);
}

static void zbmd_rdma_publish(zbmd_rdma_end *end, uint32_t channel, uint64_t value) {
    if (value <= end->last_come[channel]) return;
    end->last_come[channel] = value;
    if (value > zbmd_load64(end->own, zbmd_cell_offset(end->slot, channel)))
        zbmd_notify(end->own, end->slot, channel, value);
}

static void zbmd_rdma_came(zbmd_rdma_end *end, const struct ibv_wc *wc) {
    uint32_t buffer = (uint32_t)wc->wr_id;
    uint64_t kind = end->notes[2 * buffer], value = end->notes[2 * buffer + 1];
    if (wc->opcode == IBV_WC_RECV_RDMA_WITH_IMM) {
        uint32_t word = ntohl(wc->imm_data), channel = word & ((1U << ZBMD_RDMA_CHANNEL_BITS) - 1);
        ++end->taken;
        if (channel < ZBMD_CHANNELS)
            zbmd_rdma_publish(end, channel, end->last_come[channel] + (word >> ZBMD_RDMA_CHANNEL_BITS));
        else
            zbmd_rdma_failed(end, ZBMD_RDMA_MALFORMED);
    } else if (wc->byte_len != ZBMD_RDMA_NOTE_BYTES || kind > ZBMD_RDMA_GOODBYE_NOTE) {
        zbmd_rdma_failed(end, ZBMD_RDMA_MALFORMED);
    } else if (kind == ZBMD_RDMA_GOODBYE_NOTE) {
        end->goodbye = 1;
    } else if (kind == ZBMD_RDMA_CREDIT_NOTE) {
        if (value < end->returned || value > end->told) zbmd_rdma_failed(end, ZBMD_RDMA_MALFORMED);
        else end->returned = value;
    } else {
        ++end->taken;
        zbmd_rdma_publish(end, (uint32_t)kind, value);
    }
    if (end->state <= ZBMD_RDMA_OPEN && zbmd_rdma_receive(end, buffer))
        zbmd_rdma_failed(end, IBV_WC_GENERAL_ERR);
}

static int zbmd_rdma_complete(zbmd_rdma_plane *plane, const struct ibv_wc *wc) {
    uint32_t index = (uint32_t)(wc->wr_id >> 48 & 0x7fff);
    zbmd_rdma_end *end = index < ZBMD_RDMA_ENDS ? plane->ends[index] : NULL;
    int told;
    if (end == NULL || (uint16_t)end->generation != (uint16_t)(wc->wr_id >> 32)) return 0;
    told = end->state == ZBMD_RDMA_FAILED || end->goodbye;
    if (wc->status != IBV_WC_SUCCESS) zbmd_rdma_failed(end, (int)wc->status);
    else if (wc->wr_id & ZBMD_RDMA_RECEIVE_BIT) zbmd_rdma_came(end, wc);
    else end->acked += (uint32_t)((uint32_t)wc->wr_id + 1 - (uint32_t)end->acked);
    if (end->state == ZBMD_RDMA_OPEN && end->taken - end->given_back >= ZBMD_RDMA_CREDITS / 2 &&
        end->posted - end->acked < ZBMD_RDMA_SENDS + ZBMD_RDMA_CONTROL) {
        if (zbmd_rdma_send_credit(end)) zbmd_rdma_failed(end, IBV_WC_GENERAL_ERR);
    }
    if (!told && (end->state == ZBMD_RDMA_FAILED || end->goodbye)) return ZBMD_RDMA_ATTENTION;
    if (end->room_wanted && zbmd_rdma_may_post(end)) return ZBMD_RDMA_ATTENTION;
    if (end->acked < end->awaited) return 0;
    return end->asked ? ZBMD_RDMA_ATTENTION : ZBMD_RDMA_LATER;
}

/* Take what has completed; bits of ZBMD_RDMA_SOME, _ATTENTION and _LATER. */
static int zbmd_rdma_poll(zbmd_rdma_plane *plane) {
    struct ibv_wc completions[ZBMD_RDMA_POLL];
    int count, found = 0;
    pthread_mutex_lock(&plane->lock);
    count = ibv_poll_cq(plane->queue, ZBMD_RDMA_POLL, completions);
    for (int i = 0; i < count; ++i) found |= ZBMD_RDMA_SOME | zbmd_rdma_complete(plane, &completions[i]);
    pthread_mutex_unlock(&plane->lock);
    return found;
}

static void zbmd_rdma_wake(zbmd_rdma_plane *plane) {
    atomic_store(&plane->attention, 1);
    eventfd_write(plane->wake_fd, 1);
}

/* The same, for a thread that does nothing for Python: the plane's own receives it. */
static int zbmd_rdma_poll_only(zbmd_rdma_plane *plane) {
    int found = zbmd_rdma_poll(plane);
    if (found & ZBMD_RDMA_ATTENTION) zbmd_rdma_wake(plane);
    else if (found & ZBMD_RDMA_LATER) atomic_store(&plane->attention, 1);
    return found;
}

static void zbmd_rdma_drain(zbmd_rdma_plane *plane) {
    eventfd_t count;
    eventfd_read(plane->wake_fd, &count);
}

/* Sleep until something completes or somebody wakes us. */
static void zbmd_rdma_park(zbmd_rdma_plane *plane, int with_queue, int timeout_ms) {
    struct pollfd fds[2] = {{plane->wake_fd, POLLIN, 0}, {plane->channel->fd, POLLIN, 0}};
    struct ibv_cq *queue;
    void *cookie;
    poll(fds, with_queue ? 2 : 1, timeout_ms);
    if (fds[0].revents) zbmd_rdma_drain(plane);
    if (fds[1].revents && ibv_get_cq_event(plane->channel, &queue, &cookie) == 0) ibv_ack_cq_events(queue, 1);
}

/* For a thread that polls: sleep a while, as far as nothing completes. */
static void zbmd_rdma_doze(zbmd_rdma_plane *plane, int timeout_ms) {
    ibv_req_notify_cq(plane->queue, 0);
    if (!zbmd_rdma_poll_only(plane)) zbmd_rdma_park(plane, 1, timeout_ms);
}

/* Whether somebody polls in place of the plane's own thread, or will soon: then that has slept for a while. To
 * wake it each time that a wait ends would cost more than the wait. */
static int zbmd_rdma_stands_by(zbmd_rdma_plane *plane) {
    int theirs;
    atomic_store(&plane->standing_by, 1);
    theirs = atomic_load(&plane->drivers) != 0 ||
             (!atomic_load(&plane->asked) &&
              zbmd_now_ns() - atomic_load(&plane->left_ns) < ZBMD_RDMA_LEASE_NS);
    if (theirs) zbmd_rdma_park(plane, 0, ZBMD_RDMA_STAND_BY_MS);
    atomic_store(&plane->standing_by, 0);
    return theirs;
}

/* The plane's own thread: until there is something for Python, or it is `until_ns` (1), or the plane stops (0). */
static int zbmd_rdma_run(zbmd_rdma_plane *plane, uint64_t spin_ns, uint64_t until_ns) {
    uint64_t last_ns = zbmd_now_ns();
    while (!atomic_load(&plane->stopping)) {
        int found = 0;
        if (atomic_exchange(&plane->attention, 0)) return 1;
        if (zbmd_now_ns() >= until_ns) return 1;
        if (zbmd_rdma_stands_by(plane)) continue;
        found = zbmd_rdma_poll(plane);
        if (found & (ZBMD_RDMA_ATTENTION | ZBMD_RDMA_LATER)) return 1;
        if (found) last_ns = zbmd_now_ns();
        else if (zbmd_now_ns() - last_ns >= spin_ns) {
            atomic_store(&plane->parked, 1); /* before: somebody else may take what comes at once */
            ibv_req_notify_cq(plane->queue, 0);
            found = zbmd_rdma_poll(plane); /* what came before it was armed is not told */
            last_ns = zbmd_now_ns();
            if (!found && last_ns < until_ns) {
                uint64_t left_ms = (until_ns - last_ns) / 1000000 + 1;
                zbmd_rdma_park(plane, 1, left_ms < ZBMD_RDMA_IDLE_MS ? (int)left_ms : ZBMD_RDMA_IDLE_MS);
                last_ns = zbmd_now_ns();
            }
            atomic_store(&plane->parked, 0);
            if (found & (ZBMD_RDMA_ATTENTION | ZBMD_RDMA_LATER)) return 1;
        } else zbmd_pause();
    }
    return 0;
}

static void zbmd_rdma_enter(zbmd_rdma_plane *plane) { atomic_fetch_add(&plane->drivers, 1); }

static void zbmd_rdma_stop(zbmd_rdma_plane *plane) {
    atomic_store(&plane->stopping, 1);
    zbmd_rdma_wake(plane);
}

/* wanted: somebody who does not poll waits for what comes. The plane's own thread is woken, too, if it sleeps for the
 * device: the one word of that may have come to us, and then nobody would be told of anything any more. */
static void zbmd_rdma_leave(zbmd_rdma_plane *plane, int wanted) {
    atomic_store(&plane->left_ns, wanted ? 0 : zbmd_now_ns());
    if (atomic_fetch_sub(&plane->drivers, 1) == 1 &&
        (wanted || atomic_load(&plane->asked) || atomic_load(&plane->parked)))
        eventfd_write(plane->wake_fd, 1);
}

/* Somebody waits for what an end has under way, and does not poll. */
static void zbmd_rdma_ask(zbmd_rdma_end *end) {
    zbmd_rdma_plane *plane = end->plane;
    pthread_mutex_lock(&plane->lock);
    if (!end->asked) atomic_fetch_add(&plane->asked, 1);
    end->asked = 1;
    pthread_mutex_unlock(&plane->lock);
    if (atomic_load(&plane->standing_by) && !atomic_load(&plane->drivers)) eventfd_write(plane->wake_fd, 1);
}

/* Under the lock: nothing is under way any more. */
static void zbmd_rdma_ask_no_more(zbmd_rdma_end *end) {
    if (end->asked) atomic_fetch_sub(&end->plane->asked, 1);
    end->asked = 0;
}

/* -- set-up ------------------------------------------------------------------------------------------------ */

static int zbmd_rdma_begin(zbmd_rdma_plane *plane, uint32_t ends_max) {
    int most = (int)ends_max * (ZBMD_RDMA_SENDS + ZBMD_RDMA_CONTROL + ZBMD_RDMA_RECEIVES);
    struct ibv_device_attr device;
    plane->ends_max = ends_max;
    if (ibv_query_device(plane->context, &device) == 0 && device.max_cqe < most) most = device.max_cqe;
    pthread_mutex_init(&plane->lock, NULL);
    plane->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    plane->channel = plane->wake_fd < 0 ? NULL : ibv_create_comp_channel(plane->context);
    if (plane->channel == NULL) return -1;
    fcntl(plane->channel->fd, F_SETFL, fcntl(plane->channel->fd, F_GETFL) | O_NONBLOCK);
    plane->queue = ibv_create_cq(plane->context, most, NULL, plane->channel, 0);
    return plane->queue == NULL ? -1 : 0;
}

/* The ends are closed, and nobody runs or waits. */
static void zbmd_rdma_finish(zbmd_rdma_plane *plane) {
    if (plane->queue != NULL) ibv_destroy_cq(plane->queue);
    if (plane->channel != NULL) ibv_destroy_comp_channel(plane->channel);
    if (plane->wake_fd >= 0) close(plane->wake_fd);
    plane->queue = NULL;
    plane->channel = NULL;
    plane->wake_fd = -1;
}

/* Into its error state, and gone: nothing is written, here or there, any more. What had come is published. */
static void zbmd_rdma_end_close(zbmd_rdma_end *end) {
    zbmd_rdma_plane *plane = end->plane;
    if (end->state == ZBMD_RDMA_CLOSED) return;
    if (end->qp != NULL) {
        struct ibv_qp_attr attributes = {.qp_state = IBV_QPS_ERR};
        ibv_modify_qp(end->qp, &attributes, IBV_QP_STATE);
        for (int turns = 0; turns < ZBMD_RDMA_LAST_POLLS && zbmd_rdma_poll_only(plane); ++turns) {}
    }
    pthread_mutex_lock(&plane->lock);
    end->state = ZBMD_RDMA_CLOSED;
    zbmd_rdma_ask_no_more(end);
    if (plane->ends[end->index] == end) plane->ends[end->index] = NULL;
    pthread_mutex_unlock(&plane->lock);
    if (end->qp != NULL) ibv_destroy_qp(end->qp);
    if (end->notes_mr != NULL) ibv_dereg_mr(end->notes_mr);
    free(end->notes);
    end->qp = NULL;
    end->notes_mr = NULL;
    end->notes = NULL;
}

static int zbmd_rdma_end_open(zbmd_rdma_plane *plane, zbmd_rdma_end *end) {
    struct ibv_qp_init_attr wanted = {.send_cq = plane->queue, .recv_cq = plane->queue, .qp_type = IBV_QPT_RC};
    size_t nbytes = ZBMD_RDMA_RECEIVES * ZBMD_RDMA_NOTE_BYTES;
    end->plane = plane;
    end->awaited = ZBMD_RDMA_NOBODY;
    end->state = ZBMD_RDMA_CLOSED;
    pthread_mutex_lock(&plane->lock);
    for (uint32_t index = 0; index < plane->ends_max && end->state == ZBMD_RDMA_CLOSED; ++index)
        if (plane->ends[index] == NULL) {
            plane->ends[index] = end;
            end->index = index;
            end->generation = ++plane->generations[index];
            end->state = ZBMD_RDMA_MADE;
        }
    pthread_mutex_unlock(&plane->lock);
    if (end->state == ZBMD_RDMA_CLOSED) {
        errno = EMFILE;
        return -1;
    }
    wanted.cap.max_send_wr = ZBMD_RDMA_SENDS + ZBMD_RDMA_CONTROL;
    wanted.cap.max_recv_wr = ZBMD_RDMA_RECEIVES;
    wanted.cap.max_send_sge = wanted.cap.max_recv_sge = 1;
    wanted.cap.max_inline_data = ZBMD_RDMA_INLINE_BYTES;
    if ((end->notes = aligned_alloc(64, (nbytes + 63) / 64 * 64)) == NULL) return -1;
    if ((end->notes_mr = ibv_reg_mr(plane->domain, end->notes, nbytes, IBV_ACCESS_LOCAL_WRITE)) == NULL) return -1;
    return (end->qp = ibv_create_qp(plane->domain, &wanted)) == NULL ? -1 : 0;
}

static int zbmd_rdma_end_connect(zbmd_rdma_end *end, const zbmd_rdma_path *path) {
    int error = zbmd_rdma_path_init(end->qp, path, IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE);
    for (uint32_t buffer = 0; !error && buffer < ZBMD_RDMA_RECEIVES; ++buffer) error = zbmd_rdma_receive(end, buffer);
    if (!error) error = zbmd_rdma_path_ready(end->qp, path);
    if (error) return error;
    pthread_mutex_lock(&end->plane->lock);
    end->state = ZBMD_RDMA_OPEN;
    pthread_mutex_unlock(&end->plane->lock);
    return 0;
}

#endif
