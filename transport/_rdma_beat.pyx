"""One end of a way for heartbeats by RDMA: gives types to rdma_beat.h. See _rdma_beat.pyi."""

from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset
from libc.errno cimport errno
from zbmd.transport._rdma cimport Device, ibv_context, ibv_pd

import os

from zbmd.transport.errors import LocalProtocolError, UserError

cdef extern from "rdma_beat.h" nogil:
    const char *ZBMD_BEAT_WAY
    struct ibv_qp:
        uint32_t qp_num
    struct ibv_mr:
        uint32_t rkey
    struct zbmd_rdma_path:
        uint8_t gid[16]
        uint32_t number
        uint32_t first_psn
        uint32_t own_psn
        uint32_t lid
        uint32_t mtu
        uint32_t port
        uint32_t gid_index
        uint32_t timeout
        uint32_t retries
    struct zbmd_rdma_beat:
        ibv_qp *qp
        ibv_mr *inbox_mr
        uint64_t *inbox
        int status
    int zbmd_rdma_beat_open(zbmd_rdma_beat *self, ibv_context *context, ibv_pd *domain)
    int zbmd_rdma_beat_connect(zbmd_rdma_beat *self, const zbmd_rdma_path *path, uint64_t remote, uint32_t rkey)
    void zbmd_rdma_beat_close(zbmd_rdma_beat *self)


cdef class BeatEnd:
    cdef Device device
    cdef zbmd_rdma_beat end

    def __cinit__(self, Device device not None):
        memset(&self.end, 0, sizeof(self.end))
        self.device = device
        if zbmd_rdma_beat_open(&self.end, device.context, device.domain):
            why = os.strerror(errno)
            zbmd_rdma_beat_close(&self.end)
            raise UserError(f"the RDMA device {device.name} gives no queue pair for heartbeats: {why}.")

    def __dealloc__(self):
        zbmd_rdma_beat_close(&self.end)

    cdef require_open(self):
        if self.end.qp == NULL:
            raise LocalProtocolError("this way for heartbeats has ended")

    @property
    def number(self):
        self.require_open()
        return self.end.qp.qp_num

    @property
    def address(self):
        self.require_open()
        return <size_t>self.end.inbox

    @property
    def key(self):
        self.require_open()
        return self.end.inbox_mr.rkey

    @property
    def status(self):
        return self.end.status

    def connect(self, bytes gid, *, uint64_t address, uint32_t key, uint32_t number, uint32_t first_psn,
                uint32_t own_psn, uint32_t lid, uint32_t mtu, uint32_t port, uint32_t gid_index, uint32_t timeout,
                uint32_t retries):
        cdef zbmd_rdma_path path
        cdef int error
        self.require_open()
        memcpy(path.gid, <const uint8_t *>gid, 16)
        path.number, path.first_psn, path.own_psn = number, first_psn, own_psn
        path.lid, path.mtu, path.port, path.gid_index = lid, mtu, port, gid_index
        path.timeout, path.retries = timeout, retries
        error = zbmd_rdma_beat_connect(&self.end, &path, address, key)
        if error:
            raise UserError(f"an RDMA device cannot connect its queue pair: {os.strerror(error)}.")

    @property
    def way(self):
        self.require_open()
        return PyCapsule_New(&self.end, ZBMD_BEAT_WAY, NULL)

    def close(self):
        zbmd_rdma_beat_close(&self.end)
