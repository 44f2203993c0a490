// SPDX-License-Identifier: Apache-2.0
// Vector compares: a 64-bit lane mask in VCC or an SGPR pair; inactive lanes give 0. Ins.aux != 0: v_cmpx (EXEC too).
#include "valu_math.h"

static inline const Ins *compare_done(Wave *w, const Ins *i, const uint32_t *t) {
    const uint64_t m = pack_mask(t) & (w->full ? ~0ull : pack_mask(w->em));
    put64(w->s, i->sdst, m);
    if (i->aux) set_exec(w, m);
    return i + 1;
}

#define LOADS32() vrow t0 ALIGN64, t1 ALIGN64; const uint32_t *a = src32(w, i, 0, t0), *b = src32(w, i, 1, t1);
#define LOADS16()                                                                                                      \
    vrow t0 ALIGN64, t1 ALIGN64;                                                                                       \
    const uint32_t *a = i->kind[0] == SRC_VGPR ? w->v[i->src[0]] : src_other(w, i, 0, t0, 15);                         \
    const uint32_t *b = i->kind[1] == SRC_VGPR ? w->v[i->src[1]] : src_other(w, i, 1, t1, 15);
#define LOADS64()                                                                                                      \
    vrow t0[2] ALIGN64, t1[2] ALIGN64; const uint32_t *al, *ah, *bl, *bh;                                              \
    src64(w, i, 0, t0, &al, &ah); src64(w, i, 1, t1, &bl, &bh);

#define CMP(name, LOADS, TYPE, XA, XB, cond)                                                                           \
    static const Ins *op_v_cmp_##name(Wave *w, const Ins *i) {                                                         \
        vrow t ALIGN64;                                                                                                \
        LOADS()                                                                                                        \
        for (int l = 0; l < LANES; l++) { const TYPE x = XA, y = XB; (void)x; (void)y; t[l] = (cond) ? ~0u : 0u; }     \
        return compare_done(w, i, t);                                                                                  \
    }
