# cython: boundscheck=False, wraparound=False
"""The turnstile, and the fast path of repeated calls. See _fast_path.pyi."""

import threading

cimport cython
cimport numpy as cnp
from cpython.object cimport PyObject, PyTypeObject
from cpython.ref cimport Py_INCREF
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from zbmd.collectives.flight._flight cimport F_COMPLETE, FlightRing, QuickClock, zbmd_quick_ns
from zbmd.collectives.native._stepper cimport (
    BUFFERS, IN, OUT, PUB, S_DONE, Header, NativeGroup, NativeProgram, run_close, run_open, zbmd_run
)

from zbmd.collectives.algorithms.catalogue import Operation
from zbmd.transport.errors import LocalProtocolError

cdef extern from "numpy/arrayobject.h":
    object PyArray_NewFromDescr(PyTypeObject *subtype, cnp.PyArray_Descr *descr, int nd, cnp.npy_intp *dims, cnp.npy_intp *strides,
                                void *data, int flags, PyObject *parent)
    PyTypeObject PyArray_Type

cnp.import_array()

cdef int ALL_REDUCE = Operation.ALL_REDUCE.value
cdef int REDUCE = Operation.REDUCE.value
cdef int BROADCAST = Operation.BROADCAST.value
cdef int ALL_GATHER = Operation.ALL_GATHER.value
cdef int GATHER = Operation.GATHER.value
cdef object NO_ROOT = -1  # as turns.py has it

WAITING_MAX = 1024
QUICK_BYTES_MAX = QUICK_BYTES

cdef enum:
    KNOWN = 128       # calls that a fast path knows; one more takes another's place
    WAYS = 8          # known calls that a call may be found among: a set of the table
    LOOKS = 40        # for the other members, before a small operation lets go of the GIL: some microseconds
    QUICK_BYTES = 1408
    NOWHERE = 0
    AT_X = 1
    AT_OUT = 2


def array_at(owner, uint64_t address, Py_ssize_t count, cnp.dtype dtype not None):
    cdef cnp.npy_intp extent = count
    Py_INCREF(dtype)  # which the array keeps
    cdef cnp.ndarray made = PyArray_NewFromDescr(&PyArray_Type, <cnp.PyArray_Descr *>dtype, 1, &extent, NULL, <void *><uintptr_t>address,
                                                 cnp.NPY_ARRAY_C_CONTIGUOUS | cnp.NPY_ARRAY_WRITEABLE, NULL)
    cnp.PyArray_UpdateFlags(made, cnp.NPY_ARRAY_ALIGNED)
    cnp.set_array_base(made, owner)
    return made


@cython.final
cdef class Turnstile:
    """Lets threads through one at a time, in the order in which they came."""

    def __cinit__(self):
        self.busy, self.gates, self.flight = False, [], None

    def __enter__(self):
        if self.flight is not None:
            self.flight.land()
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


