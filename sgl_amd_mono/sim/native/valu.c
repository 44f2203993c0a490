// SPDX-License-Identifier: Apache-2.0
// Element-wise VALU handlers (valu.def), carries, multiply-add wide, division, cndmask, bitop3.
#include "valu_math.h"

#define A (a[l])
#define B (b[l])
#define C (c[l])
#define D (d[l])
#define SA ((int32_t)a[l])
#define SB ((int32_t)b[l])
#define SC ((int32_t)c[l])
#define FA u2f(a[l])
#define FB u2f(b[l])
#define FC u2f(c[l])
#define FD u2f(d[l])

// Writes expr to d under EXEC. Lanes are independent, so the loop has no carried dependence even when d is a source.
#define EACH(expr)                                                                                                     \
    if (likely(w->full)) {                                                                                             \
        _Pragma("GCC ivdep") for (int l = 0; l < LANES; l++) d[l] = (expr);                                            \
    } else {                                                                                                           \
        const uint32_t *em = w->em;                                                                                    \
        _Pragma("GCC ivdep") for (int l = 0; l < LANES; l++) { const uint32_t r = (expr); d[l] = em[l] ? r : d[l]; }   \
    }

#define UN(name, sig, ...)                                                                                             \
    static const Ins *op_##name(Wave *w, const Ins *i) {                                                               \
        vrow t0 ALIGN64;                                                                                               \
        const uint32_t *a = src32(w, i, 0, t0);                                                                        \
        uint32_t *d = w->v[i->dst];                                                                                    \
        EACH(__VA_ARGS__)                                                                                              \
        return i + 1;                                                                                                  \
    }
#define BI(name, sig, ...)                                                                                             \
    static const Ins *op_##name(Wave *w, const Ins *i) {                                                               \
        vrow t0 ALIGN64, t1 ALIGN64;                                                                                   \
        const uint32_t *a = src32(w, i, 0, t0), *b = src32(w, i, 1, t1);                                               \
        uint32_t *d = w->v[i->dst];                                                                                    \
        EACH(__VA_ARGS__)                                                                                              \
        return i + 1;                                                                                                  \
    }
#define TER(name, sig, ...)                                                                                            \
    static const Ins *op_##name(Wave *w, const Ins *i) {                                                               \
        vrow t0 ALIGN64, t1 ALIGN64, t2 ALIGN64;                                                                       \
        const uint32_t *a = src32(w, i, 0, t0), *b = src32(w, i, 1, t1), *c = src32(w, i, 2, t2);                      \
        uint32_t *d = w->v[i->dst];                                                                                    \
        EACH(__VA_ARGS__)                                                                                              \
        return i + 1;                                                                                                  \
    }
#define ACC(name, sig, ...) BI(name, sig, __VA_ARGS__)

#define QA ((uint64_t)ah[l] << 32 | al[l])
#define QB ((uint64_t)bh[l] << 32 | bl[l])
#define QC ((uint64_t)ch[l] << 32 | cl[l])
#define DA u2d(QA)
#define DB u2d(QB)
#define DC u2d(QC)
#define PAIR(x, k) vrow t##k[2] ALIGN64; const uint32_t *x##l, *x##h; src64(w, i, k, t##k, &x##l, &x##h);
#define ONE(x, k) vrow t##k ALIGN64; const uint32_t *x = src32(w, i, k, t##k);
#define EACH64(expr)                                                                                                   \
    vrow rl ALIGN64, rh ALIGN64;                                                                                       \
    uint32_t *dl = w->v[i->dst], *dh = w->v[i->dst + 1];                                                               \
    const uint32_t *em = w->em;                                                                                        \
    for (int l = 0; l < LANES; l++) {                                                                                  \
        const uint64_t r = (expr);                                                                                     \
        rl[l] = (uint32_t)r;                                                                                           \
        rh[l] = (uint32_t)(r >> 32);                                                                                   \
    }                                                                                                                  \
    for (int l = 0; l < LANES; l++) dl[l] = (rl[l] & em[l]) | (dl[l] & ~em[l]);                                        \
    for (int l = 0; l < LANES; l++) dh[l] = (rh[l] & em[l]) | (dh[l] & ~em[l]);
