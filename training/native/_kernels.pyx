# cython: boundscheck=False, wraparound=False, cdivision=True
"""The numpy device's own kernels. See _kernels.pyi."""

import numpy as np

cimport numpy as cnp
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

cnp.import_array()

cdef extern from "training/native/engine.h" nogil:
    enum:
        CODE_SOURCES_MAX
    void zbmd_code(uint8_t *const *, size_t, const uint8_t *const *, size_t, const uint8_t *, size_t)
    uint64_t zbmd_state_sum(const uint32_t *, size_t, uint64_t)
    void zbmd_random_words(uint32_t *, size_t, uint32_t, const uint32_t *, uint64_t)
    void zbmd_gelu_f32(float *, const float *, const float *, size_t)
    void zbmd_gelu_f64(double *, const double *, const double *, size_t)
    void zbmd_gelu_grad_f32(float *, const float *, const float *, size_t)
    void zbmd_gelu_grad_f64(double *, const double *, const double *, size_t)
    void zbmd_squared_relu_f32(float *, const float *, const float *, size_t)
    void zbmd_squared_relu_f64(double *, const double *, const double *, size_t)
    void zbmd_squared_relu_grad_f32(float *, const float *, const float *, size_t)
    void zbmd_squared_relu_grad_f64(double *, const double *, const double *, size_t)
    void zbmd_norm_f32(float *, float *, const float *, const float *, const float *, size_t, size_t, float)
    void zbmd_norm_f64(double *, double *, const double *, const double *, const double *, size_t, size_t, double)
    void zbmd_norm_grad_f32(
        float *, float *, float *, const float *, const float *, const float *, size_t, size_t)
    void zbmd_norm_grad_f64(
        double *, double *, double *, const double *, const double *, const double *, size_t, size_t)
    double zbmd_cross_entropy_f32(float *, const float *, const int64_t *, size_t, size_t)
    double zbmd_cross_entropy_f64(double *, const double *, const int64_t *, size_t, size_t)
    void zbmd_cross_entropy_grad_f32(
        float *, const float *, const float *, const int64_t *, size_t, size_t, float)
    void zbmd_cross_entropy_grad_f64(
        double *, const double *, const double *, const int64_t *, size_t, size_t, double)
    void zbmd_embedding_grad_f32(float *, const float *, const int64_t *, size_t, size_t, size_t)
    void zbmd_embedding_grad_f64(double *, const double *, const int64_t *, size_t, size_t, size_t)
    void zbmd_adamw_f32(
        float *, float *, float *, const float *, const float *, const float *, const float *, size_t,
        const double *)
    void zbmd_adamw_f64(
        double *, double *, double *, const double *, const double *, const double *, const double *, size_t,
        const double *)
    size_t zbmd_attention_scratch_f32(size_t, size_t)
    size_t zbmd_attention_scratch_f64(size_t, size_t)
    void zbmd_attention_f32(
        float *, float *, float *, const float *, const float *, size_t, size_t, size_t, size_t, size_t)
    void zbmd_attention_f64(
        double *, double *, double *, const double *, const double *, size_t, size_t, size_t, size_t, size_t)
    void zbmd_attention_grad_f32(
        float *, float *, const float *, const float *, const float *, const float *, const float *,
        size_t, size_t, size_t, size_t, size_t)
    void zbmd_attention_grad_f64(
        double *, double *, const double *, const double *, const double *, const double *, const double *,
        size_t, size_t, size_t, size_t, size_t)


cdef bint is_single(cnp.ndarray array) except -1:
    """Whether the elements are float32; float64 is the other that there is a kernel for."""
    cdef int kind = cnp.PyArray_TYPE(array)
    if kind == cnp.NPY_FLOAT32:
        return True
    if kind == cnp.NPY_FLOAT64:
        return False
    raise TypeError(f"there are kernels for float32 and float64, not {array.dtype}")


