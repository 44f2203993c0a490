// SPDX-License-Identifier: Apache-2.0
// Branches, waits, barriers, clocks, scalar loads, cache maintenance.
#include "sim.h"

static inline const Ins *branch(Wave *w, const Ins *i) {
    const Ins *target = w->L->p->ins + i->imm;
    end_run(w, i);
    w->seg = target;
    if (target <= i && --w->budget <= 0) { w->pc = target; return NULL; }
    return target;
}
#define BRANCH(name, cond) static const Ins *op_##name(Wave *w, const Ins *i) { return (cond) ? branch(w, i) : i + 1; }
BRANCH(s_branch, 1)
BRANCH(s_cbranch_scc0, !w->scc)
BRANCH(s_cbranch_scc1, w->scc)
BRANCH(s_cbranch_vccz, s64(w->s, S_VCC) == 0)
BRANCH(s_cbranch_vccnz, s64(w->s, S_VCC) != 0)
BRANCH(s_cbranch_execz, get_exec(w) == 0)
BRANCH(s_cbranch_execnz, get_exec(w) != 0)
static const Ins *op_s_call_b64(Wave *w, const Ins *i) {
    put64(w->s, i->dst, (uint64_t)0x7ffc0000u << 32 | 4ull * (uint32_t)(i + 1 - w->L->p->ins));
    return branch(w, i);
}

static const Ins *stop_after(Wave *w, const Ins *i) { // ends the slice behind i
    end_run(w, i);
    w->seg = w->pc = i + 1;
    return NULL;
}
static const Ins *op_s_nop(Wave *w, const Ins *i) { (void)w; return i + 1; }
static const Ins *op_s_sleep(Wave *w, const Ins *i) { w->slept = 1; return stop_after(w, i); }
static const Ins *op_s_barrier(Wave *w, const Ins *i) {
    Group *g = w->g;
    stop_after(w, i);
    w->state = WAVE_BARRIER;
    w->L->barriers++;
    g->at_barrier++;
    if (g->at_barrier == g->live) release_barrier(g);
    return NULL;
}
static const Ins *op_s_endpgm(Wave *w, const Ins *i) {
    end_run(w, i);
    w->seg = w->pc = i;
    wave_ended(w);
    return NULL;
}
// aux: vmcnt | lgkmcnt << 8, 255 = not waited for
static const Ins *op_s_waitcnt(Wave *w, const Ins *i) {
    if (w->adv) adv_wait(w, (int)(i->aux & 255), (int)(i->aux >> 8 & 255));
    return i + 1;
}
static const Ins *op_s_trap(Wave *w, const Ins *i) {
    return raise_fault(w, i, FAULT_TRAP, -1, (uint64_t)(uint32_t)i->imm, 0, 0);
}
static const Ins *op_s_memrealtime(Wave *w, const Ins *i) {
    w->read_clock = 1;
    put64(w->s, i->dst, w->m->clock);
    if (w->adv) adv_hold_scalars(w, i->dst, 2);
    return i + 1;
}
// The shader clock: 24 cycles a tick of the 100 MHz clock.
static const Ins *op_s_memtime(Wave *w, const Ins *i) {
    w->read_clock = 1;
    put64(w->s, i->dst, w->m->clock * 24);
    if (w->adv) adv_hold_scalars(w, i->dst, 2);
    return i + 1;
}
static const Ins *op_buffer_inv(Wave *w, const Ins *i) { if (w->adv) adv_inv(w, i); return i + 1; }
static const Ins *op_buffer_wbl2(Wave *w, const Ins *i) { if (w->adv) adv_wbl2(w, i); return i + 1; }

