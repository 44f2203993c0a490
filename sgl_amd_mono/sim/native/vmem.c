// SPDX-License-Identifier: Apache-2.0
// Vector memory: global, flat, scratch and buffer loads, stores and atomics; LDS DMA. decode.py reduces the mnemonics
// to these handlers: Ins.mem_bytes is the size of one lane's access, Ins.aux the load mode or the atomic operation.
#include "valu_math.h"

// Load modes: what happens to a value shorter than a register.
enum { LOAD_ZERO = 0, LOAD_SIGN = 1, LOAD_D16 = 2, LOAD_D16_HI = 3, LOAD_D16_SIGN = 4, LOAD_D16_HI_SIGN = 5 };
// Fields: src[0] address row, src[1] data row, src[2] scalar base or descriptor, src[3] scalar offset; imm offset; dst
// result row.

static inline uint32_t policy(const Ins *i) { return i->flags >> 8 & 7; } // sc0, sc1, nt

// ---- addresses ----
typedef struct { uint64_t a[LANES] ALIGN64; uint64_t mask; } Lanes;

// Inactive lanes take the address of the first active one, so that later loops need no mask.
static inline void fill_inactive(Lanes *p) {
    if (p->mask == ~0ull || !p->mask) return;
    const uint64_t first = p->a[__builtin_ctzll(p->mask)];
    for (int l = 0; l < LANES; l++) p->a[l] = p->mask >> l & 1 ? p->a[l] : first;
}
static void global_address(Wave *w, const Ins *i, Lanes *p) {
    const int64_t off = i->imm;
    p->mask = get_exec(w);
    if (i->flags & F_SADDR) {
        const uint64_t base = s64(w->s, i->src[2]) + (uint64_t)off;
        const uint32_t *v = w->v[i->src[0]];
        for (int l = 0; l < LANES; l++) p->a[l] = base + v[l];
    } else {
        const uint32_t *lo = w->v[i->src[0]], *hi = w->v[i->src[0] + 1];
        for (int l = 0; l < LANES; l++) p->a[l] = ((uint64_t)hi[l] << 32 | lo[l]) + (uint64_t)off;
    }
    fill_inactive(p);
}

// The allocation that holds every lane's access, or NULL.
static Alloc *common_alloc(Wave *w, const Lanes *p, uint32_t bytes) {
    uint64_t lo = p->a[0], hi = p->a[0];
    for (int l = 1; l < LANES; l++) {
        lo = p->a[l] < lo ? p->a[l] : lo;
        hi = p->a[l] > hi ? p->a[l] : hi;
    }
    Alloc *al = w->last;
    if (!(lo >= al->dev && hi - al->dev + bytes <= al->size && hi >= al->dev)) {
        al = find_alloc(w->m, w->L->rank, lo);
        if (!al || hi - al->dev + bytes > al->size) return NULL;
        w->last = al;
    }
    return al;
}
static Alloc *lane_alloc(Wave *w, const Ins *i, uint64_t a, int lane, uint32_t bytes, int write) {
    Alloc *al = find_alloc(w->m, w->L->rank, a);
    if (!al || a - al->dev + bytes > al->size) {
        raise_fault(w, i, a < 4096 ? FAULT_GPU : FAULT_OOB, lane, a, bytes, (uint32_t)write);
        return NULL;
    }
    return al;
}

// ---- polls ----
// A load of the same addresses by the same instruction, with no effect of the wave in between, is a failed poll pass.
static int poll_pass(Wave *w, const Ins *i, const Lanes *p, Alloc *al) {
    uint64_t h = p->mask * 0x9e3779b97f4a7c15ull;
    for (int l = 0; l < LANES; l++) h = (h ^ p->a[l]) * 0x100000001b3ull;
    for (uint32_t k = 0; k < w->npolls; k++) {
        PollSlot *s = &w->polls[k];
        if (s->pc != i) continue;
        if (s->hash != h) { s->hash = h; s->run = w->poll_runs; return 0; }
        const uint64_t first = p->a[p->mask ? __builtin_ctzll(p->mask) : 0];
        al->polls[region_of(al, first - al->dev)]++;
        for (uint32_t r = s->run; r < w->poll_runs; r++) {
            w->L->poll_prof[w->poll_log[r][0]]++;
            w->L->poll_prof[w->poll_log[r][1]]--;
        }
        w->poll_runs = s->run;
        for (uint32_t j = 0; j < w->npolls; j++) if (w->polls[j].run > s->run) w->polls[j].run = s->run;
        return 1;
    }
    if (w->npolls < POLL_SLOTS) w->polls[w->npolls++] = (PollSlot){i, h, w->poll_runs};
    return 0;
}
static inline void end_polls(Wave *w) { w->npolls = w->poll_runs = 0; }

