/* One execution of a program on one rank: where every operand lies, and the data part of an instruction. */
#ifndef ZBMD_RUN_H
#define ZBMD_RUN_H

#include "half_floats.h"
#include "peers.h"
#include "stores.h"
#include "transport/native/nontemporal.h"

/* The numbers of program.py. */
enum { ZBMD_PUT, ZBMD_NOTIFY, ZBMD_WAIT, ZBMD_REDUCE, ZBMD_COPY, ZBMD_FINISH };
enum { ZBMD_OUT, ZBMD_SCRATCH, ZBMD_INBOX, ZBMD_PUB, ZBMD_IN, ZBMD_BUFFERS = 32 };
enum { ZBMD_GROUP_MAX = 1022, ZBMD_WIDTH = 12, ZBMD_WIDE_BYTES = 4 };

/* The rows of a layout (layout.py): where each block begins and how long it is, in elements. */
enum { ZBMD_LENGTH, ZBMD_IN_WHOLE, ZBMD_IN_STAGED, ZBMD_OUT_WHOLE, ZBMD_OUT_STAGED, ZBMD_LAYOUT_ROWS };

typedef struct {
    char *(*address)[ZBMD_BUFFERS];   /* by rank, as are the next two rows */
    uint64_t *in_stride, *out_stride; /* under a layout: 1 if staged, else 0 */
    uint64_t *seen;
    uint64_t *foreign; /* by rank: a bit for each buffer that lies in its own memory, at `address` there */
    const int32_t *pids; /* by rank, of those whose memory can be read; or NULL */
    char *bounce;      /* 2 x ZBMD_BOUNCE_BYTES, if there are such */
    char *scratch;
    uint64_t count, slot_bytes, item, blocks, pub_bytes;
    int per_block, dtype, narrow;
    int streams;             /* puts go past the cache */
    int results_stay;        /* in the caches, for peers read them next */
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
    return (zbmd_place){at, buffer == ZBMD_SCRATCH || buffer == ZBMD_INBOX, 0};
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
    zbmd_place place = zbmd_place_of(buffer, run->address[rank][buffer] + first * run->item);
    if (run->foreign[rank] >> buffer & 1) place.pid = run->pids[rank];
    return place;
}

/* The operands of a put, reduce, copy or finish; `b` only of a reduce. */
typedef struct {
    zbmd_place dst, a, b;
    uint64_t count;
} zbmd_move;

