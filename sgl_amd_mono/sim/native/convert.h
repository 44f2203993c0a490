/* SPDX-License-Identifier: Apache-2.0
 *
 * Number formats and transcendental functions of gfx950.
 *
 * Formats: bf16; f16; OCP fp8 e4m3 ("fp8") and e5m2 ("bf8"); OCP MX fp6 e2m3, bf6 e3m2 and fp4 e2m1; e8m0 scales.
 * Everything here works on bits, so that the host's denormal mode plays no part, unless the comment says otherwise.
 *
 * Choices where AMD's documents are silent:
 *   fp8/bf8, value too large after rounding: without clamp (FP16_OVFL = 0) NaN for fp8 and infinity for bf8; with
 *   clamp the largest finite value. A true infinity stays one (fp8: NaN) in both modes. fp4/fp6/bf6 have neither:
 *   they saturate, a NaN as well.
 *   Stochastic rounding adds the top bits of the seed below the last kept bit, carries, and truncates.
 *   Scales of v_cvt_scalef32_*: 2^(e - 127) with e the exponent field of the f32 scale; 255 gives NaN (fp4/fp6:
 *   saturated).
 */
#ifndef SIM_CONVERT_H
#define SIM_CONVERT_H

#include <stdint.h>
#include <string.h>

#ifndef SIM_MFMA_H
typedef uint32_t sim_lanes[64];
#endif

extern float sim_table_fp8[256], sim_table_bf8[256], sim_table_fp6[64], sim_table_bf6[64], sim_table_fp4[16];