#define HANDLER64(name, SETUP, ...)                                                                                    \
    static const Ins *op_##name(Wave *w, const Ins *i) {                                                               \
        SETUP EACH64(__VA_ARGS__)                                                                                      \
        return i + 1;                                                                                                  \
    }
#define U64_Q(name, sig, ...) HANDLER64(name, PAIR(a, 0), __VA_ARGS__)
#define U64_I(name, sig, ...) HANDLER64(name, ONE(a, 0), __VA_ARGS__)
#define U64_IQ(name, sig, ...) HANDLER64(name, ONE(a, 0) PAIR(b, 1), __VA_ARGS__)
#define U64_QI(name, sig, ...) HANDLER64(name, PAIR(a, 0) ONE(b, 1), __VA_ARGS__)
#define U64_QQ(name, sig, ...) HANDLER64(name, PAIR(a, 0) PAIR(b, 1), __VA_ARGS__)
#define U64_QIQ(name, sig, ...) HANDLER64(name, PAIR(a, 0) ONE(b, 1) PAIR(c, 2), __VA_ARGS__)
#define U64_QQQ(name, sig, ...) HANDLER64(name, PAIR(a, 0) PAIR(b, 1) PAIR(c, 2), __VA_ARGS__)
#define U32_Q(name, sig, ...)                                                                                          \
    static const Ins *op_##name(Wave *w, const Ins *i) {                                                               \
        PAIR(a, 0)                                                                                                     \
        uint32_t *d = w->v[i->dst];                                                                                    \
        EACH(__VA_ARGS__)                                                                                              \
        return i + 1;                                                                                                  \
    }

#include "valu.def"
#undef UN
#undef BI
#undef TER
#undef ACC
#undef U64_Q
#undef U64_I
#undef U64_IQ
#undef U64_QI
#undef U64_QQ
#undef U64_QIQ
#undef U64_QQQ
#undef U32_Q

// ---- carries: vdst, carry-out mask, a, b [, carry-in mask] ----
// Carry bits of inactive lanes are 0.
#define CARRY(name, ncin, value, out)                                                                                  \
    static const Ins *op_##name(Wave *w, const Ins *i) {                                                               \
        vrow ca ALIGN64, ci ALIGN64;                                                                                   \
        ONE(a, 0) ONE(b, 1)                                                                                            \
        if (ncin) expand_mask(s64(w->s, i->src[2]), ci);                                                               \
        uint32_t *d = w->v[i->dst];                                                                                    \
        const uint32_t *em = w->em;                                                                                    \
        _Pragma("GCC ivdep") for (int l = 0; l < LANES; l++) {                                                         \
            const uint32_t cin = ncin ? ci[l] & 1u : 0u;                                                               \
            (void)cin;                                                                                                 \
            const uint64_t r = (value);                                                                                \
            ca[l] = em[l] && (out) ? ~0u : 0u;                                                                         \
            d[l] = em[l] ? (uint32_t)r : d[l];                                                                         \
        }                                                                                                              \
        put64(w->s, i->sdst, pack_mask(ca));                                                                           \
        return i + 1;                                                                                                  \
    }
CARRY(v_add_co_u32, 0, (uint64_t)A + B, r >> 32)
CARRY(v_sub_co_u32, 0, (uint64_t)A - B, r >> 63)
CARRY(v_subrev_co_u32, 0, (uint64_t)B - A, r >> 63)
CARRY(v_addc_co_u32, 1, (uint64_t)A + B + cin, r >> 32)
CARRY(v_subb_co_u32, 1, (uint64_t)A - B - cin, r >> 63)
CARRY(v_subbrev_co_u32, 1, (uint64_t)B - A - cin, r >> 63)

