/* Operations on rows and elements; included by engine.h, once for each type of real (see lanes.h).
 * Arrays are contiguous; `dst` may be the source where a comment says so. */

/* Elements: `expression` of the vectors a and b. dst may be a or b. */
#define ELEMENTS(name, expression)                                                                   \
    ZBMD_CLONES void NAME(name)(REAL *dst, const REAL *left, const REAL *right, size_t n) {          \
        size_t i = 0;                                                                                \
        for (; i + LANES <= n; i += LANES) {                                                         \
            VEC a = LOAD(left + i), b = LOAD(right + i);                                             \
            STORE(dst + i, (expression));                                                            \
        }                                                                                            \
        if (i < n) {                                                                                 \
            VEC a = NAME(load_part)(left + i, n - i, 0), b = NAME(load_part)(right + i, n - i, 0);   \
            NAME(store_part)(dst + i, (expression), n - i);                                          \
        }                                                                                            \
    }

#define GELU_SCALE ((REAL)1.59576912160573081145) /* 2 * sqrt(2 / pi) */
#define GELU_CUBIC ((REAL)0.044715)

/* The tanh form of GELU is x times this, a logistic function; 0 where it is too small for an exponential, so that
 * minus infinity gives NaN, as in PyTorch. */
INLINE VEC NAME(gelu_odds)(VEC x) {
    VEC inner = x * GELU_SCALE * (x * x * GELU_CUBIC + (REAL)1);
    return SELECT(inner < -EXP_LIMIT, (VEC){0}, (REAL)1 / (NAME(exp)(-inner) + (REAL)1));
}

INLINE VEC NAME(gelu_slope)(VEC x) {
    VEC odds = NAME(gelu_odds)(x);
    VEC inner_slope = (x * x * ((REAL)3 * GELU_CUBIC) + (REAL)1) * GELU_SCALE;
    return odds + x * odds * ((REAL)1 - odds) * inner_slope;
}

INLINE VEC NAME(positive)(VEC x) { return SELECT(x < (REAL)0, (VEC){0}, x); }

ELEMENTS(gelu, a * NAME(gelu_odds)(b))
ELEMENTS(gelu_grad, a * NAME(gelu_slope)(b))
ELEMENTS(squared_relu, NAME(positive)(a) * NAME(positive)(b))
ELEMENTS(squared_relu_grad, a * (NAME(positive)(b) * (REAL)2))

/* The sum over a row of `expression` of the vectors a and b; where a row ends both are `rest`. */
#define ROW_SUM(name, expression)                                                                    \
    INLINE REAL NAME(name)(const REAL *left, const REAL *right, size_t n, REAL rest) {               \
        VEC sum = {0};                                                                               \
        size_t i = 0;                                                                                \
        for (; i + LANES <= n; i += LANES) {                                                         \
            VEC a = LOAD(left + i), b = LOAD(right + i);                                             \
            (void)b;                                                                                 \
            sum += (expression);                                                                     \
        }                                                                                            \
        if (i < n) {                                                                                 \
            VEC a = NAME(load_part)(left + i, n - i, rest);                                          \
            VEC b = NAME(load_part)(right + i, n - i, rest);                                         \
            (void)b;                                                                                 \
            sum += (expression);                                                                     \
        }                                                                                            \
        return NAME(add_lanes)(sum);                                                                 \
    }

ROW_SUM(row_sum, a)
ROW_SUM(row_dot, a *b)
ROW_SUM(row_spread, (a - rest) * (b - rest))

/* y = (x - mean) / sqrt(spread / n + epsilon) * gain (+ bias). Without a bias the mean is taken for 0: that
 * is the root-mean-square norm. `rows` keeps mean and inverse of each row for the way back. */
ZBMD_CLONES void NAME(norm)(REAL *y, REAL *rows, const REAL *x, const REAL *gain, const REAL *bias, size_t count,
                            size_t n, REAL epsilon) {
    for (size_t row = 0; row < count; row++, x += n, y += n) {
        REAL mean = bias ? NAME(row_sum)(x, x, n, 0) / (REAL)n : 0;
        REAL inverse = 1 / SQRT(NAME(row_spread)(x, x, n, mean) / (REAL)n + epsilon);
        rows[2 * row] = mean;
        rows[2 * row + 1] = inverse;
        for (size_t i = 0; i < n; i++) y[i] = (x[i] - mean) * inverse * gain[i] + (bias ? bias[i] : 0);
    }
}

