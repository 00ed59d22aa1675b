# cython: boundscheck=False, wraparound=False
"""The turnstile and the fast path of calls that have been made before. See _fast_path.pyi."""

import threading

cimport cython
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from zbmd.collectives.flight._flight cimport F_COMPLETE, FlightRing, QuickClock, zbmd_quick_ns
from zbmd.collectives.native._stepper cimport (
    BUFFERS, IN, OUT, PUB, S_DONE, Header, NativeGroup, NativeProgram, Run, run_close, run_open
)

from zbmd.collectives.algorithms.catalogue import Operation
from zbmd.transport.errors import LocalProtocolError

cnp.import_array()

cdef int ALL_REDUCE = Operation.ALL_REDUCE.value
cdef object NO_ROOT = -1  # as runs.py has it

WAITING_MAX = 1024
SHAPES_MAX = SHAPES
LOOKS_WITH_GIL = LOOKS
QUICK_BYTES_MAX = QUICK_BYTES

cdef enum:
    SHAPES = 128
    WAYS = 8          # shapes that a call may be found among: a set of the table
    LOOKS = 40
    QUICK_BYTES = 1408
    NOWHERE = 0
    AT_X = 1
    AT_OUT = 2


@cython.final
cdef class Turnstile:
    """Lets threads through one at a time, in the order in which they came."""

    def __cinit__(self):
        self.busy, self.gates = False, []

    def __enter__(self):
        # Made first: nothing below lets another thread in between the look and what is done about it.
        if not self.busy:
            self.busy = True
            return self
        gate = threading.Lock()
        gate.acquire()
        if len(self.gates) >= WAITING_MAX:
            raise LocalProtocolError(f"{WAITING_MAX} threads already wait for this communicator")
        if self.busy:
            self.gates.append(gate)
            gate.acquire()
        else:
            self.busy = True
        return self

    def __exit__(self, *_):
        self._pass_on()

    @property
    def waiting(self):
        return len(self.gates)

    cdef void _pass_on(self):
        if self.gates:
            self.gates.pop(0).release()
        else:
            self.busy = False


cdef class Shape:
    """One call that has been made before: everything of it but its arrays' addresses."""

    cdef readonly object plan
    cdef NativeProgram program
    cdef object descr, op, algorithm, root, kept
    cdef int operation
    cdef Py_ssize_t size, out_size, extent
    cdef bint has_x, has_out, quick
    cdef bint writes_x, writes_out, shares_x, shares_out
    cdef int place[BUFFERS]
    cdef uint64_t nbytes, most
    cdef uint64_t x_bytes, out_bytes
    cdef int32_t flight, flight_read
    cdef Run *run
    cdef Header header

    def __cinit__(self):
        self.run = <Run *>calloc(1, sizeof(Run))
        if self.run == NULL:
            raise MemoryError

    def __dealloc__(self):
        if self.run != NULL:
            run_close(self.run)
            free(self.run)


cdef inline bint same(object a, object b):
    return a is b or a == b


cdef inline char *data_of(object x):
    return <char *>cnp.PyArray_DATA(<cnp.ndarray>x)


cdef inline Py_ssize_t extent_of(object x):
    return cnp.PyArray_DIM(<cnp.ndarray>x, 0) if cnp.PyArray_NDIM(<cnp.ndarray>x) else -1


cdef inline bint usable(object x, bint writes):
    cdef int flags = cnp.NPY_ARRAY_C_CONTIGUOUS | cnp.NPY_ARRAY_ALIGNED | (cnp.NPY_ARRAY_WRITEABLE if writes else 0)
    return cnp.PyArray_CHKFLAGS(<cnp.ndarray>x, flags)