// vdst pair, carry mask, a, b, pair c
static const Ins *op_v_mad_u64_u32(Wave *w, const Ins *i) {
    vrow ca ALIGN64;
    ONE(a, 0) ONE(b, 1) PAIR(c, 2)
    uint32_t *dl = w->v[i->dst], *dh = w->v[i->dst + 1];
    const uint32_t *em = w->em;
    _Pragma("GCC ivdep") for (int l = 0; l < LANES; l++) {
        const uint64_t p = (uint64_t)A * B, r = p + QC;
        ca[l] = em[l] && r < p ? ~0u : 0u;
        dl[l] = em[l] ? (uint32_t)r : dl[l];
        dh[l] = em[l] ? (uint32_t)(r >> 32) : dh[l];
    }
    put64(w->s, i->sdst, pack_mask(ca));
    return i + 1;
}
static const Ins *op_v_mad_i64_i32(Wave *w, const Ins *i) {
    vrow ca ALIGN64;
    ONE(a, 0) ONE(b, 1) PAIR(c, 2)
    uint32_t *dl = w->v[i->dst], *dh = w->v[i->dst + 1];
    const uint32_t *em = w->em;
    for (int l = 0; l < LANES; l++) {
        int64_t r;
        const int over = __builtin_add_overflow((int64_t)SA * SB, (int64_t)QC, &r);
        ca[l] = em[l] && over ? ~0u : 0u;
        dl[l] = em[l] ? (uint32_t)r : dl[l];
        dh[l] = em[l] ? (uint32_t)((uint64_t)r >> 32) : dh[l];
    }
    put64(w->s, i->sdst, pack_mask(ca));
    return i + 1;
}

static const Ins *op_v_cndmask_b32(Wave *w, const Ins *i) {
    vrow ci ALIGN64;
    ONE(a, 0) ONE(b, 1)
    expand_mask(s64(w->s, i->src[2]), ci);
    uint32_t *d = w->v[i->dst];
    EACH(ci[l] ? B : A)
    return i + 1;
}

static inline uint32_t mux(uint32_t s, uint32_t one, uint32_t zero) { return zero ^ ((one ^ zero) & s); }
#define TT(n) (0u - (tt >> (n) & 1u))
#define BITOP \
    mux(A, mux(B, mux(C, TT(7), TT(6)), mux(C, TT(5), TT(4))), mux(B, mux(C, TT(3), TT(2)), mux(C, TT(1), TT(0))))
static const Ins *op_v_bitop3_b32(Wave *w, const Ins *i) {
    ONE(a, 0) ONE(b, 1) ONE(c, 2)
    const uint32_t tt = i->aux;
    uint32_t *d = w->v[i->dst];
    EACH(BITOP)
    return i + 1;
}
static const Ins *op_v_bitop3_b16(Wave *w, const Ins *i) {
    ONE(a, 0) ONE(b, 1) ONE(c, 2)
    const uint32_t tt = i->aux;
    uint32_t *d = w->v[i->dst];
    EACH(BITOP & 0xffffu)
    return i + 1;
}
static const Ins *op_v_mbcnt_lo_u32_b32(Wave *w, const Ins *i) {
    ONE(a, 0) ONE(b, 1)
    uint32_t *d = w->v[i->dst];
    EACH((uint32_t)__builtin_popcount(A & (l < 32 ? (1u << l) - 1u : ~0u)) + B)
    return i + 1;
}
static const Ins *op_v_mbcnt_hi_u32_b32(Wave *w, const Ins *i) {
    ONE(a, 0) ONE(b, 1)
    uint32_t *d = w->v[i->dst];
    EACH((uint32_t)__builtin_popcount(A & (l < 32 ? 0u : (1u << (l - 32)) - 1u)) + B)
    return i + 1;
}

