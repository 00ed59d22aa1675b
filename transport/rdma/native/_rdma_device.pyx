# cython: language_level=3, embedsignature=False
"""An RDMA device, memory that it may touch, and where a peer's queue pair is: by libibverbs. See _rdma_device.pyi."""

from libc.errno cimport errno
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

import os

from zbmd.transport.errors import LocalProtocolError, UserError
from zbmd.transport.rdma.dmabuf import DmaBufRefused

cdef extern from "<infiniband/verbs.h>" nogil:
    enum:
        IBV_ACCESS_LOCAL_WRITE
        IBV_ACCESS_REMOTE_WRITE
        IBV_ACCESS_REMOTE_READ
        IBV_GID_TYPE_ROCE_V1
        IBV_PORT_ACTIVE
    struct ibv_device:
        pass
    struct ibv_port_attr:
        int state
        int active_mtu
        uint32_t max_msg_sz
        uint16_t lid
    union ibv_gid:
        uint8_t raw[16]
    struct ibv_gid_entry:
        ibv_gid gid
        uint32_t gid_index
        uint32_t port_num
        uint32_t gid_type
    ibv_device **ibv_get_device_list(int *count)
    void ibv_free_device_list(ibv_device **devices)
    const char *ibv_get_device_name(ibv_device *device)
    ibv_context *ibv_open_device(ibv_device *device)
    int ibv_close_device(ibv_context *context)
    int ibv_query_port(ibv_context *context, uint8_t port, ibv_port_attr *found)
    Py_ssize_t ibv_query_gid_table(ibv_context *context, ibv_gid_entry *found, size_t most, uint32_t flags)
    ibv_pd *ibv_alloc_pd(ibv_context *context)
    int ibv_dealloc_pd(ibv_pd *domain)
    ibv_mr *ibv_reg_mr(ibv_pd *domain, void *address, size_t nbytes, int access)
    int ibv_dereg_mr(ibv_mr *region)

cdef extern from "transport/rdma/native/rdma_dmabuf.h" nogil:
    ibv_mr *zbmd_dmabuf_register(ibv_pd *domain, uint64_t offset, size_t nbytes, uint64_t address, int fd, int access)

cdef extern from "transport/rdma/native/rdma_path.h" nogil:
    int zbmd_rdma_path_look_up(ibv_pd *domain, const zbmd_rdma_path *path)

cdef enum:
    GIDS_MAX = 256
    GID_BYTES = 16

ROCE_V1 = IBV_GID_TYPE_ROCE_V1
ACTIVE = IBV_PORT_ACTIVE


cdef int rights(bint remote_read, bint remote_write) noexcept nogil:
    return (IBV_ACCESS_LOCAL_WRITE | (IBV_ACCESS_REMOTE_READ if remote_read else 0)
            | (IBV_ACCESS_REMOTE_WRITE if remote_write else 0))


cdef class Device:
    """An opened device, with a protection domain of its own. It goes with the last object made of it."""

    def __cinit__(self, str name):
        cdef int count = 0, index
        cdef ibv_device **devices = ibv_get_device_list(&count)
        self.name = name
        known = []
        if devices != NULL:
            for index in range(count):
                known.append(ibv_get_device_name(devices[index]).decode())
                if known[-1] == name:
                    self.context = ibv_open_device(devices[index])
            ibv_free_device_list(devices)
        if self.context == NULL:
            raise UserError(
                f"the RDMA device {name!r} cannot be opened. There are: {', '.join(known) or 'none'}.")
        self.domain = ibv_alloc_pd(self.context)
        if self.domain == NULL:
            raise UserError(f"the RDMA device {name} gives no protection domain: {os.strerror(errno)}.")

    def __dealloc__(self):
        if self.domain != NULL:
            ibv_dealloc_pd(self.domain)
        if self.context != NULL:
            ibv_close_device(self.context)

    def port(self, uint8_t number):
        cdef ibv_port_attr found
        if ibv_query_port(self.context, number, &found):
            raise UserError(f"port {number} of the RDMA device {self.name} cannot be asked.")
        return found.state, found.active_mtu, found.lid, found.max_msg_sz

    def gids(self):
        cdef ibv_gid_entry entries[GIDS_MAX]
        cdef Py_ssize_t count = ibv_query_gid_table(self.context, entries, GIDS_MAX, 0), index
        return [
            (entries[index].port_num, entries[index].gid_index, entries[index].gid_type,
             bytes(entries[index].gid.raw[:16]))
            for index in range(max(<Py_ssize_t>0, count))
        ]

    def look_up(self, Path path not None):
        cdef int error
        with nogil:
            error = zbmd_rdma_path_look_up(self.domain, &path.path)
        return error

    def register(self, size_t address, size_t nbytes, *, bint remote_read=False, bint remote_write=False):
        cdef Registration made = Registration.__new__(Registration)
        cdef int access = rights(remote_read, remote_write)
        made.device = self
        with nogil:
            made.region = ibv_reg_mr(self.domain, <void *>address, nbytes, access)
        if made.region == NULL:
            raise UserError(
                f"{nbytes} bytes cannot be registered with the RDMA device {self.name}: "
                f"{os.strerror(errno)}. May this user lock so much memory (ulimit -l)?")
        made.address = address
        made.nbytes = nbytes
        return made

    def register_dmabuf(self, int fd, uint64_t offset, size_t nbytes, uint64_t address, *, bint remote_read=False,
                        bint remote_write=False):
        cdef Registration made = Registration.__new__(Registration)
        cdef int access = rights(remote_read, remote_write)
        made.device = self
        with nogil:
            made.region = zbmd_dmabuf_register(self.domain, offset, nbytes, address, fd, access)
        if made.region == NULL:
            raise DmaBufRefused(self.name, errno)
        made.address = address
        made.nbytes = nbytes
        return made


cdef class Registration:
    """Memory that a device may touch, until this object is gone. A reference keeps the memory."""

    def __dealloc__(self):
        if self.region != NULL:
            ibv_dereg_mr(self.region)

    @property
    def key(self):
        return 0 if self.region == NULL else self.region.rkey

    def revoke(self):
        cdef ibv_mr *region = self.region
        cdef int error = 0
        self.region = NULL
        if region != NULL:
            with nogil:
                error = ibv_dereg_mr(region)
        if error:
            raise UserError(f"memory cannot be taken back from the RDMA device {self.device.name}: "
                            f"{os.strerror(error)}")


cdef class Path:
    """The way from a queue pair of ours to one of a peer."""

    def __cinit__(self, bytes gid not None, *, uint32_t number, uint32_t first_psn, uint32_t own_psn, uint32_t lid,
                  uint32_t mtu, uint32_t port, uint32_t gid_index, uint32_t timeout, uint32_t retries):
        if len(gid) != GID_BYTES:
            raise LocalProtocolError(f"an address of {len(gid)} bytes: a GID has {GID_BYTES}")
        memcpy(self.path.gid, <const uint8_t *>gid, GID_BYTES)
        self.path.number, self.path.first_psn, self.path.own_psn = number, first_psn, own_psn
        self.path.lid, self.path.mtu, self.path.port, self.path.gid_index = lid, mtu, port, gid_index
        self.path.timeout, self.path.retries = timeout, retries