cdef void *reals(cnp.ndarray array, bint single, Py_ssize_t size) except NULL:
    """The address of a contiguous array's elements, which must be `size` of that type."""
    cdef int kind = cnp.NPY_FLOAT32 if single else cnp.NPY_FLOAT64
    if cnp.PyArray_TYPE(array) != kind or not cnp.PyArray_ISCARRAY_RO(array):
        raise TypeError(f"an array of {array.dtype} and strides {(<object>array).strides} is of no use here")
    if cnp.PyArray_SIZE(array) != size:
        raise ValueError(f"an array has {cnp.PyArray_SIZE(array)} elements, and {size} belong there")
    return cnp.PyArray_DATA(array)


cdef int64_t *places(cnp.ndarray array, Py_ssize_t size, Py_ssize_t below) except NULL:
    """Where `size` indices lie, each of them in [0, below)."""
    if cnp.PyArray_TYPE(array) != cnp.NPY_INT64 or not cnp.PyArray_ISCARRAY_RO(array):
        raise TypeError("indices are a contiguous array of int64")
    if cnp.PyArray_SIZE(array) != size:
        raise ValueError(f"there are {cnp.PyArray_SIZE(array)} indices, and {size} rows")
    cdef int64_t *found = <int64_t *>cnp.PyArray_DATA(array)
    cdef Py_ssize_t i
    for i in range(size):
        if found[i] < 0 or found[i] >= below:
            raise IndexError(f"index {found[i]} of row {i} is out of [0, {below})")
    return found


def fits(*arrays):
    for array in arrays:
        if not isinstance(array, np.ndarray) or not cnp.PyArray_ISCARRAY_RO(array):
            return False
        if cnp.PyArray_TYPE(array) not in (cnp.NPY_FLOAT32, cnp.NPY_FLOAT64):
            return False
        if cnp.PyArray_TYPE(array) != cnp.PyArray_TYPE(arrays[0]):
            return False
    return True


def random_words(cnp.ndarray out, uint64_t key, uint32_t first, uint32_t second, uint32_t third, uint32_t fourth):
    if cnp.PyArray_TYPE(out) != cnp.NPY_UINT32 or not cnp.PyArray_ISCARRAY(out):
        raise TypeError("random words are a contiguous array of uint32")
    cdef uint32_t[3] rest = [second, third, fourth]
    cdef uint32_t *words = <uint32_t *>cnp.PyArray_DATA(out)
    cdef Py_ssize_t n = cnp.PyArray_SIZE(out)
    with nogil:
        zbmd_random_words(words, n, first, rest, key)


ctypedef void (*Singles)(float *, const float *, const float *, size_t) noexcept nogil
ctypedef void (*Doubles)(double *, const double *, const double *, size_t) noexcept nogil


cdef int elements(Singles singles, Doubles doubles, cnp.ndarray dst, cnp.ndarray left, cnp.ndarray x) except -1:
    """Have the kernel of x's type write to `dst` what it makes of `left` and `x`, all of one size."""
    cdef bint single = is_single(x)
    cdef Py_ssize_t n = cnp.PyArray_SIZE(x)
    cdef void *to = reals(dst, single, n)
    cdef void *a = reals(left, single, n)
    cdef void *b = reals(x, single, n)
    with nogil:
        if single:
            singles(<float *>to, <float *>a, <float *>b, n)
        else:
            doubles(<double *>to, <double *>a, <double *>b, n)
    return 0


def gelu(cnp.ndarray out, cnp.ndarray x):
    elements(zbmd_gelu_f32, zbmd_gelu_f64, out, x, x)


def gelu_grad(cnp.ndarray dy, cnp.ndarray x):
    elements(zbmd_gelu_grad_f32, zbmd_gelu_grad_f64, dy, dy, x)


def squared_relu(cnp.ndarray out, cnp.ndarray x):
    elements(zbmd_squared_relu_f32, zbmd_squared_relu_f64, out, x, x)