// ---- division ----
// v_div_scale d, vcc, s0, s1 (denominator), s2 (numerator): scales s0 so that the refinement neither overflows nor
// loses bits; VCC tells v_div_fmas to undo it.
static const Ins *op_v_div_scale_f32(Wave *w, const Ins *i) {
    vrow m ALIGN64;
    ONE(a, 0) ONE(b, 1) ONE(c, 2)
    uint32_t *d = w->v[i->dst];
    const uint32_t *em = w->em;
    for (int l = 0; l < LANES; l++) {
        const uint32_t s0 = A, den = B, num = C;
        uint32_t r = s0;
        int vcc = 0;
        const int32_t ed = (int32_t)(den >> 23 & 255), en = (int32_t)(num >> 23 & 255);
        const double q = sim_f64_from_bits(num) / sim_f64_from_bits(den);
        const uint32_t rcp_bits = f2u((float)(1.0 / sim_f64_from_bits(den)));
        const uint32_t q_bits = f2u((float)q);
        const int rcp_denormal = (rcp_bits & 0x7f800000u) == 0 && (rcp_bits & 0x7fffffffu);
        const int q_denormal = q != 0 && (q < 0 ? -q : q) < 0x1p-126;
        (void)q_bits;
        if ((den & 0x7fffffffu) == 0 || (num & 0x7fffffffu) == 0) r = 0x7fc00000u;
        else if (en - ed >= 96) { // the quotient is near overflow
            vcc = 1;
            if (s0 == den) r = f2u((float)ldexp(sim_f64_from_bits(s0), 64));
        } else if (ed == 0) r = f2u((float)ldexp(sim_f64_from_bits(s0), 64)); // denormal denominator
        else if (rcp_denormal &&
                 q_denormal) { // the denominator is huge: brought down, v_div_fmas brings the quotient down
            vcc = 1;
            if (s0 == den) r = f2u((float)ldexp(sim_f64_from_bits(s0), -64));
        } else if (rcp_denormal) r = f2u((float)ldexp(sim_f64_from_bits(s0), -64));
        else if (q_denormal) {
            vcc = 1;
            if (s0 == num) r = f2u((float)ldexp(sim_f64_from_bits(s0), 64));
        } else if (en <= 23) r = f2u((float)ldexp(sim_f64_from_bits(s0), 64)); // small numerator
        m[l] = em[l] && vcc ? ~0u : 0u;
        if (em[l]) d[l] = r;
    }
    put64(w->s, i->sdst, pack_mask(m));
    return i + 1;
}
// d = fma(a, b, c), times 2^64 (exponent of c above 127) or 2^-64 where VCC is set; one rounding.
static const Ins *op_v_div_fmas_f32(Wave *w, const Ins *i) {
    vrow m ALIGN64;
    ONE(a, 0) ONE(b, 1) ONE(c, 2)
    expand_mask(s64(w->s, S_VCC), m);
    uint32_t *d = w->v[i->dst];
    const uint32_t *em = w->em;
    for (int l = 0; l < LANES; l++) {
        if (!em[l]) continue;
        uint32_t r;
        if (m[l]) {
            // fma in f64 (product exact), rounded to odd, then scaled: the only rounding to f32 is the last one
            const double p = sim_f64_from_bits(A) * sim_f64_from_bits(B), z = sim_f64_from_bits(C), s = p + z;
            const double bb = s - p, err = (p - (s - bb)) + (z - bb);
            uint64_t u = d2u(s);
            if (err != 0 && err == err && !(u & 1)) u += (err > 0) == (s > 0) ? 1ull : ~0ull;
            r = f2u((float)ldexp(u2d(u), (C >> 23 & 255) > 127 ? 64 : -64));
        } else r = nan_f32(__builtin_fmaf(FA, FB, FC));
        d[l] = r;
    }
    return i + 1;
}
static const Ins *op_v_div_scale_f64(Wave *w, const Ins *i) {
    vrow m ALIGN64;
    PAIR(a, 0) PAIR(b, 1) PAIR(c, 2)
    uint32_t *dl = w->v[i->dst], *dh = w->v[i->dst + 1];
    const uint32_t *em = w->em;
    for (int l = 0; l < LANES; l++) {
        const double s0 = DA, den = DB, num = DC, q = num / den, rcp = 1.0 / den;
        const int32_t ed = (int32_t)(QB >> 52 & 2047), en = (int32_t)(QC >> 52 & 2047);
        const int rcp_denormal = rcp != 0 && fabs(rcp) < 0x1p-1022, q_denormal = q != 0 && fabs(q) < 0x1p-1022;
        double r = s0;
        int vcc = 0;
        if (den == 0 || num == 0) r = u2d(0x7ff8000000000000ull);
        else if (en - ed >= 768) { vcc = 1; if (QA == QB) r = ldexp(s0, 128); }
        else if (ed == 0) r = ldexp(s0, 128);
        else if (rcp_denormal && q_denormal) { vcc = 1; if (QA == QB) r = ldexp(s0, -128); }
        else if (rcp_denormal) r = ldexp(s0, -128);
        else if (q_denormal) { vcc = 1; if (QA == QC) r = ldexp(s0, 128); }
        else if (en <= 53) r = ldexp(s0, 128);
        m[l] = em[l] && vcc ? ~0u : 0u;
        if (em[l]) { dl[l] = (uint32_t)d2u(r); dh[l] = (uint32_t)(d2u(r) >> 32); }
    }
    put64(w->s, i->sdst, pack_mask(m));
    return i + 1;
}
// (a * b + c) * 2^n with one rounding. The f64 sum is the exact one but for a rest whose sign decides where the scaled
// sum is a tie.
static double scaled_fma(double a, double b, double c, int n) {
    const double s = fma(a, b, c), d = ldexp(s, n), lost = s - ldexp(d, -n);
    if (n > 0 || d != d || d - d != 0 || lost == 0) return d;
    if (fabs(lost) != ldexp(1.0, -1075 - n)) return d; // not half a denormal's unit: no tie
    const double p = a * b, e = fma(a, b, -p), t = p + c, z = t - p, rest = (p - (t - z)) + (c - z) + e + (t - s);
    if (rest == 0 || (rest > 0) == (lost < 0)) return d; // an exact tie, or d lies on the rest's side already
    return nextafter(d, rest > 0 ? INFINITY : -INFINITY);
}
static const Ins *op_v_div_fmas_f64(Wave *w, const Ins *i) {
    vrow m ALIGN64;
    PAIR(a, 0) PAIR(b, 1) PAIR(c, 2)
    expand_mask(s64(w->s, S_VCC), m);
    EACH64(d2u(m[l] ? scaled_fma(DA, DB, DC, (QC >> 52 & 2047) > 1023 ? 128 : -128) : fma(DA, DB, DC)))
    return i + 1;
}
static const Ins *op_v_div_fixup_f64(Wave *w, const Ins *i) {
    PAIR(a, 0) PAIR(b, 1) PAIR(c, 2)
    uint32_t *dl = w->v[i->dst], *dh = w->v[i->dst + 1];
    for (int l = 0; l < LANES; l++) {
        if (!w->em[l]) continue;
        const uint64_t sign = (QB ^ QC) & 0x8000000000000000ull;
        const double q = DA, den = DB, num = DC;
        uint64_t r;
        if (num != num) r = QC | 0x8000000000000ull;
        else if (den != den) r = QB | 0x8000000000000ull;
        else if ((num == 0 && den == 0) || (fabs(num) == INFINITY && fabs(den) == INFINITY)) r = 0xfff8000000000000ull;
        else if (den == 0 || fabs(num) == INFINITY) r = sign | 0x7ff0000000000000ull;
        else if (num == 0 || fabs(den) == INFINITY) r = sign;
        else if ((int32_t)(QC >> 52 & 2047) - (int32_t)(QB >> 52 & 2047) < -1075) r = sign;
        else r = q != q ? sign | 0x7ff0000000000000ull : sign | (QA & 0x7fffffffffffffffull);
        dl[l] = (uint32_t)r;
        dh[l] = (uint32_t)(r >> 32);
    }
    return i + 1;
}

