/* The numpy device's own kernels, for float and double, where numpy's passes over memory are the limit.
 *
 * Each is one thread's. The order of every sum is part of the code and no operation is fused, so the bits depend
 * neither on the machine's registers nor on where the arrays lie. Sizes and indices are checked by the caller. */
#ifndef ZBMD_ENGINE_H
#define ZBMD_ENGINE_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__gnu_linux__)
#define ZBMD_CLONES __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define ZBMD_CLONES
#endif

#include "coding.h"
#include "philox.h"

#define REAL float
#define BITS int32_t
#define LANES 16
#define SUFFIX f32
#define SQRT sqrtf
#define LOG logf
#define EXP_LIMIT 87.0f
#define EXP_SHIFTER 12582912.0f
#define EXP_SHIFTER_BITS 0x4B400000
#define EXP_BIAS 127
#define EXP_MANTISSA_BITS 23
#define EXP_LN2_HIGH 0.693359375f
#define EXP_LN2_LOW -2.12194440e-4f
#define EXP_FACTORS \
    {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}
#include "lanes.h"
#include "rows.h"
#include "attention.h"
#include "lanes_end.h"

#define REAL double
#define BITS int64_t
#define LANES 8
#define SUFFIX f64
#define SQRT sqrt
#define LOG log
#define EXP_LIMIT 708.0
#define EXP_SHIFTER 6755399441055744.0
#define EXP_SHIFTER_BITS 0x4338000000000000
#define EXP_BIAS 1023
#define EXP_MANTISSA_BITS 52
#define EXP_LN2_HIGH 6.93147180369123816490e-1
#define EXP_LN2_LOW 1.90821492927058770002e-10
#define EXP_FACTORS                                                                              \
    {1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, \
     1.0 / 5040,       1.0 / 720,       1.0 / 120,      1.0 / 24,      1.0 / 6,      1.0 / 2}
#include "lanes.h"
#include "rows.h"
#include "attention.h"
#include "lanes_end.h"

#endif
