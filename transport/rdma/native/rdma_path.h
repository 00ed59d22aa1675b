/* How a reliable connection is brought up: from a queue pair that was made to one that sends. */
#ifndef ZBMD_RDMA_PATH_H
#define ZBMD_RDMA_PATH_H

#include <errno.h>
#include <infiniband/verbs.h>
#include <stdint.h>
#include <string.h>

#define ZBMD_RDMA_TICK_NS 4096ull /* << timeout: how long an acknowledgement may take; 0: for ever */
#define ZBMD_RDMA_READS 8 /* of a queue pair that are under way in the device */
/* How long a peer waits before it tries again where we have no receive: 82 ms, so that it gives up after about half a
 * second, as where nothing is acknowledged. Credit rules it out: who is refused meets a fault, not a busy moment. */
#define ZBMD_RDMA_RNR_TIMER 26

typedef struct zbmd_rdma_path {
    uint8_t gid[16];
    uint32_t number, first_psn, own_psn, lid, mtu, port, gid_index, timeout, retries;
} zbmd_rdma_path;

/* Receives may be posted from now on. access: what the peer may do. 0, or an errno. */
static inline int zbmd_rdma_path_init(struct ibv_qp *qp, const zbmd_rdma_path *path, unsigned access) {
    struct ibv_qp_attr to = {.qp_state = IBV_QPS_INIT, .port_num = (uint8_t)path->port, .qp_access_flags = access};
    return ibv_modify_qp(qp, &to, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
}

/* The way to the peer's port. */
static inline struct ibv_ah_attr zbmd_rdma_path_way(const zbmd_rdma_path *path) {
    struct ibv_ah_attr way = {.is_global = 1, .dlid = (uint16_t)path->lid, .port_num = (uint8_t)path->port};
    way.grh.sgid_index = (uint8_t)path->gid_index;
    way.grh.hop_limit = 64;
    memcpy(way.grh.dgid.raw, path->gid, sizeof path->gid);
    return way;
}

/* Have the kernel find who has the peer's address, if it does not know: it asks the network, for up to a second.
 * 0, or an errno: ETIMEDOUT if nobody has answered. */
static inline int zbmd_rdma_path_look_up(struct ibv_pd *domain, const zbmd_rdma_path *path) {
    struct ibv_ah_attr way = zbmd_rdma_path_way(path);
    struct ibv_ah *handle = ibv_create_ah(domain, &way);
    return handle ? ibv_destroy_ah(handle) : errno;
}

/* It receives and sends. 0, or an errno. */
static inline int zbmd_rdma_path_ready(struct ibv_qp *qp, const zbmd_rdma_path *path) {
    struct ibv_qp_attr to = {.qp_state = IBV_QPS_RTR};
    int error;
    to.path_mtu = (enum ibv_mtu)path->mtu;
    to.dest_qp_num = path->number;
    to.rq_psn = path->first_psn;
    to.max_dest_rd_atomic = to.max_rd_atomic = ZBMD_RDMA_READS;
    to.min_rnr_timer = ZBMD_RDMA_RNR_TIMER;
    to.ah_attr = zbmd_rdma_path_way(path);
    error = ibv_modify_qp(qp, &to,
                          IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                              IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
    if (error) return error;
    to.qp_state = IBV_QPS_RTS;
    to.sq_psn = path->own_psn;
    to.timeout = (uint8_t)path->timeout;
    to.retry_cnt = (uint8_t)path->retries;
    to.rnr_retry = (uint8_t)path->retries;
    return ibv_modify_qp(qp, &to,
                         IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                             IBV_QP_MAX_QP_RD_ATOMIC);
}

#endif
