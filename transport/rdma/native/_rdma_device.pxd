"""The interface of an RDMA device for other compiled modules."""

from libc.stdint cimport uint8_t, uint32_t


cdef extern from "transport/rdma/native/rdma_path.h" nogil:
    struct ibv_context:
        pass
    struct ibv_pd:
        pass
    struct ibv_mr:
        uint32_t lkey
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


cdef class Device:
    cdef readonly str name
    cdef ibv_context *context
    cdef ibv_pd *domain


cdef class Registration:
    cdef Device device
    cdef ibv_mr *region
    cdef readonly size_t address
    cdef readonly size_t nbytes


cdef class Path:
    cdef zbmd_rdma_path path
