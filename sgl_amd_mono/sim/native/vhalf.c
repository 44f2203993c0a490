// SPDX-License-Identifier: Apache-2.0
// 16-bit (half.def) and packed operations: v_pk_*, dot products, v_fma_mix.
#include "valu_math.h"

#define EACH(expr)                                                                                                     \
    {                                                                                                                  \
        const uint32_t *em = w->em;                                                                                    \
        _Pragma("GCC ivdep") for (int l = 0; l < LANES; l++) { const uint32_t r = (expr); d[l] = em[l] ? r : d[l]; }   \
    }
static inline const uint32_t *src16(Wave *w, const Ins *i, int k, uint32_t *t) {
    return i->kind[k] == SRC_VGPR ? w->v[i->src[k]] : src_other(w, i, k, t, 15);
}
#define A (a[l] & 0xffffu)
#define B (b[l] & 0xffffu)
#define C (c[l] & 0xffffu)
#define SA ((int32_t)(int16_t)a[l])
#define SB ((int32_t)(int16_t)b[l])
#define SC ((int32_t)(int16_t)c[l])
#define HALF(x) u2f(sim_f32_from_f16((uint16_t)(x)))
#define HA HALF(a[l])
#define HB HALF(b[l])
#define HC HALF(c[l])
#define HD HALF(d[l])
#define HANDLER(name, SETUP, ...)                                                                                      \
    static const Ins *op_##name(Wave *w, const Ins *i) {                                                               \
        SETUP                                                                                                          \
        uint32_t *d = w->v[i->dst];                                                                                    \
        EACH((uint32_t)(__VA_ARGS__) & 0xffffu)                                                                        \
        return i + 1;                                                                                                  \
    }
#define S16(x, k) vrow t##k ALIGN64; const uint32_t *x = src16(w, i, k, t##k);
#define S32(x, k) vrow t##k ALIGN64; const uint32_t *x = src32(w, i, k, t##k);
#define HUN(name, sig, ...) HANDLER(name, S16(a, 0), __VA_ARGS__)
#define HBI(name, sig, ...) HANDLER(name, S16(a, 0) S16(b, 1), __VA_ARGS__)
#define HTER(name, sig, ...) HANDLER(name, S16(a, 0) S16(b, 1) S16(c, 2), __VA_ARGS__)
#define HACC HBI
#define HFROM32(name, sig, ...) /* below */
#include "half.def"
#undef HUN
#undef HBI
#undef HTER
#undef HACC

static const Ins *op_v_cvt_f16_f32(Wave *w, const Ins *i) {
    S32(a, 0)
    uint32_t *d = w->v[i->dst];
    EACH((uint32_t)sim_f16_from_f32(a[l]))
    return i + 1;
}

// ---- packed 16-bit: op_sel picks the half for the low result, op_sel_hi for the high one; neg_lo, neg_hi ----
// Both result halves as rows of 16-bit operands.
static void packed_halves(Wave *w, const Ins *i, int k, uint32_t *lo, uint32_t *hi, int is_float) {
    vrow t ALIGN64;
    const uint32_t *s = i->kind[k] == SRC_VGPR ? w->v[i->src[k]] : src_other(w, i, k, t, -1);
    const uint32_t sl = (i->op_sel >> k & 1) * 16, sh = (i->op_sel_hi >> k & 1) * 16;
    const uint32_t nl = is_float && (i->neg_lo >> k & 1) ? 0x8000u : 0,
        nh = is_float && (i->neg_hi >> k & 1) ? 0x8000u : 0;
    for (int l = 0; l < LANES; l++) {
        const uint32_t x = s[l];
        lo[l] = (x >> sl & 0xffffu) ^ nl;
        hi[l] = (x >> sh & 0xffffu) ^ nh;
    }
}
#define PK_SETUP(n, fl)                                                                                                \
    vrow pl[3] ALIGN64, ph[3] ALIGN64;                                                                                 \
    for (int k = 0; k < n; k++) packed_halves(w, i, k, pl[k], ph[k], fl);
