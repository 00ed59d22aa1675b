/* Causal attention in blocks, forwards and backwards; included by engine.h, once for each type of real.
 *
 * The softmax is taken as the keys go by, and the (T, T) weights exist one block at a time: T. Dao and others,
 * "FlashAttention", 2022, arXiv:2205.14135; M. Milakov, N. Gimelshein, "Online normalizer calculation for
 * softmax", 2018, arXiv:1805.02867. Blocks above the diagonal are never computed. A head's rows are packed side
 * by side, `wide` elements each, a multiple of LANES; keys also with positions innermost. What is behind the
 * last row or feature is zero. */
#define MICRO_ROWS 8
#define QUERY_BLOCK 32
#define KEY_BLOCK 64

INLINE size_t NAME(up)(size_t n, size_t to) { return (n + to - 1) / to * to; }

/* c (m, n) += a (m, k) b (k, n): a by its strides, m a multiple of MICRO_ROWS, n of LANES; sums in order of k. */
INLINE void NAME(add_product)(size_t m, size_t n, size_t k, const REAL *a, size_t a_row, size_t a_k, const REAL *b,
                              size_t b_row, REAL *c, size_t c_row) {
    for (size_t j = 0; j < n; j += LANES)
        for (size_t i = 0; i < m; i += MICRO_ROWS) {
            VEC sum[MICRO_ROWS];
            const REAL *from = a + i * a_row;
            for (int r = 0; r < MICRO_ROWS; r++) sum[r] = LOAD(c + (i + r) * c_row + j);
            for (size_t p = 0; p < k; p++) {
                VEC along = LOAD(b + p * b_row + j);
                for (int r = 0; r < MICRO_ROWS; r++) sum[r] += from[r * a_row + p * a_k] * along;
            }
            for (int r = 0; r < MICRO_ROWS; r++) STORE(c + (i + r) * c_row + j, sum[r]);
        }
}

/* One head of one sequence: its rows packed, and what is kept of each row. */
typedef struct {
    size_t length, depth, wide, tall;
    REAL *q, *k, *v, *k_across, *v_across, *out, *dq, *dk, *dv, *block, *slope, *bias, *weigh;
} NAME(head);

/* Elements of scratch for one head; lays `head` out in `memory` where that is given. */
INLINE size_t NAME(lay_out)(NAME(head) * head, REAL *memory, size_t length, size_t depth) {
    size_t wide = NAME(up)(depth, LANES), tall = NAME(up)(length, KEY_BLOCK), rows = wide * tall;
    REAL **parts[] = {&head->q, &head->k, &head->v, &head->k_across, &head->v_across,
                      &head->out, &head->dq, &head->dk, &head->dv};
    head->length = length, head->depth = depth, head->wide = wide, head->tall = tall;
    size_t used = 0;
    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++, used += rows)
        if (memory) *parts[i] = memory + used;
    if (memory) {
        head->block = memory + used, head->slope = head->block + QUERY_BLOCK * KEY_BLOCK;
        head->bias = head->slope + QUERY_BLOCK * KEY_BLOCK, head->weigh = head->bias + length + tall;
    }
    return used + 2 * QUERY_BLOCK * KEY_BLOCK + length + tall + 2 * tall;
}

size_t NAME(attention_scratch)(size_t length, size_t depth) {
    NAME(head) head;
    return NAME(lay_out)(&head, NULL, length, depth);
}

INLINE void NAME(pack)(const NAME(head) * head, REAL *into, REAL *across, const REAL *from, size_t stride,
                       REAL scale) {
    memset(into, 0, head->tall * head->wide * sizeof(REAL));
    for (size_t i = 0; i < head->length; i++)
        for (size_t f = 0; f < head->depth; f++) into[i * head->wide + f] = from[i * stride + f] * scale;
    if (!across) return;
    for (size_t f = 0; f < head->depth; f++)
        for (size_t i = 0; i < head->tall; i++) across[f * head->tall + i] = into[i * head->wide + f];
}

/* The bias by distance, the other way round: a query's row of it begins `length - 1 - query` in, and what
 * lies in its future is minus infinity. */
INLINE void NAME(pack_bias)(const NAME(head) * head, const REAL *bias) {
    for (size_t i = 0; i < head->length; i++) head->bias[i] = bias[head->length - 1 - i];
    for (size_t i = 0; i < head->tall; i++) head->bias[head->length + i] = -INFINITY;
}

INLINE const REAL *NAME(bias_of)(const NAME(head) * head, size_t query, size_t key) {
    return head->bias + head->length - 1 - query + key;
}

INLINE size_t NAME(keys_of)(size_t last_query, size_t first_key) {
    size_t keys = NAME(up)(last_query + 1 - first_key, LANES);
    return keys < KEY_BLOCK ? keys : KEY_BLOCK;
}

