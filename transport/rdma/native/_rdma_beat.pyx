"""One end of a way for heartbeats by RDMA: gives types to rdma_beat.h. See _rdma_beat.pyi."""

from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memset
from libc.errno cimport errno
from zbmd.transport.rdma.native._rdma_device cimport Device, Path, ibv_context, ibv_mr, ibv_pd, zbmd_rdma_path

import os

from zbmd.transport.errors import LocalProtocolError, UserError

cdef extern from "transport/rdma/native/rdma_beat.h" nogil:
    const char *ZBMD_BEAT_WAY
    struct ibv_qp:
        uint32_t qp_num
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

    def connect(self, Path path not None, *, uint64_t address, uint32_t key):
        cdef int error
        self.require_open()
        error = zbmd_rdma_beat_connect(&self.end, &path.path, address, key)
        if error:
            raise UserError(f"an RDMA device cannot connect its queue pair: {os.strerror(error)}.")

    @property
    def way(self):
        self.require_open()
        return PyCapsule_New(&self.end, ZBMD_BEAT_WAY, NULL)

    def close(self):
        zbmd_rdma_beat_close(&self.end)