#define CMP_INT(sfx, LOADS, TYPE, XA, XB)                                                                              \
    CMP(f_##sfx, LOADS, TYPE, XA, XB, 0) CMP(lt_##sfx, LOADS, TYPE, XA, XB, x < y)                                     \
    CMP(eq_##sfx, LOADS, TYPE, XA, XB, x == y)                                                                         \
    CMP(le_##sfx, LOADS, TYPE, XA, XB, x <= y) CMP(gt_##sfx, LOADS, TYPE, XA, XB, x > y)                               \
    CMP(ne_##sfx, LOADS, TYPE, XA, XB, x != y) CMP(ge_##sfx, LOADS, TYPE, XA, XB, x >= y)                              \
    CMP(t_##sfx, LOADS, TYPE, XA, XB, 1)
#define CMP_FLOAT(sfx, LOADS, TYPE, XA, XB)                                                                            \
    CMP(f_##sfx, LOADS, TYPE, XA, XB, 0) CMP(lt_##sfx, LOADS, TYPE, XA, XB, x < y)                                     \
    CMP(eq_##sfx, LOADS, TYPE, XA, XB, x == y)                                                                         \
    CMP(le_##sfx, LOADS, TYPE, XA, XB, x <= y) CMP(gt_##sfx, LOADS, TYPE, XA, XB, x > y)                               \
    CMP(lg_##sfx, LOADS, TYPE, XA, XB, x < y || x > y) CMP(ge_##sfx, LOADS, TYPE, XA, XB, x >= y)                      \
    CMP(o_##sfx, LOADS, TYPE, XA, XB, x == x && y == y) CMP(u_##sfx, LOADS, TYPE, XA, XB, x != x || y != y)            \
    CMP(nge_##sfx, LOADS, TYPE, XA, XB, !(x >= y)) CMP(nlg_##sfx, LOADS, TYPE, XA, XB, !(x < y || x > y))              \
    CMP(ngt_##sfx, LOADS, TYPE, XA, XB, !(x > y)) CMP(nle_##sfx, LOADS, TYPE, XA, XB, !(x <= y))                       \
    CMP(neq_##sfx, LOADS, TYPE, XA, XB, x != y) CMP(nlt_##sfx, LOADS, TYPE, XA, XB, !(x < y))                          \
    CMP(tru_##sfx, LOADS, TYPE, XA, XB, 1)

CMP_INT(u32, LOADS32, uint32_t, a[l], b[l])
CMP_INT(i32, LOADS32, int32_t, (int32_t)a[l], (int32_t)b[l])
CMP_INT(u16, LOADS16, uint32_t, a[l] & 0xffffu, b[l] & 0xffffu)
CMP_INT(i16, LOADS16, int32_t, (int16_t)a[l], (int16_t)b[l])
CMP_INT(u64, LOADS64, uint64_t, (uint64_t)ah[l] << 32 | al[l], (uint64_t)bh[l] << 32 | bl[l])
CMP_INT(i64, LOADS64, int64_t, (int64_t)((uint64_t)ah[l] << 32 | al[l]), (int64_t)((uint64_t)bh[l] << 32 | bl[l]))
CMP_FLOAT(f32, LOADS32, float, u2f(a[l]), u2f(b[l]))
CMP_FLOAT(f16, LOADS16, float, u2f(sim_f32_from_f16((uint16_t)a[l])), u2f(sim_f32_from_f16((uint16_t)b[l])))
CMP_FLOAT(f64, LOADS64, double, u2d((uint64_t)ah[l] << 32 | al[l]), u2d((uint64_t)bh[l] << 32 | bl[l]))

// Class mask bits: 0 sNaN, 1 qNaN, 2 -inf, 3 -normal, 4 -denormal, 5 -0, 6 +0, 7 +denormal, 8 +normal, 9 +inf.
static inline uint32_t class_of(int negative, int exponent_zero, int exponent_max, int mantissa_zero, int quiet_bit) {
    if (exponent_max) return mantissa_zero ? (negative ? 2u : 9u) : quiet_bit ? 1u : 0u;
    if (exponent_zero) return mantissa_zero ? (negative ? 5u : 6u) : negative ? 4u : 7u;
    return negative ? 3u : 8u;
}
static const Ins *op_v_cmp_class_f32(Wave *w, const Ins *i) {
    vrow t ALIGN64;
    LOADS32()
    for (int l = 0; l < LANES; l++) {
        const uint32_t x = a[l], e = x >> 23 & 255;
        t[l] = b[l] >> class_of(x >> 31, e == 0, e == 255, (x & 0x7fffffu) == 0, x >> 22 & 1) & 1 ? ~0u : 0u;
    }
    return compare_done(w, i, t);
}
static const Ins *op_v_cmp_class_f16(Wave *w, const Ins *i) {
    vrow t ALIGN64, t0 ALIGN64, t1 ALIGN64;
    const uint32_t *a = i->kind[0] == SRC_VGPR ? w->v[i->src[0]] : src_other(w, i, 0, t0, 15), *b = src32(w, i, 1, t1);
    for (int l = 0; l < LANES; l++) {
        const uint32_t x = a[l] & 0xffff, e = x >> 10 & 31;
        t[l] = b[l] >> class_of(x >> 15, e == 0, e == 31, (x & 0x3ffu) == 0, x >> 9 & 1) & 1 ? ~0u : 0u;
    }
    return compare_done(w, i, t);
}
static const Ins *op_v_cmp_class_f64(Wave *w, const Ins *i) {
    vrow t ALIGN64, t1 ALIGN64, t0[2] ALIGN64;
    const uint32_t *al, *ah, *b = src32(w, i, 1, t1);
    src64(w, i, 0, t0, &al, &ah);
    for (int l = 0; l < LANES; l++) {
        const uint32_t x = ah[l], e = x >> 20 & 2047;
        t[l] = b[l] >> class_of(x >> 31, e == 0, e == 2047, (x & 0xfffffu) == 0 && al[l] == 0, x >> 19 & 1)
            & 1 ? ~0u : 0u;
    }
    return compare_done(w, i, t);
}

// Both forms share a handler: decode.py sets aux for v_cmpx.
#define ROW(name, sig) {"v_cmp_" #name, op_v_cmp_##name, sig, CLS_VALU},                                               \
    {"v_cmpx_" #name, op_v_cmp_##name, sig, CLS_VALU},
#define ROWS_INT(sfx, sig) ROW(f_##sfx, sig) ROW(lt_##sfx, sig) ROW(eq_##sfx, sig) ROW(le_##sfx, sig)                  \
    ROW(gt_##sfx, sig)                                                                                                 \
    ROW(ne_##sfx, sig) ROW(ge_##sfx, sig) ROW(t_##sfx, sig)
#define ROWS_FLOAT(sfx, sig) ROW(f_##sfx, sig) ROW(lt_##sfx, sig) ROW(eq_##sfx, sig) ROW(le_##sfx, sig)                \
    ROW(gt_##sfx, sig)                                                                                                 \
    ROW(lg_##sfx, sig) ROW(ge_##sfx, sig) ROW(o_##sfx, sig) ROW(u_##sfx, sig) ROW(nge_##sfx, sig)                      \
    ROW(nlg_##sfx, sig)                                                                                                \
    ROW(ngt_##sfx, sig) ROW(nle_##sfx, sig) ROW(neq_##sfx, sig) ROW(nlt_##sfx, sig) ROW(tru_##sfx, sig)
const OpEntry vcmp_ops[] = {
    ROWS_INT(u32, "m=ii") ROWS_INT(i32, "m=ii") ROWS_INT(u16, "m=bb") ROWS_INT(i16, "m=bb")
    ROWS_INT(u64, "m=qq") ROWS_INT(i64, "m=qq")
    ROWS_FLOAT(f32, "m=ff") ROWS_FLOAT(f16, "m=hh") ROWS_FLOAT(f64, "m=dd")
    ROW(class_f32, "m=fi") ROW(class_f16, "m=hi") ROW(class_f64, "m=di")
};
const int vcmp_count = sizeof vcmp_ops / sizeof vcmp_ops[0];
