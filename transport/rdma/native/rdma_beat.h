/* Heartbeats by one-sided writes: a queue pair of its own, and 32 bytes that the peer may write.
 *
 * A beat is one inline WRITE over the one before; nothing of the observer runs for it but its device. That it has
 * arrived, its completion tells. A device that completes nothing, not even as failed, is not waited for: the one in
 * software was seen to forget its timer when its port went down. See beat_way.h and actors/cluster/heartbeats/heartbeat.h.
 */
#ifndef ZBMD_RDMA_BEAT_H
#define ZBMD_RDMA_BEAT_H

#include "beat_way.h"
#include "transport/native/segment.h"
#include "rdma_path.h"
#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#define ZBMD_RDMA_BEATS 8 /* that are under way; then none is sent until one has arrived */
#define ZBMD_RDMA_BEAT_PATIENCE 4 /* times as long as the device takes to give a write up */
#define ZBMD_RDMA_BEAT_BYTES (ZBMD_WAY_BEAT_WORDS * sizeof(uint64_t))

typedef struct zbmd_rdma_beat {
    struct zbmd_beat_way way; /* the first, by which the others are found */
    struct ibv_cq *queue;
    struct ibv_qp *qp;
    struct ibv_mr *inbox_mr;
    uint64_t *inbox;
    uint64_t remote;
    uint32_t rkey;
    uint64_t posted, arrived;
    uint64_t heard_ns, patience_ns; /* when it last completed one; how long it may take while as many as can wait */
    int status; /* of the first write that has failed; 0 while none has */
} zbmd_rdma_beat;

static void zbmd_rdma_beat_poll(zbmd_rdma_beat *self, uint64_t now_ns) {
    struct ibv_wc done[ZBMD_RDMA_BEATS];
    int count = ibv_poll_cq(self->queue, ZBMD_RDMA_BEATS, done);
    for (int i = 0; i < count; ++i) {
        if (done[i].status != IBV_WC_SUCCESS && !self->status) self->status = (int)done[i].status;
        ++self->arrived;
    }
    if (count < 0 && !self->status) self->status = IBV_WC_GENERAL_ERR;
    if (count > 0 || self->posted == self->arrived) self->heard_ns = now_ns;
    int full = self->posted - self->arrived == ZBMD_RDMA_BEATS;
    if (full && now_ns - self->heard_ns > self->patience_ns && !self->status) self->status = IBV_WC_RESP_TIMEOUT_ERR;
}

static int zbmd_rdma_beat_write(struct zbmd_beat_way *way, const uint64_t beat[ZBMD_WAY_BEAT_WORDS]) {
    zbmd_rdma_beat *self = (zbmd_rdma_beat *)way;
    zbmd_rdma_beat_poll(self, zbmd_now_ns());
    if (self->status) return ZBMD_WAY_BROKEN;
    int under_way = (int)(self->posted - self->arrived);
    if (under_way == ZBMD_RDMA_BEATS) return under_way;
    struct ibv_sge place = {(uintptr_t)beat, ZBMD_RDMA_BEAT_BYTES, 0};
    struct ibv_send_wr request = {.sg_list = &place, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
                                  .send_flags = IBV_SEND_INLINE | IBV_SEND_SIGNALED};
    struct ibv_send_wr *bad;
    request.wr.rdma.remote_addr = self->remote;
    request.wr.rdma.rkey = self->rkey;
    if (ibv_post_send(self->qp, &request, &bad)) {
        self->status = IBV_WC_GENERAL_ERR;
        return ZBMD_WAY_BROKEN;
    }
    ++self->posted;
    return under_way;
}

/* 0, or -1 with errno; `zbmd_rdma_beat_close` either way. */
static int zbmd_rdma_beat_open(zbmd_rdma_beat *self, struct ibv_context *context, struct ibv_pd *domain) {
    struct ibv_qp_init_attr wanted = {.qp_type = IBV_QPT_RC};
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    void *inbox = mmap(NULL, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (inbox == MAP_FAILED) return -1;
    self->inbox = inbox; /* zeros */
    /* A page of its own, that no child has: before Linux 5.12 a fork may give us another than the device writes. */
    if (madvise(inbox, page, MADV_DONTFORK)) return -1;
    self->way.write = zbmd_rdma_beat_write;
    self->way.inbox = self->inbox;
    self->inbox_mr = ibv_reg_mr(domain, self->inbox, ZBMD_RDMA_BEAT_BYTES,
                                IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    if (self->inbox_mr == NULL) return -1;
    if ((self->queue = ibv_create_cq(context, ZBMD_RDMA_BEATS, NULL, NULL, 0)) == NULL) return -1;
    wanted.send_cq = wanted.recv_cq = self->queue;
    wanted.cap.max_send_wr = ZBMD_RDMA_BEATS;
    wanted.cap.max_recv_wr = wanted.cap.max_send_sge = wanted.cap.max_recv_sge = 1;
    wanted.cap.max_inline_data = ZBMD_RDMA_BEAT_BYTES;
    return (self->qp = ibv_create_qp(domain, &wanted)) == NULL ? -1 : 0;
}

/* The peer may write, and we. 0, or an errno. */
static int zbmd_rdma_beat_connect(zbmd_rdma_beat *self, const zbmd_rdma_path *path, uint64_t remote, uint32_t rkey) {
    int error = zbmd_rdma_path_init(self->qp, path, IBV_ACCESS_REMOTE_WRITE);
    self->remote = remote;
    self->rkey = rkey;
    self->patience_ns = ZBMD_RDMA_BEAT_PATIENCE * (path->retries + 1ull) * (ZBMD_RDMA_TICK_NS << path->timeout);
    return error ? error : zbmd_rdma_path_ready(self->qp, path);
}

/* Nothing is written any more, here or there. Idempotent. */
static void zbmd_rdma_beat_close(zbmd_rdma_beat *self) {
    if (self->qp != NULL) ibv_destroy_qp(self->qp);
    if (self->queue != NULL) ibv_destroy_cq(self->queue);
    if (self->inbox_mr != NULL) ibv_dereg_mr(self->inbox_mr);
    if (self->inbox != NULL) munmap(self->inbox, (size_t)sysconf(_SC_PAGESIZE));
    self->qp = NULL;
    self->queue = NULL;
    self->inbox_mr = NULL;
    self->inbox = NULL;
}

#endif
