// SPDX-License-Identifier: Apache-2.0
// Lane and register movement: readlane, writelane, permlane swaps, AGPR moves, swaps, generic conversions of convert.h.
#include "convert.h"
#include "sim.h"

static const Ins *op_v_readfirstlane_b32(Wave *w, const Ins *i) {
    vrow t ALIGN64;
    const uint64_t e = get_exec(w);
    w->s[i->dst] = src32(w, i, 0, t)[e ? __builtin_ctzll(e) : 0];
    return i + 1;
}
static uint32_t scalar_operand(Wave *w, const Ins *i, int k) {
    return i->kind[k] == SRC_CONST  ? w->crows[i->src[k]][0]
           : i->kind[k] == SRC_SGPR ? w->s[i->src[k]]
                                    : w->v[i->src[k]][0];
}
static const Ins *op_v_readlane_b32(Wave *w, const Ins *i) {
    vrow t ALIGN64;
    w->s[i->dst] = src32(w, i, 0, t)[scalar_operand(w, i, 1) & 63];
    return i + 1;
}
static const Ins *op_v_writelane_b32(Wave *w, const Ins *i) { // EXEC is ignored
    w->v[i->dst][scalar_operand(w, i, 1) & 63] = scalar_operand(w, i, 0);
    return i + 1;
}
static const Ins *op_v_accvgpr_read_b32(Wave *w, const Ins *i) {
    vrow t ALIGN64;
    const uint32_t *a = src32(w, i, 0, t);
    uint32_t *d = w->v[i->dst];
    for (int l = 0; l < LANES; l++) d[l] = w->em[l] ? a[l] : d[l];
    return i + 1;
}
// Both operands are written. Lanes outside EXEC keep their value.
static const Ins *op_v_swap_b32(Wave *w, const Ins *i) {
    uint32_t *a = w->v[i->dst], *b = w->v[i->src[0]];
    for (int l = 0; l < LANES; l++) if (w->em[l]) { const uint32_t t = a[l]; a[l] = b[l]; b[l] = t; }
    return i + 1;
}
static void swap_lanes(Wave *w, uint32_t *a, int la, uint32_t *b, int lb) {
    const uint32_t x = a[la], y = b[lb];
    if (w->em[la]) a[la] = y;
    if (w->em[lb]) b[lb] = x;
}
// The upper half of the first operand changes places with the lower half of the second.
static const Ins *op_v_permlane32_swap_b32(Wave *w, const Ins *i) {
    for (int l = 0; l < 32; l++) swap_lanes(w, w->v[i->dst], 32 + l, w->v[i->src[0]], l);
    return i + 1;
}
// Odd rows of 16 of the first operand change places with even rows of the second.
static const Ins *op_v_permlane16_swap_b32(Wave *w, const Ins *i) {
    for (int r = 0; r < 64; r += 32)
        for (int l = 0; l < 16; l++) swap_lanes(w, w->v[i->dst], r + 16 + l, w->v[i->src[0]], r + l);
    return i + 1;
}
static const Ins *op_v_prng_b32(Wave *w, const Ins *i) {
    vrow t ALIGN64;
    const uint32_t *a = src32(w, i, 0, t);
    uint32_t *d = w->v[i->dst];
    for (int l = 0; l < LANES; l++) if (w->em[l]) d[l] = sim_prng(a[l]);
    return i + 1;
}
// Source k as nregs consecutive rows; scalars and constants are splatted into t.
static const sim_lanes *operand_rows(Wave *w, const Ins *i, int k, int nregs, vrow *t) {
    if (i->kind[k] == SRC_VGPR) return (const sim_lanes *)w->v[i->src[k]];
    if (i->kind[k] == SRC_NONE) return NULL;
    if (nregs <= 1)
        return (
            const sim_lanes *)(src_other(w, i, k, t[0], 31) == t[0] ? t : (const vrow *)src_other(w, i, k, t[0], 31));
    for (int r = 0; r < nregs; r++)
        splat(t[r], i->kind[k] == SRC_CONST ? w->crows[i->src[k] + r][0] : w->s[i->src[k] + r]);
    return (const sim_lanes *)t;
}
// v_cvt_scalef32_*, fp8, bf8, bf16 packing: ext is a struct sim_cvt.
static const Ins *op_convert(Wave *w, const Ins *i) {
    vrow t[3][16] ALIGN64;
    const struct sim_cvt *c = i->ext;
    const struct sim_cvt_info *info = sim_cvt_info(c->kind);
    const sim_lanes *s0 = operand_rows(w, i, 0, info->s0_regs, t[0]);
    const sim_lanes *s1 = info->s1_regs ? operand_rows(w, i, 1, info->s1_regs, t[1]) : NULL;
    const uint32_t *scale =
        info->scale_operand ? (const uint32_t *)operand_rows(w, i, info->scale_operand, 1, t[2]) : NULL;
    struct sim_cvt call = *c;
    call.clamp = (uint8_t)(w->mode >> 23 & 1); // MODE.FP16_OVFL
    sim_cvt_wave(&call, (sim_lanes *)w->v[i->dst], s0, s1, scale, w->em);
    return i + 1;
}

#define ROW(name, sig) {#name, op_##name, sig, CLS_VALU},
const OpEntry vmove_ops[] = {
    ROW(v_readfirstlane_b32, "s=i") ROW(v_readlane_b32, "s=ii") ROW(v_writelane_b32, "i=ii")
        ROW(v_accvgpr_read_b32, "i=i"){"v_accvgpr_write_b32", op_v_accvgpr_read_b32, "i=i", CLS_VALU},
    {"v_accvgpr_mov_b32", op_v_accvgpr_read_b32, "i=i", CLS_VALU},
    ROW(v_swap_b32, "i=i") ROW(v_permlane32_swap_b32, "i=i") ROW(v_permlane16_swap_b32, "i=i")
        ROW(v_prng_b32, "i=i"){"convert", op_convert, "?", CLS_CONVERT},
};
const int vmove_count = sizeof vmove_ops / sizeof vmove_ops[0];
