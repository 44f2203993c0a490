/* SPDX-License-Identifier: Apache-2.0
 *
 * Matrix instructions; layouts, accumulation order and special values are defined in mfma.h.
 */
#include "mfma.h"
#include "convert.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#define OPERANDS                                                                                                      \
    const struct sim_mfma *op, sim_lanes *d, const sim_lanes *a, const sim_lanes *b, const sim_lanes *c,              \
        const uint32_t *sa, const uint32_t *sb

#define LANES 64
#define MAX_K 128
#define BLOCK_K 32
#define SCALE_NAN 0xffu
#define SCALE_BIAS 127
#define CANONICAL_NAN 0x7fc00000u

/* ---- denormals are kept whatever the wave's mode --------------------------------------------------------------- */

#if defined(__SSE2__)
#include <xmmintrin.h>
#define FLUSH_BITS 0x8040u /* MXCSR: flush to zero, denormals are zero */
static inline unsigned denormals_on(void) {
    const unsigned csr = _mm_getcsr();
    if (csr & FLUSH_BITS) _mm_setcsr(csr & ~FLUSH_BITS);
    return csr;
}
static inline void denormals_restore(const unsigned *csr) {
    if (*csr & FLUSH_BITS) _mm_setcsr(*csr);
}
#define KEEP_DENORMALS const unsigned csr __attribute__((cleanup(denormals_restore))) = denormals_on()
#else
#define KEEP_DENORMALS ((void)0)
#endif

/* ---- one row of 16 f32 columns --------------------------------------------------------------------------------- */

