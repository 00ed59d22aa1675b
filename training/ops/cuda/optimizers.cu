// Optimizers over flat float32 arrays, one block a span of at most 16,384 elements, and the gradient's norm. Products
// and sums are rounded one by one, so that the bits are those of `zbmd.training.optim`: the compiler may fuse the
// operators * and +, whatever -fmad says, but not these functions. Numbers that
// change from step to step lie in device memory, so that a captured graph reads new ones.
#include "device.cuh"

DEVICE float times(float a, float b) { return __fmul_rn(a, b); }
DEVICE float plus(float a, float b) { return __fadd_rn(a, b); }

struct Span {
    i64 start, stop;
    float keep;  // what weight decay leaves of a weight: 1 - learning rate * decay, or 1
    float unused;
};
#define ELEMENTS(i) (i64 i = spans[blockIdx.x].start + threadIdx.x; i < spans[blockIdx.x].stop; i += blockDim.x)

// The weights also as bf16 for the next step's products, if `narrow` is not 0.
DEVICE void keep_weight(float *weights, bf16 *narrow, i64 i, float weight) {
    weights[i] = weight;
    if (narrow) narrow[i] = from_float<bf16>(weight);
}

struct AdamWStep {
    float beta1, beta2, rest1, rest2;  // rest: 1 - beta, rounded once
    float grad_scale, step_size, epsilon;
};
// In place or not: new and old arrays are the same, or apart.
template <typename T>
DEVICE void adamw(float *weights, float *mean, float *square, bf16 *narrow, const float *old_weights,
                  const float *old_mean, const float *old_square, const T *grads, const Span *spans,
                  const AdamWStep *step) {
    AdamWStep s = *step;
    float keep = spans[blockIdx.x].keep;
    for ELEMENTS(i) {
        float slope = times(to_float(grads[i]), s.grad_scale);
        float m = plus(times(old_mean[i], s.beta1), times(slope, s.rest1));
        float v = plus(times(old_square[i], s.beta2), times(times(slope, slope), s.rest2));
        float move = times(__fdiv_rn(m, plus(__fsqrt_rn(v), s.epsilon)), s.step_size);
        mean[i] = m, square[i] = v;
        keep_weight(weights, narrow, i, plus(times(old_weights[i], keep), -move));
    }
}

struct OneMomentStep {
    float beta1, beta2, rest1, rest2;  // beta1: SGD's momentum
    float grad_scale, learning_rate;
};
template <typename T, bool NESTEROV>
DEVICE void sgd(float *weights, float *mean, bf16 *narrow, const float *old_weights, const float *old_mean,
                const T *grads, const Span *spans, const OneMomentStep *step) {
    OneMomentStep s = *step;
    float keep = spans[blockIdx.x].keep;
    for ELEMENTS(i) {
        float slope = times(to_float(grads[i]), s.grad_scale), velocity = plus(times(old_mean[i], s.beta1), slope);
        mean[i] = velocity;
        float move = times(NESTEROV ? plus(slope, times(velocity, s.beta1)) : velocity, s.learning_rate);
        keep_weight(weights, narrow, i, plus(times(old_weights[i], keep), -move));
    }
}
template <typename T>
DEVICE void lion(float *weights, float *mean, bf16 *narrow, const float *old_weights, const float *old_mean,
                 const T *grads, const Span *spans, const OneMomentStep *step) {
    OneMomentStep s = *step;
    float keep = spans[blockIdx.x].keep;
    for ELEMENTS(i) {
        float slope = times(to_float(grads[i]), s.grad_scale), before = old_mean[i];
        float move = plus(times(before, s.beta1), times(slope, s.rest1));
        move = move > 0.0f ? 1.0f : move < 0.0f ? -1.0f : move;  // the sign; NaN stays NaN
        mean[i] = plus(times(before, s.beta2), times(slope, s.rest2));
        keep_weight(weights, narrow, i, plus(times(old_weights[i], keep), -times(move, s.learning_rate)));
    }
}

