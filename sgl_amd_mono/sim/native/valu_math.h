// SPDX-License-Identifier: Apache-2.0
// Scalar building blocks of the VALU handlers; branch-free where the compiler shall vectorise them.
#ifndef SIM_VALU_MATH_H
#define SIM_VALU_MATH_H

#include <math.h>

#include "convert.h"
#include "sim.h"

static inline uint32_t umin(uint32_t a, uint32_t b) { return a < b ? a : b; }
static inline uint32_t umax(uint32_t a, uint32_t b) { return a > b ? a : b; }
static inline int32_t imin(int32_t a, int32_t b) { return a < b ? a : b; }
static inline int32_t imax(int32_t a, int32_t b) { return a > b ? a : b; }
static inline int32_t sext24(uint32_t x) { return (int32_t)(x << 8) >> 8; }
static inline uint32_t saturate_i32(int64_t x) {
    return (uint32_t)(x > INT32_MAX ? INT32_MAX : x < INT32_MIN ? INT32_MIN : (int32_t)x);
}

// The default NaN of gfx950 is positive, x86's negative.
static inline uint32_t nan_f32(float f) { const uint32_t u = f2u(f); return u == 0xffc00000u ? 0x7fc00000u : u; }

static inline uint32_t bit_reverse(uint32_t x) {
    x = (x >> 1 & 0x55555555u) | (x & 0x55555555u) << 1;
    x = (x >> 2 & 0x33333333u) | (x & 0x33333333u) << 2;
    x = (x >> 4 & 0x0f0f0f0fu) | (x & 0x0f0f0f0fu) << 4;
    x = (x >> 8 & 0x00ff00ffu) | (x & 0x00ff00ffu) << 8;
    return x >> 16 | x << 16;
}
static inline uint32_t first_sign_change(uint32_t x) { // -1 when all bits are equal
    const uint32_t y = x ^ (uint32_t)((int32_t)x >> 31);
    return y ? (uint32_t)__builtin_clz(y) : ~0u;
}
static inline uint32_t bit_field_signed(uint32_t a, uint32_t b, uint32_t c) {
    const uint32_t o = b & 31, n = c & 31;
    const uint32_t x = n + o > 32 ? a : a << ((32 - n - o) & 31);
    const int32_t r = n + o > 32 ? (int32_t)a >> o : (int32_t)(n + o == 0 ? 0 : x) >> ((32 - n) & 31);
    return n == 0 ? 0 : (uint32_t)r;
}
static inline uint32_t permuted_byte(uint64_t data, uint32_t sel) {
    const uint32_t byte = (uint32_t)(data >> (8 * (sel & 7))) & 255u;
    // 8..11: sign of bytes 1, 3, 5, 7; 12: zero; above: ones
    const uint32_t sign = (uint32_t)(data >> (16 * (sel & 3) + 15)) & 1u ? 255u : 0u;
    return sel < 8 ? byte : sel < 12 ? sign : sel == 12 ? 0u : 255u;
}
static inline uint32_t byte_permute(uint32_t a, uint32_t b, uint32_t c) {
    const uint64_t data = (uint64_t)a << 32 | b;
    return permuted_byte(data, c & 255) | permuted_byte(data, c >> 8 & 255) << 8 |
           permuted_byte(data, c >> 16 & 255) << 16 | permuted_byte(data, c >> 24) << 24;
}
static inline uint32_t saturate_u8(uint32_t x) {
    const int32_t lo = (int16_t)x, hi = (int32_t)x >> 16;
    return (uint32_t)imax(0, imin(255, lo)) | (uint32_t)imax(0, imin(255, hi)) << 8;
}
static inline uint32_t sad_u8(uint32_t a, uint32_t b) {
    uint32_t r = 0;
    for (int k = 0; k < 32; k += 8) {
        const int32_t x = (int32_t)(a >> k & 255), y = (int32_t)(b >> k & 255);
        r += (uint32_t)(x > y ? x - y : y - x);
    }
    return r;
}
static inline uint32_t sad_u16(uint32_t a, uint32_t b) {
    const int32_t x = (int32_t)(a & 0xffff) - (int32_t)(b & 0xffff), y = (int32_t)(a >> 16) - (int32_t)(b >> 16);
    return (uint32_t)(x < 0 ? -x : x) + (uint32_t)(y < 0 ? -y : y);
}
static inline uint32_t lerp_u8(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t r = 0;
    for (int k = 0; k < 32; k += 8) r |= (((a >> k & 255) + (b >> k & 255) + (c >> k & 1)) >> 1) << k;
    return r;
}
static inline uint32_t dot4_i8(uint32_t a, uint32_t b) {
    int32_t r = 0;
    for (int k = 0; k < 32; k += 8) r += (int32_t)(int8_t)(a >> k) * (int8_t)(b >> k);
    return (uint32_t)r;
}
static inline uint32_t dot4_u8(uint32_t a, uint32_t b) {
    uint32_t r = 0;
    for (int k = 0; k < 32; k += 8) r += (a >> k & 255) * (b >> k & 255);
    return r;
}
static inline uint32_t dot8_i4(uint32_t a, uint32_t b) {
    int32_t r = 0;
    for (int k = 0; k < 32; k += 4) r += ((int32_t)(a << (28 - k)) >> 28) * ((int32_t)(b << (28 - k)) >> 28);
    return (uint32_t)r;
}
static inline uint32_t dot8_u4(uint32_t a, uint32_t b) {
    uint32_t r = 0;
    for (int k = 0; k < 32; k += 4) r += (a >> k & 15) * (b >> k & 15);
    return r;
}