#if defined(__AVX512F__)
typedef __m512 row16;
static inline row16 row_load(const float *p) { return _mm512_loadu_ps(p); }
static inline void row_store(float *p, row16 v) { _mm512_storeu_ps(p, v); }
static inline row16 row_fma(float a, row16 b, row16 c) { return _mm512_fmadd_ps(_mm512_set1_ps(a), b, c); }
#define ROW_TILE 8
#elif defined(__AVX2__) && defined(__FMA__)
typedef struct { __m256 lo, hi; } row16;
static inline row16 row_load(const float *p) { return (row16){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void row_store(float *p, row16 v) { _mm256_storeu_ps(p, v.lo); _mm256_storeu_ps(p + 8, v.hi); }
static inline row16 row_fma(float a, row16 b, row16 c) {
    __m256 s = _mm256_set1_ps(a);
    return (row16){_mm256_fmadd_ps(s, b.lo, c.lo), _mm256_fmadd_ps(s, b.hi, c.hi)};
}
#define ROW_TILE 4
#else
typedef struct { float x[16]; } row16;
static inline row16 row_load(const float *p) { row16 r; memcpy(&r, p, sizeof r); return r; }
static inline void row_store(float *p, row16 v) { memcpy(p, &v, sizeof v); }
static inline row16 row_fma(float a, row16 b, row16 c) {
#if defined(__FP_FAST_FMAF)
    for (int i = 0; i < 16; i++) c.x[i] = fmaf(a, b.x[i], c.x[i]);
#else /* exact too while the product is: every format but f32, unless the product leaves f32's range */
    for (int i = 0; i < 16; i++) c.x[i] = a * b.x[i] + c.x[i];
#endif
    return c;
}
#define ROW_TILE 4
#endif

/* acc[m][n] = fma chain over k of a[k][m] * b[k][n]; dim_a, n are multiples of 16. */
static inline __attribute__((always_inline)) void
chain(float *acc, const float *a, const float *b, int rows, int cols, int k_first, int k_end) {
    for (int n = 0; n < cols; n += 16) {
        for (int m = 0; m < rows; m += ROW_TILE) {
            row16 t[ROW_TILE];
            for (int i = 0; i < ROW_TILE; i++) t[i] = row_load(acc + (m + i) * cols + n);
            for (int k = k_first; k < k_end; k++) {
                const row16 bv = row_load(b + k * cols + n);
                const float *av = a + k * rows + m;
                for (int i = 0; i < ROW_TILE; i++) t[i] = row_fma(av[i], bv, t[i]);
            }
            for (int i = 0; i < ROW_TILE; i++) row_store(acc + (m + i) * cols + n, t[i]);
        }
    }
}

static inline float as_float(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
static inline uint32_t as_bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
static inline uint32_t canonical(uint32_t u) { return (u & 0x7fffffffu) > 0x7f800000u ? CANONICAL_NAN : u; }

/* ---- operand decode: x[k][i], i < dim, of one block ------------------------------------------------------------ */

static int format_bits(int fmt) {
    switch (fmt) {
    case SIM_FMT_F32: return 32;
    case SIM_FMT_BF16: case SIM_FMT_F16: return 16;
    case SIM_FMT_FP6: case SIM_FMT_BF6: return 6;
    case SIM_FMT_FP4: return 4;
    default: return 8;
    }
}

static const float *small_table(int fmt) {
    switch (fmt) {
    case SIM_FMT_FP8: return sim_table_fp8;
    case SIM_FMT_BF8: return sim_table_bf8;
    case SIM_FMT_FP6: return sim_table_fp6;
    case SIM_FMT_BF6: return sim_table_bf6;
    default: return sim_table_fp4;
    }
}

static inline __attribute__((always_inline)) void
decode_run(float *x, const sim_lanes *src, int fmt, int dim, int lane0, int first_element, int k0, int count) {
    if (fmt == SIM_FMT_BF16) {
        for (int j = 0; j < count; j += 2) {
            const uint32_t *s = src[(first_element + j) / 2] + lane0;
            float *lo = x + (k0 + j) * dim, *hi = lo + dim;
            for (int i = 0; i < dim; i++) {
                uint32_t l = s[i] << 16, h = s[i] & 0xffff0000u;
                memcpy(lo + i, &l, 4);
                memcpy(hi + i, &h, 4);
            }
        }
    } else if (fmt == SIM_FMT_F16) {
        for (int j = 0; j < count; j += 2) {
            const uint32_t *s = src[(first_element + j) / 2] + lane0;
            float *lo = x + (k0 + j) * dim, *hi = lo + dim;
#if defined(__AVX512F__)
            for (int i = 0; i < dim; i += 16) {
                const __m512i v = _mm512_loadu_si512(s + i);
                _mm512_storeu_ps(lo + i, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(v)));
                _mm512_storeu_ps(hi + i, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(v, 16))));
            }
#else
            for (int i = 0; i < dim; i++) {
                uint32_t l = sim_f32_from_f16((uint16_t)s[i]), h = sim_f32_from_f16((uint16_t)(s[i] >> 16));
                memcpy(lo + i, &l, 4);
                memcpy(hi + i, &h, 4);
            }
#endif
        }
    } else if (fmt == SIM_FMT_F32) {
        for (int j = 0; j < count; j++) memcpy(x + (k0 + j) * dim, src[first_element + j] + lane0, dim * sizeof(float));
    } else {
        const float *table = small_table(fmt);
        const int bits = format_bits(fmt);
        const uint32_t mask = (1u << bits) - 1;
        for (int j = 0; j < count; j++) {
            const int bit = (first_element + j) * bits, shift = bit & 31;
            const uint32_t *s = src[bit / 32] + lane0;
            /* a 6-bit element may straddle two registers */
            const uint32_t *t = shift + bits > 32 ? src[bit / 32 + 1] + lane0 : s;
            float *row = x + (k0 + j) * dim;
            for (int i = 0; i < dim; i++) row[i] = table[(uint32_t)((((uint64_t)t[i] << 32) | s[i]) >> shift) & mask];
        }
    }
}

static inline __attribute__((always_inline)) void
decode_block(float *x, const sim_lanes *src, int fmt, int dim, int k, int blocks, int block, int f8f6f4) {
    const int groups = LANES / (dim * blocks), per_lane = k / groups;
    for (int g = 0; g < groups; g++) {
        const int lane0 = (block * groups + g) * dim;
        if (f8f6f4 && (fmt == SIM_FMT_FP8 || fmt == SIM_FMT_BF8)) {
            decode_run(x, src, fmt, dim, lane0, 0, 16 * g, 16);
            decode_run(x, src, fmt, dim, lane0, 16, 16 * groups + 16 * g, 16);
        } else {
            decode_run(x, src, fmt, dim, lane0, 0, g * per_lane, per_lane);
        }
    }
}

