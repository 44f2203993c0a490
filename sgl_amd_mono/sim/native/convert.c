/* SPDX-License-Identifier: Apache-2.0
 *
 * Format tables and the whole-wave conversions; formats, roundings and special values are defined in convert.h.
 */
#include "convert.h"

#include <stddef.h>

#define LANES 64
#define MAX_REGISTERS 32
#define SCALE_NAN 255u

float sim_table_fp8[256], sim_table_bf8[256], sim_table_fp6[64], sim_table_bf6[64], sim_table_fp4[16];

/* Value of a code by its definition: (-1)^s 2^(max(e, 1) - bias) (m / 2^mbits + (e > 0)). */
static float small_value(uint32_t code, int ebits, int mbits, int bias) {
    const uint32_t e = (code >> mbits) & ((1u << ebits) - 1), m = code & ((1u << mbits) - 1);
    double v = (double)m / (double)(1 << mbits) + (e ? 1.0 : 0.0);
    for (int i = (int)(e ? e : 1) - bias; i > 0; i--) v *= 2.0;
    for (int i = (int)(e ? e : 1) - bias; i < 0; i++) v *= 0.5;
    return (float)((code >> (ebits + mbits)) & 1 ? -v : v);
}

__attribute__((constructor)) static void fill_tables(void) {
    for (uint32_t c = 0; c < 256; c++) {
        sim_table_fp8[c] = small_value(c, 4, 3, 7);
        sim_table_bf8[c] = small_value(c, 5, 2, 15);
        if ((c & 0x7f) == 0x7f) sim_table_fp8[c] = sim_float_f32(((c & 0x80) << 24) | SIM_NAN);
        if ((c & 0x7c) == 0x7c) sim_table_bf8[c] = sim_float_f32(((c & 0x80) << 24) | (c & 3 ? SIM_NAN : 0x7f800000u));
    }
    for (uint32_t c = 0; c < 64; c++) {
        sim_table_fp6[c] = small_value(c, 2, 3, 1);
        sim_table_bf6[c] = small_value(c, 3, 2, 3);
    }
    for (uint32_t c = 0; c < 16; c++) sim_table_fp4[c] = small_value(c, 2, 1, 1);
}