// ---- float32 ----
static inline uint32_t quiet(uint32_t x) { return x | 0x400000u; }
static inline int is_nan_bits(uint32_t x) { return (x & 0x7fffffffu) > 0x7f800000u; }
static inline int is_snan_bits(uint32_t x) { return is_nan_bits(x) && !(x & 0x400000u); }
// Selection by an all-ones or all-zeros mask: unlike ?: it never becomes a branch.
static inline uint32_t pick(uint32_t mask, uint32_t one, uint32_t zero) { return zero ^ ((one ^ zero) & mask); }
static inline uint32_t nan_mask(uint32_t x) { return 0u - (uint32_t)((x & 0x7fffffffu) > 0x7f800000u); }
// Total order of the bits: -0 below +0; only for operands that are not NaN.
static inline int32_t order_key(uint32_t x) { return (int32_t)(x ^ ((uint32_t)((int32_t)x >> 31) >> 1)); }
// IEEE-mode minimum and maximum (minNum): a number beats a quiet NaN, a signalling NaN is quieted and returned.
static inline uint32_t select_f32(uint32_t a, uint32_t b, uint32_t r) {
    const uint32_t na = nan_mask(a), nb = nan_mask(b);
    const uint32_t sa = na & (0u - (uint32_t)((a & 0x400000u) == 0)), sb = nb & (0u - (uint32_t)((b & 0x400000u) == 0));
    r = pick(nb, a, r);
    r = pick(na, b, r);
    r = pick((na & nb) | sa, a | 0x400000u, pick(sb, b | 0x400000u, r));
    return r;
}
static inline uint32_t min_f32(uint32_t a, uint32_t b) {
    return select_f32(a, b, pick(0u - (uint32_t)(order_key(a) < order_key(b)), a, b));
}
static inline uint32_t max_f32(uint32_t a, uint32_t b) {
    return select_f32(a, b, pick(0u - (uint32_t)(order_key(a) > order_key(b)), a, b));
}
// IEEE 754-2019 minimum and maximum: a NaN wins.
static inline uint32_t minimum_f32(uint32_t a, uint32_t b) {
    const uint32_t r = pick(0u - (uint32_t)(order_key(a) < order_key(b)), a, b);
    return pick(nan_mask(a), a | 0x400000u, pick(nan_mask(b), b | 0x400000u, r));
}
static inline uint32_t maximum_f32(uint32_t a, uint32_t b) {
    const uint32_t r = pick(0u - (uint32_t)(order_key(a) > order_key(b)), a, b);
    return pick(nan_mask(a), a | 0x400000u, pick(nan_mask(b), b | 0x400000u, r));
}
static inline uint32_t med3_f32(uint32_t a, uint32_t b, uint32_t c) {
    const uint32_t low = min_f32(a, b), high = max_f32(a, b);
    const uint32_t r = max_f32(low, min_f32(high, c)), with_nan = min_f32(low, c);
    return pick(nan_mask(a) | nan_mask(b) | nan_mask(c), with_nan, r);
}
static inline uint32_t ldexp_f32(uint32_t a, int32_t e) {
    const int32_t n = imax(-300, imin(300, e));
    const double r = sim_f64_from_bits(a) * u2d((uint64_t)(1023 + n) << 52);
    return is_nan_bits(a) ? quiet(a) : f2u((float)r);
}
static inline uint32_t fract_f32(uint32_t a) {
    const float x = u2f(a), f = __builtin_floorf(x);
    const uint32_t r = f2u(x - f);
    const uint32_t top = 0x3f7fffffu; // never 1.0
    return is_nan_bits(a) ? quiet(a) : (a & 0x7fffffffu) == 0x7f800000u ? 0x7fc00000u : r > top ? top : r;
}
static inline double fract_f64(double x) {
    const double r = x - __builtin_floor(x), top = u2d(0x3fefffffffffffffull);
    return r > top ? top : r;
}
static inline uint32_t frexp_mant_f32(uint32_t a) {
    const uint32_t e = a >> 23 & 255, m = a & 0x7fffffu;
    const uint32_t shift = m ? (uint32_t)__builtin_clz(m | 1) - 8 : 0;
    const uint32_t normal = (a & 0x807fffffu) | 0x3f000000u,
                   small = (a & 0x80000000u) | 0x3f000000u | (m << shift & 0x7fffffu);
    return e == 255 ? (m ? quiet(a) : a) : e ? normal : m ? small : a;
}
static inline int32_t frexp_exp_f32(uint32_t a) {
    const uint32_t e = a >> 23 & 255, m = a & 0x7fffffu;
    const int32_t shift = m ? __builtin_clz(m) - 8 : 0;
    return e == 255 ? 0 : e ? (int32_t)e - 126 : m ? -125 - shift : 0;
}
static inline double frexp_mant_f64(double x) { int e; return x != x || x - x != 0 ? x : frexp(x, &e); }
static inline int32_t frexp_exp_f64(double x) { int e = 0; if (x == x && x - x == 0) (void)frexp(x, &e); return e; }