static void touch(Alloc *al, uint64_t offset, uint32_t bytes) {
    for (uint64_t k = offset / 4; k <= (offset + bytes - 1) / 4; k++) al->touched[k / 64] |= 1ull << (k % 64);
}

// ---- loads ----
static inline uint32_t extend(const uint8_t *h, uint32_t bytes, uint32_t mode, uint32_t old) {
    uint32_t x;
    if (bytes == 1)
        x = mode == LOAD_SIGN                                   ? (uint32_t)(int8_t)*h
            : mode == LOAD_D16_SIGN || mode == LOAD_D16_HI_SIGN ? (uint16_t)(int8_t)*h
                                                                : *h;
    else { uint16_t u; memcpy(&u, h, 2); x = mode == LOAD_SIGN ? (uint32_t)(int16_t)u : u; }
    if (mode == LOAD_D16 || mode == LOAD_D16_SIGN) return (old & 0xffff0000u) | x;
    if (mode == LOAD_D16_HI || mode == LOAD_D16_HI_SIGN) return (old & 0xffffu) | x << 16;
    return x;
}
// Puts one lane's loaded bytes into its registers.
void deliver_lane(Wave *w, const Ins *i, int l, const uint8_t *h) {
    if (i->mem_bytes < 4) { uint32_t *d = w->v[i->dst]; d[l] = extend(h, i->mem_bytes, i->aux, d[l]); return; }
    for (uint32_t k = 0; k < i->mem_bytes / 4u; k++) memcpy(&w->v[i->dst + k][l], h + 4 * k, 4);
}

// Checks one access as a whole, counts it and handles injected faults: 0 go on, 1 stop (stalled or faulted).
static int account(Wave *w, const Ins *i, const Lanes *p, Alloc *al, uint32_t bytes, int write, int polled) {
    if (unlikely(write && al->kind == KIND_READONLY)) {
        raise_fault(w, i, FAULT_READONLY, __builtin_ctzll(p->mask), p->a[__builtin_ctzll(p->mask)], bytes, 1);
        return 1;
    }
    if (unlikely(w->m->nstalls) && watch_access(w, i, al, p->a[0] - al->dev, write)) return 1;
    const uint64_t n = (uint64_t)__builtin_popcountll(p->mask) * bytes;
    if (unlikely(w->m->trace != NULL) && !polled) trace_access(w, i, al, p->a[0] - al->dev, n, write);
    if (write) al->bytes_written[policy(i)] += n;
    else if (!polled) { al->bytes_read[policy(i)] += n; w->g->streamed += n; }
    if (unlikely(al->stamps != NULL)) {
        for (uint64_t m = p->mask; m; m &= m - 1) {
            const uint64_t o = p->a[__builtin_ctzll(m)] - al->dev;
            if (write) mailbox_write(w, al, o, bytes); else mailbox_read(w, al, o, bytes);
        }
    }
    if (unlikely(al->touched && !write))
        for (uint64_t m = p->mask; m; m &= m - 1) touch(al, p->a[__builtin_ctzll(m)] - al->dev, bytes);
    return 0;
}

// No lane is active: the operation still counts for s_waitcnt.
static const Ins *nothing(Wave *w, const Ins *i) {
    if (w->adv) adv_count_vm(w);
    return i + 1;
}
static int synchronising(const Ins *i, const Alloc *al) {
    return (i->flags & (F_SC0 | F_SC1)) || al->kind == KIND_MAILBOX;
}

