// SPDX-License-Identifier: Apache-2.0
// Scalar ALU. Operands are indices into the scalar file; program constants follow the registers.
#include "sim.h"

#define S(k) (s[i->src[k]])
#define A S(0)
#define B S(1)
#define SA ((int32_t)A)
#define SB ((int32_t)B)
#define QA s64(s, i->src[0])
#define QB s64(s, i->src[1])
#define IMM ((uint32_t)i->imm)

// r: the result; the statement list may set scc.
#define OP32(name, sig, ...)                                                                                           \
    static const Ins *op_##name(Wave *w, const Ins *i) {                                                               \
        uint32_t *s = w->s, r, scc = w->scc;                                                                           \
        __VA_ARGS__;                                                                                                   \
        s[i->dst] = r;                                                                                                 \
        w->scc = scc;                                                                                                  \
        return i + 1;                                                                                                  \
    }
#define OP64(name, sig, ...)                                                                                           \
    static const Ins *op_##name(Wave *w, const Ins *i) {                                                               \
        uint32_t *s = w->s, scc = w->scc;                                                                              \
        uint64_t r;                                                                                                    \
        __VA_ARGS__;                                                                                                   \
        put64(s, i->dst, r);                                                                                           \
        w->scc = scc;                                                                                                  \
        return i + 1;                                                                                                  \
    }
#define SCMP(name, sig, cond)                                                                                          \
    static const Ins *op_##name(Wave *w, const Ins *i) {                                                               \
        const uint32_t *s = w->s;                                                                                      \
        w->scc = (cond);                                                                                               \
        return i + 1;                                                                                                  \
    }
#define SAVEEXEC(name, sig, expr)                                                                                      \
    static const Ins *op_##name(Wave *w, const Ins *i) {                                                               \
        uint32_t *s = w->s;                                                                                            \
        const uint64_t e = get_exec(w), a = QA, r = (expr);                                                            \
        put64(s, i->dst, e);                                                                                           \
        set_exec(w, r);                                                                                                \
        w->scc = r != 0;                                                                                               \
        return i + 1;                                                                                                  \
    }
// v: s_andn1_wrexec and s_andn2_wrexec write EXEC and the destination alike.
#define WREXEC(name, sig, expr)                                                                                        \
    static const Ins *op_##name(Wave *w, const Ins *i) {                                                               \
        uint32_t *s = w->s;                                                                                            \
        const uint64_t e = get_exec(w), a = QA, r = (expr);                                                            \
        put64(s, i->dst, r);                                                                                           \
        set_exec(w, r);                                                                                                \
        w->scc = r != 0;                                                                                               \
        return i + 1;                                                                                                  \
    }

static inline uint32_t reverse32(uint32_t x) {
    uint32_t r = 0;
    for (int k = 0; k < 32; k++) r |= (x >> k & 1u) << (31 - k);
    return r;
}
static inline int32_t sign_change(uint64_t x, int bits) { // first bit from the top that differs from the sign, -1: none
    const uint64_t top = x >> (bits - 1) & 1;
    for (int k = bits - 2; k >= 0; k--) if ((x >> k & 1) != top) return bits - 1 - k;
    return -1;
}
static inline uint32_t quad_mask32(uint64_t x, int n) {
    uint32_t r = 0;
    for (int k = 0; k < n; k++) r |= (uint32_t)((x >> (4 * k) & 15) != 0) << k;
    return r;
}
static inline uint64_t wqm(uint64_t x, int bits) {
    uint64_t r = 0;
    for (int k = 0; k < bits; k += 4) if (x >> k & 15) r |= 15ull << k;
    return r;
}
static inline uint32_t bits32(uint64_t n) { return (uint32_t)((1ull << n) - 1); }
static inline uint64_t mask64(uint32_t n) { return n >= 64 ? ~0ull : (1ull << n) - 1; }

#include "salu.def"
#undef OP32
#undef OP64
#undef SCMP
#undef SAVEEXEC
#undef WREXEC

// ---- program counter: byte offsets do not exist, a code address is 4 * the instruction index plus a tag in the high
// word ----
#define CODE_TAG 0x7ffc0000u
static const Ins *op_s_getpc_b64(Wave *w, const Ins *i) {
    put64(w->s, i->dst, (uint64_t)CODE_TAG << 32 | 4ull * (uint32_t)(i + 1 - w->L->p->ins));
    return i + 1;
}
static const Ins *jump(Wave *w, const Ins *i, uint64_t address) {
    const uint64_t index = (address & 0xffffffffu) / 4;
    if ((address >> 32) != CODE_TAG || index >= w->L->p->count)
        return raise_fault(w, i, FAULT_INTERNAL, -1, address, 0, 0);
    end_run(w, i);
    w->seg = w->L->p->ins + index;
    return w->seg;
}
static const Ins *op_s_setpc_b64(Wave *w, const Ins *i) { return jump(w, i, s64(w->s, i->src[0])); }
static const Ins *op_s_swappc_b64(Wave *w, const Ins *i) {
    const uint64_t to = s64(w->s, i->src[0]);
    put64(w->s, i->dst, (uint64_t)CODE_TAG << 32 | 4ull * (uint32_t)(i + 1 - w->L->p->ins));
    return jump(w, i, to);
}