static inline int32_t to_i32(float x) { // truncates; NaN 0; saturates
    const float t = x >= 2147483648.0f || x != x ? 0.0f : x < -2147483648.0f ? -2147483648.0f : x;
    return x >= 2147483648.0f ? INT32_MAX : (int32_t)t;
}
static inline uint32_t to_u32(float x) {
    const float t = x > 0.0f && x < 4294967296.0f ? x : 0.0f;
    const int big = t >= 2147483648.0f;
    const uint32_t r = (uint32_t)(int32_t)(big ? t - 2147483648.0f : t) ^ (big ? 0x80000000u : 0u);
    return x >= 4294967296.0f ? ~0u : r;
}
static inline int32_t d_to_i32(double x) {
    return x != x ? 0 : x >= 2147483647.0 ? INT32_MAX : x <= -2147483648.0 ? INT32_MIN : (int32_t)x;
}
static inline uint32_t d_to_u32(double x) { return !(x > 0) ? 0 : x >= 4294967295.0 ? ~0u : (uint32_t)x; }
static inline uint32_t clamp_i16(int32_t x) { return (uint32_t)imax(-32768, imin(32767, x)) & 0xffffu; }
static inline uint32_t norm_i16(float x) {
    const float c = x != x ? 0.0f : x > 1.0f ? 1.0f : x < -1.0f ? -1.0f : x;
    return (uint32_t)(int32_t)__builtin_rintf(c * 32767.0f) & 0xffffu;
}
static inline uint32_t norm_u16(float x) {
    const float c = !(x > 0.0f) ? 0.0f : x > 1.0f ? 1.0f : x;
    return (uint32_t)(int32_t)__builtin_rintf(c * 65535.0f) & 0xffffu;
}
static inline double min_f64(double a, double b) {
    if (a != a) return b;
    if (b != b) return a;
    return a < b ? a : b < a ? b : (d2u(a) >> 63 ? a : b);
}
static inline double max_f64(double a, double b) {
    if (a != a) return b;
    if (b != b) return a;
    return a > b ? a : b > a ? b : (d2u(a) >> 63 ? b : a);
}

