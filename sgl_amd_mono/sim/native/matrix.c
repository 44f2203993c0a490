// SPDX-License-Identifier: Apache-2.0
// Matrix instructions: operands of mfma.h from the register file. Ins.ext is a struct sim_mfma.
#include "mfma.h"
#include "sim.h"

static const uint32_t *scale_row(Wave *w, const Ins *i, int k, uint32_t *t) {
    return i->kind[k] == SRC_NONE ? NULL : src32(w, i, k, t);
}
// src: 0 A, 1 B, 2 C; the scales are in dpp_ctrl (index) / sdwa_sel (kind) because only four sources fit.
static const Ins *op_mfma(Wave *w, const Ins *i) {
    if (unlikely(w->m->trace != NULL)) trace_mfma(w, i);
    vrow ta ALIGN64, tb ALIGN64;
    const struct sim_mfma *m = i->ext;
    const sim_lanes *c = i->kind[2] == SRC_VGPR ? (const sim_lanes *)w->v[i->src[2]] : NULL;
    const uint32_t *sa = NULL, *sb = NULL;
    if (m->scaled) {
        Ins s = {0};
        s.src[0] = i->src[3]; s.kind[0] = i->kind[3];
        s.src[1] = i->dpp_ctrl; s.kind[1] = i->sdwa_sel[0];
        sa = scale_row(w, &s, 0, ta);
        sb = scale_row(w, &s, 1, tb);
    }
    m->fn(m, (sim_lanes *)w->v[i->dst], (const sim_lanes *)w->v[i->src[0]], (const sim_lanes *)w->v[i->src[1]], c, sa,
        sb);
    return i + 1;
}
const OpEntry mfma_ops[] = {{"mfma", op_mfma, "?", CLS_MFMA}};
const int mfma_ops_count = 1;