static const Ins *load_split(Wave *w, const Ins *i, const Lanes *p, uint32_t lds_base);

// lds_base: where lane 0 lands for LDS DMA.
static const Ins *load(Wave *w, const Ins *i, const Lanes *p, uint32_t lds_base) {
    const uint32_t bytes = i->mem_bytes;
    if (!p->mask) return nothing(w, i);
    Alloc *al = common_alloc(w, p, bytes);
    if (unlikely(!al)) return load_split(w, i, p, lds_base);
    int polled = 0;
    if (synchronising(i, al)) {
        polled = poll_pass(w, i, p, al);
        if (w->budget > 1) w->budget = 1; // a wave that synchronises yields at its next backward branch
    }
    if (account(w, i, p, al, bytes, 0, polled)) return NULL;
    if (unlikely(w->adv != NULL)) return adv_load(w, i, p->a, p->mask, lds_base);
    const uint8_t *h = al->host - al->dev;
    if (i->flags & F_LDS) {
        for (uint64_t m = p->mask; m; m &= m - 1) {
            const int l = __builtin_ctzll(m);
            memcpy(w->lds + lds_base + (uint32_t)l * bytes, h + p->a[l], bytes);
        }
        return i + 1;
    }
    vrow *d = &w->v[i->dst];
    const uint32_t *em = w->em;
    switch (bytes) {
    case 4:
        if (p->mask == ~0ull) for (int l = 0; l < LANES; l++) memcpy(&d[0][l], h + p->a[l], 4);
        else
            for (int l = 0; l < LANES; l++) {
                uint32_t x;
                memcpy(&x, h + p->a[l], 4);
                d[0][l] = p->mask >> l & 1 ? x : d[0][l];
            }
        break;
    case 8: case 12: case 16:
        if (p->mask == ~0ull && bytes == 16)
            for (int l = 0; l < LANES; l++) {
                uint32_t x[4];
                memcpy(x, h + p->a[l], 16);
                d[0][l] = x[0]; d[1][l] = x[1]; d[2][l] = x[2]; d[3][l] = x[3];
            }
        else
            for (uint64_t m = p->mask; m; m &= m - 1) {
                const int l = __builtin_ctzll(m);
                uint32_t x[4];
                memcpy(x, h + p->a[l], bytes);
                for (uint32_t k = 0; k < bytes / 4; k++) d[k][l] = x[k];
            }
        break;
    default:
        (void)em;
        for (uint64_t m = p->mask; m; m &= m - 1) {
            const int l = __builtin_ctzll(m);
            d[0][l] = extend(h + p->a[l], bytes, i->aux, d[0][l]);
        }
    }
    return i + 1;
}
// Lanes in several allocations: one group of lanes after the other.
static const Ins *load_split(Wave *w, const Ins *i, const Lanes *p, uint32_t lds_base) {
    uint64_t rest = p->mask;
    while (rest) {
        const int first = __builtin_ctzll(rest);
        Alloc *al = lane_alloc(w, i, p->a[first], first, i->mem_bytes, 0);
        if (!al) return NULL;
        Lanes part = *p;
        part.mask = 0;
        for (uint64_t m = rest; m; m &= m - 1) {
            const int l = __builtin_ctzll(m);
            if (p->a[l] - al->dev < al->size && p->a[l] - al->dev + i->mem_bytes <= al->size) part.mask |= 1ull << l;
        }
        fill_inactive(&part);
        if (!load(w, i, &part, lds_base)) return NULL;
        rest &= ~part.mask;
    }
    return i + 1;
}

