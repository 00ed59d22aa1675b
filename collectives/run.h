/* One execution of a program on one rank: where every operand lies, and the data part of an instruction. */
#ifndef ZBMD_RUN_H
#define ZBMD_RUN_H

#include "narrow.h"
#include "stores.h"

/* The numbers of program.py. */
enum { ZBMD_PUT, ZBMD_NOTIFY, ZBMD_WAIT, ZBMD_REDUCE, ZBMD_COPY };
enum { ZBMD_OUT, ZBMD_SCRATCH, ZBMD_INBOX, ZBMD_PUB, ZBMD_IN, ZBMD_BUFFERS = 32 };
enum { ZBMD_GROUP_MAX = 1022, ZBMD_WIDTH = 12, ZBMD_WIDE_BYTES = 4 };

/* The rows of a layout (layout.py): where each block begins and how long it is, in elements. */
enum { ZBMD_LENGTH, ZBMD_IN_WHOLE, ZBMD_IN_STAGED, ZBMD_OUT_WHOLE, ZBMD_OUT_STAGED, ZBMD_LAYOUT_ROWS };

typedef struct {
    char *(*address)[ZBMD_BUFFERS];   /* by rank, as are the next two rows */
    uint64_t *in_stride, *out_stride; /* under a layout: 1 if staged, else 0 */
    uint64_t *seen;
    char *scratch;
    uint64_t count, slot_bytes, item, blocks, pub_bytes;
    int per_block, dtype, narrow;
    int streams;             /* puts go past the cache */
    uint32_t divisor;        /* of an average; 0 otherwise */
    const uint64_t *layout;  /* ZBMD_LAYOUT_ROWS x blocks, or NULL: blocks of `count`, one stride apart */
    const uint64_t *extents; /* under a layout, by rank: elements of in (whole, staged) and out (whole, staged) */
    zbmd_kernel kernel;
} zbmd_run;

/* Where a block of `in` or `out` begins, in elements. */
static inline uint64_t zbmd_block_at(const zbmd_run *run, int rank, int buffer, int block) {
    uint64_t stride = buffer == ZBMD_IN ? run->in_stride[rank] : run->out_stride[rank];
    uint64_t row = buffer == ZBMD_IN ? ZBMD_IN_WHOLE : ZBMD_OUT_WHOLE;
    if (!run->layout) return (uint64_t)block * stride;
    return run->layout[(row + stride) * run->blocks + block];
}

/* Slots hold a 16-bit float as f32. */
static inline zbmd_place zbmd_place_of(int buffer, char *at) {
    return (zbmd_place){at, buffer == ZBMD_SCRATCH || buffer == ZBMD_INBOX};
}

static inline zbmd_place zbmd_locate(const zbmd_run *run, int rank, int buffer, int index, int block,
                                     uint64_t first) {
    if (buffer == ZBMD_SCRATCH)
        return zbmd_place_of(buffer, run->scratch + (uint64_t)index * run->slot_bytes);
    if (buffer == ZBMD_INBOX)
        return zbmd_place_of(buffer, run->address[rank][buffer] + (uint64_t)index * run->slot_bytes);
    if (buffer == ZBMD_OUT || buffer == ZBMD_IN)
        first += zbmd_block_at(run, rank, buffer, block);
    else if (buffer == ZBMD_PUB && run->layout)
        first += run->layout[ZBMD_IN_STAGED * run->blocks + block];
    return zbmd_place_of(buffer, run->address[rank][buffer] + first * run->item);
}

/* The operands of a put, reduce or copy; `b` only of a reduce. */
typedef struct {
    zbmd_place dst, a, b;
    uint64_t count;
} zbmd_move;

static inline zbmd_move zbmd_move_of(const zbmd_run *run, const int32_t *row, int own) {
    zbmd_move move = {{NULL, 0}, {NULL, 0}, {NULL, 0}, 0};
    int block = row[1] / run->per_block;
    uint64_t j = (uint64_t)(row[1] % run->per_block);
    uint64_t length = run->layout ? run->layout[block] : run->count;
    uint64_t first = j * length / run->per_block;
    move.count = (j + 1) * length / run->per_block - first;
    move.dst = zbmd_locate(run, row[0] == ZBMD_PUT ? row[2] : own, row[4], row[5], block, first);
    move.a = zbmd_locate(run, row[6], row[7], row[8], block, first);
    if (row[0] == ZBMD_REDUCE) move.b = zbmd_locate(run, row[9], row[10], row[11], block, first);
    return move;
}

/* Move or reduce the data. What is reduced into `out` is a chunk's end result. */
static inline void zbmd_apply(const zbmd_run *run, const int32_t *row, zbmd_move move) {
    uint32_t divisor = row[4] == ZBMD_OUT ? run->divisor : 0;
    if (!move.count) return;
    if (row[0] != ZBMD_REDUCE) {
        if (move.dst.at == move.a.at) return;
        if (run->narrow)
            zbmd_copy_narrow(run->dtype, move.dst, move.a, move.count);
        else if (run->streams && row[0] == ZBMD_PUT)
            zbmd_stream(move.dst.at, move.a.at, move.count * run->item);
        else
            memmove(move.dst.at, move.a.at, move.count * run->item);
    } else if (run->narrow) {
        zbmd_reduce_narrow(run->dtype, run->kernel, move.dst, move.a, move.b, move.count, divisor);
    } else {
        run->kernel(move.dst.at, move.a.at, move.b.at, move.count);
        if (divisor) zbmd_divide(run->dtype, move.dst.at, move.count, divisor);
    }
}

static inline void zbmd_perform(const zbmd_run *run, const int32_t *row, int own) {
    zbmd_apply(run, row, zbmd_move_of(run, row, own));
}

#endif