/* ---- C and D --------------------------------------------------------------------------------------------------- */

static inline int c_register(int n, int block, int i) { return n == 4 ? i : block * (n * n / LANES) + i; }

/* Row of register i (within the block) and lane group q = lane / n. */
static inline int c_row(int n, int q, int i) { return n == 32 ? 8 * (i / 4) + 4 * q + i % 4 : 4 * q + i; }

static inline void load_c(float *acc, const struct sim_mfma *op, const sim_lanes *c, int n, int block) {
    if (!c) {
        const float v = as_float(op->c_const);
        for (int i = 0; i < n * n; i++) acc[i] = v;
        return;
    }
    for (int i = 0; i < n * n / LANES; i++)
        for (int q = 0; q < LANES / n; q++)
            memcpy(acc + c_row(n, q, i) * n, c[c_register(n, block, i)] + q * n, n * sizeof(float));
}

static inline void store_d(sim_lanes *d, const float *acc, int n, int block) {
    for (int i = 0; i < n * n / LANES; i++)
        for (int q = 0; q < LANES / n; q++) {
            const float *row = acc + c_row(n, q, i) * n;
            uint32_t *out = d[c_register(n, block, i)] + q * n;
            for (int j = 0; j < n; j++) out[j] = canonical(as_bits(row[j]));
        }
}

/* ---- broadcast controls of the forms outside f8f6f4 ------------------------------------------------------------ */

/* A: within each group of 2^cbsz blocks, every block reads block abid of the group. B: lane group pattern blgp. */
static const sim_lanes *broadcast_a(sim_lanes *tmp, const sim_lanes *a, const struct sim_mfma *op, int regs) {
    if (op->cbsz == 0 || op->blocks == 1) return a;
    const int lanes = LANES / op->blocks, group = 1 << op->cbsz;
    for (int r = 0; r < regs; r++)
        for (int l = 0; l < LANES; l++) {
            const int block = l / lanes;
            tmp[r][l] = a[r][(block / group * group + op->abid % group) * lanes + l % lanes];
        }
    return (const sim_lanes *)tmp;
}

static const sim_lanes *broadcast_b(sim_lanes *tmp, const sim_lanes *b, const struct sim_mfma *op, int regs) {
    if (op->blgp == 0) return b;
    for (int r = 0; r < regs; r++)
        for (int l = 0; l < LANES; l++) {
            int from;
            switch (op->blgp) {
            case 1: from = l % 32; break;                   /* the first 32 lanes for all */
            case 2: from = 32 + l % 32; break;              /* the last 32 lanes for all */
            case 3: from = (l + 16) % LANES; break;         /* rotated by 16 lanes */
            default: from = 16 * (op->blgp - 4) + l % 16;   /* 16 lanes for all */
            }
            tmp[r][l] = b[r][from];
        }
    return (const sim_lanes *)tmp;
}

static int operand_registers(int fmt, int dim, int k, int blocks) {
    return k * dim * blocks / LANES * format_bits(fmt) / 32;
}

/* ---- f32 results, 16 and 32 columns ---------------------------------------------------------------------------- */

static inline __attribute__((always_inline)) void
run_float(const struct sim_mfma *op, sim_lanes *d, const sim_lanes *a, const sim_lanes *b, const sim_lanes *c,
          int fmt_a, int fmt_b, int n, int k, int blocks) {
    KEEP_DENORMALS;
    float x[MAX_K * 32], y[MAX_K * 32], acc[4][32 * 32];
    sim_lanes ta[8], tb[8];
    a = broadcast_a(ta, a, op, operand_registers(fmt_a, n, k, blocks));
    b = broadcast_b(tb, b, op, operand_registers(fmt_b, n, k, blocks));
    for (int block = 0; block < blocks; block++) {
        decode_block(x, a, fmt_a, n, k, blocks, block, 0);
        decode_block(y, b, fmt_b, n, k, blocks, block, 0);
        load_c(acc[block], op, c, n, block);
        chain(acc[block], x, y, n, n, 0, k);
    }
    for (int block = 0; block < blocks; block++) store_d(d, acc[block], n, block);
}