def squared_relu_grad(cnp.ndarray dy, cnp.ndarray x):
    elements(zbmd_squared_relu_grad_f32, zbmd_squared_relu_grad_f64, dy, dy, x)


def norm(cnp.ndarray out, cnp.ndarray rows, cnp.ndarray x, cnp.ndarray gain, bias, double epsilon):
    cdef bint single = is_single(x)
    cdef Py_ssize_t n = max(1, cnp.PyArray_SIZE(gain))
    cdef Py_ssize_t count = cnp.PyArray_SIZE(x) // n
    cdef void *y = reals(out, single, count * n)
    cdef void *kept = reals(rows, single, 2 * count)
    cdef void *source = reals(x, single, count * n)
    cdef void *gains = reals(gain, single, n)
    cdef void *biases = NULL
    if bias is not None:
        biases = reals(bias, single, n)
    with nogil:
        if single:
            zbmd_norm_f32(<float *>y, <float *>kept, <float *>source, <float *>gains, <float *>biases, count, n,
                          <float>epsilon)
        else:
            zbmd_norm_f64(<double *>y, <double *>kept, <double *>source, <double *>gains, <double *>biases,
                          count, n, epsilon)


def norm_grad(cnp.ndarray dy, cnp.ndarray dgain, dbias, cnp.ndarray rows, cnp.ndarray x, cnp.ndarray gain):
    cdef bint single = is_single(x)
    cdef Py_ssize_t n = max(1, cnp.PyArray_SIZE(gain))
    cdef Py_ssize_t count = cnp.PyArray_SIZE(x) // n
    cdef void *slopes = reals(dy, single, count * n)
    cdef void *gain_slopes = reals(dgain, single, n)
    cdef void *kept = reals(rows, single, 2 * count)
    cdef void *source = reals(x, single, count * n)
    cdef void *gains = reals(gain, single, n)
    cdef void *bias_slopes = NULL
    if dbias is not None:
        bias_slopes = reals(dbias, single, n)
    with nogil:
        if single:
            zbmd_norm_grad_f32(<float *>slopes, <float *>gain_slopes, <float *>bias_slopes, <float *>kept,
                               <float *>source, <float *>gains, count, n)
        else:
            zbmd_norm_grad_f64(<double *>slopes, <double *>gain_slopes, <double *>bias_slopes, <double *>kept,
                               <double *>source, <double *>gains, count, n)


def cross_entropy(cnp.ndarray logs, cnp.ndarray logits, cnp.ndarray targets):
    cdef bint single = is_single(logits)
    cdef Py_ssize_t count = cnp.PyArray_SIZE(targets)
    cdef Py_ssize_t n = logits.shape[1]
    cdef void *source = reals(logits, single, count * n)
    cdef void *kept = reals(logs, single, count)
    cdef int64_t *wanted = places(targets, count, n)
    cdef double total
    with nogil:
        if single:
            total = zbmd_cross_entropy_f32(<float *>kept, <float *>source, wanted, count, n)
        else:
            total = zbmd_cross_entropy_f64(<double *>kept, <double *>source, wanted, count, n)
    return total


def cross_entropy_grad(
    cnp.ndarray out, cnp.ndarray logs, cnp.ndarray logits, cnp.ndarray targets, double scale
):
    cdef bint single = is_single(logits)
    cdef Py_ssize_t count = cnp.PyArray_SIZE(targets)
    cdef Py_ssize_t n = logits.shape[1]
    cdef void *slopes = reals(out, single, count * n)
    cdef void *source = reals(logits, single, count * n)
    cdef void *kept = reals(logs, single, count)
    cdef int64_t *wanted = places(targets, count, n)
    with nogil:
        if single:
            zbmd_cross_entropy_grad_f32(<float *>slopes, <float *>kept, <float *>source, wanted, count, n,
                                        <float>scale)
        else:
            zbmd_cross_entropy_grad_f64(<double *>slopes, <double *>kept, <double *>source, wanted, count, n,
                                        scale)