// ---- scalar loads: imm dwords in mem_bytes; src[0] base pair, src[1] offset (SGPR or constant) ----
static const Ins *scalar_load(Wave *w, const Ins *i, uint64_t base, uint64_t offset) {
    const uint64_t address = (base + offset) & ~3ull;
    const uint32_t n = i->mem_bytes;
    Alloc *al = find_alloc(w->m, w->L->rank, address);
    if (!al && address - w->L->kernarg_alloc->dev < w->L->kernarg_alloc->size) al = w->L->kernarg_alloc;
    if (!al || address - al->dev + n > al->size)
        return raise_fault(w, i, address < 4096 ? FAULT_GPU : FAULT_OOB, -1, address, n, 0);
    al->bytes_read[0] += n;
    if (w->adv) return adv_smem(w, i, address, n / 4);
    memcpy(&w->s[i->dst], al->host + (address - al->dev), n);
    return i + 1;
}
static const Ins *op_s_load(Wave *w, const Ins *i) {
    return scalar_load(w, i, s64(w->s, i->src[0]),
        (uint64_t)(int64_t)i->imm + (i->kind[1] == SRC_NONE ? 0 : w->s[i->src[1]]));
}
static const Ins *op_s_buffer_load(Wave *w, const Ins *i) {
    const uint32_t *r = &w->s[i->src[0]];
    const uint64_t base = (uint64_t)(r[1] & 0xffffu) << 32 | r[0];
    const uint32_t stride = r[1] >> 16 & 0x3fff,
        offset = (uint32_t)i->imm + (i->kind[1] == SRC_NONE ? 0 : w->s[i->src[1]]);
    const uint64_t limit = stride ? (uint64_t)stride * r[2] : r[2];
    if (offset + i->mem_bytes > limit) { // beyond num_records: zeros, by dword
        for (uint32_t k = 0; k < i->mem_bytes / 4u; k++) w->s[i->dst + k] = 0;
        if (offset >= limit) return i + 1;
        Ins part = *i;
        part.mem_bytes = (uint8_t)((limit - offset) & ~3ull);
        return scalar_load(w, &part, base, offset) ? i + 1 : NULL;
    }
    return scalar_load(w, i, base, offset);
}

#define BR(name) {#name, op_##name, "branch", CLS_BRANCH},
#define NOP(name, cls) {#name, op_s_nop, "imm", cls},
#define SLOAD(n) {"s_load_dword" n, op_s_load, "smem", CLS_SMEM},                                                      \
    {"s_buffer_load_dword" n, op_s_buffer_load, "smem", CLS_SMEM},
const OpEntry control_ops[] = {
    BR(s_branch) BR(s_cbranch_scc0) BR(s_cbranch_scc1) BR(s_cbranch_vccz) BR(s_cbranch_vccnz)
    BR(s_cbranch_execz) BR(s_cbranch_execnz)
    {"s_call_b64", op_s_call_b64, "call", CLS_BRANCH},
    {"s_sleep", op_s_sleep, "imm", CLS_WAIT}, {"s_barrier", op_s_barrier, "imm", CLS_BARRIER},
    {"s_endpgm", op_s_endpgm, "imm", CLS_OTHER},
    {"s_waitcnt", op_s_waitcnt, "waitcnt", CLS_WAIT}, {"s_trap", op_s_trap, "imm", CLS_OTHER},
    {"s_memrealtime", op_s_memrealtime, "q=", CLS_SMEM}, {"s_memtime", op_s_memtime, "q=", CLS_SMEM},
    {"buffer_inv", op_buffer_inv, "cache", CLS_VMEM}, {"buffer_wbl2", op_buffer_wbl2, "cache", CLS_VMEM},
    NOP(s_nop, CLS_WAIT) NOP(s_setprio, CLS_OTHER) NOP(s_sethalt, CLS_OTHER) NOP(s_icache_inv, CLS_OTHER)
    NOP(s_dcache_inv, CLS_OTHER)
    NOP(s_dcache_wb, CLS_OTHER) NOP(s_dcache_inv_vol, CLS_OTHER) NOP(s_dcache_wb_vol, CLS_OTHER)
    NOP(s_sendmsg, CLS_OTHER) NOP(s_ttracedata, CLS_OTHER)
    NOP(s_incperflevel, CLS_OTHER) NOP(s_decperflevel, CLS_OTHER) NOP(s_wakeup, CLS_OTHER) NOP(v_nop, CLS_VALU)
    SLOAD("") SLOAD("x2") SLOAD("x4") SLOAD("x8") SLOAD("x16")
};
const int control_count = sizeof control_ops / sizeof control_ops[0];