/* One row of scores becomes odds beside the largest score so far; returns what all before has to be scaled by. */
INLINE REAL NAME(row_of_odds)(REAL *scores, const REAL *bias, size_t n, REAL *most, REAL *total) {
    VEC top = *most - (VEC){0}, sum = {0};
    for (size_t i = 0; i < n; i += LANES) {
        VEC score = LOAD(scores + i) + LOAD(bias + i);
        STORE(scores + i, score);
        top = NAME(larger)(score, top);
    }
    REAL before = *most;
    *most = NAME(largest_lane)(top);
    for (size_t i = 0; i < n; i += LANES) {
        VEC odds = NAME(exp)(LOAD(scores + i) - *most);
        STORE(scores + i, odds);
        sum += odds;
    }
    VEC fade = NAME(exp)(before - *most - (VEC){0});
    *total = *total * fade[0] + NAME(add_lanes)(sum);
    return fade[0];
}

INLINE void NAME(queries_forward)(const NAME(head) * head, size_t first, REAL *out) {
    size_t rows = head->length - first < QUERY_BLOCK ? head->length - first : QUERY_BLOCK;
    size_t tall = NAME(up)(rows, MICRO_ROWS), last = first + rows - 1, wide = head->wide;
    REAL most[QUERY_BLOCK], total[QUERY_BLOCK];
    for (size_t r = 0; r < QUERY_BLOCK; r++) most[r] = -INFINITY, total[r] = 0;
    memset(out, 0, tall * wide * sizeof(REAL));
    for (size_t key = 0; key <= last; key += KEY_BLOCK) {
        size_t keys = NAME(keys_of)(last, key);
        memset(head->block, 0, tall * KEY_BLOCK * sizeof(REAL));
        NAME(add_product)(tall, keys, head->depth, head->q + first * wide, wide, 1, head->k_across + key,
                          head->tall, head->block, KEY_BLOCK);
        for (size_t r = 0; r < rows; r++) {
            REAL fade = NAME(row_of_odds)(head->block + r * KEY_BLOCK, NAME(bias_of)(head, first + r, key), keys,
                                          &most[r], &total[r]);
            if (key > 0)
                for (size_t f = 0; f < wide; f += LANES) STORE(out + r * wide + f, LOAD(out + r * wide + f) * fade);
        }
        memset(head->block + rows * KEY_BLOCK, 0, (tall - rows) * KEY_BLOCK * sizeof(REAL));
        NAME(add_product)(tall, wide, keys, head->block, KEY_BLOCK, 1, head->v + key * wide, wide, out, wide);
    }
    for (size_t r = 0; r < rows; r++) {
        head->weigh[first + r] = most[r] + LOG(total[r]);
        for (size_t f = 0; f < wide; f += LANES)
            STORE(out + r * wide + f, LOAD(out + r * wide + f) * (1 / total[r]));
    }
}

/* y (batch * length, heads * depth) and, of each (sequence, head, query), the log of its sum of exponentials.
 * qkv: (batch * length, 3 * heads * depth); bias: (heads, bias_row), by distance. */
ZBMD_CLONES void NAME(attention)(REAL *y, REAL *logs, REAL *scratch, const REAL *qkv, const REAL *bias,
                                 size_t bias_row, size_t batch, size_t length, size_t heads, size_t depth) {
    NAME(head) head;
    NAME(lay_out)(&head, scratch, length, depth);
    size_t features = heads * depth;
    REAL scale = 1 / SQRT((REAL)depth);
    for (size_t h = 0; h < heads; h++) {
        NAME(pack_bias)(&head, bias + h * bias_row);
        for (size_t b = 0; b < batch; b++) {
            const REAL *from = qkv + b * length * 3 * features + h * depth;
            NAME(pack)(&head, head.q, NULL, from, 3 * features, scale);
            NAME(pack)(&head, head.k, head.k_across, from + features, 3 * features, 1);
            NAME(pack)(&head, head.v, NULL, from + 2 * features, 3 * features, 1);
            for (size_t first = 0; first < length; first += QUERY_BLOCK)
                NAME(queries_forward)(&head, first, head.out + first * head.wide);
            for (size_t i = 0; i < length; i++)
                memcpy(y + (b * length + i) * features + h * depth, head.out + i * head.wide, depth * sizeof(REAL));
            memcpy(logs + (b * heads + h) * length, head.weigh, length * sizeof(REAL));
        }
    }
}