#define FLOAT_CASE(name, fmt, n, k)                                                                                   \
    static void name(OPERANDS) {                                                                                      \
        (void)sa; (void)sb;                                                                                           \
        run_float(op, d, a, b, c, fmt, fmt, n, k, 1);                                                                 \
    }
FLOAT_CASE(bf16_16x16x32, SIM_FMT_BF16, 16, 32)
FLOAT_CASE(bf16_16x16x16, SIM_FMT_BF16, 16, 16)
FLOAT_CASE(bf16_32x32x16, SIM_FMT_BF16, 32, 16)
FLOAT_CASE(bf16_32x32x8, SIM_FMT_BF16, 32, 8)
FLOAT_CASE(f16_16x16x32, SIM_FMT_F16, 16, 32)
FLOAT_CASE(f16_16x16x16, SIM_FMT_F16, 16, 16)
FLOAT_CASE(f16_32x32x16, SIM_FMT_F16, 32, 16)
FLOAT_CASE(f16_32x32x8, SIM_FMT_F16, 32, 8)
FLOAT_CASE(f32_16x16x4, SIM_FMT_F32, 16, 4)
FLOAT_CASE(f32_32x32x2, SIM_FMT_F32, 32, 2)

static void float_any(OPERANDS) {
    (void)sa; (void)sb;
    if (op->n == 16) run_float(op, d, a, b, c, op->fmt_a, op->fmt_b, 16, op->k, op->blocks);
    else run_float(op, d, a, b, c, op->fmt_a, op->fmt_b, 32, op->k, op->blocks);
}

/* 4 x 4, 16 blocks: lane l is row/column l % 4 of block l / 4. */
static void float_4x4(OPERANDS) {
    KEEP_DENORMALS;
    (void)sa; (void)sb;
    float x[16][MAX_K], y[16][MAX_K], out[4][LANES];
    sim_lanes ta[4], tb[4];
    a = broadcast_a(ta, a, op, operand_registers(op->fmt_a, 4, op->k, 16));
    b = broadcast_b(tb, b, op, operand_registers(op->fmt_b, 4, op->k, 16));
    for (int block = 0; block < 16; block++) {
        decode_block(x[block], a, op->fmt_a, 4, op->k, 16, block, 0);
        decode_block(y[block], b, op->fmt_b, 4, op->k, 16, block, 0);
    }
    for (int i = 0; i < 4; i++)
        for (int l = 0; l < LANES; l++) {
            float s = as_float(c ? c[i][l] : op->c_const);
            for (int k = 0; k < op->k; k++) s = fmaf(x[l / 4][k * 4 + i], y[l / 4][k * 4 + l % 4], s);
            out[i][l] = s;
        }
    for (int i = 0; i < 4; i++)
        for (int l = 0; l < LANES; l++) d[i][l] = canonical(as_bits(out[i][l]));
}

/* ---- i8 -------------------------------------------------------------------------------------------------------- */

static void int8_any(OPERANDS) {
    (void)sa; (void)sb;
    const int n = op->n, blocks = op->blocks, groups = LANES / (n * blocks), regs = op->k / groups / 4;
    uint32_t acc[32][LANES];
    sim_lanes ta[4], tb[4];
    a = broadcast_a(ta, a, op, regs);
    b = broadcast_b(tb, b, op, regs);
    const int d_regs = n == 4 ? 4 : n * n / LANES * blocks;
    for (int r = 0; r < d_regs; r++) {
        const int per_block = n == 4 ? 4 : n * n / LANES;
        for (int l = 0; l < LANES; l++) {
            const int block = n == 4 ? l / 4 : r / per_block, i = r % per_block;
            const int row = n == 4 ? i : c_row(n, l / n, i);
            uint32_t s = c ? c[r][l] : op->c_const;
            for (int g = 0; g < groups; g++) {
                const int la = (block * groups + g) * n + row, lb = (block * groups + g) * n + l % n;
                for (int j = 0; j < regs; j++)
                    for (int byte = 0; byte < 32; byte += 8)
                        s += (uint32_t)((int32_t)(int8_t)(a[j][la] >> byte) * (int32_t)(int8_t)(b[j][lb] >> byte));
            }
            acc[r][l] = s;
        }
    }
    memcpy(d, acc, d_regs * sizeof(sim_lanes));
}

