// SPDX-License-Identifier: Apache-2.0
// Optional trace of a run: which bytes each workgroup requests and uses, by the hand-offs that lie behind its waves.
//
// A stage is the number of hand-offs behind a wave (Depth.total). A cell counts the bytes of one workgroup that were
// read, written, or used: a byte is used by the first vector or matrix instruction that reads the register which a load
// of readonly memory put it in (that wave has then waited for it). Failed poll passes are not counted.
#include <stdlib.h>
#include "mfma.h"
#include "sim.h"

typedef struct { // read by machine.py
    uint32_t alloc;
    uint16_t region, issue, use;
    uint8_t kind, policy; // kind: TRACE_*
    uint32_t group;
    uint64_t bytes;
} Cell;
typedef struct { uint32_t alloc; uint16_t issue, bytes; } Origin; // of a register row; alloc: id + 1
typedef struct {
    Cell *cells;
    uint32_t count, room, last;
    Origin *origin; // [waves][VGPRs]
} GroupTrace;
struct Trace {
    uint32_t launches;
    uint32_t *ngroups;
    GroupTrace **groups; // [launch][workgroup]
};

const Ins *op_wrapped(Wave *w, const Ins *i);
static const Ins *op_traced(Wave *w, const Ins *i);

void trace_free(Machine *m) {
    struct Trace *t = m->trace;
    if (!t) return;
    for (uint32_t k = 0; k < t->launches; k++) {
        for (uint32_t g = 0; t->groups[k] && g < t->ngroups[k]; g++) {
            free(t->groups[k][g].cells);
            free(t->groups[k][g].origin);
        }
        free(t->groups[k]);
    }
    free(t->groups);
    free(t->ngroups);
    free(t);
    m->trace = NULL;
}
// A fresh trace for the launches of Machine.launches; without memory there is none, and the report says so.
void trace_start(Machine *m) {
    trace_free(m);
    struct Trace *t = calloc(1, sizeof *t);
    if (!t) return;
    m->trace = t;
    t->ngroups = calloc(m->nlaunches, sizeof *t->ngroups);
    t->groups = calloc(m->nlaunches, sizeof *t->groups);
    if (!t->ngroups || !t->groups) { trace_free(m); return; }
    t->launches = m->nlaunches;
    for (uint32_t k = 0; k < m->nlaunches; k++) {
        Program *p = m->launches[k]->p;
        for (uint32_t j = 0; j < p->count; j++)
            if (p->ins[j].cls == CLS_VALU || p->ins[j].cls == CLS_CONVERT) p->ins[j].fn = op_traced;
        t->ngroups[k] = m->launches[k]->ngroups;
        t->groups[k] = calloc(t->ngroups[k], sizeof(GroupTrace));
        if (!t->groups[k]) { trace_free(m); return; }
    }
}

static void add(const Wave *w, GroupTrace *g, uint32_t alloc, uint32_t region, uint32_t issue, uint32_t use,
                uint32_t kind, uint32_t policy, uint64_t bytes) {
    for (uint32_t n = 0; n < g->count; n++) { // the latest cell first
        const uint32_t k = n ? (n == g->last ? 0 : n) : g->last;
        Cell *c = &g->cells[k];
        if (c->alloc == alloc && c->region == region && c->issue == issue && c->use == use && c->kind == kind &&
            c->policy == policy) {
            c->bytes += bytes;
            g->last = k;
            return;
        }
    }
    if (g->count == g->room) {
        const uint32_t room = g->room ? 2 * g->room : 32;
        Cell *c = realloc(g->cells, room * sizeof *c);
        if (!c) return;
        g->cells = c;
        g->room = room;
    }
    g->last = g->count;
    g->cells[g->count++] = (Cell){alloc, (uint16_t)region, (uint16_t)issue, (uint16_t)use, (uint8_t)kind,
                                  (uint8_t)policy, w->g->id, bytes};
}
static GroupTrace *of(const Wave *w) { return &w->m->trace->groups[w->L->index][w->g->id]; }
static Origin *origin_of(const Wave *w, GroupTrace *g) {
    const size_t rows = w->L->p->vgprs ? w->L->p->vgprs : 1;
    if (!g->origin) g->origin = calloc(rows * w->g->nwaves, sizeof *g->origin);
    return g->origin ? g->origin + rows * w->id : NULL;
}