static inline uint32_t sim_bits_f32(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
static inline float sim_float_f32(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
static inline uint64_t sim_bits_f64(double f) { uint64_t u; memcpy(&u, &f, 8); return u; }
static inline double sim_float_f64(uint64_t u) { double f; memcpy(&f, &u, 8); return f; }

/* ---- bf16 and f16 ---------------------------------------------------------------------------------------------- */

static inline uint16_t sim_bf16_from_f32(uint32_t f) {
    const uint32_t rounded = (f + 0x7fffu + ((f >> 16) & 1u)) >> 16, nan = (f >> 16) | 0x40u;
    return (uint16_t)((f & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

static inline uint32_t sim_f32_from_bf16(uint16_t h) { return (uint32_t)h << 16; }

static inline uint16_t sim_f16_from_f32(uint32_t f) {
    const uint32_t sign = (f >> 16) & 0x8000u, a = f & 0x7fffffffu;
    const uint32_t normal = (a + 0xfffu + ((a >> 13) & 1u) - (112u << 23)) >> 13;
    /* a denormal result: the significand shifted down */
    const uint32_t e = a >> 23, shift = e < 96u ? 30u : e > 112u ? 14u : 126u - e, m = (a & 0x7fffffu) | 0x800000u;
    const uint32_t q = m >> shift, rest = m & ((1u << shift) - 1u), half = 1u << (shift - 1u);
    const uint32_t denormal = q + ((rest > half || (rest == half && (q & 1u))) ? 1u : 0u);
    uint32_t r = a < 0x38800000u ? denormal : normal;
    r = a >= 0x477ff000u ? 0x7c00u : r; /* 65520 and above round to infinity */
    r = a > 0x7f800000u ? 0x7e00u | ((a >> 13) & 0x3ffu) : r;
    return (uint16_t)(sign | r);
}

static inline uint16_t sim_f16_from_f32_rtz(uint32_t f) {
    const uint32_t sign = (f >> 16) & 0x8000u, a = f & 0x7fffffffu;
    const uint32_t e = a >> 23, shift = e < 96u ? 30u : e > 112u ? 14u : 126u - e, m = (a & 0x7fffffu) | 0x800000u;
    uint32_t r = a < 0x38800000u ? m >> shift : (a - (112u << 23)) >> 13;
    r = a >= 0x47800000u ? 0x7bffu : r; /* too large: the largest finite value */
    r = a == 0x7f800000u ? 0x7c00u : r;
    r = a > 0x7f800000u ? 0x7e00u | ((a >> 13) & 0x3ffu) : r;
    return (uint16_t)(sign | r);
}

static inline uint32_t sim_f32_from_f16(uint16_t h) {
    const uint32_t sign = ((uint32_t)h & 0x8000u) << 16, a = h & 0x7fffu;
    const uint32_t normal = (a << 13) + (112u << 23);
    const uint32_t denormal = sim_bits_f32((float)(int32_t)a * 0x1p-24f);
    uint32_t r = a < 0x400u ? denormal : normal;
    r = a >= 0x7c00u ? 0x7f800000u | (a << 13 & 0x7fffffu) | (a > 0x7c00u ? 0x400000u : 0u) : r;
    return sign | r;
}

/* ---- f64 <-> f32 without the host's denormal mode -------------------------------------------------------------- */

/* The f32 of the given bits as f64, exactly; the payload of a NaN is not kept. */
static inline double sim_f64_from_bits(uint32_t u) {
    const uint32_t e = (u >> 23) & 0xffu, m = u & 0x7fffffu;
    const double denormal = (double)(int32_t)m * 0x1p-149;
    const double normal = sim_float_f64(((uint64_t)(e + 896u) << 52) | ((uint64_t)m << 29));
    double r = e ? normal : denormal;
    r = e == 255u ? sim_float_f64(m ? 0x7ff8000000000000ull : 0x7ff0000000000000ull) : r;
    return u >> 31 ? -r : r;
}

/* ---- small formats --------------------------------------------------------------------------------------------- */

/* Magnitude code of |x| with mbits mantissa bits and smallest normal exponent emin, rounded to nearest even; may
 * exceed the format. */
static inline uint32_t sim_code_rne(double x, int mbits, int emin) {
    const uint64_t u = sim_bits_f64(x) & 0x7fffffffffffffffull;
    int e = (int)(u >> 52) - 1023;
    e = e < emin ? emin : e > 200 ? 200 : e;
    const double scaled = sim_float_f64(u) * sim_float_f64((uint64_t)(1023 + mbits - e) << 52);
    /* round to nearest even: scaled is below 2^52 unless the value is out of range anyway */
    const double n = (scaled + 0x1p52) - 0x1p52;
    const uint32_t mantissa = scaled < 1024.0 ? (uint32_t)(int32_t)n : 1024u;
    return ((uint32_t)(e - emin) << mbits) + mantissa;
}

/* The same with the seed's top bits added below the last kept bit and truncation. */
static inline uint32_t sim_code_sr(double x, uint32_t seed, int mbits, int emin) {
    const uint64_t u = sim_bits_f64(x) & 0x7fffffffffffffffull;
    int e = (int)(u >> 52) - 1023;
    e = e < emin ? emin : e > 200 ? 200 : e;
    const double scaled = sim_float_f64(u) * sim_float_f64((uint64_t)(1023 + mbits - e) << 52) + (double)seed * 0x1p-32;
    const uint32_t mantissa = scaled < 1024.0 ? (uint32_t)(int32_t)scaled : 1024u;
    return ((uint32_t)(e - emin) << mbits) + mantissa;
}

enum sim_small { SIM_SMALL_FP8, SIM_SMALL_BF8, SIM_SMALL_FP6, SIM_SMALL_BF6, SIM_SMALL_FP4 };

/* Code of x in a small format. sr: stochastic with seed, else nearest even. */
static inline uint32_t sim_small_from_f64(double x, int format, int sr, uint32_t seed, int clamp) {
    static const int mbits[5] = {3, 2, 3, 2, 1}, emin[5] = {-6, -14, 0, -2, 0}, bits[5] = {8, 8, 6, 6, 4};
    static const uint32_t largest[5] = {0x7e, 0x7b, 0x1f, 0x1f, 0x7}, over[5] = {0x7f, 0x7c, 0x1f, 0x1f, 0x7};
    static const uint32_t infinity[5] = {0x7f, 0x7c, 0x1f, 0x1f, 0x7}, nan[5] = {0x7f, 0x7f, 0x1f, 0x1f, 0x7};
    const uint32_t sign = (uint32_t)(sim_bits_f64(x) >> 63) << (bits[format] - 1);
    const double a = sim_float_f64(sim_bits_f64(x) & 0x7fffffffffffffffull);
    if (x != x) return sign | nan[format];
    if (a > 1e300) return sign | infinity[format];
    const uint32_t code = sr ? sim_code_sr(a, seed, mbits[format], emin[format])
                             : sim_code_rne(a, mbits[format], emin[format]);
    return sign | (code > largest[format] ? (clamp ? largest[format] : over[format]) : code);
}

static inline uint8_t sim_fp8_from_f32(uint32_t f, int clamp) {
    return (uint8_t)sim_small_from_f64(sim_f64_from_bits(f), SIM_SMALL_FP8, 0, 0, clamp);
}
static inline uint8_t sim_bf8_from_f32(uint32_t f, int clamp) {
    return (uint8_t)sim_small_from_f64(sim_f64_from_bits(f), SIM_SMALL_BF8, 0, 0, clamp);
}
static inline uint8_t sim_fp8_from_f32_sr(uint32_t f, uint32_t seed, int clamp) {
    return (uint8_t)sim_small_from_f64(sim_f64_from_bits(f), SIM_SMALL_FP8, 1, seed, clamp);
}
static inline uint8_t sim_bf8_from_f32_sr(uint32_t f, uint32_t seed, int clamp) {
    return (uint8_t)sim_small_from_f64(sim_f64_from_bits(f), SIM_SMALL_BF8, 1, seed, clamp);
}
static inline uint32_t sim_f32_from_fp8(uint8_t c) { return sim_bits_f32(sim_table_fp8[c]); }
static inline uint32_t sim_f32_from_bf8(uint8_t c) { return sim_bits_f32(sim_table_bf8[c]); }
static inline uint32_t sim_f32_from_fp6(uint8_t c) { return sim_bits_f32(sim_table_fp6[c & 63]); }
static inline uint32_t sim_f32_from_bf6(uint8_t c) { return sim_bits_f32(sim_table_bf6[c & 63]); }
static inline uint32_t sim_f32_from_fp4(uint8_t c) { return sim_bits_f32(sim_table_fp4[c & 15]); }

static inline uint32_t sim_prng(uint32_t u) { return (u << 1) ^ (u >> 31 ? 197u : 0u); } /* v_prng_b32 */

/* ---- transcendentals ----------------------------------------------------------------------------------------------
 *
 * The hardware's results are within 1 ulp; here they are the f64 value rounded once to f32 (its last bit is this
 * simulator's choice). Denormal inputs count as zero of their sign and denormal results are flushed, as LLVM assumes
 * when it scales around v_exp/v_log/v_rcp/v_rsq/v_sqrt_f32. The f16 forms keep denormals. NaN results are 0x7fc00000
 * (0x7e00), a NaN input is quieted. */

#define SIM_NAN 0x7fc00000u

static inline uint32_t sim_flush(uint32_t u) { return (u & 0x7f800000u) ? u : u & 0x80000000u; }
static inline uint32_t sim_is_nan(uint32_t u) { return (u & 0x7fffffffu) > 0x7f800000u; }

/* f64 -> f32 bits, rounded once; results below the smallest normal are flushed to a zero of their sign. */
static inline uint32_t sim_round_flush(double x) {
    const uint32_t u = sim_bits_f32((float)x), sign = (uint32_t)(sim_bits_f64(x) >> 63) << 31;
    return (u & 0x7fffffffu) < 0x00800000u ? sign : u;
}

static inline double sim_nearest(double x) { return (x + 0x1.8p52) - 0x1.8p52; }

/* 2^x for |x| <= 1100: 2^round(x) times the exponential series of the remainder, relative error below 1e-14. */
static inline double sim_exp2(double x) {
    const double n = sim_nearest(x), t = (x - n) * 0.69314718055994530942;
    double p = 1.0 / 479001600.0;
    p = p * t + 1.0 / 39916800.0;
    p = p * t + 1.0 / 3628800.0;
    p = p * t + 1.0 / 362880.0;
    p = p * t + 1.0 / 40320.0;
    p = p * t + 1.0 / 5040.0;
    p = p * t + 1.0 / 720.0;
    p = p * t + 1.0 / 120.0;
    p = p * t + 1.0 / 24.0;
    p = p * t + 1.0 / 6.0;
    p = p * t + 0.5;
    p = p * t + 1.0;
    p = p * t + 1.0;
    return p * sim_float_f64((uint64_t)((int32_t)n + 1023) << 52);
}

/* log2 of a positive normal f64: exponent plus the atanh series of the mantissa in [sqrt(1/2), sqrt(2)). */
static inline double sim_log2(double x) {
    const uint64_t u = sim_bits_f64(x), shifted = u - 0x3fe6a09e667f3bcdull; /* sqrt(1/2) */
    const int32_t e = (int32_t)((int64_t)shifted >> 52);
    const double m = sim_float_f64(u - ((uint64_t)(int64_t)e << 52));
    const double t = (m - 1.0) / (m + 1.0), z = t * t;
    double p = 1.0 / 21.0;
    p = p * z + 1.0 / 19.0;
    p = p * z + 1.0 / 17.0;
    p = p * z + 1.0 / 15.0;
    p = p * z + 1.0 / 13.0;
    p = p * z + 1.0 / 11.0;
    p = p * z + 1.0 / 9.0;
    p = p * z + 1.0 / 7.0;
    p = p * z + 1.0 / 5.0;
    p = p * z + 1.0 / 3.0;
    p = p * z + 1.0;
    return (double)e + p * t * 2.88539008177792681472; /* 2 / ln 2 */
}

/* sin of x turns where cosine == 0, cos otherwise; |x| <= 2^20. */
static inline double sim_turn(double x, int cosine) {
    const double r = x - sim_nearest(x), q = sim_nearest(r * 4.0);
    const double t = (r - q * 0.25) * 6.28318530717958647693, z = t * t; /* within an eighth of a turn */
    double s = 1.0 / 6227020800.0, c = -1.0 / 87178291200.0;
    s = s * z - 1.0 / 39916800.0;
    s = s * z + 1.0 / 362880.0;
    s = s * z - 1.0 / 5040.0;
    s = s * z + 1.0 / 120.0;
    s = s * z - 1.0 / 6.0;
    s = s * z * t + t;
    c = c * z + 1.0 / 479001600.0;
    c = c * z - 1.0 / 3628800.0;
    c = c * z + 1.0 / 40320.0;
    c = c * z - 1.0 / 720.0;
    c = c * z + 1.0 / 24.0;
    c = c * z - 0.5;
    c = c * z + 1.0;
    const int quadrant = ((int32_t)q + (cosine ? 1 : 0)) & 3;
    const double v = quadrant & 1 ? c : s;
    return quadrant & 2 ? -v : v;
}

static inline uint32_t sim_exp_f32(uint32_t u) {
    const uint32_t f = sim_flush(u);
    double x = sim_f64_from_bits(f);
    x = x < -200.0 ? -200.0 : x > 200.0 ? 200.0 : x;
    x = sim_is_nan(u) ? 0.0 : x;
    const uint32_t r = sim_round_flush(sim_exp2(x));
    return sim_is_nan(u) ? u | 0x400000u : r;
}

static inline uint32_t sim_log_f32(uint32_t u) {
    const uint32_t f = sim_flush(u), zero = (f & 0x7fffffffu) == 0;
    const uint32_t r = sim_round_flush(sim_log2(sim_f64_from_bits(zero || f >= 0x7f800000u ? 0x3f800000u : f)));
    uint32_t out = zero ? 0xff800000u : f == 0x7f800000u ? 0x7f800000u : f >> 31 ? SIM_NAN : r;
    return sim_is_nan(u) ? u | 0x400000u : out;
}

static inline uint32_t sim_rcp_f32(uint32_t u) {
    const uint32_t f = sim_flush(u), zero = (f & 0x7fffffffu) == 0;
    const uint32_t r = sim_round_flush(1.0 / sim_f64_from_bits(zero ? 0x3f800000u : f));
    const uint32_t out = zero ? f | 0x7f800000u : r;
    return sim_is_nan(u) ? u | 0x400000u : out;
}

static inline uint32_t sim_sqrt_f32(uint32_t u) {
    const uint32_t f = sim_flush(u), zero = (f & 0x7fffffffu) == 0, negative = f >> 31;
    const double x = sim_f64_from_bits(zero || negative ? 0x3f800000u : f);
    const uint32_t r = sim_round_flush(__builtin_sqrt(x));
    const uint32_t out = zero ? f : negative ? SIM_NAN : r;
    return sim_is_nan(u) ? u | 0x400000u : out;
}

static inline uint32_t sim_rsq_f32(uint32_t u) {
    const uint32_t f = sim_flush(u), zero = (f & 0x7fffffffu) == 0, negative = f >> 31;
    const double x = sim_f64_from_bits(zero || negative ? 0x3f800000u : f);
    const uint32_t r = sim_round_flush(1.0 / __builtin_sqrt(x));
    const uint32_t out = zero ? f | 0x7f800000u : negative ? SIM_NAN : r;
    return sim_is_nan(u) ? u | 0x400000u : out;
}

/* x in turns; outside [-256, 256] the result is sin 0 or cos 0, infinities give NaN. */
static inline uint32_t sim_trig_f32(uint32_t u, int cosine) {
    const uint32_t f = sim_flush(u), a = f & 0x7fffffffu, outside = a > 0x43800000u;
    const double x = sim_f64_from_bits(outside ? 0u : f);
    uint32_t r = sim_round_flush(sim_turn(x, cosine));
    r = r << 1 ? r : 0u; /* an exact zero at whole and half turns is positive */
    r = outside ? (cosine ? 0x3f800000u : 0u) : r;
    r = a == 0 && !cosine ? f : r;
    r = a == 0x7f800000u ? SIM_NAN : r;
    return sim_is_nan(u) ? u | 0x400000u : r;
}
static inline uint32_t sim_sin_f32(uint32_t u) { return sim_trig_f32(u, 0); }
static inline uint32_t sim_cos_f32(uint32_t u) { return sim_trig_f32(u, 1); }

/* f16 forms: through f32 (which holds every f16 result to far more than f16's last bit), rounded to f16 with its
 * denormals. */
static inline uint16_t sim_exp_f16(uint16_t h) { return sim_f16_from_f32(sim_exp_f32(sim_f32_from_f16(h))); }
static inline uint16_t sim_log_f16(uint16_t h) { return sim_f16_from_f32(sim_log_f32(sim_f32_from_f16(h))); }
static inline uint16_t sim_rcp_f16(uint16_t h) { return sim_f16_from_f32(sim_rcp_f32(sim_f32_from_f16(h))); }
static inline uint16_t sim_sqrt_f16(uint16_t h) { return sim_f16_from_f32(sim_sqrt_f32(sim_f32_from_f16(h))); }
static inline uint16_t sim_rsq_f16(uint16_t h) { return sim_f16_from_f32(sim_rsq_f32(sim_f32_from_f16(h))); }
static inline uint16_t sim_sin_f16(uint16_t h) { return sim_f16_from_f32(sim_sin_f32(sim_f32_from_f16(h))); }
static inline uint16_t sim_cos_f16(uint16_t h) { return sim_f16_from_f32(sim_cos_f32(sim_f32_from_f16(h))); }

/* ---- whole-wave conversions ------------------------------------------------------------------------------------ */

/* What sim_cvt_wave needs to know of an instruction; registers of each operand as it stands in the assembly text. */
struct sim_cvt_info {
    const char *name;
    uint8_t source, target; /* enum sim_cvt_format */
    uint8_t form;           /* enum sim_cvt_form */
    uint8_t d_regs, s0_regs, s1_regs; /* s1_regs 0: there is no second source besides the scale */
    uint8_t scale_operand;  /* which source operand is the f32 scale: 1 or 2; 0: none */
    uint8_t target_entry;   /* op_sel text: 1: two sources, the third entry is OPSEL bit 3 (see sim_cvt_op_sel) */
};

enum sim_cvt_format {
    SIM_CVT_FP8, SIM_CVT_BF8, SIM_CVT_FP6, SIM_CVT_BF6, SIM_CVT_FP4, /* as enum sim_small */
    SIM_CVT_F32, SIM_CVT_F16, SIM_CVT_BF16
};

enum sim_cvt_form {
    /* s0, s1 -> two elements in the word OPSEL[3] or, fp4, the byte OPSEL[3:2] of d; the rest of d is kept */
    SIM_FORM_PACK2,
    SIM_FORM_PACK2H,    /* both halves of s0 -> likewise */
    SIM_FORM_SR1,       /* s0 (seed s1) -> byte OPSEL[3:2], or half OPSEL[3], of d; the rest is kept */
    SIM_FORM_SR2,       /* two elements of s0 (seed s1) -> byte OPSEL[3:2] of d */
    SIM_FORM_UNPACK2,   /* word OPSEL[0], or for fp4 byte OPSEL[1:0], of s0 -> two elements */
    SIM_FORM_UNPACK1,   /* byte OPSEL[1:0] of s0 -> one element (f16: half OPSEL[3] of d, the other half is kept) */
    SIM_FORM_INTERLEAVE,/* 16 f32 of s0 and of s1, alternating -> 32 elements */
    SIM_FORM_PACK32,    /* 32 elements of s0 -> 32 elements */
    SIM_FORM_SR32,      /* the same, stochastic with seed s1, stepped by v_prng_b32 */
    SIM_FORM_UNPACK32,  /* 32 elements -> 32 elements */
    SIM_FORM_WIDE2      /* s0, s1 f32 -> two 16-bit halves of d */
};

struct sim_cvt {
    uint16_t kind;  /* sim_cvt_kind */
    uint8_t op_sel; /* OPSEL bits 0..3 as encoded (sim_cvt_op_sel) */
    uint8_t clamp;  /* FP16_OVFL: fp8/bf8 overflow saturates */
};

int sim_cvt_kind(const char *mnemonic);              /* -1: unknown */
int sim_cvt_count(void);
const struct sim_cvt_info *sim_cvt_info(int kind);
/* OPSEL bits from the entries of the text's op_sel list (bit i = entry i). */
int sim_cvt_op_sel(int kind, int entries);
/* Merges the results into d under exec (64 words of 0 or ~0). scale: f32 bits a lane, NULL where the instruction has
 * none. */
void sim_cvt_wave(const struct sim_cvt *op, sim_lanes *d, const sim_lanes *s0, const sim_lanes *s1,
                  const uint32_t *scale, const uint32_t *exec);

#endif
