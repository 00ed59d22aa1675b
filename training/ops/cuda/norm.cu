// Root-mean-square and layer norms over rows, forward and backward. x, y, dy, dx: (rows, features), row-major;
// gain, bias: (features,) float32; statistics: (rows, 2) float32, the mean (0 for RMS) and the inverse deviation.
#include "device.cuh"

// One block a row. y = (x - mean) * inverse * gain + bias. other, total: (rows, features), or 0: x is then x + other,
// rounded, and is written to total.
template <typename T, bool CENTRED>
DEVICE void normalise(T *y, float *statistics, const T *x, const float *gain, const float *bias, int features,
                      float epsilon, const T *other, T *total) {
    __shared__ float partial[WARP];
    u64 row = blockIdx.x;
    x += row * features, y += row * features;
    if (other) {
        other += row * features, total += row * features;
        for (int i = threadIdx.x; i < features; i += blockDim.x)
            total[i] = from_float<T>(to_float(x[i]) + to_float(other[i]));
        x = total;  // each thread reads what it has written
    }
    float mean = 0.0f;
    if (CENTRED) {
        float sum = 0.0f;
        for (int i = threadIdx.x; i < features; i += blockDim.x) sum += to_float(x[i]);
        mean = block_sum(sum, partial) / features;
    }
    float square = 0.0f;
    for (int i = threadIdx.x; i < features; i += blockDim.x) {
        float centred = to_float(x[i]) - mean;
        square += centred * centred;
    }
    float inverse = 1.0f / sqrtf(block_sum(square, partial) / features + epsilon);
    for (int i = threadIdx.x; i < features; i += blockDim.x) {
        float unit = (to_float(x[i]) - mean) * inverse;
        y[i] = from_float<T>(CENTRED ? unit * gain[i] + bias[i] : unit * gain[i]);
    }
    if (threadIdx.x == 0) statistics[2 * row] = mean, statistics[2 * row + 1] = inverse;
}

// One block a row. dx = (dy gain - unit mean(dy gain unit) - mean(dy gain)) * inverse + other; the last mean for layer
// norms. other: (rows, features), or 0.
template <typename T, bool CENTRED>
DEVICE void normalise_grad(T *dx, const T *dy, const T *x, const float *statistics, const float *gain, int features,
                           const T *other) {
    __shared__ float partial[WARP];
    u64 row = blockIdx.x;
    x += row * features, dx += row * features, dy += row * features;
    float mean = statistics[2 * row], inverse = statistics[2 * row + 1], along = 0.0f, level = 0.0f;
    for (int i = threadIdx.x; i < features; i += blockDim.x) {
        float slope = to_float(dy[i]) * gain[i];
        along += slope * (to_float(x[i]) - mean) * inverse;
        level += slope;
    }
    along = block_sum(along, partial) / features;
    level = CENTRED ? block_sum(level, partial) / features : 0.0f;
    for (int i = threadIdx.x; i < features; i += blockDim.x) {
        float slope = to_float(dy[i]) * gain[i], unit = (to_float(x[i]) - mean) * inverse;
        float made = (slope - unit * along - level) * inverse;
        dx[i] = from_float<T>(other ? made + to_float(other[row * features + i]) : made);
    }
}

// Partial sums over the rows of a run of `run` rows, in their order: block (c, r) has columns 32 c to 32 c + 31 of
// run r. dgain, dbias: (runs, features); `sum_runs` adds the runs up. dbias may be 0.
template <typename T>
DEVICE void gain_grad(float *dgain, float *dbias, const T *dy, const T *x, const float *statistics, int rows,
                      int features, int run) {
    __shared__ float sums[2][8][WARP + 1];
    int lane = threadIdx.x % WARP, strip = threadIdx.x / WARP, column = blockIdx.x * WARP + lane;
    int first = blockIdx.y * run, last = min(first + run, rows);
    float gain = 0.0f, bias = 0.0f;
    if (column < features)
        for (int row = first + strip; row < last; row += 8) {
            u64 at = (u64)row * features + column;
            float slope = to_float(dy[at]);
            gain += slope * (to_float(x[at]) - statistics[2 * row]) * statistics[2 * row + 1];
            bias += slope;
        }
    sums[0][strip][lane] = gain, sums[1][strip][lane] = bias;
    __syncthreads();
    if (strip < 2 && column < features && (strip == 0 || dbias)) {
        float total = 0.0f;
        for (int i = 0; i < 8; i++) total += sums[strip][i][lane];
        (strip ? dbias : dgain)[(u64)blockIdx.y * features + column] = total;
    }
}

// As gain_grad, of the columns of x alone: partial (runs, columns).
template <typename T> DEVICE void columns_of(float *partial, const T *x, int rows, int columns, int run) {
    __shared__ float sums[8][WARP + 1];
    int lane = threadIdx.x % WARP, strip = threadIdx.x / WARP, column = blockIdx.x * WARP + lane;
    int first = blockIdx.y * run, last = min(first + run, rows);
    float sum = 0.0f;
    if (column < columns)
        for (int row = first + strip; row < last; row += 8) sum += to_float(x[(u64)row * columns + column]);
    sums[strip][lane] = sum;
    __syncthreads();
    if (strip == 0 && column < columns) {
        float total = 0.0f;
        for (int i = 0; i < 8; i++) total += sums[i][lane];
        partial[(u64)blockIdx.y * columns + column] = total;
    }
}

#define NORMS(suffix, T)                                                                                             \
    KERNEL rms_norm_##suffix(T *y, float *statistics, const T *x, const float *gain, int features, float epsilon,    \
                             const T *other, T *total) {                                                             \
        normalise<T, false>(y, statistics, x, gain, 0, features, epsilon, other, total);                             \
    }                                                                                                                \
    KERNEL layer_norm_##suffix(T *y, float *statistics, const T *x, const float *gain, const float *bias,            \
                               int features, float epsilon, const T *other, T *total) {                              \
        normalise<T, true>(y, statistics, x, gain, bias, features, epsilon, other, total);                           \
    }                                                                                                                \
    KERNEL rms_norm_grad_##suffix(T *dx, const T *dy, const T *x, const float *statistics, const float *gain,        \
                                  int features, const T *other) {                                                    \
        normalise_grad<T, false>(dx, dy, x, statistics, gain, features, other);                                      \
    }                                                                                                                \
    KERNEL layer_norm_grad_##suffix(T *dx, const T *dy, const T *x, const float *statistics, const float *gain,      \
                                    int features, const T *other) {                                                  \
        normalise_grad<T, true>(dx, dy, x, statistics, gain, features, other);                                       \
    }                                                                                                                \
    KERNEL norm_gain_grad_##suffix(float *dgain, float *dbias, const T *dy, const T *x, const float *statistics,     \
                                   int rows, int features, int run) {                                                \
        gain_grad<T>(dgain, dbias, dy, x, statistics, rows, features, run);                                          \
    }                                                                                                                \
    KERNEL column_sums_##suffix(float *partial, const T *x, int rows, int columns, int run) {                        \
        columns_of<T>(partial, x, rows, columns, run);                                                               \
    }

NORMS(f32, float)
NORMS(bf16, bf16)

// out (columns,) = the sum over `runs` rows of partial (runs, columns), in their order.
KERNEL sum_runs(float *out, const float *partial, int runs, int columns) {
    int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= columns) return;
    float total = 0.0f;
    for (int run = 0; run < runs; run++) total += partial[(u64)run * columns + column];
    out[column] = total;
}