// ---- stores ----
static const Ins *store(Wave *w, const Ins *i, const Lanes *p) {
    const uint32_t bytes = i->mem_bytes;
    if (!p->mask) return nothing(w, i);
    Alloc *al = common_alloc(w, p, bytes);
    if (unlikely(!al)) {
        uint64_t rest = p->mask;
        while (rest) {
            const int first = __builtin_ctzll(rest);
            al = lane_alloc(w, i, p->a[first], first, bytes, 1);
            if (!al) return NULL;
            Lanes part = *p;
            part.mask = 0;
            for (uint64_t m = rest; m; m &= m - 1) {
                const int l = __builtin_ctzll(m);
                if (p->a[l] - al->dev < al->size && p->a[l] - al->dev + bytes <= al->size) part.mask |= 1ull << l;
            }
            fill_inactive(&part);
            if (!store(w, i, &part)) return NULL;
            rest &= ~part.mask;
        }
        return i + 1;
    }
    end_polls(w);
    if (account(w, i, p, al, bytes, 1, 0)) return NULL;
    w->m->version++;
    if (unlikely(w->adv != NULL)) return adv_store(w, i, p->a, p->mask, i->src[1]);
    uint8_t *h = al->host - al->dev;
    const vrow *s = &w->v[i->src[1]];
    if (unlikely(w->m->nstore_faults && al->shared)) {
        for (uint64_t m = p->mask; m; m &= m - 1) {
            const int l = __builtin_ctzll(m);
            uint32_t x[4];
            for (uint32_t k = 0; k < (bytes + 3) / 4; k++) x[k] = s[k][l];
            if (bytes < 4 && i->aux) x[0] >>= 16;
            if (!store_faulted(w->m, w, al, p->a[l] - al->dev, bytes, x)) memcpy(h + p->a[l], x, bytes);
        }
        return i + 1;
    }
    const uint32_t shift = bytes < 4 && i->aux ? 16 : 0; // d16_hi
    for (uint64_t m = p->mask; m; m &= m - 1) {
        const int l = __builtin_ctzll(m);
        switch (bytes) {
        case 1: h[p->a[l]] = (uint8_t)(s[0][l] >> shift); break;
        case 2: { const uint16_t x = (uint16_t)(s[0][l] >> shift); memcpy(h + p->a[l], &x, 2); break; }
        case 4: memcpy(h + p->a[l], &s[0][l], 4); break;
        case 8: { const uint64_t x = (uint64_t)s[1][l] << 32 | s[0][l]; memcpy(h + p->a[l], &x, 8); break; }
        default: {
            uint32_t x[4];
            for (uint32_t k = 0; k < bytes / 4; k++) x[k] = s[k][l];
            memcpy(h + p->a[l], x, bytes);
        }
        }
    }
    return i + 1;
}