static inline zbmd_move zbmd_move_of(const zbmd_run *run, const int32_t *row, int own) {
    zbmd_move move = {{NULL, 0, 0}, {NULL, 0, 0}, {NULL, 0, 0}, 0};
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

/* Of arrays so long, copies go past the caches: they would not stay there, and a store through the cache reads its
 * line first. Measured with both cores copying 8 MiB: 25 GB/s each for memmove's 12; 2 MiB: 28 for 39. */
#define ZBMD_STREAM_COPIES (8ULL << 20)

static inline int zbmd_is_long(const zbmd_run *run) {
    return run->count * run->item * run->blocks >= ZBMD_STREAM_COPIES;
}

static inline void zbmd_copy_part(const zbmd_run *run, int kind, char *dst, const char *src, uint64_t nbytes) {
    int apart = dst + nbytes <= src || src + nbytes <= dst;
    int streams = kind == ZBMD_PUT ? run->streams : zbmd_is_long(run);
    if (apart && streams)
        zbmd_stream(dst, src, nbytes);
    else
        memmove(dst, src, nbytes);
}

/* Bytes that are reduced and then leave past the caches. Measured for sums of 16 MiB: 630 us, through the cache 850;
 * longer tiles interrupt their reads for longer, 1 KiB 800 and 4 KiB 1,250. */
enum { ZBMD_REDUCE_TILE = 512 };

static inline void zbmd_reduce_part(const zbmd_run *run, char *dst, const char *a, const char *b, uint64_t nbytes,
                                    uint32_t divisor) {
    if (!nbytes) return;
    run->kernel(dst, a, b, nbytes / run->item);
    if (divisor) zbmd_divide(run->dtype, dst, nbytes / run->item, divisor);
}

/* dst = a op b, divided by `divisor` unless that is 0. A long result leaves past the caches, if it is not where an
 * operand is: that line has been read. */
static inline void zbmd_reduce_whole(const zbmd_run *run, zbmd_move move, int is_result, uint32_t divisor) {
    _Alignas(ZBMD_STREAM_LINE) char tile[ZBMD_REDUCE_TILE];
    char *dst = move.dst.at;
    const char *a = move.a.at, *b = move.b.at;
    uint64_t nbytes = move.count * run->item, head = zbmd_stream_head(dst, nbytes), n;
    if (!is_result || run->results_stay || !zbmd_is_long(run) || dst == a || dst == b || head % run->item) {
        zbmd_reduce_part(run, dst, a, b, nbytes, divisor);
        return;
    }
    uint64_t end = head + (nbytes - head) / ZBMD_STREAM_LINE * ZBMD_STREAM_LINE;
    zbmd_reduce_part(run, dst, a, b, head, divisor);
    for (uint64_t at = head; at < end; at += n) {
        n = end - at < ZBMD_REDUCE_TILE ? end - at : ZBMD_REDUCE_TILE;
        zbmd_reduce_part(run, tile, a + at, b + at, n, divisor);
        zbmd_stream_lines(dst + at, tile, n);
    }
    zbmd_reduce_part(run, dst + end, a + end, b + end, nbytes - end, divisor);
    zbmd_stream_fence();
}

/* dst = src / divisor. */
static inline void zbmd_finish(const zbmd_run *run, char *dst, const char *src, uint64_t count, uint32_t divisor) {
    memcpy(dst, src, count * run->item);
    zbmd_divide(run->dtype, dst, count, divisor);
}

/* Move or reduce the data. What is reduced into `out`, or finished, is a chunk's end result. */
static inline void zbmd_apply(const zbmd_run *run, const int32_t *row, zbmd_move move) {
    uint32_t divisor = row[4] == ZBMD_OUT ? run->divisor : 0;
    if (!move.count) return;
    if (row[0] == ZBMD_FINISH && divisor) {
        if (run->narrow)
            zbmd_finish_narrow(run->dtype, move.dst, move.a, move.count, divisor);
        else
            zbmd_finish(run, move.dst.at, move.a.at, move.count, divisor);
    } else if (row[0] != ZBMD_REDUCE) {
        if (move.dst.at == move.a.at) return;
        if (run->narrow)
            zbmd_copy_narrow(run->dtype, move.dst, move.a, move.count);
        else
            zbmd_copy_part(run, row[0], move.dst.at, move.a.at, move.count * run->item);
    } else if (run->narrow) {
        zbmd_reduce_narrow(run->dtype, run->kernel, move.dst, move.a, move.b, move.count, divisor);
    } else {
        zbmd_reduce_whole(run, move, row[4] == ZBMD_OUT, divisor);
    }
}

/* Bytes of an element there. */
static inline uint64_t zbmd_item_at(const zbmd_run *run, zbmd_place place) {
    return run->narrow && place.wide ? sizeof(float) : run->item;
}

/* The elements of an operand from `first` on, `count` of them: where they lie, or read to `bounce`. */
static inline int zbmd_fetch(const zbmd_run *run, zbmd_place *place, uint64_t first, uint64_t count, char *bounce) {
    char *at = place->at + first * zbmd_item_at(run, *place);
    int error = place->pid ? zbmd_read_peer(place->pid, (uint64_t)(uintptr_t)at, bounce, count * run->item) : 0;
    *place = (zbmd_place){place->pid ? bounce : at, place->wide, 0};
    return error;
}

/* `zbmd_apply`, with operands in the memory of peers. Returns 0, or errno. */
static inline int zbmd_apply_foreign(const zbmd_run *run, const int32_t *row, zbmd_move move) {
    uint64_t step = ZBMD_BOUNCE_BYTES / run->item;
    int error = 0;
    if (row[0] != ZBMD_REDUCE && zbmd_item_at(run, move.dst) == run->item)
        return zbmd_read_peer(move.a.pid, (uint64_t)(uintptr_t)move.a.at, move.dst.at, move.count * run->item);
    for (uint64_t first = 0; first < move.count && !error; first += step) {
        zbmd_move part = move;
        part.count = move.count - first < step ? move.count - first : step;
        part.dst.at += first * zbmd_item_at(run, part.dst);
        error = zbmd_fetch(run, &part.a, first, part.count, run->bounce);
        if (!error && row[0] == ZBMD_REDUCE)
            error = zbmd_fetch(run, &part.b, first, part.count, run->bounce + ZBMD_BOUNCE_BYTES);
        if (!error) zbmd_apply(run, row, part);
    }
    return error;
}

/* Returns 0, or errno of a read of a peer's memory. */
static inline int zbmd_perform(const zbmd_run *run, const int32_t *row, int own) {
    zbmd_move move = zbmd_move_of(run, row, own);
    if (move.a.pid || move.b.pid) return zbmd_apply_foreign(run, row, move);
    zbmd_apply(run, row, move);
    return 0;
}

#endif