/* ---- f64 16x16x4 ----------------------------------------------------------------------------------------------- */

static double pair(const sim_lanes *r, int reg, int lane) {
    const uint64_t u = ((uint64_t)r[2 * reg + 1][lane] << 32) | r[2 * reg][lane];
    double f;
    memcpy(&f, &u, 8);
    return f;
}

static void f64_16x16x4(OPERANDS) {
    KEEP_DENORMALS;
    (void)sa; (void)sb;
    double out[4][LANES];
    const uint64_t cu = (uint64_t)op->c_const << 32;
    double c_value;
    memcpy(&c_value, &cu, 8);
    for (int i = 0; i < 4; i++)
        for (int l = 0; l < LANES; l++) {
            double s = c ? pair(c, i, l) : c_value;
            for (int k = 0; k < 4; k++) {
                double av = pair(a, 0, k * 16 + 4 * i + l / 16), bv = pair(b, 0, k * 16 + l % 16);
                if (op->blgp & 1) av = -av; /* blgp negates A, B, C in the f64 forms */
                if (op->blgp & 2) bv = -bv;
                if (k == 0 && (op->blgp & 4)) s = -s;
                s = fma(av, bv, s);
            }
            out[i][l] = s;
        }
    for (int i = 0; i < 4; i++)
        for (int l = 0; l < LANES; l++) {
            uint64_t u;
            memcpy(&u, &out[i][l], 8);
            if (out[i][l] != out[i][l]) u = 0x7ff8000000000000ull;
            d[2 * i][l] = (uint32_t)u;
            d[2 * i + 1][l] = (uint32_t)(u >> 32);
        }
}

/* ---- f8f6f4 ---------------------------------------------------------------------------------------------------- */

/* scale[block][i] = 2^(byte - 127) of row/column i, NaN for 0xff; 1 where there is no scale register. */
static inline void load_scales(double scale[4][32], const uint32_t *reg, int byte, int dim, int blocks) {
    for (int j = 0; j < blocks; j++)
        for (int i = 0; i < dim; i++) {
            const uint32_t e = reg ? (reg[j * dim + i] >> (8 * byte)) & 0xffu : SCALE_BIAS;
            const uint64_t bits = e == SCALE_NAN ? 0x7ff8000000000000ull : (uint64_t)(e + 1023 - SCALE_BIAS) << 52;
            memcpy(&scale[j][i], &bits, 8);
        }
}

/* acc = f32(acc + sum * scale_a[m] * scale_b[n]); the scale product is exact in f64. */
static inline __attribute__((always_inline)) void
add_scaled(float *acc, const float *sum, const double *scale_a, const double *scale_b, int n) {
    for (int m = 0; m < n; m++)
        for (int j = 0; j < n; j++)
            acc[m * n + j] = (float)((double)acc[m * n + j] + (double)sum[m * n + j] * (scale_a[m] * scale_b[j]));
}

static inline __attribute__((always_inline)) void
run_f8f6f4(OPERANDS, int n, int k) {
    KEEP_DENORMALS;
    float x[MAX_K * 16], y[MAX_K * 16], acc[32 * 32], sum[32 * 32];
    double scale_a[4][32], scale_b[4][32];
    decode_block(x, a, op->fmt_a, n, k, 1, 0, 1);
    decode_block(y, b, op->fmt_b, n, k, 1, 0, 1);
    load_scales(scale_a, op->scaled ? sa : NULL, op->byte_a, n, k / BLOCK_K);
    load_scales(scale_b, op->scaled ? sb : NULL, op->byte_b, n, k / BLOCK_K);
    load_c(acc, op, c, n, 0);
    for (int j = 0; j < k / BLOCK_K; j++) {
        memset(sum, 0, n * n * sizeof(float));
        chain(sum, x, y, n, n, j * BLOCK_K, (j + 1) * BLOCK_K);
        add_scaled(acc, sum, scale_a[j], scale_b[j], n);
    }
    store_d(d, acc, n, 0);
}

static void f8f6f4_any(OPERANDS) {
    if (op->n == 16) run_f8f6f4(op, d, a, b, c, sa, sb, 16, 128);
    else run_f8f6f4(op, d, a, b, c, sa, sb, 32, 64);
}