#define X (x[l])
#define PK(name, n, fl, expr)                                                                                          \
    static inline uint32_t half_##name(uint32_t a, uint32_t b, uint32_t c) { (void)a; (void)b; (void)c;                \
        return (uint32_t)(expr) & 0xffffu; }                                                                           \
    static const Ins *op_##name(Wave *w, const Ins *i) {                                                               \
        PK_SETUP(n, fl)                                                                                                \
        uint32_t *d = w->v[i->dst];                                                                                    \
        if (n < 3) for (int l = 0; l < LANES; l++) pl[2][l] = ph[2][l] = 0;                                            \
        EACH(half_##name(pl[0][l], pl[1][l], pl[2][l]) | half_##name(ph[0][l], ph[1][l], ph[2][l]) << 16)              \
        return i + 1;                                                                                                  \
    }
PK(v_pk_add_u16, 2, 0, a + b)
PK(v_pk_add_i16, 2, 0, a + b)
PK(v_pk_sub_u16, 2, 0, a - b)
PK(v_pk_sub_i16, 2, 0, a - b)
PK(v_pk_add_u16_clamp, 2, 0, umin(a + b, 0xffff))
PK(v_pk_sub_u16_clamp, 2, 0, a < b ? 0 : a - b)
PK(v_pk_add_i16_clamp, 2, 0, clamp_i16((int16_t)a + (int16_t)b))
PK(v_pk_sub_i16_clamp, 2, 0, clamp_i16((int16_t)a - (int16_t)b))
PK(v_pk_mul_lo_u16, 2, 0, a * b)
PK(v_pk_mad_u16, 3, 0, a * b + c)
PK(v_pk_mad_i16, 3, 0, a * b + c)
PK(v_pk_max_u16, 2, 0, umax(a, b))
PK(v_pk_min_u16, 2, 0, umin(a, b))
PK(v_pk_max_i16, 2, 0, imax((int16_t)a, (int16_t)b))
PK(v_pk_min_i16, 2, 0, imin((int16_t)a, (int16_t)b))
PK(v_pk_lshlrev_b16, 2, 0, b << (a & 15))
PK(v_pk_lshrrev_b16, 2, 0, b >> (a & 15))
PK(v_pk_ashrrev_i16, 2, 0, (int16_t)b >> (a & 15))
PK(v_pk_add_f16, 2, 1, to_f16(HALF(a) + HALF(b)))
PK(v_pk_mul_f16, 2, 1, to_f16(HALF(a) * HALF(b)))
PK(v_pk_min_f16, 2, 1, min_f16(a, b))
PK(v_pk_max_f16, 2, 1, max_f16(a, b))
PK(v_pk_fma_f16, 3, 1, fma_f16(HALF(a), HALF(b), HALF(c)))
PK(v_pk_minimum3_f16, 3, 1, to_f16(u2f(minimum_f32(minimum_f32(f2u(HALF(a)), f2u(HALF(b))), f2u(HALF(c))))))
PK(v_pk_maximum3_f16, 3, 1, to_f16(u2f(maximum_f32(maximum_f32(f2u(HALF(a)), f2u(HALF(b))), f2u(HALF(c))))))

// d(32) = c(32) + a.lo * b.lo + a.hi * b.hi; the products are exact in f32. Order of the sums as in the CDNA4 ISA's
// pseudo code: c, low, high, but for v_dot2_f32_bf16: low, high, c.
#define LO(conv) conv(pl[0][l]), conv(pl[1][l])
#define HI(conv) conv(ph[0][l]), conv(ph[1][l])
#define C_FIRST(conv, c) __builtin_fmaf(HI(conv), __builtin_fmaf(LO(conv), c))
#define C_LAST(conv, c) (__builtin_fmaf(HI(conv), conv(pl[0][l]) * conv(pl[1][l])) + (c))
#define DOT(name, acc, conv, order)                                                                                    \
    static const Ins *op_##name(Wave *w, const Ins *i) {                                                               \
        vrow tc ALIGN64;                                                                                               \
        PK_SETUP(2, 1)                                                                                                 \
        uint32_t *d = w->v[i->dst];                                                                                    \
        const uint32_t *c = acc ? d : src32(w, i, 2, tc);                                                              \
        EACH(nan_f32(order(conv, u2f(c[l]))))                                                                          \
        return i + 1;                                                                                                  \
    }