// ---- atomics ----
enum {
    AT_SWAP,
    AT_CMPSWAP,
    AT_ADD,
    AT_SUB,
    AT_SMIN,
    AT_UMIN,
    AT_SMAX,
    AT_UMAX,
    AT_AND,
    AT_OR,
    AT_XOR,
    AT_INC,
    AT_DEC,
    AT_ADD_F32,
    AT_PK_ADD_F16,
    AT_PK_ADD_BF16,
    AT_ADD_F64,
    AT_MIN_F64,
    AT_MAX_F64,
    AT_RSUB,
    AT_MSKOR,
    AT_MIN_F32,
    AT_MAX_F32
};
static uint32_t pk_add_bf16(uint32_t a, uint32_t b) {
    const uint32_t lo = sim_bf16_from_f32(f2u(u2f(a << 16) + u2f(b << 16)));
    return lo | (uint32_t)sim_bf16_from_f32(f2u(u2f(a & 0xffff0000u) + u2f(b & 0xffff0000u))) << 16;
}
static uint32_t pk_add_f16(uint32_t a, uint32_t b) {
    const uint32_t lo = to_f16(u2f(sim_f32_from_f16((uint16_t)a)) + u2f(sim_f32_from_f16((uint16_t)b)));
    return lo | to_f16(u2f(sim_f32_from_f16((uint16_t)(a >> 16))) + u2f(sim_f32_from_f16((uint16_t)(b >> 16)))) << 16;
}
// New memory value; x: data, y: second data (compare value of cmpswap, mask of mskor).
uint64_t atomic_result(uint32_t op, int wide, uint64_t m, uint64_t x, uint64_t y) {
    if (!wide) {
        const uint32_t a = (uint32_t)m, b = (uint32_t)x;
        switch (op) {
        case AT_SWAP: return b;
        case AT_CMPSWAP: return a == (uint32_t)y ? b : a;
        case AT_ADD: return a + b;
        case AT_SUB: return a - b;
        case AT_RSUB: return b - a;
        case AT_SMIN: return (uint32_t)imin((int32_t)a, (int32_t)b);
        case AT_UMIN: return umin(a, b);
        case AT_SMAX: return (uint32_t)imax((int32_t)a, (int32_t)b);
        case AT_UMAX: return umax(a, b);
        case AT_AND: return a & b;
        case AT_OR: return a | b;
        case AT_XOR: return a ^ b;
        case AT_INC: return a >= b ? 0 : a + 1;
        case AT_DEC: return a == 0 || a > b ? b : a - 1;
        case AT_ADD_F32: return nan_f32(u2f(a) + u2f(b));
        case AT_MIN_F32: return min_f32(a, b);
        case AT_MAX_F32: return max_f32(a, b);
        case AT_PK_ADD_F16: return pk_add_f16(a, b);
        case AT_PK_ADD_BF16: return pk_add_bf16(a, b);
        case AT_MSKOR: return (a & ~b) | (uint32_t)y;
        default: return a;
        }
    }
    switch (op) {
    case AT_SWAP: return x;
    case AT_CMPSWAP: return m == y ? x : m;
    case AT_ADD: return m + x;
    case AT_SUB: return m - x;
    case AT_RSUB: return x - m;
    case AT_SMIN: return (int64_t)m < (int64_t)x ? m : x;
    case AT_UMIN: return m < x ? m : x;
    case AT_SMAX: return (int64_t)m > (int64_t)x ? m : x;
    case AT_UMAX: return m > x ? m : x;
    case AT_AND: return m & x;
    case AT_OR: return m | x;
    case AT_XOR: return m ^ x;
    case AT_INC: return m >= x ? 0 : m + 1;
    case AT_DEC: return m == 0 || m > x ? x : m - 1;
    case AT_ADD_F64: return d2u(u2d(m) + u2d(x));
    case AT_MIN_F64: return d2u(min_f64(u2d(m), u2d(x)));
    case AT_MAX_F64: return d2u(max_f64(u2d(m), u2d(x)));
    case AT_MSKOR: return (m & ~x) | y;
    default: return m;
    }
}
// Data of lane l: x = first value, y = second (cmpswap: source, compare).
static inline void atomic_data(const Wave *w, const Ins *i, int l, uint64_t *x, uint64_t *y) {
    const vrow *s = &w->v[i->src[1]];
    if (i->mem_bytes == 8) {
        *x = (uint64_t)s[1][l] << 32 | s[0][l];
        *y = i->aux == AT_CMPSWAP ? (uint64_t)s[3][l] << 32 | s[2][l] : 0;
    } else {
        *x = s[0][l];
        *y = i->aux == AT_CMPSWAP ? s[1][l] : 0;
    }
}
// Lanes act in ascending order. F_SC0: the old value is returned.
static const Ins *atomic(Wave *w, const Ins *i, const Lanes *p) {
    const uint32_t bytes = i->mem_bytes;
    if (!p->mask) return nothing(w, i);
    for (uint64_t m = p->mask; m; m &= m - 1) { // check before anything changes
        const int l = __builtin_ctzll(m);
        Alloc *al = lane_alloc(w, i, p->a[l], l, bytes, 1);
        if (!al) return NULL;
        if (p->a[l] % bytes) return raise_fault(w, i, FAULT_MISALIGNED, l, p->a[l], bytes, 1);
        if (al->kind == KIND_READONLY) return raise_fault(w, i, FAULT_READONLY, l, p->a[l], bytes, 1);
        if (w->m->nstalls && watch_access(w, i, al, p->a[l] - al->dev, 1)) return NULL;
    }
    end_polls(w);
    w->m->version++;
    if (w->budget > 1) w->budget = 1;
    if (w->adv) adv_before_atomic(w, i, p->a, p->mask, bytes, (i->flags & F_SC1) != 0);
    for (uint64_t m = p->mask; m; m &= m - 1) {
        const int l = __builtin_ctzll(m);
        Alloc *al = find_alloc(w->m, w->L->rank, p->a[l]);
        uint8_t *h = al->host + (p->a[l] - al->dev);
        uint64_t old = 0, x, y;
        memcpy(&old, h, bytes);
        atomic_data(w, i, l, &x, &y);
        const uint64_t r = atomic_result(i->aux, bytes == 8, old, x, y);
        if (al->stamps) {
            mailbox_read(w, al, p->a[l] - al->dev, bytes);
            mailbox_write(w, al, p->a[l] - al->dev, bytes);
        }
        if (!(w->m->nstore_faults && al->shared && store_faulted(w->m, w, al, p->a[l] - al->dev, bytes, &r)))
            memcpy(h, &r, bytes);
        al->bytes_written[policy(i)] += bytes;
        if (i->flags & F_SC0) {
            w->v[i->dst][l] = (uint32_t)old;
            if (bytes == 8) w->v[i->dst + 1][l] = (uint32_t)(old >> 32);
        }
    }
    if (w->adv) {
        if (i->flags & F_SC0) adv_hold_rows(w, i->dst, bytes / 4, p->mask);
        else adv_count_vm(w);
    }
    return i + 1;
}