#define OPTIMIZERS(suffix, T)                                                                                       \
    KERNEL adamw_##suffix(float *weights, float *mean, float *square, bf16 *narrow, const float *old_weights,       \
                          const float *old_mean, const float *old_square, const T *grads, const Span *spans,        \
                          const AdamWStep *step) {                                                                  \
        adamw<T>(weights, mean, square, narrow, old_weights, old_mean, old_square, grads, spans, step);             \
    }                                                                                                               \
    KERNEL sgd_##suffix(float *weights, float *mean, bf16 *narrow, const float *old_weights, const float *old_mean, \
                        const T *grads, const Span *spans, const OneMomentStep *step) {                             \
        sgd<T, false>(weights, mean, narrow, old_weights, old_mean, grads, spans, step);                            \
    }                                                                                                               \
    KERNEL nesterov_##suffix(float *weights, float *mean, bf16 *narrow, const float *old_weights,                   \
                             const float *old_mean, const T *grads, const Span *spans,                              \
                             const OneMomentStep *step) {                                                           \
        sgd<T, true>(weights, mean, narrow, old_weights, old_mean, grads, spans, step);                             \
    }                                                                                                               \
    KERNEL lion_##suffix(float *weights, float *mean, bf16 *narrow, const float *old_weights,                       \
                         const float *old_mean, const T *grads, const Span *spans, const OneMomentStep *step) {     \
        lion<T>(weights, mean, narrow, old_weights, old_mean, grads, spans, step);                                  \
    }                                                                                                               \
    /* One block each 16,384 elements of grads, n in all: squares[block] = their sum of squares, in a fixed order. */ \
    KERNEL block_squares_##suffix(float *squares, const T *grads, u64 n) {                                          \
        __shared__ float partial[WARP];                                                                             \
        u64 first = blockIdx.x * 16384ull, last = min(first + 16384ull, n);                                         \
        float sum = 0.0f;                                                                                           \
        for (u64 i = first + threadIdx.x; i < last; i += blockDim.x) sum += to_float(grads[i]) * to_float(grads[i]); \
        sum = block_sum(sum, partial);                                                                              \
        if (threadIdx.x == 0) squares[blockIdx.x] = sum;                                                            \
    }

OPTIMIZERS(f32, float)
OPTIMIZERS(bf16, bf16)

// One warp: out[0] = the root of the sum of `squares` (blocks,), added in their order in double precision; out[1] =
// the factor, at most 1, that reduces the norm to `limit`. A norm that is not finite stays so, for the host to see.
KERNEL norm_and_clip(float *out, const float *squares, int blocks, float limit) {
    if (threadIdx.x) return;
    double total = 0.0;
    for (int i = 0; i < blocks; i++) total += squares[i];
    double norm = sqrt(total);
    out[0] = (float)norm;
    out[1] = norm <= limit ? 1.0f : (float)(limit / norm);
}

// One block each 16,384 words of n: sums[block] = their sum, modulo 2**64, each times an odd number of its place, which
// counts from `first`. Integers alone, so no order is needed; sum_of in transfers.py has the same bits.
KERNEL state_sums(u64 *sums, const unsigned *words, u64 first, u64 n) {
    __shared__ u64 partial[WARP];
    u64 begin = blockIdx.x * 16384ull, last = min(begin + 16384ull, n), sum = 0;
    for (u64 i = begin + threadIdx.x; i < last; i += blockDim.x) {
        u64 z = (first + i + 1) * 0x9E3779B97F4A7C15ull;
        z = (z ^ z >> 32) * 0xD6E8FEB86659FD93ull;
        sum += words[i] * ((z ^ z >> 32) | 1ull);
    }
    for (int lanes = WARP / 2; lanes; lanes /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, lanes);
    if (threadIdx.x % WARP == 0) partial[threadIdx.x / WARP] = sum;
    __syncthreads();
    if (threadIdx.x) return;
    sum = 0;
    for (unsigned warp = 0; warp < blockDim.x / WARP; warp++) sum += partial[warp];
    sums[blockIdx.x] = sum;
}