// ---- mode and hardware registers: aux = id | offset << 8 | (size - 1) << 16 ----
static uint32_t hardware_register(const Wave *w, uint32_t id) {
    switch (id) {
    case 1: return w->mode;
    case 4: return w->id & 15; // HW_ID: wave slot
    case 6: return w->lds_size / 512 << 12;
    default: return 0;
    }
}
static const Ins *op_s_getreg_b32(Wave *w, const Ins *i) {
    const uint32_t size = (i->aux >> 16 & 31) + 1;
    w->s[i->dst] = hardware_register(w, i->aux & 255) >> (i->aux >> 8 & 31) & bits32(size);
    return i + 1;
}
static void set_hardware_register(Wave *w, const Ins *i, uint32_t value) {
    const uint32_t size = (i->aux >> 16 & 31) + 1, shift = i->aux >> 8 & 31, m = bits32(size) << shift;
    if ((i->aux & 255) == 1) w->mode = (w->mode & ~m) | (value << shift & m);
}
static const Ins *op_s_setreg_b32(Wave *w, const Ins *i) { set_hardware_register(w, i, w->s[i->src[0]]); return i + 1; }
static const Ins *op_s_setreg_imm32_b32(Wave *w, const Ins *i) {
    set_hardware_register(w, i, w->s[i->src[0]]);
    return i + 1;
}

static const Ins *op_s_movrels_b32(Wave *w, const Ins *i) {
    w->s[i->dst] = w->s[(i->src[0] + w->s[S_M0]) & 127];
    return i + 1;
}
static const Ins *op_s_movreld_b32(Wave *w, const Ins *i) {
    w->s[(i->dst + w->s[S_M0]) & 127] = w->s[i->src[0]];
    return i + 1;
}
static const Ins *op_s_set_gpr_idx_on(Wave *w, const Ins *i) {
    w->gpr_idx_value = w->s[i->src[0]] & 255;
    w->s[S_M0] = (w->s[S_M0] & ~0xf0ffu) | w->gpr_idx_value | (i->aux & 15) << 12;
    w->gpr_idx = i->aux & 15;
    return i + 1;
}
static const Ins *op_s_set_gpr_idx_off(Wave *w, const Ins *i) { w->gpr_idx = 0; return i + 1; }
static const Ins *op_s_set_gpr_idx_idx(Wave *w, const Ins *i) {
    w->gpr_idx_value = w->s[i->src[0]] & 255;
    w->s[S_M0] = (w->s[S_M0] & ~0xffu) | w->gpr_idx_value;
    return i + 1;
}
static const Ins *op_s_set_gpr_idx_mode(Wave *w, const Ins *i) { w->gpr_idx = i->aux & 15; return i + 1; }
// Bit S1[4:0] of S0: from here on vector instructions are not issued, or are again.
static const Ins *op_s_setvskip(Wave *w, const Ins *i) {
    w->vskip = w->s[i->src[0]] >> (w->s[i->src[1]] & 31) & 1;
    return i + 1;
}

#define ROW(name, sig) {#name, op_##name, sig, CLS_SALU},
#define OP32(name, sig, ...) ROW(name, sig)
#define OP64 OP32
#define SCMP OP32
#define SAVEEXEC OP32
#define WREXEC OP32
const OpEntry salu_ops[] = {
#include "salu.def"
    ROW(s_getpc_b64, "q=") ROW(s_setpc_b64, "=q") ROW(s_swappc_b64, "q=q")
    ROW(s_getreg_b32, "i=") ROW(s_setreg_b32, "=i") ROW(s_setreg_imm32_b32, "=i")
    ROW(s_movrels_b32, "i=i") ROW(s_movreld_b32, "i=i")
    ROW(s_set_gpr_idx_on, "=i") ROW(s_set_gpr_idx_off, "=") ROW(s_set_gpr_idx_idx, "=i") ROW(s_set_gpr_idx_mode, "=")
    ROW(s_setvskip, "=ii")
};
const int salu_count = sizeof salu_ops / sizeof salu_ops[0];