// ---- LDS DMA destination: M0[15:0] + instruction offset + lane * bytes ----
static int lds_target(Wave *w, const Ins *i, uint32_t *base) {
    *base = (w->s[S_M0] & 0xffffu) + (uint32_t)i->imm;
    if (w->s[S_M0] > 0xffffu) *base = w->s[S_M0] + (uint32_t)i->imm; // gfx950: 160 KiB need more than 16 bits
    if (*base + LANES * i->mem_bytes > w->lds_size) {
        raise_fault(w, i, FAULT_LDS, -1, *base, LANES * i->mem_bytes, 1);
        return 0;
    }
    return 1;
}

static const Ins *op_global_load(Wave *w, const Ins *i) {
    Lanes p;
    uint32_t base = 0;
    global_address(w, i, &p);
    if ((i->flags & F_LDS) && !lds_target(w, i, &base)) return NULL;
    return load(w, i, &p, base);
}
static const Ins *op_global_store(Wave *w, const Ins *i) { Lanes p; global_address(w, i, &p); return store(w, i, &p); }
static const Ins *op_global_atomic(Wave *w, const Ins *i) {
    Lanes p;
    global_address(w, i, &p);
    return atomic(w, i, &p);
}

// ---- scratch: private memory of one lane ----
static const Ins *scratch_access(Wave *w, const Ins *i, const uint64_t *offset, uint64_t mask, int write) {
    const uint32_t room = w->L->p->scratch_bytes;
    for (uint64_t m = mask; m; m &= m - 1) {
        const int l = __builtin_ctzll(m);
        if (offset[l] + i->mem_bytes > room)
            return raise_fault(w, i, FAULT_OOB, l, offset[l], i->mem_bytes, (uint32_t)write);
        uint8_t *h = w->scratch + (size_t)l * room + offset[l];
        if (!write) { deliver_lane(w, i, l, h); continue; }
        uint32_t x[4];
        for (uint32_t k = 0; k < (i->mem_bytes + 3u) / 4; k++) x[k] = w->v[i->src[1] + k][l];
        if (i->mem_bytes < 4 && i->aux) x[0] >>= 16;
        memcpy(h, x, i->mem_bytes);
    }
    if (w->adv) {
        if (!write && i->aux < 2) adv_hold_rows(w, i->dst, (i->mem_bytes + 3u) / 4, mask);
        else adv_count_vm(w);
    }
    return i + 1;
}
static void scratch_offset(Wave *w, const Ins *i, uint64_t *o) {
    const uint32_t base = (uint32_t)i->imm + (i->flags & F_SADDR ? w->s[i->src[2]] : 0);
    for (int l = 0; l < LANES; l++) o[l] = (uint32_t)(base + (i->flags & F_VADDR ? w->v[i->src[0]][l] : 0));
}
static const Ins *op_scratch_load(Wave *w, const Ins *i) {
    uint64_t o[LANES];
    scratch_offset(w, i, o);
    return scratch_access(w, i, o, get_exec(w), 0);
}
static const Ins *op_scratch_store(Wave *w, const Ins *i) {
    uint64_t o[LANES];
    scratch_offset(w, i, o);
    return scratch_access(w, i, o, get_exec(w), 1);
}

