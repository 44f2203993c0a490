// SPDX-License-Identifier: Apache-2.0
// Operation table, programs, source operands and the wrapper for DPP, SDWA, clamp/omod and EXEC writes.
#include <stdlib.h>

#include "mfma.h"
#include "valu_math.h"

// ---- operation table: one number space over the per-file tables ----
typedef struct { const OpEntry *ops; const int *count; } Part;
static const Part parts[] = {
    {salu_ops, &salu_count},
    {valu_ops, &valu_count},
    {vcmp_ops, &vcmp_count},
    {vhalf_ops, &vhalf_count},
    {vmove_ops, &vmove_count},
    {vmem_ops, &vmem_count},
    {lds_ops, &lds_count},
    {control_ops, &control_count},
    {mfma_ops, &mfma_ops_count},
};
const OpEntry *op_entry(uint32_t op) {
    for (unsigned k = 0; k < sizeof parts / sizeof parts[0]; k++) {
        if (op < (uint32_t)*parts[k].count) return &parts[k].ops[op];
        op -= (uint32_t)*parts[k].count;
    }
    return NULL;
}
int sim_op_count(void) {
    int n = 0;
    for (unsigned k = 0; k < sizeof parts / sizeof parts[0]; k++) n += *parts[k].count;
    return n;
}
const char *sim_op_name(int op) { return op_entry((uint32_t)op)->name; }
const char *sim_op_signature(int op) { return op_entry((uint32_t)op)->sig; }
int sim_op_class(int op) { return op_entry((uint32_t)op)->cls; }
int sim_ins_size(void) { return (int)sizeof(Ins); }

// ---- programs ----
static const Ins *op_indexed(Wave *w, const Ins *i);
static void prepare_dpp(uint32_t ctrl);

void sim_program_free(Program *p) {
    if (!p) return;
    free(p->ins); free(p->consts); free(p->crows); free(p->hazards);
    free(p);
}
// records: count instructions; consts: nconst words; ext: blobs referenced by Ins.ext as 1 + byte offset.
Program *sim_program_new(const Ins *records, uint32_t count, const uint32_t *consts, uint32_t nconst, uint8_t *ext) {
    Program *p = calloc(1, sizeof *p);
    if (!p) return NULL;
    p->ins = aligned_alloc(64, (size_t)count * sizeof(Ins) + 64);
    p->consts = malloc(4 * (size_t)nconst + 4);
    p->crows = aligned_alloc(64, (size_t)(nconst + 1) * sizeof(vrow));
    if (!p->ins || !p->consts || !p->crows) { sim_program_free(p); return NULL; }
    memcpy(p->ins, records, count * sizeof(Ins));
    memcpy(p->consts, consts, 4 * (size_t)nconst);
    p->count = count;
    p->nconst = nconst;
    for (uint32_t k = 0; k < nconst; k++) splat(p->crows[k], consts[k]);
    for (uint32_t k = 0; k < count; k++) {
        Ins *i = &p->ins[k];
        const OpEntry *e = op_entry(i->op);
        i->cls = e->cls;
        i->fn = op_handler(i);
        if (i->flags & F_DPP) prepare_dpp(i->dpp_ctrl);
        if (i->ext) i->ext = ext + ((uintptr_t)i->ext - 1);
    }
    return p;
}
void sim_program_setup(Program *p, uint32_t vgprs, uint32_t lds, uint32_t scratch, int flush32, int flush64, int ieee,
    int dx10, int round32, int round64) {
    p->vgprs = vgprs;
    p->lds_bytes = lds;
    p->scratch_bytes = scratch;
    p->flush32 = (uint8_t)flush32;
    p->flush64 = (uint8_t)flush64;
    p->ieee = (uint8_t)ieee;
    p->dx10_clamp = (uint8_t)dx10;
    p->round32 = (uint8_t)round32; p->round64 = (uint8_t)round64;
}

// ---- source operands ----
// Sub-dword selections of SDWA: 0..3 byte, 4..5 word, 6 whole.
static void select_part(uint32_t *t, const uint32_t *s, uint32_t sel, int sext) {
    if (sel < 4)
        for (int l = 0; l < LANES; l++) t[l] = sext ? (uint32_t)(int8_t)(s[l] >> (8 * sel)) : s[l] >> (8 * sel) & 255u;
    else if (sel < 6)
        for (int l = 0; l < LANES; l++)
            t[l] = sext ? (uint32_t)(int16_t)(s[l] >> (16 * (sel - 4))) : s[l] >> (16 * (sel - 4)) & 0xffffu;
    else memcpy(t, s, sizeof(vrow));
}