/* fp4 x fp4: every element is a multiple of 1/2 of at most 6, so a block's sum is an exact integer number of quarters.
 * Codes become signed bytes (halves) by table look-up; A is offset by 12 to be unsigned, as the byte dot product wants,
 * and 12 * sum(b) is taken off. */
#define FP4_HALVES 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12
#define FP4_OFFSET 12

#if defined(__AVX512F__) && defined(__AVX512BW__)
typedef __m512i cols16;
static inline cols16 cols_load(const uint32_t *p) { return _mm512_loadu_si512(p); }
static inline cols16 cols_zero(void) { return _mm512_setzero_si512(); }
static inline cols16 cols_set(uint32_t v) { return _mm512_set1_epi32((int)v); }
static inline cols16 cols_dot(cols16 acc, cols16 u, cols16 s) {
#if defined(__AVX512VNNI__)
    return _mm512_dpbusd_epi32(acc, u, s);
#else
    return _mm512_add_epi32(acc, _mm512_madd_epi16(_mm512_maddubs_epi16(u, s), _mm512_set1_epi16(1)));
#endif
}
static inline cols16 cols_decode(cols16 v, int high) {
    const __m512i table = _mm512_broadcast_i32x4(_mm_setr_epi8(FP4_HALVES));
    if (high) v = _mm512_srli_epi32(v, 4);
    return _mm512_shuffle_epi8(table, _mm512_and_si512(v, _mm512_set1_epi8(15)));
}
static inline cols16 cols_sub(cols16 a, cols16 b) { return _mm512_sub_epi32(a, b); }
static inline void cols_store(int32_t *p, cols16 v) { _mm512_storeu_si512(p, v); }
static inline cols16 cols_add_bytes(cols16 v, int x) { return _mm512_add_epi8(v, _mm512_set1_epi8((char)x)); }
/* acc[16] = f32(acc + sum * quarter-scaled scale) over 16 columns. */
static inline void cols_scale(float *acc, cols16 sum, double scale_a, const double *scale_b) {
    const __m512d s = _mm512_set1_pd(scale_a);
    __m256i lo = _mm512_castsi512_si256(sum), hi = _mm512_extracti64x4_epi64(sum, 1);
    __m512d p0 = _mm512_mul_pd(_mm512_cvtepi32_pd(lo), _mm512_mul_pd(s, _mm512_loadu_pd(scale_b)));
    __m512d p1 = _mm512_mul_pd(_mm512_cvtepi32_pd(hi), _mm512_mul_pd(s, _mm512_loadu_pd(scale_b + 8)));
    _mm256_storeu_ps(acc, _mm512_cvtpd_ps(_mm512_add_pd(_mm512_cvtps_pd(_mm256_loadu_ps(acc)), p0)));
    _mm256_storeu_ps(acc + 8, _mm512_cvtpd_ps(_mm512_add_pd(_mm512_cvtps_pd(_mm256_loadu_ps(acc + 8)), p1)));
}
#elif defined(__AVX2__)
typedef struct { __m256i lo, hi; } cols16;
static inline cols16 cols_load(const uint32_t *p) {
    return (cols16){_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)(p + 8))};
}
static inline cols16 cols_zero(void) { return (cols16){_mm256_setzero_si256(), _mm256_setzero_si256()}; }
static inline cols16 cols_set(uint32_t v) { __m256i x = _mm256_set1_epi32((int)v); return (cols16){x, x}; }
static inline __m256i dot8(__m256i acc, __m256i u, __m256i s) {
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(u, s), _mm256_set1_epi16(1)));
}
static inline cols16 cols_dot(cols16 acc, cols16 u, cols16 s) {
    return (cols16){dot8(acc.lo, u.lo, s.lo), dot8(acc.hi, u.hi, s.hi)};
}
static inline __m256i decode8(__m256i v) {
    const __m256i table = _mm256_broadcastsi128_si256(_mm_setr_epi8(FP4_HALVES));
    return _mm256_shuffle_epi8(table, _mm256_and_si256(v, _mm256_set1_epi8(15)));
}
static inline cols16 cols_decode(cols16 v, int high) {
    if (high) return (cols16){decode8(_mm256_srli_epi32(v.lo, 4)), decode8(_mm256_srli_epi32(v.hi, 4))};
    return (cols16){decode8(v.lo), decode8(v.hi)};
}
static inline cols16 cols_sub(cols16 a, cols16 b) {
    return (cols16){_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)};
}
static inline void cols_store(int32_t *p, cols16 v) {
    _mm256_storeu_si256((__m256i *)p, v.lo);
    _mm256_storeu_si256((__m256i *)(p + 8), v.hi);
}
static inline cols16 cols_add_bytes(cols16 v, int x) {
    const __m256i y = _mm256_set1_epi8((char)x);
    return (cols16){_mm256_add_epi8(v.lo, y), _mm256_add_epi8(v.hi, y)};
}
static inline void cols_scale(float *acc, cols16 sum, double scale_a, const double *scale_b) {
    int32_t s[16];
    cols_store(s, sum);
    for (int j = 0; j < 16; j++) acc[j] = (float)((double)acc[j] + (double)s[j] * (scale_a * scale_b[j]));
}
#else
typedef struct { uint32_t x[16]; } cols16;
static inline cols16 cols_load(const uint32_t *p) { cols16 r; memcpy(&r, p, sizeof r); return r; }
static inline cols16 cols_zero(void) { return (cols16){{0}}; }
static inline cols16 cols_set(uint32_t v) { cols16 r; for (int i = 0; i < 16; i++) r.x[i] = v; return r; }
static inline cols16 cols_dot(cols16 acc, cols16 u, cols16 s) {
    for (int i = 0; i < 16; i++) {
        int32_t t = 0;
        for (int b = 0; b < 32; b += 8) t += (int32_t)(uint8_t)(u.x[i] >> b) * (int32_t)(int8_t)(s.x[i] >> b);
        acc.x[i] += (uint32_t)t;
    }
    return acc;
}
static inline cols16 cols_decode(cols16 v, int high) {
    static const int8_t table[16] = {FP4_HALVES};
    cols16 r;
    for (int i = 0; i < 16; i++) {
        uint32_t t = high ? v.x[i] >> 4 : v.x[i], o = 0;
        for (int b = 0; b < 32; b += 8) o |= (uint32_t)(uint8_t)table[(t >> b) & 15] << b;
        r.x[i] = o;
    }
    return r;
}
static inline cols16 cols_sub(cols16 a, cols16 b) { for (int i = 0; i < 16; i++) a.x[i] -= b.x[i]; return a; }
static inline void cols_store(int32_t *p, cols16 v) { memcpy(p, &v, sizeof v); }
static inline cols16 cols_add_bytes(cols16 v, int x) {
    for (int i = 0; i < 16; i++) {
        uint32_t o = 0;
        for (int b = 0; b < 32; b += 8) o |= (uint32_t)(uint8_t)((v.x[i] >> b) + (uint32_t)x) << b;
        v.x[i] = o;
    }
    return v;
}
static inline void cols_scale(float *acc, cols16 sum, double scale_a, const double *scale_b) {
    for (int j = 0; j < 16; j++) acc[j] = (float)((double)acc[j] + (double)(int32_t)sum.x[j] * (scale_a * scale_b[j]));
}
#endif