// ---- flat: global, LDS or private by the address' high word ----
static const Ins *flat(Wave *w, const Ins *i, int what) { // 0 load, 1 store, 2 atomic
    Lanes p;
    global_address(w, i, &p);
    const uint64_t all = p.mask;
    uint64_t lds = 0, priv = 0;
    if (w->adv) adv_count_lgkm(w);
    for (uint64_t m = all; m; m &= m - 1) {
        const int l = __builtin_ctzll(m);
        const uint32_t hi = (uint32_t)(p.a[l] >> 32);
        if (hi == SHARED_HI) lds |= 1ull << l;
        if (hi == PRIVATE_HI) priv |= 1ull << l;
    }
    if (lds) {
        for (uint64_t m = lds; m; m &= m - 1) {
            const int l = __builtin_ctzll(m);
            const uint32_t o = (uint32_t)p.a[l];
            if ((uint64_t)o + i->mem_bytes > w->lds_size)
                return raise_fault(w, i, FAULT_LDS, l, o, i->mem_bytes, what != 0);
            if (what == 0) { deliver_lane(w, i, l, w->lds + o); continue; }
            if (what == 1) {
                uint32_t x[4];
                for (uint32_t k = 0; k < (i->mem_bytes + 3u) / 4; k++) x[k] = w->v[i->src[1] + k][l];
                if (i->mem_bytes < 4 && i->aux) x[0] >>= 16;
                memcpy(w->lds + o, x, i->mem_bytes);
                w->m->version++;
                continue;
            }
            uint64_t old = 0, x, y;
            memcpy(&old, w->lds + o, i->mem_bytes);
            atomic_data(w, i, l, &x, &y);
            const uint64_t r = atomic_result(i->aux, i->mem_bytes == 8, old, x, y);
            memcpy(w->lds + o, &r, i->mem_bytes);
            w->m->version++;
            if (i->flags & F_SC0) {
                w->v[i->dst][l] = (uint32_t)old;
                if (i->mem_bytes == 8) w->v[i->dst + 1][l] = (uint32_t)(old >> 32);
            }
        }
    }
    if (priv) {
        uint64_t o[LANES];
        for (int l = 0; l < LANES; l++) o[l] = (uint32_t)p.a[l];
        if (what == 2)
            return raise_fault(w, i, FAULT_INTERNAL, __builtin_ctzll(priv), o[__builtin_ctzll(priv)], i->mem_bytes, 1);
        if (!scratch_access(w, i, o, priv, what)) return NULL;
    }
    p.mask = all & ~lds & ~priv;
    if (!p.mask) return i + 1;
    fill_inactive(&p);
    return what == 0 ? load(w, i, &p, 0) : what == 1 ? store(w, i, &p) : atomic(w, i, &p);
}
static const Ins *op_flat_load(Wave *w, const Ins *i) { return flat(w, i, 0); }
static const Ins *op_flat_store(Wave *w, const Ins *i) { return flat(w, i, 1); }
static const Ins *op_flat_atomic(Wave *w, const Ins *i) { return flat(w, i, 2); }