#define BF16(x) u2f((uint32_t)(x) << 16)
DOT(v_dot2_f32_f16, 0, HALF, C_FIRST)
DOT(v_dot2c_f32_f16, 1, HALF, C_FIRST)
DOT(v_dot2_f32_bf16, 0, BF16, C_LAST)
DOT(v_dot2c_f32_bf16, 1, BF16, C_FIRST)

// v_fma_mix: op_sel_hi says f16, op_sel its half; neg_hi is abs, neg_lo neg.
static void mix_source(Wave *w, const Ins *i, int k, uint32_t *o) {
    vrow t ALIGN64;
    const uint32_t *s = i->kind[k] == SRC_VGPR ? w->v[i->src[k]] : src_other(w, i, k, t, -1);
    const int half = i->op_sel_hi >> k & 1, hi = i->op_sel >> k & 1;
    for (int l = 0; l < LANES; l++) {
        uint32_t x = half ? sim_f32_from_f16((uint16_t)(s[l] >> (16 * hi))) : s[l];
        if (i->neg_hi >> k & 1) x &= 0x7fffffffu;
        if (i->neg_lo >> k & 1) x ^= 0x80000000u;
        o[l] = x;
    }
}
#define MIX(name, write)                                                                                               \
    static const Ins *op_##name(Wave *w, const Ins *i) {                                                               \
        vrow a ALIGN64, b ALIGN64, c ALIGN64;                                                                          \
        mix_source(w, i, 0, a); mix_source(w, i, 1, b); mix_source(w, i, 2, c);                                        \
        uint32_t *d = w->v[i->dst];                                                                                    \
        const int cl = i->clamp;                                                                                       \
        const uint32_t *em = w->em;                                                                                    \
        for (int l = 0; l < LANES; l++) {                                                                              \
            uint32_t r = nan_f32(__builtin_fmaf(u2f(a[l]), u2f(b[l]), u2f(c[l])));                                     \
            if (cl) r = is_nan_bits(r) || (r >> 31) ? 0 : r > 0x3f800000u ? 0x3f800000u : r;                           \
            d[l] = em[l] ? (write) : d[l];                                                                             \
        }                                                                                                              \
        return i + 1;                                                                                                  \
    }
MIX(v_fma_mix_f32, r)
MIX(v_fma_mixlo_f16, (d[l] & 0xffff0000u) | sim_f16_from_f32(r))
MIX(v_fma_mixhi_f16, (d[l] & 0xffffu) | (uint32_t)sim_f16_from_f32(r) << 16)

// ---- packed f32: pairs; op_sel / op_sel_hi pick the register for the low / high result ----
static void pair_halves(Wave *w, const Ins *i, int k, vrow *t, const uint32_t **lo, const uint32_t **hi, int is_float) {
    const uint32_t *l0, *h0;
    if (i->kind[k] == SRC_VGPR) { l0 = w->v[i->src[k]]; h0 = w->v[i->src[k] + 1]; }
    else if (i->kind[k] == SRC_CONST) { l0 = w->crows[i->src[k]]; h0 = w->crows[i->src[k] + 1]; }
    else { splat(t[0], w->s[i->src[k]]); splat(t[1], w->s[i->src[k] + 1]); l0 = t[0]; h0 = t[1]; }
    const uint32_t *x = i->op_sel >> k & 1 ? h0 : l0, *y = i->op_sel_hi >> k & 1 ? h0 : l0;
    if (is_float && (i->neg_lo >> k & 1)) { for (int l = 0; l < LANES; l++) t[2][l] = x[l] ^ 0x80000000u; x = t[2]; }
    if (is_float && (i->neg_hi >> k & 1)) { for (int l = 0; l < LANES; l++) t[3][l] = y[l] ^ 0x80000000u; y = t[3]; }
    *lo = x;
    *hi = y;
}
#define PKF(name, n, fl, exl, exh)                                                                                     \
    static const Ins *op_##name(Wave *w, const Ins *i) {                                                               \
        vrow t[3][4] ALIGN64;                                                                                          \
        const uint32_t *al, *ah, *bl, *bh, *cl, *ch;                                                                   \
        pair_halves(w, i, 0, t[0], &al, &ah, fl);                                                                      \
        pair_halves(w, i, 1, t[1], &bl, &bh, fl);                                                                      \
        if (n == 3) pair_halves(w, i, 2, t[2], &cl, &ch, fl); else cl = ch = al;                                       \
        (void)cl; (void)ch;                                                                                            \
        uint32_t *dl = w->v[i->dst], *dh = w->v[i->dst + 1];                                                           \
        const uint32_t *em = w->em;                                                                                    \
        _Pragma("GCC ivdep") for (int l = 0; l < LANES; l++) {                                                         \
            const uint32_t r0 = (exl), r1 = (exh);                                                                     \
            dl[l] = em[l] ? r0 : dl[l];                                                                                \
            dh[l] = em[l] ? r1 : dh[l];                                                                                \
        }                                                                                                              \
        return i + 1;                                                                                                  \
    }