// SRC_WRAPPED: a VGPR (or, op_sel_hi bit, an SGPR) that needs DPP, a part selection or sign modifiers.
NOINLINE const uint32_t *src_other(Wave *w, const Ins *i, int k, uint32_t *t, int sign) {
    switch (i->kind[k]) {
    case SRC_SGPR: splat(t, w->s[i->src[k]]); break;
    case SRC_CONST: return w->crows[i->src[k]];
    case SRC_WRAPPED:
        if (i->op_sel_hi >> k & 1) splat(t, w->s[i->src[k]]);
        else if ((i->flags & F_DPP) && k == 0) memcpy(t, w->dpp_row, sizeof(vrow));
        else memcpy(t, w->v[i->src[k]], sizeof(vrow));
        if (i->flags & F_SDWA) { if (k < 2) select_part(t, t, i->sdwa_sel[k], i->flags & (F_SEXT0 << k)); }
        else if (i->op_sel >> k & 1) select_part(t, t, 5, 0);
        break;
    default: return w->v[i->src[k]];
    }
    if (sign >= 0 && ((i->neg | i->abs) >> k & 1)) {
        // With a selected half the sign has moved to bit 15.
        const int bit = sign == 31 && (i->flags & F_SDWA) && k < 2 && i->sdwa_sel[k] < 6 ? 15 : sign;
        const uint32_t m = 1u << bit, keep = i->abs >> k & 1 ? ~m : ~0u, flip = i->neg >> k & 1 ? m : 0;
        for (int l = 0; l < LANES; l++) t[l] = (t[l] & keep) ^ flip;
    }
    return t;
}

NOINLINE void src_pair_other(Wave *w, const Ins *i, int k, vrow *t, const uint32_t **lo, const uint32_t **hi) {
    const int scalar = i->kind[k] == SRC_SGPR || (i->kind[k] == SRC_WRAPPED && (i->op_sel_hi >> k & 1));
    if (i->kind[k] == SRC_CONST) { *lo = w->crows[i->src[k]]; *hi = w->crows[i->src[k] + 1]; return; }
    if (scalar) {
        splat(t[0], w->s[i->src[k]]);
        splat(t[1], w->s[i->src[k] + 1]);
    } else {
        memcpy(t[0], w->v[i->src[k]], sizeof(vrow));
        memcpy(t[1], w->v[i->src[k] + 1], sizeof(vrow));
    }
    if ((i->neg | i->abs) >> k & 1) {
        const uint32_t keep = i->abs >> k & 1 ? 0x7fffffffu : ~0u, flip = i->neg >> k & 1 ? 0x80000000u : 0;
        for (int l = 0; l < LANES; l++) t[1][l] = (t[1][l] & keep) ^ flip;
    }
    *lo = t[0];
    *hi = t[1];
}

// ---- DPP ----
// dpp_ctrl codes as encoded: 0x000-0x0ff quad_perm, 0x101-0x10f row_shl, 0x111-0x11f row_shr, 0x121-0x12f row_ror,
// 0x130 wave_shl, 0x134 wave_rol, 0x138 wave_shr, 0x13c wave_ror, 0x140 row_mirror, 0x141 row_half_mirror, 0x142
// row_bcast:15, 0x143 row_bcast:31, 0x150-0x15f row_newbcast. Source lane of lane l, or -1.
static int dpp_source(uint32_t ctrl, int l) {
    const int row = l & ~15, in = l & 15;
    if (ctrl < 0x100) return (l & ~3) + (int)(ctrl >> (2 * (l & 3)) & 3);
    if (ctrl < 0x110) return in + (int)(ctrl & 15) < 16 ? l + (int)(ctrl & 15) : -1;
    if (ctrl < 0x120) return in - (int)(ctrl & 15) >= 0 ? l - (int)(ctrl & 15) : -1;
    if (ctrl < 0x130) return row + ((in - (int)(ctrl & 15)) & 15);
    if (ctrl >= 0x150 && ctrl < 0x160) return row + (int)(ctrl & 15);
    switch (ctrl) {
    case 0x130: return l < 63 ? l + 1 : -1;
    case 0x134: return (l + 1) & 63;
    case 0x138: return l > 0 ? l - 1 : -1;
    case 0x13c: return (l - 1) & 63;
    case 0x140: return row + 15 - in;
    case 0x141: return (l & ~7) + 7 - (l & 7);
    case 0x142: return l >= 16 ? row - 1 : -1;
    case 0x143: return l >= 32 ? 31 : -1;
    default: return l;
    }
}

// Source lanes of every control, and the lanes that have one; filled when a program with that control is loaded.
#define DPP_CONTROLS 0x160
static uint8_t dpp_lane[DPP_CONTROLS][LANES];
static uint64_t dpp_valid[DPP_CONTROLS];
static uint8_t dpp_ready[DPP_CONTROLS];
static void prepare_dpp(uint32_t ctrl) {
    if (ctrl >= DPP_CONTROLS || dpp_ready[ctrl]) return;
    for (int l = 0; l < LANES; l++) {
        const int from = dpp_source(ctrl, l);
        dpp_lane[ctrl][l] = (uint8_t)(from < 0 ? l : from);
        if (from >= 0) dpp_valid[ctrl] |= 1ull << l;
    }
    dpp_ready[ctrl] = 1;
}