cdef class KnownCall:
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
    cdef zbmd_run *run
    cdef Header header

    def __cinit__(self):
        self.run = <zbmd_run *>calloc(1, sizeof(zbmd_run))
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
    """Repeats the cached run of an identical earlier call."""

    cdef NativeGroup group
    cdef Turnstile turnstile
    cdef FlightRing ring
    cdef list known
    cdef uint64_t arena_begin, arena_end
    cdef readonly uint32_t queued
    cdef readonly uint64_t taken
    cdef uint32_t oldest
    cdef bint held
    cdef public bint open
    cdef public object far
    cdef readonly KnownCall failed
    cdef readonly int status
    cdef public object fail
    cdef KnownCall flying
    cdef object landed
    cdef uint64_t flown_ns, fly_until_ns
    cdef int64_t fly_point
    cdef int64_t kill_sequence, kill_point
    cdef QuickClock clock

    def __init__(self, NativeGroup group not None, Turnstile turnstile not None, FlightRing ring not None, *,
                 uint64_t arena_begin, uint64_t arena_end, bint held, bint counts):
        self.group, self.turnstile, self.ring = group, turnstile, ring
        self.arena_begin, self.arena_end = arena_begin, arena_end
        self.known = [None] * KNOWN
        self.queued, self.taken, self.oldest, self.held, self.open, self.far = 0, 0, 0, held, True, None
        self.failed, self.status, self.kill_sequence, self.kill_point = None, 0, -1, -1
        self.flying, self.landed, self.fail = None, None, None
        self.clock = QuickClock(counts)

    def kill_at(self, int64_t sequence, int64_t point):
        self.kill_sequence, self.kill_point = sequence, point

    def forget(self):
        """See _fast_path.pyi."""
        self.known = [None] * KNOWN
        self.oldest = 0

    def queue(self, int change):
        """Operations that wait for another thread: + 1 or - 1."""
        self.queued += change

    def learn(self, run not None, x, out, *, str op not None, str algorithm not None, object called_root,
              object places not None, object memory not None, const uint64_t[::1] addresses not None,
              const uint8_t[::1] scratch not None, uint64_t nbytes, int32_t flight, int32_t flight_read):
        """Take a call that has just run. `places`: {buffer: whether it is `out`}."""
        cdef KnownCall made = KnownCall()
        cdef NativeProgram program = run.plan.native
        cdef int i
        run_open(made.run, self.group.n)
        self.group._prepare(program, made.run, run, addresses, scratch)
        memcpy(&made.header, &self.group.own, sizeof(Header))
        made.kept, made.plan, made.program = (memory, run.layout), run.plan, program
        made.operation, made.root, made.op, made.algorithm = run.operation, called_root, op, algorithm
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
                made.shares_out |= buffer in run.plan.exposed
            else:
                made.writes_x |= buffer == OUT
                made.shares_x |= buffer in run.plan.exposed
        made.most = program.most_counted()
        made.quick = program.head_only and self.held and nbytes <= QUICK_BYTES
        for i in range(self.group.n):
            made.quick &= program.awaited[i] == 0
        made.nbytes = nbytes
        made.flight, made.flight_read = flight, flight_read
        at = self._home(made.operation, NULL if first is None else <void *>made.descr, made.size)
        for i in range(WAYS):
            if self.known[at + i] is None:
                self.known[at + i] = made
                return
        self.known[at + self.oldest % WAYS] = made
        self.oldest += 1

    cdef int _home(self, int operation, void *descr, Py_ssize_t size) noexcept:
        # The finaliser of splitmix64 over what tells calls apart.
        cdef uint64_t mixed = <uint64_t><uintptr_t>descr ^ <uint64_t>size << 20 ^ <uint64_t>operation << 56
        mixed = (mixed ^ mixed >> 30) * <uint64_t>0xbf58476d1ce4e5b9
        mixed = (mixed ^ mixed >> 27) * <uint64_t>0x94d049bb133111eb
        return <int>((mixed ^ mixed >> 31) % (KNOWN // WAYS)) * WAYS

    def run(self, int operation, x, out, str op not None, str algorithm not None, object root, uint64_t deadline_ns):
        return self._run(operation, x, out, op, algorithm, root, deadline_ns, 0, None)

    def begin(self, int operation, x, out, str op not None, str algorithm not None, object root, uint64_t timeout_ns, landed not None):
        if self.queued:
            return None
        return self._run(operation, x, out, op, algorithm, root, 0, timeout_ns, landed)

    @property
    def flies(self):
        return self.flying is not None

    def land(self):
        self._end_flight(self.flying)

    def land_now(self):
        if self.flying is not None and self.group._all_are_here(1):
            self._end_flight(self.flying)

    cdef object _end_flight(self, KnownCall call):
        """The first caller ends it: nothing before `nogil` lets another thread in."""
        cdef NativeGroup group = self.group
        cdef int status
        if call is None:
            return None
        landed, self.flying, self.landed, self.turnstile.flight = self.landed, None, None, None
        with nogil:
            status = group._complete(call.program, call.run, self.fly_point, self.fly_until_ns)
        if status == S_DONE:
            self._land(self.flown_ns)
            self.turnstile._pass_on()
            landed(None)
            return None
        self.status, self.failed = status, call
        try:
            self.fail()
        except BaseException as error:
            landed(error)

    def run_now(self, int operation, x, out, str op not None, str algorithm not None, object root, uint64_t timeout_ns):
        if self.queued:
            return None
        return self._run(operation, x, out, op, algorithm, root, 0, timeout_ns, None)

    cdef object _run(self, int operation, object x, object out, str op, str algorithm, object root, uint64_t deadline_ns,
                     uint64_t timeout_ns, object landed):
        cdef KnownCall call
        cdef void *descr = NULL
        cdef Py_ssize_t size = 0
        cdef int at
        if self.flying is not None and self.open:
            self.land_now()
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
            call = self.known[at]
            if call is None:
                return None
            if (call.operation == operation and call.size == size and same(call.root, root)
                    and (descr == NULL) == (call.descr is None) and (descr == NULL or descr == <void *>call.descr)
                    and call.has_x == (x is not None) and call.has_out == (out is not None)
                    and (x is None or call.extent == extent_of(x))
                    and (out is None or call.out_size == cnp.PyArray_SIZE(<cnp.ndarray>out))
                    and same(call.op, op) and same(call.algorithm, algorithm)):
                if landed is not None and (not call.quick or self.far is not None):
                    return None
                return self._enter(call, x, out, deadline_ns, timeout_ns, landed)
        return None

    cdef bint _readable(self, char *at, uint64_t nbytes) noexcept:
        """Whether peers can read it where it lies."""
        cdef uint64_t begin = <uint64_t><uintptr_t>at
        if self.group.pids != NULL:
            return True
        return self.arena_begin <= begin and nbytes <= self.arena_end - begin and begin <= self.arena_end

    cdef object _enter(self, KnownCall call, object x, object out, uint64_t deadline_ns, uint64_t timeout_ns, object landed):
        """Check the arrays, put in their addresses, and run."""
        cdef char *x_at = NULL
        cdef char *out_at = NULL
        cdef NativeGroup group = self.group
        cdef uint64_t left
        cdef int i
        if call.has_x:
            x_at = data_of(x)
            if not usable(x, call.writes_x) or call.shares_x and not self._readable(x_at, call.x_bytes):
                return None
        if call.has_out:
            out_at = data_of(out)
            if not usable(out, call.writes_out) or call.shares_out and not self._readable(out_at, call.out_bytes):
                return None
            if call.has_x and x_at < out_at + call.out_bytes and out_at < x_at + call.x_bytes:
                return None
        for i in range(group.n):
            left = 0xffffffff - max(group.peers[i].sent, group.peers[i].received)
            if left < call.most or group.sequence == 0xffffffff:
                return None
        memcpy(&group.own, &call.header, sizeof(Header))
        for i in (OUT, PUB, IN):
            if call.place[i] != NOWHERE:
                call.run.address[group.rank][i] = x_at if call.place[i] == AT_X else out_at
                group._tell(i, <uint64_t><uintptr_t>call.run.address[group.rank][i])
        return self._fly(call, deadline_ns, timeout_ns, landed)

    cdef object _fly(self, KnownCall call, uint64_t deadline_ns, uint64_t timeout_ns, object landed):
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
        self.ring.enter(call.flight, <uint64_t>group.sequence + 1, call.nbytes, now_ns)
        if self.far is not None:
            group.flying = call.run
            status = self.far(call.plan, deadline_ns, point)
            if status != S_DONE:
                self.status, self.failed = status, call
                return False
            self._land(now_ns)
            self.turnstile._pass_on()
            return True
        group._announce(call.program, call.run, point)
        if landed is not None:
            # The others have all that they need of us. The next caller that needs the result or the turn ends it.
            self.flying, self.landed, self.turnstile.flight = call, landed, self
            self.flown_ns, self.fly_until_ns, self.fly_point = now_ns, deadline_ns, point
            if group._all_are_here(LOOKS):
                self._end_flight(call)
            return True
        if call.quick and group._all_are_here(LOOKS):
            status = group._complete(call.program, call.run, point, deadline_ns)
        else:
            with nogil:
                status = group._complete(call.program, call.run, point, deadline_ns)
        if group.reads:
            self.ring.relabel(call.flight_read)
        if status != S_DONE:
            self.status, self.failed = status, call
            return False
        self._land(now_ns)
        self.turnstile._pass_on()
        return True

    cdef void _land(self, uint64_t began_ns) noexcept nogil:
        """It is complete. `met_ns` is by another clock, which may be a microsecond off."""
        cdef uint64_t met_ns = max(self.group.met_ns, began_ns) if self.group.met_ns else 0
        self.ring.leave(F_COMPLETE, met_ns, max(met_ns, zbmd_quick_ns(&self.clock.clock)))


cdef class FastPathCalls:
    """See _fast_path.pyi."""

    cdef public FastPath fast_path

    def all_reduce(self, x, out=None, *, str op not None="sum", str algorithm not None="auto", uint64_t deadline_ns=0):
        done = self.fast_path._run(ALL_REDUCE, x, out, op, algorithm, NO_ROOT, deadline_ns, 0, None)
        if done is None:
            return self._all_reduce(x, out, op, algorithm, deadline_ns)
        if not done:
            self.fast_path_failed()
        return x if out is None else out

    def reduce(self, x, object root, out=None, *, str op not None="sum", str algorithm not None="auto", uint64_t deadline_ns=0):
        done = self.fast_path._run(REDUCE, x, out, op, algorithm, root, deadline_ns, 0, None)
        if done is None:
            return self._reduce(x, root, out, op, algorithm, deadline_ns)
        if not done:
            self.fast_path_failed()
        return (x if out is None else out) if root == self.fast_path.group.rank else None

    def broadcast(self, x, object root, *, str algorithm not None="auto", uint64_t deadline_ns=0):
        done = self.fast_path._run(BROADCAST, x, None, "sum", algorithm, root, deadline_ns, 0, None)
        if done is None:
            return self._broadcast(x, root, algorithm, deadline_ns)
        if not done:
            self.fast_path_failed()
        return x

    def all_gather(self, x, out=None, *, str algorithm not None="auto", uint64_t deadline_ns=0):
        if out is None:
            out = self._new_gathered(x)
        done = self.fast_path._run(ALL_GATHER, x, out, "sum", algorithm, NO_ROOT, deadline_ns, 0, None)
        if done is None:
            return self._all_gather(x, out, algorithm, deadline_ns)
        if not done:
            self.fast_path_failed()
        return out

    def gather(self, x, object root, out=None, *, str algorithm not None="auto", uint64_t deadline_ns=0):
        if out is None and root == self.fast_path.group.rank:
            out = self._new_gathered(x)
        done = self.fast_path._run(GATHER, x, out, "sum", algorithm, root, deadline_ns, 0, None)
        if done is None:
            return self._gather(x, root, out, algorithm, deadline_ns)
        if not done:
            self.fast_path_failed()
        return out if root == self.fast_path.group.rank else None


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
            done = self._fast_path._run(ALL_REDUCE, x, out, op, algorithm, NO_ROOT, 0, self._limit_ns, None)
        if done is None:
            return self._all_reduce(x, out, op, algorithm, timeout, priority, stream)
        if not done:
            self.fast_path_failed()
        return x if out is None else out