/* The weights and the slopes of the scores, of one block of queries and keys. */
INLINE void NAME(weigh_block)(const NAME(head) * head, size_t first, size_t rows, size_t tall, size_t key,
                              size_t keys) {
    size_t wide = head->wide;
    memset(head->block, 0, tall * KEY_BLOCK * sizeof(REAL));
    memset(head->slope, 0, tall * KEY_BLOCK * sizeof(REAL));
    NAME(add_product)(tall, keys, head->depth, head->q + first * wide, wide, 1, head->k_across + key, head->tall,
                      head->block, KEY_BLOCK);
    NAME(add_product)(tall, keys, head->depth, head->out + first * wide, wide, 1, head->v_across + key, head->tall,
                      head->slope, KEY_BLOCK);
    for (size_t r = 0; r < rows; r++) {
        REAL *weights = head->block + r * KEY_BLOCK, *slopes = head->slope + r * KEY_BLOCK;
        const REAL *bias = NAME(bias_of)(head, first + r, key);
        REAL log = head->weigh[first + r], along = head->weigh[head->tall + first + r];
        for (size_t i = 0; i < keys; i += LANES) {
            VEC weight = NAME(exp)(LOAD(weights + i) + LOAD(bias + i) - log);
            STORE(weights + i, weight);
            STORE(slopes + i, weight * (LOAD(slopes + i) - along));
        }
    }
    memset(head->block + rows * KEY_BLOCK, 0, (tall - rows) * KEY_BLOCK * sizeof(REAL));
    memset(head->slope + rows * KEY_BLOCK, 0, (tall - rows) * KEY_BLOCK * sizeof(REAL));
}

INLINE void NAME(queries_backward)(const NAME(head) * head, size_t first) {
    size_t rows = head->length - first < QUERY_BLOCK ? head->length - first : QUERY_BLOCK;
    size_t tall = NAME(up)(rows, MICRO_ROWS), last = first + rows - 1, wide = head->wide;
    for (size_t key = 0; key <= last; key += KEY_BLOCK) {
        size_t keys = NAME(keys_of)(last, key);
        NAME(weigh_block)(head, first, rows, tall, key, keys);
        NAME(add_product)(keys, wide, rows, head->block, 1, KEY_BLOCK, head->out + first * wide, wide,
                          head->dv + key * wide, wide);
        NAME(add_product)(tall, wide, keys, head->slope, KEY_BLOCK, 1, head->k + key * wide, wide,
                          head->dq + first * wide, wide);
        NAME(add_product)(keys, wide, rows, head->slope, 1, KEY_BLOCK, head->q + first * wide, wide,
                          head->dk + key * wide, wide);
    }
}

INLINE void NAME(unpack)(const NAME(head) * head, REAL *into, size_t stride, const REAL *from, REAL scale) {
    for (size_t i = 0; i < head->length; i++)
        for (size_t f = 0; f < head->depth; f++) into[i * stride + f] = from[i * head->wide + f] * scale;
}

/* dqkv of all, from dy and what `attention` was given and returned. */
ZBMD_CLONES void NAME(attention_grad)(REAL *dqkv, REAL *scratch, const REAL *dy, const REAL *y, const REAL *logs,
                                      const REAL *qkv, const REAL *bias, size_t bias_row, size_t batch,
                                      size_t length, size_t heads, size_t depth) {
    NAME(head) head;
    NAME(lay_out)(&head, scratch, length, depth);
    size_t features = heads * depth, stride = 3 * features;
    REAL scale = 1 / SQRT((REAL)depth);
    for (size_t h = 0; h < heads; h++) {
        NAME(pack_bias)(&head, bias + h * bias_row);
        for (size_t b = 0; b < batch; b++) {
            size_t place = b * length * features + h * depth;
            const REAL *from = qkv + b * length * stride + h * depth;
            REAL *into = dqkv + b * length * stride + h * depth;
            NAME(pack)(&head, head.q, NULL, from, stride, scale);
            NAME(pack)(&head, head.k, head.k_across, from + features, stride, 1);
            NAME(pack)(&head, head.v, head.v_across, from + 2 * features, stride, 1);
            NAME(pack)(&head, head.out, NULL, dy + place, features, 1);
            memset(head.dq, 0, 3 * head.tall * head.wide * sizeof(REAL));
            for (size_t i = 0; i < length; i++) {
                head.weigh[i] = logs[(b * heads + h) * length + i];
                head.weigh[head.tall + i] =
                    NAME(row_dot)(dy + place + i * features, y + place + i * features, depth, 0);
            }
            for (size_t first = 0; first < length; first += QUERY_BLOCK) NAME(queries_backward)(&head, first);
            NAME(unpack)(&head, into, stride, head.dq, scale);
            NAME(unpack)(&head, into + features, stride, head.dk, 1);
            NAME(unpack)(&head, into + 2 * features, stride, head.dv, 1);
        }
    }
}