// Builds the permuted source and the lanes that are written. All source lanes are read before anything is written.
static uint64_t apply_dpp(Wave *w, const Ins *i, uint32_t *t) {
    static const uint64_t bank[16] = {0, 0x000f000f000f000full, 0x00f000f000f000f0ull, 0x00ff00ff00ff00ffull,
        0x0f000f000f000f00ull, 0x0f0f0f0f0f0f0f0full, 0x0ff00ff00ff00ff0ull, 0x0fff0fff0fff0fffull,
        0xf000f000f000f000ull, 0xf00ff00ff00ff00full, 0xf0f0f0f0f0f0f0f0ull, 0xf0fff0fff0fff0ffull,
        0xff00ff00ff00ff00ull, 0xff0fff0fff0fff0full, 0xfff0fff0fff0fff0ull, ~0ull};
    const uint32_t *s = w->v[i->src[0]], ctrl = i->dpp_ctrl;
    const uint8_t *from = dpp_lane[ctrl];
    const uint64_t exec = get_exec(w);
    uint64_t valid = dpp_valid[ctrl], rows = 0;
    vrow mask ALIGN64;
    if (exec != ~0ull)
        for (int l = 0; l < LANES; l++) valid &= ~((uint64_t)!(exec >> from[l] & 1) << l);
    for (int r = 0; r < 4; r++) if (i->dpp_masks >> r & 1) rows |= 0xffffull << (16 * r);
    for (int l = 0; l < LANES; l++) t[l] = s[from[l]];
    if (valid != ~0ull) {
        expand_mask(valid, mask);
        for (int l = 0; l < LANES; l++) t[l] &= mask[l];
    }
    return exec & rows & bank[i->dpp_masks >> 4] & (i->flags & F_DPP_BOUND ? ~0ull : valid);
}

// ---- results ----
static uint32_t modify_f32(uint32_t u, int omod, int clamp) {
    if (omod) u = f2u(u2f(u) * (omod == 1 ? 2.0f : omod == 2 ? 4.0f : 0.5f));
    if (clamp) u = is_nan_bits(u) || (u >> 31) ? 0 : u > 0x3f800000u ? 0x3f800000u : u;
    return u;
}
static uint32_t modify_f16(uint32_t h, int omod, int clamp) {
    return sim_f16_from_f32(modify_f32(sim_f32_from_f16((uint16_t)h), omod, clamp));
}

NOINLINE const Ins *op_wrapped(Wave *w, const Ins *i) {
    const OpEntry *e = op_entry(i->op);
    vrow dpp ALIGN64, mask ALIGN64, old[2] ALIGN64;
    const uint32_t full = w->full;
    const char kind = e->sig[0];
    const int vector_dst = i->cls != CLS_SALU && kind != 'm' && kind != 's' && kind != '=';
    const int pair = kind == 'q' || kind == 'd' || kind == 'k';
    if (i->flags & F_DPP) {
        memcpy(mask, w->em, sizeof mask);
        const uint64_t write = apply_dpp(w, i, dpp);
        w->dpp_row = dpp;
        w->full = write == ~0ull;
        expand_mask(write, w->em);
    }
    const int merges = vector_dst && (i->flags & (F_SDWA | F_POST));
    if (merges) memcpy(old, w->v[i->dst], pair ? sizeof old : sizeof(vrow));
    const Ins *next = e->fn(w, i);
    if (merges && next) {
        uint32_t *d = w->v[i->dst];
        for (int l = 0; l < LANES; l++) {
            if (!w->em[l]) continue;
            if (kind == 'f' || kind == 'k') d[l] = modify_f32(d[l], i->omod, i->clamp);
            if (kind == 'k') w->v[i->dst + 1][l] = modify_f32(w->v[i->dst + 1][l], i->omod, i->clamp);
            if (kind == 'h') d[l] = modify_f16(d[l] & 0xffff, i->omod, i->clamp);
            if (kind == 'p' && i->clamp) d[l] = modify_f16(d[l] & 0xffff, 0, 1) | modify_f16(d[l] >> 16, 0, 1) << 16;
            if (kind == 'd' && (i->omod || i->clamp)) {
                double x = u2d((uint64_t)w->v[i->dst + 1][l] << 32 | d[l]) * (i->omod == 1      ? 2
                                                                                 : i->omod == 2 ? 4
                                                                                 : i->omod == 3 ? 0.5
                                                                                                : 1);
                if (i->clamp) x = !(x > 0) ? 0 : x > 1 ? 1 : x;
                d[l] = (uint32_t)d2u(x);
                w->v[i->dst + 1][l] = (uint32_t)(d2u(x) >> 32);
            }
            if (i->flags & F_DST_HI) d[l] = (old[0][l] & 0xffffu) | d[l] << 16;
            else if (i->flags & F_KEEP_HI) d[l] = (old[0][l] & 0xffff0000u) | (d[l] & 0xffffu);
            if ((i->flags & F_SDWA) && i->sdwa_dst < 6) { // unused: 0 pad, 1 sign extend, 2 preserve
                const uint32_t bits = i->sdwa_dst < 4 ? 8 : 16,
                               shift = i->sdwa_dst < 4 ? 8u * i->sdwa_dst : 16u * (i->sdwa_dst - 4u);
                const uint32_t m = ((1u << bits) - 1u) << shift, x = d[l] << shift & m;
                uint32_t rest = 0;
                if (i->sdwa_unused == 2) rest = old[0][l] & ~m;
                else if (i->sdwa_unused == 1 && (d[l] >> (bits - 1) & 1))
                    rest = shift + bits < 32 ? ~0u << (shift + bits) : 0;
                d[l] = x | rest;
            }
        }
    }
    if (i->flags & F_DPP) {
        memcpy(w->em, mask, sizeof mask);
        w->full = full;
    }
    if (i->flags & F_EXEC_WRITE) refresh_exec(w);
    return next;
}