// ---- buffers ----
// Descriptor: base 47:0, stride 61:48, num_records word 2. On gfx9 num_records counts bytes without idxen and with
// stride 0, whatever the other is, and there the byte offset counts against it; records of stride bytes with both, and
// there the index alone does. Returns the lanes wholly inside; *some: lanes that begin inside.
static uint64_t buffer_address(Wave *w, const Ins *i, Lanes *p, uint64_t *some, uint64_t *limit, uint64_t *offsets) {
    const uint32_t *r = &w->s[i->src[2]];
    const uint64_t base = (uint64_t)(r[1] & 0xffffu) << 32 | r[0];
    const uint32_t stride = r[1] >> 16 & 0x3fff, records = r[2], soffset = w->s[i->src[3]];
    const uint64_t exec = get_exec(w);
    const uint32_t *v = w->v[i->src[0]];
    const int structured = stride != 0 && (i->flags & F_IDXEN);
    uint64_t inside = 0;
    *some = 0;
    *limit = structured ? i->mem_bytes : records;
    for (int l = 0; l < LANES; l++) {
        uint32_t index = 0, offset = (uint32_t)i->imm;
        if (i->flags & F_IDXEN) index = v[l];
        if (i->flags & F_OFFEN) offset += i->flags & F_IDXEN ? w->v[i->src[0] + 1][l] : v[l];
        uint64_t counted;
        if (structured) counted = index < records ? 0 : ~0ull >> 1;
        else counted = (uint64_t)offset + soffset + (uint64_t)index * stride;
        offsets[l] = counted;
        p->a[l] = base + soffset + offset + (uint64_t)index * stride;
        if (counted + i->mem_bytes <= *limit) inside |= 1ull << l;
        if (counted < *limit) *some |= 1ull << l;
    }
    *some &= exec;
    return inside & exec;
}
static const Ins *op_buffer_load(Wave *w, const Ins *i) {
    Lanes p;
    uint64_t some, limit, offset[LANES], exec = get_exec(w);
    uint32_t base = 0;
    if ((i->flags & F_LDS) && !lds_target(w, i, &base)) return NULL;
    const uint64_t inside = buffer_address(w, i, &p, &some, &limit, offset);
    for (uint64_t m = exec & ~inside; m; m &= m - 1) { // dwords beyond the end read as 0
        const int l = __builtin_ctzll(m);
        uint8_t x[16] = {0};
        for (uint32_t k = 0; (some >> l & 1) && i->mem_bytes > 4 && k < i->mem_bytes; k += 4) {
            if (offset[l] + k + 4 > limit) break;
            Alloc *al = lane_alloc(w, i, p.a[l] + k, l, 4, 0);
            if (!al) return NULL;
            memcpy(x + k, al->host + (p.a[l] + k - al->dev), 4);
        }
        if (i->flags & F_LDS) memcpy(w->lds + base + (uint32_t)l * i->mem_bytes, x, i->mem_bytes);
        else deliver_lane(w, i, l, x);
    }
    p.mask = inside;
    fill_inactive(&p);
    return load(w, i, &p, base);
}
static const Ins *op_buffer_store(Wave *w, const Ins *i) {
    Lanes p;
    uint64_t some, limit, offset[LANES];
    p.mask = buffer_address(w, i, &p, &some, &limit, offset);
    for (uint64_t m = some & ~p.mask; m && i->mem_bytes > 4; m &= m - 1) { // the dwords before the end are written
        const int l = __builtin_ctzll(m);
        Ins part = *i;
        part.mem_bytes = 4;
        for (uint32_t k = 0; offset[l] + k + 4 <= limit; k += 4) {
            Lanes one = p;
            one.mask = 1ull << l;
            one.a[l] = p.a[l] + k;
            fill_inactive(&one);
            part.src[1] = (uint16_t)(i->src[1] + k / 4);
            if (!store(w, &part, &one)) { if (w->pc == &part) w->pc = i; return NULL; }
        }
    }
    fill_inactive(&p);
    return store(w, i, &p);
}
static const Ins *op_buffer_atomic(Wave *w, const Ins *i) {
    Lanes p;
    uint64_t some, limit, offset[LANES];
    p.mask = buffer_address(w, i, &p, &some, &limit, offset);
    fill_inactive(&p);
    return atomic(w, i, &p);
}

#define ROW(name) {#name, op_##name, "mem", CLS_VMEM},
const OpEntry vmem_ops[] = {
    ROW(global_load) ROW(global_store) ROW(global_atomic) ROW(flat_load) ROW(flat_store) ROW(flat_atomic)
    ROW(scratch_load) ROW(scratch_store) ROW(buffer_load) ROW(buffer_store) ROW(buffer_atomic)
};
const int vmem_count = sizeof vmem_ops / sizeof vmem_ops[0];
