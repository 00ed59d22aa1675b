"""What other compiled modules need of an RDMA device."""


cdef extern from "<infiniband/verbs.h>" nogil:
    struct ibv_context:
        pass
    struct ibv_pd:
        pass


cdef class Device:
    cdef readonly str name
    cdef ibv_context *context
    cdef ibv_pd *domain