// ---- table ----
#define ROW(name, sig) {#name, op_##name, sig, CLS_VALU},
#define ROWC(name, sig) {#name, op_##name, sig, CLS_VALU},
#define UN(name, sig, ...) ROW(name, sig)
#define BI UN
#define TER UN
#define ACC UN
#define U64_Q UN
#define U64_I UN
#define U64_IQ UN
#define U64_QI UN
#define U64_QQ UN
#define U64_QIQ UN
#define U64_QQQ UN
#define U32_Q UN
const OpEntry valu_ops[] = {
#include "valu.def"
    ROW(v_add_co_u32, "im=ii") ROW(v_sub_co_u32, "im=ii") ROW(v_subrev_co_u32, "im=ii")
    ROW(v_addc_co_u32, "im=iim") ROW(v_subb_co_u32, "im=iim") ROW(v_subbrev_co_u32, "im=iim")
    ROW(v_mad_u64_u32, "qm=iiq") ROW(v_mad_i64_i32, "qm=iiq")
    ROW(v_cndmask_b32, "i=ffm") ROW(v_bitop3_b32, "i=iii") ROW(v_bitop3_b16, "b=bbb")
    ROW(v_mbcnt_lo_u32_b32, "i=ii") ROW(v_mbcnt_hi_u32_b32, "i=ii")
    ROW(v_div_scale_f32, "fm=fff") ROW(v_div_fmas_f32, "f=fff")
    ROW(v_div_scale_f64, "dm=ddd") ROW(v_div_fmas_f64, "d=ddd") ROW(v_div_fixup_f64, "d=ddd")
};
const int valu_count = sizeof valu_ops / sizeof valu_ops[0];
