// Operations on elements of flat arrays of n elements: activations, sums, casts, dropout. A grid of any size goes
// over them in strides. `y` and `dy` may be changed in place where a comment says so.
#include "device.cuh"

#define EACH(i, n) (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x)

#define ACTIVATIONS(suffix, T)                                                                              \
    KERNEL gelu_##suffix(T *y, const T *x, u64 n) {                                                         \
        for EACH(i, n) y[i] = from_float<T>(to_float(x[i]) * gelu_odds(to_float(x[i])));                    \
    }                                                                                                       \
    /* dy is multiplied by the slope at x, in place. */                                                     \
    KERNEL gelu_grad_##suffix(T *dy, const T *x, u64 n) {                                                   \
        for EACH(i, n) dy[i] = from_float<T>(to_float(dy[i]) * gelu_slope(to_float(x[i])));                 \
    }                                                                                                       \
    KERNEL squared_relu_##suffix(T *y, const T *x, u64 n) {                                                 \
        for EACH(i, n) {                                                                                    \
            float p = positive(to_float(x[i]));                                                             \
            y[i] = from_float<T>(p * p);                                                                    \
        }                                                                                                   \
    }                                                                                                       \
    KERNEL squared_relu_grad_##suffix(T *dy, const T *x, u64 n) {                                           \
        for EACH(i, n) dy[i] = from_float<T>(to_float(dy[i]) * (positive(to_float(x[i])) * 2.0f));          \
    }                                                                                                       \
    KERNEL add_##suffix(T *y, const T *a, const T *b, u64 n) {                                              \
        for EACH(i, n) y[i] = from_float<T>(to_float(a[i]) + to_float(b[i]));                               \
    }                                                                                                       \
    /* Each row of x (n elements in all) gets the bias, (features,) float32. */                             \
    KERNEL add_bias_##suffix(T *y, const T *x, const float *bias, u64 n, int features) {                    \
        for EACH(i, n) y[i] = from_float<T>(to_float(x[i]) + bias[i % features]);                           \
    }

ACTIVATIONS(f32, float)
ACTIVATIONS(bf16, bf16)

KERNEL cast_f32_bf16(bf16 *y, const float *x, u64 n) {
    for EACH(i, n) y[i] = from_float<bf16>(x[i]);
}
KERNEL cast_bf16_f32(float *y, const bf16 *x, u64 n) {
    for EACH(i, n) y[i] = to_float(x[i]);
}

// Philox4x32-10: the four words of the block with counter (a, b, c, d), as in training/native/philox.h.
DEVICE Words4 philox(u32 a, u32 b, u32 c, u32 d, u64 key) {
    u32 low = (u32)key, high = (u32)(key >> 32);
    for (int round = 0; round < 10; round++) {
        u64 left = (u64)a * 0xD2511F53u, right = (u64)c * 0xCD9E8D57u;
        a = (u32)(right >> 32) ^ b ^ low;
        b = (u32)right;
        c = (u32)(left >> 32) ^ d ^ high;
        d = (u32)left;
        low += 0x9E3779B9u;
        high += 0xBB67AE85u;
    }
    return {a, b, c, d};
}

// y = x, with each element times `factor`, or zero if its random word is below `least`. Element i is element
// start + i of the samples, which have `each` elements. noise: the seed, the step, and the number of each sample: a
// captured launch reads those of the step that it is replayed in. site: with the purpose in its highest byte. In place
// or not. A thread takes 4 neighbours, which share a block of words.
template <typename T>
DEVICE void drop(T *y, const T *x, const i64 *noise, u64 n, u64 start, u64 each, u32 site, u32 least, float factor) {
    u64 seed = noise[0];
    u32 step = (u32)noise[1];
    const i64 *samples = noise + 2;
    for (u64 first = (blockIdx.x * (u64)blockDim.x + threadIdx.x) * 4; first < n;
         first += (u64)gridDim.x * blockDim.x * 4) {
        u64 block = ~0ull, number = ~0ull;
        Words4 words = {};
        for (int k = 0; k < 4 && first + k < n; k++) {
            u64 sample = (start + first + k) / each, inside = (start + first + k) % each;
            if (inside / 4 != block || sample != number) {
                block = inside / 4, number = sample;
                words = philox((u32)block, site, step, (u32)samples[sample], seed);
            }
            u32 at = inside % 4, word = at == 0 ? words.x : at == 1 ? words.y : at == 2 ? words.z : words.w;
            y[first + k] = from_float<T>(to_float(x[first + k]) * (word >= least ? 1.0f : 0.0f) * factor);
        }
    }
}
KERNEL dropout_f32(float *y, const float *x, const i64 *noise, u64 n, u64 start, u64 each, u32 site, u32 least,
                   float factor) {
    drop<float>(y, x, noise, n, start, each, site, least, factor);
}
KERNEL dropout_bf16(bf16 *y, const bf16 *x, const i64 *noise, u64 n, u64 start, u64 each, u32 site, u32 least,
                    float factor) {
    drop<bf16>(y, x, noise, n, start, each, site, least, factor);
}