def embedding_grad(cnp.ndarray out, cnp.ndarray dy, cnp.ndarray tokens):
    cdef bint single = is_single(dy)
    cdef Py_ssize_t count = cnp.PyArray_SIZE(tokens)
    cdef Py_ssize_t vocabulary = out.shape[0]
    cdef Py_ssize_t n = out.shape[1]
    cdef void *table = reals(out, single, vocabulary * n)
    cdef void *slopes = reals(dy, single, count * n)
    cdef int64_t *wanted = places(tokens, count, vocabulary)
    with nogil:
        if single:
            zbmd_embedding_grad_f32(<float *>table, <float *>slopes, wanted, vocabulary, count, n)
        else:
            zbmd_embedding_grad_f64(<double *>table, <double *>slopes, wanted, vocabulary, count, n)


def adamw(tuple new, tuple old, cnp.ndarray grads, cnp.ndarray factors):
    cdef bint single = is_single(grads)
    cdef Py_ssize_t n = cnp.PyArray_SIZE(grads)
    cdef void *to[3]
    cdef void *of[3]
    cdef int i
    for i in range(3):
        to[i] = reals(new[i], single, n)
        of[i] = reals(old[i], single, n)
    cdef void *slopes = reals(grads, single, n)
    cdef void *constants = reals(factors, False, 6)
    with nogil:
        if single:
            zbmd_adamw_f32(<float *>to[0], <float *>to[1], <float *>to[2], <float *>of[0], <float *>of[1],
                           <float *>of[2], <float *>slopes, n, <double *>constants)
        else:
            zbmd_adamw_f64(<double *>to[0], <double *>to[1], <double *>to[2], <double *>of[0], <double *>of[1],
                           <double *>of[2], <double *>slopes, n, <double *>constants)


def attention(
    cnp.ndarray out, cnp.ndarray logs, cnp.ndarray qkv, cnp.ndarray bias, Py_ssize_t batch, Py_ssize_t heads
):
    cdef bint single = is_single(qkv)
    if batch < 1 or heads < 1:
        raise ValueError(f"{batch} sequences and {heads} heads: there is at least one of each")
    cdef Py_ssize_t length = qkv.shape[0] // batch
    cdef Py_ssize_t depth = qkv.shape[1] // (3 * heads)
    cdef Py_ssize_t rows = batch * length
    cdef Py_ssize_t bias_row = bias.shape[1]
    if bias_row < length:
        raise ValueError(f"the bias knows {bias_row} distances, and there are {length} positions")
    cdef void *y = reals(out, single, rows * heads * depth)
    cdef void *kept = reals(logs, single, rows * heads)
    cdef void *source = reals(qkv, single, rows * heads * depth * 3)
    cdef void *biases = reals(bias, single, heads * bias_row)
    cdef size_t needed = zbmd_attention_scratch_f32(length, depth) if single else (
        zbmd_attention_scratch_f64(length, depth))
    cdef cnp.ndarray scratch = np.empty(needed, dtype=qkv.dtype)
    cdef void *work = reals(scratch, single, needed)
    with nogil:
        if single:
            zbmd_attention_f32(<float *>y, <float *>kept, <float *>work, <float *>source, <float *>biases,
                               bias_row, batch, length, heads, depth)
        else:
            zbmd_attention_f64(<double *>y, <double *>kept, <double *>work, <double *>source, <double *>biases,
                               bias_row, batch, length, heads, depth)