/* Turns dy into dx, and adds the rows up, in order, in dgain and dbias (which is NULL where there is none). */
ZBMD_CLONES void NAME(norm_grad)(REAL *restrict dy, REAL *restrict dgain, REAL *restrict dbias,
                                 const REAL *restrict rows, const REAL *restrict x, const REAL *restrict gain,
                                 size_t count, size_t n) {
    memset(dgain, 0, n * sizeof(REAL));
    if (dbias) memset(dbias, 0, n * sizeof(REAL));
    for (size_t row = 0; row < count; row++, x += n, dy += n) {
        REAL mean = rows[2 * row], inverse = rows[2 * row + 1];
        VEC along = {0}, level = {0};
        if (dbias)
            for (size_t i = 0; i < n; i++) dbias[i] += dy[i];
        for (size_t i = 0; i < n; i += LANES) {
            size_t left = n - i < LANES ? n - i : LANES;
            VEC unit, slope, total;
            if (left == LANES) {
                unit = (LOAD(x + i) - mean) * inverse;
                slope = LOAD(dy + i);
                total = LOAD(dgain + i) + slope * unit;
                slope *= LOAD(gain + i);
                STORE(dgain + i, total);
                STORE(dy + i, slope);
            } else {
                unit = (NAME(load_part)(x + i, left, mean) - mean) * inverse;
                slope = NAME(load_part)(dy + i, left, 0);
                total = NAME(load_part)(dgain + i, left, 0) + slope * unit;
                slope *= NAME(load_part)(gain + i, left, 0);
                NAME(store_part)(dgain + i, total, left);
                NAME(store_part)(dy + i, slope, left);
            }
            along += slope * unit;
            level += slope;
        }
        REAL share = NAME(add_lanes)(along) / (REAL)n;
        REAL shift = dbias ? NAME(add_lanes)(level) / (REAL)n : 0;
        for (size_t i = 0; i < n; i++)
            dy[i] = (dy[i] - (x[i] - mean) * inverse * share - shift) * inverse;
    }
}

INLINE REAL NAME(row_most)(const REAL *x, size_t n) {
    VEC most = -INFINITY - (VEC){0};
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) most = NAME(larger)(LOAD(x + i), most);
    if (i < n) most = NAME(larger)(NAME(load_part)(x + i, n - i, -INFINITY), most);
    return NAME(largest_lane)(most);
}

INLINE REAL NAME(row_odds)(const REAL *x, size_t n, REAL most) {
    VEC sum = {0};
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) sum += NAME(exp)(LOAD(x + i) - most);
    if (i < n) sum += NAME(exp)(NAME(load_part)(x + i, n - i, -INFINITY) - most);
    return NAME(add_lanes)(sum);
}

/* Returns the sum of -log softmax(logits)[target]; `logs` keeps the log of each row's sum of exponentials.
 * Targets are checked by the caller. */
ZBMD_CLONES double NAME(cross_entropy)(REAL *logs, const REAL *logits, const int64_t *targets, size_t count,
                                       size_t n) {
    double total = 0;
    for (size_t row = 0; row < count; row++, logits += n) {
        REAL most = NAME(row_most)(logits, n);
        logs[row] = most + LOG(NAME(row_odds)(logits, n, most));
        total += (double)(logs[row] - logits[targets[row]]);
    }
    return total;
}

ZBMD_CLONES void NAME(cross_entropy_grad)(REAL *grad, const REAL *logs, const REAL *logits,
                                          const int64_t *targets, size_t count, size_t n, REAL scale) {
    for (size_t row = 0; row < count; row++, logits += n, grad += n) {
        size_t i = 0;
        for (; i + LANES <= n; i += LANES) STORE(grad + i, NAME(exp)(LOAD(logits + i) - logs[row]) * scale);
        if (i < n) {
            VEC x = NAME(load_part)(logits + i, n - i, 0);
            NAME(store_part)(grad + i, NAME(exp)(x - logs[row]) * scale, n - i);
        }
        grad[targets[row]] -= scale;
    }
}

/* table[tokens[row]] += dy[row], in the order of the rows; the tokens are checked by the caller. */
ZBMD_CLONES void NAME(embedding_grad)(REAL *restrict table, const REAL *restrict dy, const int64_t *tokens,
                                      size_t vocabulary, size_t count, size_t n) {
    memset(table, 0, vocabulary * n * sizeof(REAL));
    for (size_t row = 0; row < count; row++, dy += n) {
        REAL *into = table + (size_t)tokens[row] * n;
        for (size_t i = 0; i < n; i++) into[i] += dy[i];
    }
}

/* One block of AdamW, whose new state may be the old one; factors: beta1, beta2, grad_scale, step_size, epsilon, keep (see optim/elementwise.py). */
ZBMD_CLONES void NAME(adamw)(REAL *weights, REAL *mean, REAL *square, const REAL *old_weights,
                             const REAL *old_mean, const REAL *old_square, const REAL *grads, size_t n,
                             const double *factors) {
    REAL beta1 = (REAL)factors[0], beta2 = (REAL)factors[1], scale = (REAL)factors[2];
    REAL fresh1 = (REAL)(1 - factors[0]), fresh2 = (REAL)(1 - factors[1]);
    REAL step_size = (REAL)factors[3], epsilon = (REAL)factors[4], keep = (REAL)factors[5];
    _Pragma("GCC ivdep") for (size_t i = 0; i < n; i++) {
        REAL grad = grads[i] * scale;
        REAL m = old_mean[i] * beta1 + grad * fresh1;
        REAL s = old_square[i] * beta2 + grad * grad * fresh2;
        mean[i] = m;
        square[i] = s;
        weights[i] = old_weights[i] * keep - m / (SQRT(s) + epsilon) * step_size;
    }
}