@cython.final
cdef class FastPath:
    """The way of calls that have been made before past everything that decided how they run."""

    cdef NativeGroup group
    cdef Turnstile turnstile
    cdef FlightRing ring
    cdef list shapes
    cdef uint64_t arena_begin, arena_end
    cdef readonly uint32_t queued
    cdef readonly uint64_t taken
    cdef uint32_t oldest
    cdef bint held
    cdef public bint open
    cdef public object far
    cdef readonly Shape failed
    cdef readonly int status
    cdef int64_t kill_sequence, kill_point
    cdef QuickClock clock

    def __init__(self, NativeGroup group not None, Turnstile turnstile not None, FlightRing ring not None, *,
                 uint64_t arena_begin, uint64_t arena_end, bint held, bint counts):
        self.group, self.turnstile, self.ring = group, turnstile, ring
        self.arena_begin, self.arena_end = arena_begin, arena_end
        self.shapes = [None] * SHAPES
        self.queued, self.taken, self.oldest, self.held, self.open, self.far = 0, 0, 0, held, True, None
        self.failed, self.status, self.kill_sequence, self.kill_point = None, 0, -1, -1
        self.clock = QuickClock(counts)

    def kill_at(self, int64_t sequence, int64_t point):
        self.kill_sequence, self.kill_point = sequence, point

    def forget(self):
        """See _fast_path.pyi."""
        self.shapes = [None] * SHAPES
        self.oldest = 0

    def queue(self, int change):
        """Operations that wait for another thread: + 1 or - 1."""
        self.queued += change

    def learn(self, object plan, NativeProgram program not None, x, out, *, str op not None, str algorithm not None,
              object called_root, object places not None, object memory not None,
              const uint64_t[::1] addresses not None, uint64_t nbytes, int32_t flight, int32_t flight_read, int operation,
              int dtype, int reduction, int root, uint64_t count, uint64_t total, uint32_t piece, uint64_t in_stride,
              uint64_t out_stride, uintptr_t scratch, uint64_t scratch_bytes, const uint64_t[:, ::1] layout=None,
              const uint64_t[:, ::1] extents=None, uint64_t layout_digest=0):
        """Take a call that has just run. `places`: {buffer: whether it is `out`}."""
        cdef Shape made = Shape()
        cdef int i
        run_open(made.run, self.group.n)
        self.group._prepare(program, made.run, addresses, operation, dtype, reduction, root, count, total, piece,
                            in_stride, out_stride, scratch, scratch_bytes, layout, extents, layout_digest)
        memcpy(&made.header, &self.group.own, sizeof(Header))
        made.kept = (memory, None if layout is None else layout.base, None if extents is None else extents.base)
        made.plan, made.program = plan, program
        made.operation, made.root, made.op, made.algorithm = operation, called_root, op, algorithm
        made.has_x, made.has_out = x is not None, out is not None
        first = x if made.has_x else out
        made.descr = None if first is None else first.dtype
        made.size = x.size if made.has_x else 0
        made.extent = extent_of(x) if made.has_x else -1
        made.out_size = out.size if made.has_out else 0
        made.x_bytes = x.nbytes if made.has_x else 0
        made.out_bytes = out.nbytes if made.has_out else 0
        for i in range(BUFFERS):
            made.place[i] = NOWHERE
        for buffer, at_out in places.items():
            made.place[buffer] = AT_OUT if at_out else AT_X
            if at_out:
                made.writes_out |= buffer == OUT
                made.shares_out |= buffer in plan.exposed
            else:
                made.writes_x |= buffer == OUT
                made.shares_x |= buffer in plan.exposed
        made.most = program.most_counted()
        made.quick = program.head_only and self.held and nbytes <= QUICK_BYTES
        for i in range(self.group.n):
            made.quick &= program.awaited[i] == 0
        made.nbytes = nbytes
        made.flight, made.flight_read = flight, flight_read
        at = self._home(operation, NULL if first is None else <void *>made.descr, made.size)
        for i in range(WAYS):
            if self.shapes[at + i] is None:
                self.shapes[at + i] = made
                return
        self.shapes[at + self.oldest % WAYS] = made
        self.oldest += 1

    cdef int _home(self, int operation, void *descr, Py_ssize_t size) noexcept:
        # The finaliser of splitmix64 over what tells calls apart.
        cdef uint64_t mixed = <uint64_t><uintptr_t>descr ^ <uint64_t>size << 20 ^ <uint64_t>operation << 56
        mixed = (mixed ^ mixed >> 30) * <uint64_t>0xbf58476d1ce4e5b9
        mixed = (mixed ^ mixed >> 27) * <uint64_t>0x94d049bb133111eb
        return <int>((mixed ^ mixed >> 31) % (SHAPES // WAYS)) * WAYS

    def run(self, int operation, x, out, str op not None, str algorithm not None, object root, uint64_t deadline_ns):
        return self._run(operation, x, out, op, algorithm, root, deadline_ns, 0)

    def run_now(self, int operation, x, out, str op not None, str algorithm not None, object root, uint64_t timeout_ns):
        if self.queued:
            return None
        return self._run(operation, x, out, op, algorithm, root, 0, timeout_ns)

    cdef object _run(self, int operation, object x, object out, str op, str algorithm, object root, uint64_t deadline_ns,
                     uint64_t timeout_ns):
        cdef Shape shape
        cdef void *descr = NULL
        cdef Py_ssize_t size = 0
        cdef int at
        if not self.open or self.turnstile.busy:
            return None
        if x is not None:
            if type(x) is not cnp.ndarray:
                return None
            descr = <void *>cnp.PyArray_DESCR(<cnp.ndarray>x)
            size = cnp.PyArray_SIZE(<cnp.ndarray>x)
        if out is not None:
            if type(out) is not cnp.ndarray:
                return None
            if x is None:
                descr = <void *>cnp.PyArray_DESCR(<cnp.ndarray>out)
            elif <void *>cnp.PyArray_DESCR(<cnp.ndarray>out) != descr:
                return None
        at = self._home(operation, descr, size)
        for at in range(at, at + WAYS):
            shape = self.shapes[at]
            if shape is None:
                return None
            if (shape.operation == operation and shape.size == size and same(shape.root, root)
                    and (descr == NULL) == (shape.descr is None) and (descr == NULL or descr == <void *>shape.descr)
                    and shape.has_x == (x is not None) and shape.has_out == (out is not None)
                    and (x is None or shape.extent == extent_of(x))
                    and (out is None or shape.out_size == cnp.PyArray_SIZE(<cnp.ndarray>out))
                    and same(shape.op, op) and same(shape.algorithm, algorithm)):
                return self._enter(shape, x, out, deadline_ns, timeout_ns)
        return None

    cdef bint _readable(self, char *at, uint64_t nbytes) noexcept:
        """Whether peers can read it where it lies."""
        cdef uint64_t begin = <uint64_t><uintptr_t>at
        if self.group.pids != NULL:
            return True
        return self.arena_begin <= begin and nbytes <= self.arena_end - begin and begin <= self.arena_end

    cdef object _enter(self, Shape shape, object x, object out, uint64_t deadline_ns, uint64_t timeout_ns):
        """Check the arrays, put in their addresses, and run."""
        cdef char *x_at = NULL
        cdef char *out_at = NULL
        cdef NativeGroup group = self.group
        cdef uint64_t left
        cdef int i
        if shape.has_x:
            x_at = data_of(x)
            if not usable(x, shape.writes_x) or shape.shares_x and not self._readable(x_at, shape.x_bytes):
                return None
        if shape.has_out:
            out_at = data_of(out)
            if not usable(out, shape.writes_out) or shape.shares_out and not self._readable(out_at, shape.out_bytes):
                return None
            if shape.has_x and x_at < out_at + shape.out_bytes and out_at < x_at + shape.x_bytes:
                return None
        for i in range(group.n):
            left = 0xffffffff - max(group.peers[i].sent, group.peers[i].received)
            if left < shape.most or group.sequence == 0xffffffff:
                return None
        memcpy(&group.own, &shape.header, sizeof(Header))
        for i in (OUT, PUB, IN):
            if shape.place[i] != NOWHERE:
                shape.run.address[group.rank][i] = x_at if shape.place[i] == AT_X else out_at
                group._tell(i, <uint64_t><uintptr_t>shape.run.address[group.rank][i])
        return self._fly(shape, deadline_ns, timeout_ns)

    cdef object _fly(self, Shape shape, uint64_t deadline_ns, uint64_t timeout_ns):
        cdef NativeGroup group = self.group
        cdef uint64_t now_ns = zbmd_quick_ns(&self.clock.clock)
        cdef int64_t point = -1
        cdef int status
        if self.kill_sequence == <int64_t>group.sequence + 1:
            point = self.kill_point
        if timeout_ns:
            deadline_ns = now_ns + timeout_ns
        self.turnstile.busy = True
        self.taken += 1
        group.met_ns = 0
        self.ring.enter(shape.flight, <uint64_t>group.sequence + 1, shape.nbytes, now_ns)
        if self.far is not None:
            group.flying = shape.run
            status = self.far(shape.plan, deadline_ns, point)
            if status != S_DONE:
                self.status, self.failed = status, shape
                return False
            self._land(now_ns)
            self.turnstile._pass_on()
            return True
        group._announce(shape.program, shape.run, point)
        if shape.quick and group._all_are_here(LOOKS):
            status = group._complete(shape.program, shape.run, point, deadline_ns)
        else:
            with nogil:
                status = group._complete(shape.program, shape.run, point, deadline_ns)
        if group.reads:
            self.ring.relabel(shape.flight_read)
        if status != S_DONE:
            self.status, self.failed = status, shape
            return False
        self._land(now_ns)
        self.turnstile._pass_on()
        return True

    cdef void _land(self, uint64_t began_ns) noexcept nogil:
        """It is complete. Who met the others was told by another clock, which may be a microsecond off."""
        cdef uint64_t met_ns = max(self.group.met_ns, began_ns) if self.group.met_ns else 0
        self.ring.leave(F_COMPLETE, met_ns, max(met_ns, zbmd_quick_ns(&self.clock.clock)))


cdef class FastPathCalls:
    """See _fast_path.pyi."""

    cdef public FastPath fast_path

    def all_reduce(self, x, out=None, *, str op not None="sum", str algorithm not None="auto", uint64_t deadline_ns=0):
        done = self.fast_path._run(ALL_REDUCE, x, out, op, algorithm, NO_ROOT, deadline_ns, 0)
        if done is None:
            return self._all_reduce(x, out, op, algorithm, deadline_ns)
        if not done:
            self.fast_path_failed()
        return x if out is None else out


cdef class BlockingCalls:
    """See _fast_path.pyi."""

    cdef readonly FastPath _fast_path
    cdef uint64_t _limit_ns

    def __init__(self, FastPath fast_path not None, uint64_t limit_ns):
        self._fast_path, self._limit_ns = fast_path, limit_ns

    def all_reduce(self, x, *, out=None, str op not None="sum", str algorithm not None="auto", timeout=None, int priority=0,
                   stream=None):
        done = None
        if timeout is None and priority == 0 and self._fast_path.queued == 0:
            done = self._fast_path._run(ALL_REDUCE, x, out, op, algorithm, NO_ROOT, 0, self._limit_ns)
        if done is None:
            return self._all_reduce(x, out, op, algorithm, timeout, priority, stream)
        if not done:
            self.fast_path_failed()
        return x if out is None else out