PKF(v_pk_add_f32, 2, 1, nan_f32(u2f(al[l]) + u2f(bl[l])), nan_f32(u2f(ah[l]) + u2f(bh[l])))
PKF(v_pk_mul_f32, 2, 1, nan_f32(u2f(al[l]) * u2f(bl[l])), nan_f32(u2f(ah[l]) * u2f(bh[l])))
PKF(v_pk_fma_f32, 3, 1, nan_f32(__builtin_fmaf(u2f(al[l]), u2f(bl[l]), u2f(cl[l]))),
    nan_f32(__builtin_fmaf(u2f(ah[l]), u2f(bh[l]), u2f(ch[l]))))
PKF(v_pk_mov_b32, 2, 0, al[l], bl[l]) // op_sel alone picks, low result from source 0, high from source 1

#define ROW(name, sig) {#name, op_##name, sig, CLS_VALU},
#define HUN(name, sig, ...) ROW(name, sig)
#define HBI HUN
#define HTER HUN
#define HACC HUN
#undef HFROM32
#define HFROM32 HUN
const OpEntry vhalf_ops[] = {
#include "half.def"
    ROW(v_pk_add_u16, "P=PP") ROW(v_pk_add_i16, "P=PP") ROW(v_pk_sub_u16, "P=PP") ROW(v_pk_sub_i16, "P=PP")
    ROW(v_pk_add_u16_clamp, "P=PP") ROW(v_pk_sub_u16_clamp, "P=PP") ROW(v_pk_add_i16_clamp, "P=PP")
    ROW(v_pk_sub_i16_clamp, "P=PP")
    ROW(v_pk_mul_lo_u16, "P=PP") ROW(v_pk_mad_u16, "P=PPP") ROW(v_pk_mad_i16, "P=PPP")
    ROW(v_pk_max_u16, "P=PP") ROW(v_pk_min_u16, "P=PP") ROW(v_pk_max_i16, "P=PP") ROW(v_pk_min_i16, "P=PP")
    ROW(v_pk_lshlrev_b16, "P=PP") ROW(v_pk_lshrrev_b16, "P=PP") ROW(v_pk_ashrrev_i16, "P=PP")
    ROW(v_pk_add_f16, "p=pp") ROW(v_pk_mul_f16, "p=pp") ROW(v_pk_min_f16, "p=pp") ROW(v_pk_max_f16, "p=pp")
    ROW(v_pk_fma_f16, "p=ppp")
    ROW(v_pk_minimum3_f16, "p=ppp") ROW(v_pk_maximum3_f16, "p=ppp")
    ROW(v_dot2_f32_f16, "f=ppf") ROW(v_dot2c_f32_f16, "f=pp") ROW(v_dot2_f32_bf16, "f=PPf")
    ROW(v_dot2c_f32_bf16, "f=PP")
    ROW(v_fma_mix_f32, "f=MMM") ROW(v_fma_mixlo_f16, "f=MMM") ROW(v_fma_mixhi_f16, "f=MMM")
    ROW(v_pk_add_f32, "k=kk") ROW(v_pk_mul_f32, "k=kk") ROW(v_pk_fma_f32, "k=kkk") ROW(v_pk_mov_b32, "k=kk")
};
const int vhalf_count = sizeof vhalf_ops / sizeof vhalf_ops[0];