def attention_grad(
    cnp.ndarray out, cnp.ndarray dy, cnp.ndarray y, cnp.ndarray logs, cnp.ndarray qkv, cnp.ndarray bias,
    Py_ssize_t batch, Py_ssize_t heads
):
    cdef bint single = is_single(qkv)
    if batch < 1 or heads < 1:
        raise ValueError(f"{batch} sequences and {heads} heads: there is at least one of each")
    cdef Py_ssize_t length = qkv.shape[0] // batch
    cdef Py_ssize_t depth = qkv.shape[1] // (3 * heads)
    cdef Py_ssize_t rows = batch * length
    cdef Py_ssize_t bias_row = bias.shape[1]
    if bias_row < length:
        raise ValueError(f"the bias knows {bias_row} distances, and there are {length} positions")
    cdef void *into = reals(out, single, rows * heads * depth * 3)
    cdef void *slopes = reals(dy, single, rows * heads * depth)
    cdef void *result = reals(y, single, rows * heads * depth)
    cdef void *kept = reals(logs, single, rows * heads)
    cdef void *source = reals(qkv, single, rows * heads * depth * 3)
    cdef void *biases = reals(bias, single, heads * bias_row)
    cdef size_t needed = zbmd_attention_scratch_f32(length, depth) if single else (
        zbmd_attention_scratch_f64(length, depth))
    cdef cnp.ndarray scratch = np.empty(needed, dtype=qkv.dtype)
    cdef void *work = reals(scratch, single, needed)
    with nogil:
        if single:
            zbmd_attention_grad_f32(
                <float *>into, <float *>work, <float *>slopes, <float *>result, <float *>kept, <float *>source,
                <float *>biases, bias_row, batch, length, heads, depth)
        else:
            zbmd_attention_grad_f64(
                <double *>into, <double *>work, <double *>slopes, <double *>result, <double *>kept,
                <double *>source, <double *>biases, bias_row, batch, length, heads, depth)


cdef uint8_t *bytes_of(object array, Py_ssize_t size, bint written) except NULL:
    """Where `size` contiguous bytes of uint8 lie, which may be written if `written`."""
    if not isinstance(array, np.ndarray) or cnp.PyArray_TYPE(array) != cnp.NPY_UINT8:
        raise TypeError("shards are arrays of uint8")
    if not (cnp.PyArray_ISCARRAY(array) if written else cnp.PyArray_ISCARRAY_RO(array)):
        raise TypeError("shards are contiguous, and those that are written writable")
    if cnp.PyArray_SIZE(array) != size:
        raise ValueError(f"a shard has {cnp.PyArray_SIZE(array)} bytes, and {size} belong there")
    return <uint8_t *>cnp.PyArray_DATA(array)


def code(list outs, list sources, bytes matrix):
    cdef uint8_t *to[CODE_SOURCES_MAX]
    cdef const uint8_t *of[CODE_SOURCES_MAX]
    cdef size_t results = len(outs), count = len(sources)
    if not 0 < count <= CODE_SOURCES_MAX or results > CODE_SOURCES_MAX:
        raise ValueError(f"{results} shards of {count}: there can be {CODE_SOURCES_MAX}")
    if len(matrix) != <Py_ssize_t>(results * count):
        raise ValueError(f"a matrix of {len(matrix)} numbers for {results} shards of {count}")
    cdef Py_ssize_t n = sources[0].size
    cdef size_t i
    for i in range(count):
        of[i] = bytes_of(sources[i], n, False)
    for i in range(results):
        to[i] = bytes_of(outs[i], n, True)
    cdef const uint8_t *numbers = <const uint8_t *><char *>matrix
    with nogil:
        zbmd_code(<uint8_t *const *>to, results, <const uint8_t *const *>of, count, numbers, n)


def state_sum(cnp.ndarray words, uint64_t first):
    if cnp.PyArray_TYPE(words) != cnp.NPY_UINT32 or words.ndim != 1 or not words.flags.c_contiguous:
        raise ValueError("expected contiguous 32-bit words")
    cdef const uint32_t *at = <const uint32_t *>cnp.PyArray_DATA(words)
    cdef size_t n = cnp.PyArray_SIZE(words)
    cdef uint64_t found
    with nogil:
        found = zbmd_state_sum(at, n, first)
    return found