#define PACK2(name, src, dst, form, s1, scale, entry)                                                                 \
    {"v_cvt_" name, SIM_CVT_##src, SIM_CVT_##dst, SIM_FORM_##form, 1, 1, s1, scale, entry}

static const struct sim_cvt_info infos[] = {
    PACK2("pk_fp8_f32", F32, FP8, PACK2, 1, 0, 1),
    PACK2("pk_bf8_f32", F32, BF8, PACK2, 1, 0, 1),
    PACK2("pk_bf16_f32", F32, BF16, WIDE2, 1, 0, 1),
    PACK2("pk_f16_f32", F32, F16, WIDE2, 1, 0, 1),
    PACK2("sr_fp8_f32", F32, FP8, SR1, 1, 0, 0),
    PACK2("sr_bf8_f32", F32, BF8, SR1, 1, 0, 0),
    PACK2("sr_f16_f32", F32, F16, SR1, 1, 0, 1),
    PACK2("sr_bf16_f32", F32, BF16, SR1, 1, 0, 1),
    {"v_cvt_f32_fp8", SIM_CVT_FP8, SIM_CVT_F32, SIM_FORM_UNPACK1, 1, 1, 0, 0, 0},
    {"v_cvt_f32_bf8", SIM_CVT_BF8, SIM_CVT_F32, SIM_FORM_UNPACK1, 1, 1, 0, 0, 0},
    {"v_cvt_pk_f32_fp8", SIM_CVT_FP8, SIM_CVT_F32, SIM_FORM_UNPACK2, 2, 1, 0, 0, 0},
    {"v_cvt_pk_f32_bf8", SIM_CVT_BF8, SIM_CVT_F32, SIM_FORM_UNPACK2, 2, 1, 0, 0, 0},
    PACK2("scalef32_pk_fp8_f32", F32, FP8, PACK2, 1, 2, 0),
    PACK2("scalef32_pk_bf8_f32", F32, BF8, PACK2, 1, 2, 0),
    PACK2("scalef32_pk_fp4_f32", F32, FP4, PACK2, 1, 2, 0),
    PACK2("scalef32_pk_fp8_f16", F16, FP8, PACK2H, 0, 1, 1),
    PACK2("scalef32_pk_bf8_f16", F16, BF8, PACK2H, 0, 1, 1),
    PACK2("scalef32_pk_fp8_bf16", BF16, FP8, PACK2H, 0, 1, 1),
    PACK2("scalef32_pk_bf8_bf16", BF16, BF8, PACK2H, 0, 1, 1),
    PACK2("scalef32_pk_fp4_f16", F16, FP4, PACK2H, 0, 1, 0),
    PACK2("scalef32_pk_fp4_bf16", BF16, FP4, PACK2H, 0, 1, 0),
    PACK2("scalef32_sr_fp8_f32", F32, FP8, SR1, 1, 2, 0),
    PACK2("scalef32_sr_bf8_f32", F32, BF8, SR1, 1, 2, 0),
    PACK2("scalef32_sr_fp8_f16", F16, FP8, SR1, 1, 2, 0),
    PACK2("scalef32_sr_bf8_f16", F16, BF8, SR1, 1, 2, 0),
    PACK2("scalef32_sr_fp8_bf16", BF16, FP8, SR1, 1, 2, 0),
    PACK2("scalef32_sr_bf8_bf16", BF16, BF8, SR1, 1, 2, 0),
    {"v_cvt_scalef32_sr_pk_fp4_f32", SIM_CVT_F32, SIM_CVT_FP4, SIM_FORM_SR2, 1, 2, 1, 2, 0},
    {"v_cvt_scalef32_sr_pk_fp4_f16", SIM_CVT_F16, SIM_CVT_FP4, SIM_FORM_SR2, 1, 1, 1, 2, 0},
    {"v_cvt_scalef32_sr_pk_fp4_bf16", SIM_CVT_BF16, SIM_CVT_FP4, SIM_FORM_SR2, 1, 1, 1, 2, 0},
    {"v_cvt_scalef32_pk_f32_fp8", SIM_CVT_FP8, SIM_CVT_F32, SIM_FORM_UNPACK2, 2, 1, 0, 1, 0},
    {"v_cvt_scalef32_pk_f32_bf8", SIM_CVT_BF8, SIM_CVT_F32, SIM_FORM_UNPACK2, 2, 1, 0, 1, 0},
    {"v_cvt_scalef32_pk_f32_fp4", SIM_CVT_FP4, SIM_CVT_F32, SIM_FORM_UNPACK2, 2, 1, 0, 1, 0},
    PACK2("scalef32_pk_f16_fp8", FP8, F16, UNPACK2, 0, 1, 0),
    PACK2("scalef32_pk_f16_bf8", BF8, F16, UNPACK2, 0, 1, 0),
    PACK2("scalef32_pk_f16_fp4", FP4, F16, UNPACK2, 0, 1, 0),
    PACK2("scalef32_pk_bf16_fp8", FP8, BF16, UNPACK2, 0, 1, 0),
    PACK2("scalef32_pk_bf16_bf8", BF8, BF16, UNPACK2, 0, 1, 0),
    PACK2("scalef32_pk_bf16_fp4", FP4, BF16, UNPACK2, 0, 1, 0),
    PACK2("scalef32_f32_fp8", FP8, F32, UNPACK1, 0, 1, 0),
    PACK2("scalef32_f32_bf8", BF8, F32, UNPACK1, 0, 1, 0),
    PACK2("scalef32_f16_fp8", FP8, F16, UNPACK1, 0, 1, 1),
    PACK2("scalef32_f16_bf8", BF8, F16, UNPACK1, 0, 1, 1),
    {"v_cvt_scalef32_2xpk16_fp6_f32", SIM_CVT_F32, SIM_CVT_FP6, SIM_FORM_INTERLEAVE, 6, 16, 16, 2, 0},
    {"v_cvt_scalef32_2xpk16_bf6_f32", SIM_CVT_F32, SIM_CVT_BF6, SIM_FORM_INTERLEAVE, 6, 16, 16, 2, 0},
    {"v_cvt_scalef32_pk32_fp6_f16", SIM_CVT_F16, SIM_CVT_FP6, SIM_FORM_PACK32, 6, 16, 0, 1, 0},
    {"v_cvt_scalef32_pk32_fp6_bf16", SIM_CVT_BF16, SIM_CVT_FP6, SIM_FORM_PACK32, 6, 16, 0, 1, 0},
    {"v_cvt_scalef32_pk32_bf6_f16", SIM_CVT_F16, SIM_CVT_BF6, SIM_FORM_PACK32, 6, 16, 0, 1, 0},
    {"v_cvt_scalef32_pk32_bf6_bf16", SIM_CVT_BF16, SIM_CVT_BF6, SIM_FORM_PACK32, 6, 16, 0, 1, 0},
    {"v_cvt_scalef32_sr_pk32_fp6_f32", SIM_CVT_F32, SIM_CVT_FP6, SIM_FORM_SR32, 6, 32, 1, 2, 0},
    {"v_cvt_scalef32_sr_pk32_bf6_f32", SIM_CVT_F32, SIM_CVT_BF6, SIM_FORM_SR32, 6, 32, 1, 2, 0},
    {"v_cvt_scalef32_sr_pk32_fp6_f16", SIM_CVT_F16, SIM_CVT_FP6, SIM_FORM_SR32, 6, 16, 1, 2, 0},
    {"v_cvt_scalef32_sr_pk32_bf6_f16", SIM_CVT_F16, SIM_CVT_BF6, SIM_FORM_SR32, 6, 16, 1, 2, 0},
    {"v_cvt_scalef32_sr_pk32_fp6_bf16", SIM_CVT_BF16, SIM_CVT_FP6, SIM_FORM_SR32, 6, 16, 1, 2, 0},
    {"v_cvt_scalef32_sr_pk32_bf6_bf16", SIM_CVT_BF16, SIM_CVT_BF6, SIM_FORM_SR32, 6, 16, 1, 2, 0},
    {"v_cvt_scalef32_pk32_f32_fp6", SIM_CVT_FP6, SIM_CVT_F32, SIM_FORM_UNPACK32, 32, 6, 0, 1, 0},
    {"v_cvt_scalef32_pk32_f32_bf6", SIM_CVT_BF6, SIM_CVT_F32, SIM_FORM_UNPACK32, 32, 6, 0, 1, 0},
    {"v_cvt_scalef32_pk32_f16_fp6", SIM_CVT_FP6, SIM_CVT_F16, SIM_FORM_UNPACK32, 16, 6, 0, 1, 0},
    {"v_cvt_scalef32_pk32_f16_bf6", SIM_CVT_BF6, SIM_CVT_F16, SIM_FORM_UNPACK32, 16, 6, 0, 1, 0},
    {"v_cvt_scalef32_pk32_bf16_fp6", SIM_CVT_FP6, SIM_CVT_BF16, SIM_FORM_UNPACK32, 16, 6, 0, 1, 0},
    {"v_cvt_scalef32_pk32_bf16_bf6", SIM_CVT_BF6, SIM_CVT_BF16, SIM_FORM_UNPACK32, 16, 6, 0, 1, 0},
};

int sim_cvt_count(void) { return (int)(sizeof infos / sizeof *infos); }

int sim_cvt_kind(const char *mnemonic) {
    for (int i = 0; i < sim_cvt_count(); i++)
        if (!strcmp(infos[i].name, mnemonic)) return i;
    return -1;
}

const struct sim_cvt_info *sim_cvt_info(int kind) { return kind < 0 || kind >= sim_cvt_count() ? NULL : &infos[kind]; }

int sim_cvt_op_sel(int kind, int entries) {
    if (infos[kind].target_entry) return (entries & 3) | ((entries >> 2) & 1) << 3;
    return entries & 15;
}

static int format_bits(int format) {
    static const int bits[] = {8, 8, 6, 6, 4, 32, 16, 16};
    return bits[format];
}

static uint32_t get_bits(const uint32_t *words, int bit, int count) {
    uint64_t v = words[bit / 32];
    if (bit % 32 + count > 32) v |= (uint64_t)words[bit / 32 + 1] << 32;
    return (uint32_t)(v >> (bit % 32)) & (count == 32 ? ~0u : (1u << count) - 1u);
}

static void put_bits(uint32_t *words, int bit, int count, uint32_t value) {
    for (int i = 0; i < count; i++, bit++)
        words[bit / 32] = (words[bit / 32] & ~(1u << bit % 32)) | ((value >> i) & 1u) << bit % 32;
}

static double element_value(uint32_t code, int format) {
    switch (format) {
    case SIM_CVT_FP8: return sim_f64_from_bits(sim_f32_from_fp8((uint8_t)code));
    case SIM_CVT_BF8: return sim_f64_from_bits(sim_f32_from_bf8((uint8_t)code));
    case SIM_CVT_FP6: return sim_f64_from_bits(sim_f32_from_fp6((uint8_t)code));
    case SIM_CVT_BF6: return sim_f64_from_bits(sim_f32_from_bf6((uint8_t)code));
    case SIM_CVT_FP4: return sim_f64_from_bits(sim_f32_from_fp4((uint8_t)code));
    case SIM_CVT_F16: return sim_f64_from_bits(sim_f32_from_f16((uint16_t)code));
    case SIM_CVT_BF16: return sim_f64_from_bits(code << 16);
    default: return sim_f64_from_bits(code);
    }
}

/* Bits of x rounded once to an IEEE-like format with ebits/mbits (f32, f16, bf16), nearest even or stochastic. */
static uint32_t ieee_code(double x, int ebits, int mbits, int sr, uint32_t seed) {
    const int bias = (1 << (ebits - 1)) - 1, emin = 1 - bias;
    const uint32_t infinity = ((1u << ebits) - 1u) << mbits;
    const uint32_t sign = (uint32_t)(sim_bits_f64(x) >> 63) << (ebits + mbits);
    const double a = sim_float_f64(sim_bits_f64(x) & 0x7fffffffffffffffull);
    if (x != x) return sign | infinity | 1u << (mbits - 1);
    if (a > 1e300) return sign | infinity;
    if (sim_bits_f64(a) < 0x0010000000000000ull) return sign;
    int e = (int)(sim_bits_f64(a) >> 52) - 1023;
    e = e < emin ? emin : e;
    double scaled = a * sim_float_f64((uint64_t)(1023 + mbits - e) << 52);
    const uint32_t n = sr ? (uint32_t)(scaled + (double)seed * 0x1p-32) : (uint32_t)((scaled + 0x1p52) - 0x1p52);
    const uint64_t code = ((uint64_t)(e - emin) << mbits) + n;
    return sign | (code >= infinity ? infinity : (uint32_t)code);
}

static uint32_t element_code(double x, int format, int sr, uint32_t seed, int clamp) {
    switch (format) {
    case SIM_CVT_F32: return ieee_code(x, 8, 23, sr, seed);
    case SIM_CVT_F16: return ieee_code(x, 5, 10, sr, seed);
    case SIM_CVT_BF16: return ieee_code(x, 8, 7, sr, seed);
    default: return sim_small_from_f64(x, format, sr, seed, clamp);
    }
}

/* 2^(e - 127) of the exponent field, or NaN. */
static double scale_value(uint32_t bits) {
    const uint32_t e = (bits >> 23) & 0xffu;
    return e == SCALE_NAN ? sim_float_f64(0x7ff8000000000000ull) : sim_float_f64((uint64_t)(e + 896u) << 52);
}

/* x / scale; a NaN scale gives a NaN with the sign of x. */
static double divide(double x, double scale) {
    const uint64_t sign = sim_bits_f64(x) & 0x8000000000000000ull;
    return scale != scale ? sim_float_f64(sign | 0x7ff8000000000000ull) : x / scale;
}

static void bf16_pair(uint32_t *d, const uint32_t *s0, const uint32_t *s1, const uint32_t *exec) {
    for (int l = 0; l < LANES; l++) {
        const uint32_t v = sim_bf16_from_f32(s0[l]) | (uint32_t)sim_bf16_from_f32(s1[l]) << 16;
        d[l] = (v & exec[l]) | (d[l] & ~exec[l]);
    }
}

static void convert_lane(const struct sim_cvt_info *info, const struct sim_cvt *op, uint32_t *d, const uint32_t *a,
                         const uint32_t *b, double scale) {
    const int from = format_bits(info->source), to = format_bits(info->target), sel = op->op_sel;
    const uint32_t seed = b[0];
#define NARROW(code, sr, random)                                                                                      \
    element_code(divide(element_value(code, info->source), scale), info->target, sr, random, op->clamp)
#define WIDEN(code) element_code(element_value(code, info->source) * scale, info->target, 0, 0, 0)
    switch (info->form) {
    case SIM_FORM_WIDE2:
        put_bits(d, 0, 16, NARROW(a[0], 0, 0));
        put_bits(d, 16, 16, NARROW(b[0], 0, 0));
        break;
    case SIM_FORM_PACK2:
    case SIM_FORM_PACK2H: {
        const int at = to == 4 ? 8 * (sel >> 2) : 16 * (sel >> 3);
        const uint32_t first = info->form == SIM_FORM_PACK2 ? a[0] : a[0] & 0xffffu;
        const uint32_t second = info->form == SIM_FORM_PACK2 ? b[0] : a[0] >> 16;
        put_bits(d, at, to, NARROW(first, 0, 0));
        put_bits(d, at + to, to, NARROW(second, 0, 0));
        break;
    }
    case SIM_FORM_SR1:
        put_bits(d, to == 16 ? 16 * (sel >> 3) : 8 * (sel >> 2), to, NARROW(get_bits(a, 0, from), 1, seed));
        break;
    case SIM_FORM_SR2:
        put_bits(d, 8 * (sel >> 2), 4, NARROW(get_bits(a, 0, from), 1, seed));
        put_bits(d, 8 * (sel >> 2) + 4, 4, NARROW(get_bits(a, from, from), 1, sim_prng(seed)));
        break;
    case SIM_FORM_UNPACK2: {
        const int at = from == 4 ? 8 * (sel & 3) : 16 * (sel & 1);
        put_bits(d, 0, to, WIDEN(get_bits(a, at, from)));
        put_bits(d, to, to, WIDEN(get_bits(a, at + from, from)));
        break;
    }
    case SIM_FORM_UNPACK1:
        put_bits(d, to == 16 ? 16 * (sel >> 3) : 0, to, WIDEN(get_bits(a, 8 * (sel & 3), 8)));
        break;
    case SIM_FORM_INTERLEAVE:
        for (int i = 0; i < 16; i++) {
            put_bits(d, 2 * i * to, to, NARROW(a[i], 0, 0));
            put_bits(d, (2 * i + 1) * to, to, NARROW(b[i], 0, 0));
        }
        break;
    case SIM_FORM_PACK32:
        for (int i = 0; i < 32; i++) put_bits(d, i * to, to, NARROW(get_bits(a, i * from, from), 0, 0));
        break;
    case SIM_FORM_SR32: {
        uint32_t random = seed;
        for (int i = 0; i < 32; i++, random = sim_prng(random))
            put_bits(d, i * to, to, NARROW(get_bits(a, i * from, from), 1, random));
        break;
    }
    default:
        for (int i = 0; i < 32; i++) put_bits(d, i * to, to, WIDEN(get_bits(a, i * from, from)));
    }
#undef NARROW
#undef WIDEN
}

void sim_cvt_wave(const struct sim_cvt *op, sim_lanes *d, const sim_lanes *s0, const sim_lanes *s1,
                  const uint32_t *scale, const uint32_t *exec) {
    const struct sim_cvt_info *info = &infos[op->kind];
    if (info->form == SIM_FORM_WIDE2 && info->target == SIM_CVT_BF16) {
        bf16_pair(d[0], s0[0], s1[0], exec);
        return;
    }
    for (int l = 0; l < LANES; l++) {
        if (!exec[l]) continue;
        uint32_t a[MAX_REGISTERS], b[MAX_REGISTERS] = {0}, out[MAX_REGISTERS];
        for (int r = 0; r < info->s0_regs; r++) a[r] = s0[r][l];
        for (int r = 0; r < info->s1_regs; r++) b[r] = s1[r][l];
        for (int r = 0; r < info->d_regs; r++) out[r] = d[r][l];
        convert_lane(info, op, out, a, b, scale ? scale_value(scale[l]) : 1.0);
        for (int r = 0; r < info->d_regs; r++) d[r][l] = out[r];
    }
}
