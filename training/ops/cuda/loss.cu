// Embedding, and cross-entropy with its gradient.
#include "device.cuh"

// One block a row of logits, (rows, classes). losses[row] = log(sum(exp(logits))) - logits[target]; the logits
// become their gradient, scale (softmax - one_hot), in place. scale: one float in device memory. A target outside
// the classes makes loss and gradient NaN.
template <typename T>
DEVICE void row_loss(T *logits, float *losses, const i64 *targets, const float *scale, int classes) {
    __shared__ float partial[WARP];
    u64 row = blockIdx.x;
    logits += row * classes;
    i64 target = targets[row];
    bool known = target >= 0 && target < classes;
    float picked = known ? to_float(logits[target]) : __int_as_float(0x7fc00000);
    float most = __int_as_float(0xff800000);
    for (int i = threadIdx.x; i < classes; i += blockDim.x) most = larger(to_float(logits[i]), most);
    most = block_max(most, partial);  // after it, every thread has read the target's logit
    float sum = 0.0f;
    for (int i = threadIdx.x; i < classes; i += blockDim.x) sum += fast_exp(to_float(logits[i]) - most);
    float log_sum = most + logf(block_sum(sum, partial)), factor = known ? *scale : picked;
    for (int i = threadIdx.x; i < classes; i += blockDim.x) {
        float share = fast_exp(to_float(logits[i]) - log_sum);
        logits[i] = from_float<T>((share - (i == target ? 1.0f : 0.0f)) * factor);
    }
    if (threadIdx.x == 0) losses[row] = log_sum - picked;
}
KERNEL cross_entropy_f32(float *logits, float *losses, const i64 *targets, const float *scale, int classes) {
    row_loss<float>(logits, losses, targets, scale, classes);
}
KERNEL cross_entropy_bf16(bf16 *logits, float *losses, const i64 *targets, const float *scale, int classes) {
    row_loss<bf16>(logits, losses, targets, scale, classes);
}

// Cross-entropy of logits whose classes are divided over ranks, (rows, classes) here. One block a row:
// sums[row] = log(sum(exp(logits))), and sums[rows + row] = logits[place], 0 where `places` has -1.
template <typename T>
DEVICE void row_sums(float *sums, const T *logits, const i64 *places, int classes) {
    __shared__ float partial[WARP];
    u64 row = blockIdx.x;
    logits += row * classes;
    float most = __int_as_float(0xff800000);
    for (int i = threadIdx.x; i < classes; i += blockDim.x) most = larger(to_float(logits[i]), most);
    most = block_max(most, partial);
    float sum = 0.0f;
    for (int i = threadIdx.x; i < classes; i += blockDim.x) sum += fast_exp(to_float(logits[i]) - most);
    sum = block_sum(sum, partial);
    if (threadIdx.x) return;
    i64 place = places[row];
    sums[row] = most + logf(sum);
    sums[gridDim.x + row] = place >= 0 && place < classes ? to_float(logits[place]) : 0.0f;
}
KERNEL part_sums_f32(float *sums, const float *logits, const i64 *places, int classes) {
    row_sums<float>(sums, logits, places, classes);
}
KERNEL part_sums_bf16(float *sums, const bf16 *logits, const i64 *places, int classes) {
    row_sums<bf16>(sums, logits, places, classes);
}

// One block a row: the logits become their gradient, factor (softmax - one_hot), in place, given the log of the sum
// over the classes of all ranks.
template <typename T>
DEVICE void row_slopes(T *logits, const float *log_sums, const i64 *places, float factor, int classes) {
    u64 row = blockIdx.x;
    logits += row * classes;
    float log_sum = log_sums[row];
    i64 place = places[row];
    for (int i = threadIdx.x; i < classes; i += blockDim.x) {
        float share = fast_exp(to_float(logits[i]) - log_sum);
        logits[i] = from_float<T>((share - (i == place ? 1.0f : 0.0f)) * factor);
    }
}
KERNEL part_slopes_f32(float *logits, const float *log_sums, const i64 *places, float factor, int classes) {
    row_slopes<float>(logits, log_sums, places, factor, classes);
}
KERNEL part_slopes_bf16(bf16 *logits, const float *log_sums, const i64 *places, float factor, int classes) {
    row_slopes<bf16>(logits, log_sums, places, factor, classes);
}

// One block a row: y (rows, features) = table (vocabulary, features) at tokens. A token outside gives NaN.
template <typename T> DEVICE void rows_of(T *y, const T *table, const i64 *tokens, int vocabulary, int features) {
    i64 token = tokens[blockIdx.x];
    bool known = token >= 0 && token < vocabulary;
    for (int i = threadIdx.x; i < features; i += blockDim.x)
        y[(u64)blockIdx.x * features + i] = known ? table[token * features + i] : from_float<T>(__int_as_float(0x7fc00000));
}
KERNEL embedding_f32(float *y, const float *table, const i64 *tokens, int vocabulary, int features) {
    rows_of<float>(y, table, tokens, vocabulary, features);
}
KERNEL embedding_bf16(bf16 *y, const bf16 *table, const i64 *tokens, int vocabulary, int features) {
    rows_of<bf16>(y, table, tokens, vocabulary, features);
}

// One block a token of the vocabulary. out (vocabulary, features) float32 = the rows of dy (rows, features), added up
// by token in their order: `order` has the rows sorted by token, stable, and `starts` (vocabulary + 1,) where each
// token's rows begin in it. The row of a token that does not occur becomes zero. So the grid is the same in each step.
template <typename T>
DEVICE void add_rows(float *out, const T *dy, const int *order, const int *starts, int features) {
    int first = starts[blockIdx.x], last = starts[blockIdx.x + 1];
    for (int i = threadIdx.x; i < features; i += blockDim.x) {
        float sum = 0.0f;
        for (int at = first; at < last; at++) sum += to_float(dy[(u64)order[at] * features + i]);
        out[(u64)blockIdx.x * features + i] = sum;
    }
}
KERNEL embedding_grad_f32(float *out, const float *dy, const int *order, const int *starts, int features) {
    add_rows<float>(out, dy, order, starts, features);
}
KERNEL embedding_grad_bf16(float *out, const bf16 *dy, const int *order, const int *starts, int features) {
    add_rows<bf16>(out, dy, order, starts, features);
}