static inline __attribute__((always_inline)) void
run_fp4(OPERANDS, int n, int k) {
    KEEP_DENORMALS;
    const int blocks = k / BLOCK_K;
    float acc[32 * 32];
    double scale_a[4][32], scale_b[4][32];
    int32_t codes[8][32];
    load_scales(scale_a, op->scaled ? sa : NULL, op->byte_a, n, blocks);
    load_scales(scale_b, op->scaled ? sb : NULL, op->byte_b, n, blocks);
    load_c(acc, op, c, n, 0);
    for (int j = 0; j < blocks; j++) {
        /* codes[2r + h][m]: four unsigned bytes of row m, register r, even (h = 0) or odd (h = 1) elements. */
        for (int r = 0; r < 4; r++)
            for (int m = 0; m < n; m += 16) {
                const cols16 v = cols_load(a[r] + j * n + m);
                cols_store(codes[2 * r] + m, cols_add_bytes(cols_decode(v, 0), FP4_OFFSET));
                cols_store(codes[2 * r + 1] + m, cols_add_bytes(cols_decode(v, 1), FP4_OFFSET));
            }
        for (int col = 0; col < n; col += 16) {
            cols16 bv[8], offset = cols_zero();
            double scale[16];
            for (int r = 0; r < 4; r++) {
                const cols16 v = cols_load(b[r] + j * n + col);
                bv[2 * r] = cols_decode(v, 0);
                bv[2 * r + 1] = cols_decode(v, 1);
            }
            for (int t = 0; t < 8; t++) offset = cols_dot(offset, cols_set(FP4_OFFSET * 0x01010101u), bv[t]);
            for (int i = 0; i < 16; i++) scale[i] = scale_b[j][col + i] * 0.25; /* the sum counts quarters */
            for (int m = 0; m < n; m++) {
                cols16 s = cols_zero();
                for (int t = 0; t < 8; t++) s = cols_dot(s, cols_set((uint32_t)codes[t][m]), bv[t]);
                cols_scale(acc + m * n + col, cols_sub(s, offset), scale_a[j][m], scale);
            }
        }
    }
    store_d(d, acc, n, 0);
}