void trace_access(Wave *w, const Ins *i, const Alloc *al, uint64_t offset, uint64_t bytes, int write) {
    GroupTrace *g = of(w);
    const uint32_t stage = w->depth.total;
    const uint32_t region = al->nregions ? region_of(al, offset) : 0;
    add(w, g, al->id, region, stage, stage, write ? TRACE_WRITE : TRACE_READ, i->flags >> 8 & 7, bytes);
    if (write || (i->flags & F_LDS)) return;
    Origin *o = origin_of(w, g);
    const uint32_t rows = i->mem_bytes < 4 ? 1 : i->mem_bytes / 4u;
    for (uint32_t k = 0; o && k < rows && i->dst + k < w->L->p->vgprs; k++)
        o[i->dst + k] = (Origin){al->kind == KIND_READONLY ? al->id + 1 : 0, (uint16_t)stage, (uint16_t)(bytes / rows)};
}

static void used(Wave *w, GroupTrace *g, Origin *o, uint32_t row, uint32_t rows) {
    for (uint32_t k = row; k < row + rows && k < w->L->p->vgprs; k++) {
        if (!o[k].alloc) continue;
        add(w, g, o[k].alloc - 1, 0, o[k].issue, w->depth.total, TRACE_USE, 0, o[k].bytes);
        o[k].alloc = 0;
    }
}
static uint32_t operand_rows(uint32_t dim, const struct sim_mfma *m, uint32_t format) {
    static const uint8_t bits[] = {8, 8, 6, 6, 4, 16, 16, 32, 8, 64};
    return (dim * m->k * m->blocks / LANES * bits[format] + 31) / 32;
}
// A vector instruction while a machine traces; it stays in the program, and does nothing more for other machines.
static const Ins *op_traced(Wave *w, const Ins *i) {
    const OpEntry *op = op_entry(i->op);
    if (w->m->trace) {
        GroupTrace *g = of(w);
        Origin *o = origin_of(w, g);
        const char *sig = strchr(op->sig, '=');
        for (int k = 0; o && k < i->nsrc && k < 4; k++) {
            const int vector = i->kind[k] == SRC_VGPR || (i->kind[k] == SRC_WRAPPED && !(i->op_sel_hi >> k & 1));
            const char letter = sig && (size_t)k < strlen(sig + 1) ? sig[1 + k] : 'i';
            if (vector) used(w, g, o, i->src[k], letter == 'q' || letter == 'd' || letter == 'k' ? 2 : 1);
        }
    }
    return i->flags & (F_DPP | F_SDWA | F_POST | F_EXEC_WRITE) ? op_wrapped(w, i) : op->fn(w, i);
}
void trace_mfma(Wave *w, const Ins *i) {
    GroupTrace *g = of(w);
    Origin *o = origin_of(w, g);
    if (!o) return;
    const struct sim_mfma *m = i->ext;
    used(w, g, o, i->src[0], operand_rows(m->m, m, m->fmt_a));
    used(w, g, o, i->src[1], operand_rows(m->n, m, m->fmt_b));
    if (m->scaled) {
        if (i->kind[3] == SRC_VGPR) used(w, g, o, i->src[3], 1);
        if (i->sdwa_sel[0] == SRC_VGPR) used(w, g, o, i->dpp_ctrl, 1);
    }
}

// Copies the cells of a launch, at most room; returns how many there are, -1 without a trace.
int64_t sim_trace(const Machine *m, uint32_t launch, void *out, int64_t room) {
    const struct Trace *t = m->trace;
    if (!t || launch >= t->launches) return -1;
    int64_t n = 0;
    for (uint32_t g = 0; g < t->ngroups[launch]; g++)
        for (uint32_t k = 0; k < t->groups[launch][g].count; k++, n++)
            if (n < room) ((Cell *)out)[n] = t->groups[launch][g].cells[k];
    return n;
}