// Division, after the pseudo code of the CDNA3 ISA. q: quotient so far, d: denominator, n: numerator.
static inline uint32_t div_fixup_f32(uint32_t q, uint32_t d, uint32_t n) {
    const uint32_t sign = (d ^ n) & 0x80000000u;
    const uint32_t ad = d & 0x7fffffffu, an = n & 0x7fffffffu;
    const int32_t en = (int32_t)(an >> 23), ed = (int32_t)(ad >> 23);
    if (an > 0x7f800000u) return quiet(n);
    if (ad > 0x7f800000u) return quiet(d);
    if (an == 0 && ad == 0) return 0xffc00000u;
    if (an == 0x7f800000u && ad == 0x7f800000u) return 0xffc00000u;
    if (ad == 0 || an == 0x7f800000u) return sign | 0x7f800000u;
    if (an == 0 || ad == 0x7f800000u) return sign;
    if (en - ed < -150) return sign; // underflow
    if (ed == 255) return sign | 0x7f800000u;
    return is_nan_bits(q) ? sign | 0x7f800000u : sign | (q & 0x7fffffffu);
}
static inline uint32_t div_fixup_f16(uint32_t q, uint32_t d, uint32_t n) {
    const uint32_t sign = (d ^ n) & 0x8000u, ad = d & 0x7fffu, an = n & 0x7fffu;
    if (an > 0x7c00u) return n | 0x200u;
    if (ad > 0x7c00u) return d | 0x200u;
    if ((an == 0 && ad == 0) || (an == 0x7c00u && ad == 0x7c00u)) return 0xfe00u;
    if (ad == 0 || an == 0x7c00u) return sign | 0x7c00u;
    if (an == 0 || ad == 0x7c00u) return sign;
    return sign | (q & 0x7fffu);
}

// ---- float16 ----
static inline uint32_t to_f16(float x) { return sim_f16_from_f32(f2u(x)); }
static inline uint32_t fma_f16(float a, float b, float c) {
    const double d = (double)a * b + c; // the product is exact; round to odd so that the second rounding is harmless
    float f = (float)d;
    uint32_t u = f2u(f);
    if ((double)f != d && d == d && !(u & 1)) u += ((double)f < d) == (d > 0) ? 1u : ~0u;
    return sim_f16_from_f32(u);
}
static inline int h_nan(uint32_t x) { return (x & 0x7fffu) > 0x7c00u; }
static inline int h_snan(uint32_t x) { return h_nan(x) && !(x & 0x200u); }
// minNum and maxNum as for f32: a number beats a quiet NaN, a signalling NaN is quieted and returned.
static inline uint32_t select_f16(uint32_t a, uint32_t b, uint32_t r) {
    r = h_nan(b) ? a : r;
    r = h_nan(a) ? b : r;
    r = h_nan(a) && h_nan(b) ? a | 0x200u : r;
    r = h_snan(b) ? b | 0x200u : r;
    r = h_snan(a) ? a | 0x200u : r;
    return r;
}
static inline int32_t order_key16(uint32_t x) { return (int16_t)(x ^ ((uint32_t)((int16_t)x >> 15) & 0x7fffu)); }
static inline uint32_t min_f16(uint32_t a, uint32_t b) {
    return select_f16(a, b, order_key16(a) < order_key16(b) ? a : b);
}
static inline uint32_t max_f16(uint32_t a, uint32_t b) {
    return select_f16(a, b, order_key16(a) > order_key16(b) ? a : b);
}
static inline uint32_t fract_f16(uint32_t a) {
    const float x = u2f(sim_f32_from_f16((uint16_t)a));
    const uint32_t r = to_f16(x - __builtin_floorf(x));
    return r > 0x3bffu && r < 0x7c00u ? 0x3bffu : r;
}
#endif