static void fp4_16x16x128(OPERANDS) {
    run_fp4(op, d, a, b, c, sa, sb, 16, 128);
}

static void fp4_32x32x64(OPERANDS) {
    run_fp4(op, d, a, b, c, sa, sb, 32, 64);
}

/* ---- selection ------------------------------------------------------------------------------------------------- */

int sim_mfma_select(struct sim_mfma *op) {
    op->fn = NULL;
    if (op->m != op->n || (op->n != 4 && op->n != 16 && op->n != 32)) return -1;
    if (op->f8f6f4) {
        if (op->fmt_a > SIM_FMT_FP4 || op->fmt_b > SIM_FMT_FP4 || op->byte_a > 3 || op->byte_b > 3) return -1;
        if (op->n * op->k != 2048 || op->n == 4) return -1;
        if (op->fmt_a == SIM_FMT_FP4 && op->fmt_b == SIM_FMT_FP4) op->fn = op->n == 16 ? fp4_16x16x128 : fp4_32x32x64;
        else op->fn = f8f6f4_any;
        return 0;
    }
    if (op->acc == SIM_ACC_F64) {
        if (op->n != 16 || op->k != 4) return -1;
        op->fn = f64_16x16x4;
        return 0;
    }
    if (op->acc == SIM_ACC_I32) {
        if (op->fmt_a != SIM_FMT_I8 || op->fmt_b != SIM_FMT_I8) return -1;
        op->fn = int8_any;
        return 0;
    }
    if (op->n == 4) {
        op->fn = float_4x4;
        return 0;
    }
    op->fn = float_any;
    if (op->blocks == 1 && op->fmt_a == SIM_FMT_BF16) {
        if (op->n == 16 && op->k == 32) op->fn = bf16_16x16x32;
        if (op->n == 16 && op->k == 16) op->fn = bf16_16x16x16;
        if (op->n == 32 && op->k == 16) op->fn = bf16_32x32x16;
        if (op->n == 32 && op->k == 8) op->fn = bf16_32x32x8;
    }
    if (op->blocks == 1 && op->fmt_a == SIM_FMT_F16) {
        if (op->n == 16 && op->k == 32) op->fn = f16_16x16x32;
        if (op->n == 16 && op->k == 16) op->fn = f16_16x16x16;
        if (op->n == 32 && op->k == 16) op->fn = f16_32x32x16;
        if (op->n == 32 && op->k == 8) op->fn = f16_32x32x8;
    }
    if (op->blocks == 1 && op->fmt_a == SIM_FMT_F32) op->fn = op->n == 16 ? f32_16x16x4 : f32_32x32x2;
    return 0;
}

int sim_mfma_size(void) { return (int)sizeof(struct sim_mfma); }

int sim_mfma_run(struct sim_mfma *op, sim_lanes *d, const sim_lanes *a, const sim_lanes *b, const sim_lanes *c,
                 const uint32_t *scale_a, const uint32_t *scale_b) {
    if (sim_mfma_select(op)) return -1;
    op->fn(op, d, a, b, c, scale_a, scale_b);
    return 0;
}