// Between s_set_gpr_idx_on and _off: register numbers are offset by the index at run time.
static const Ins *op_indexed(Wave *w, const Ins *i) {
    Ins c = *i;
    const OpEntry *e = op_entry(i->op);
    c.fn = i->flags & (F_DPP | F_SDWA | F_POST | F_EXEC_WRITE) ? op_wrapped : e->fn;
    const char *sig = e->sig;
    for (int k = 0; k < 3; k++)
        if ((w->gpr_idx >> k & 1) && i->kind[k] == SRC_VGPR) c.src[k] = (uint16_t)(i->src[k] + w->gpr_idx_value);
    if ((w->gpr_idx >> 3 & 1) && sig[0] != 'm' && sig[0] != 's' && sig[0] != '=')
        c.dst = (uint16_t)(i->dst + w->gpr_idx_value);
    for (int k = 0; k < 3; k++)
        if (i->kind[k] == SRC_VGPR && c.src[k] >= w->L->p->vgprs)
            return raise_fault(w, i, FAULT_INTERNAL, -1, c.src[k], 0, 0);
    if (c.dst >= w->L->p->vgprs) return raise_fault(w, i, FAULT_INTERNAL, -1, c.dst, 0, 0);
    return c.fn(w, &c) ? i + 1 : NULL;
}

// A vector instruction of a program that has s_setvskip: under it nothing is issued, counters stay as they are.
static const Ins *op_skippable(Wave *w, const Ins *i) {
    if (w->vskip) return i + 1;
    if (i->flags & F_INDEXED) return op_indexed(w, i);
    return i->flags & (F_DPP | F_SDWA | F_POST | F_EXEC_WRITE) ? op_wrapped(w, i) : op_entry(i->op)->fn(w, i);
}

op_fn op_handler(const Ins *i) {
    if (i->flags & F_SKIPPABLE) return op_skippable;
    if (i->flags & F_INDEXED) return op_indexed;
    return i->flags & (F_DPP | F_SDWA | F_POST | F_EXEC_WRITE) ? op_wrapped : op_entry(i->op)->fn;
}

// ---- faults ----
const Ins *raise_fault(
    Wave *w, const Ins *i, uint32_t kind, int lane, uint64_t address, uint32_t bytes, uint32_t write) {
    Fault *f = &w->m->fault;
    if (f->kind == FAULT_NONE) {
        f->kind = kind;
        f->rank = (int32_t)w->L->rank;
        f->launch = (int32_t)w->L->index;
        f->group = (int32_t)w->g->id;
        f->wave = (int32_t)w->id;
        f->lane = lane;
        f->address = address;
        f->bytes = bytes;
        f->write = write;
        f->pc = (int32_t)(i - w->L->p->ins);
    }
    w->pc = i;
    return NULL;
}

// Counts the straight run [w->seg, last] once.
void end_run(Wave *w, const Ins *last) {
    const Ins *base = w->L->p->ins;
    const int64_t a = w->seg - base, b = last - base + 1;
    if (b <= a) return;
    w->L->prof[a]++;
    w->L->prof[b]--;
    w->icount += (uint64_t)(b - a);
    if (w->npolls && w->poll_runs < POLL_RUNS) {
        w->poll_log[w->poll_runs][0] = (uint32_t)a;
        w->poll_log[w->poll_runs][1] = (uint32_t)b;
        w->poll_runs++;
    }
}
