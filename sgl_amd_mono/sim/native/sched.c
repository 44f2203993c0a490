// SPDX-License-Identifier: Apache-2.0
// Machine, launches and the deterministic scheduler.
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "sim.h"

void memory_free(Machine *m);
void memory_reset_counters(Machine *m, int track_unique);
int watch_start(Wave *w);
const Ins *op_watched(Wave *w, const Ins *i);

// Backward branches a slice (a wave that synchronises ends its slice at the first one).
#define SLICE_BRANCHES 64
// Passes over all waves in which every wave only polls, before the clock jumps.
#define IDLE_ROUNDS 4
#define IDLE_ROUNDS_DRAIN 6 // adversarial: before stores are forced out
#define IDLE_ROUNDS_ADVERSARIAL 24
// Not every slice of a polling wave holds an s_sleep or a clock read: a wave counts as polling for this many slices
// after one.
#define POLL_AGE 3
// The same once nothing has changed for long: for loops that sleep and read the clock rarely.
#define POLL_AGE_CALM 64
#define LONG_CALM 256
// Rounds without any effect after which starved waves are woken.
#define STARVED_ROUNDS 6
// Rounds without any effect after which no further wave is starved.
#define CALM_ROUNDS 12
// A jump of the clock: this part of the time since anything changed, so that deadlines 6 % apart stay apart, and at
// least so much.
#define JUMP_PART 16
#define FIRST_JUMP 1000
// Rounds after which a jump no longer waits for every wave to have read the clock.
#define PATIENCE 512
// A machine that only polls for this long (virtual) will never end: 2^37 ticks, 23 minutes.
#define CLOCK_HORIZON (1ull << 37)
// Instructions of one wave a clock tick: about 2.4 GHz / 4 cycles / 100 MHz.
#define INSTRUCTIONS_PER_TICK 6

Machine *sim_machine_new(uint32_t ranks, uint32_t cus, uint32_t adversarial, uint64_t seed) {
    Machine *m = calloc(1, sizeof *m);
    if (!m) return NULL;
    m->ranks = ranks;
    m->cus = cus;
    m->adversarial = adversarial;
    m->rng = seed * 0x2545f4914f6cdd1dull + 1;
    m->spaces = calloc(ranks, sizeof(Space));
    m->clock = 1000;
    return m;
}
void sim_machine_free(Machine *m) {
    if (!m) return;
    memory_free(m);
    adv_free(m);
    free(m->spaces);
    free(m->stalls);
    free(m->store_faults);
    free(m->late);
    free(m->nodes);
    free(m->launches);
    free(m->groups);
    free(m);
}
void sim_reseed(Machine *m, uint64_t seed) { m->rng = seed * 0x2545f4914f6cdd1dull + 1; }
uint64_t sim_clock(const Machine *m) { return m->clock; }

int sim_add_stall(Machine *m, const Stall *s) {
    Stall *p = realloc(m->stalls, (m->nstalls + 1) * sizeof *p);
    if (!p) return -1;
    m->stalls = p;
    p[m->nstalls] = *s;
    p[m->nstalls].active = 1;
    return (int)m->nstalls++;
}
int sim_add_store_fault(Machine *m, const StoreFault *s) {
    StoreFault *p = realloc(m->store_faults, (m->nstore_faults + 1) * sizeof *p);
    if (!p) return -1;
    m->store_faults = p;
    p[m->nstore_faults] = *s;
    p[m->nstore_faults].active = 1;
    return (int)m->nstore_faults++;
}
void sim_set_starve(Machine *m, int32_t rank, uint32_t rounds) {
    m->starve_rank = rank;
    m->starve_rounds = rounds;
}
void sim_clear_faults(Machine *m) { m->nstalls = m->nstore_faults = m->nlate = m->starve_rounds = 0; }
uint64_t sim_fault_hits(const Machine *m, int store, int k) {
    return store ? m->store_faults[k].hits : m->stalls[k].hits;
}

// ---- launches ----
Launch *sim_launch_new(Machine *m, Program *p, const int64_t *a, uint8_t *kernargs) {
    // a: see machine.py `_launch_words`, same order
    Launch *L = calloc(1, sizeof *L);
    if (!L) return NULL;
    L->m = m;
    L->p = p;
    L->kernargs = kernargs;
    L->rank = (uint32_t)a[0];
    for (int k = 0; k < 3; k++) { L->grid[k] = (uint32_t)a[1 + k]; L->dim[k] = (uint32_t)a[4 + k]; }
    L->lds_bytes = (uint32_t)a[7];
    L->kernarg_bytes = (uint32_t)a[8];
    L->user_sgprs = (uint32_t)a[9];
    L->sgpr_private_seg = (int32_t)a[10];
    L->sgpr_dispatch = (int32_t)a[11];
    L->sgpr_queue = (int32_t)a[12];
    L->sgpr_kernarg = (int32_t)a[13];
    L->sgpr_dispatch_id = (int32_t)a[14];
    L->sgpr_flat = (int32_t)a[15];
    L->sgpr_private_size = (int32_t)a[16];
    L->sgpr_preload = (int32_t)a[17];
    L->preload_length = (int32_t)a[18];
    L->preload_offset = (int32_t)a[19];
    L->wg_id_enable = (uint32_t)a[20];
    L->workitem_id_mode = (uint32_t)a[21];
    L->slots = (uint32_t)a[22];
    L->ngroups = L->grid[0] * L->grid[1] * L->grid[2];
    L->nwaves = (L->dim[0] * L->dim[1] * L->dim[2] + LANES - 1) / LANES;
    L->prof = calloc(p->count + 2, 8);
    L->poll_prof = calloc(p->count + 2, 8);
    L->streamed = calloc(L->ngroups + 1, 8);
    L->executed = calloc(L->ngroups + 1, 8);
    Alloc *al = calloc(1, sizeof *al);
    if (!L->prof || !L->poll_prof || !L->streamed || !L->executed || !al) return NULL;
    // The kernel argument block and the dispatch packet live in memory of their own; both are read by scalar loads
    // only.
    al->dev = (uint64_t)(uintptr_t)kernargs;
    al->size = L->kernarg_bytes + 64;
    al->host = kernargs;
    al->id = ~0u;
    al->polls = calloc(1, 8);
    al->rank = (int32_t)L->rank;
    L->kernarg_alloc = al;
    L->dispatch_packet = kernargs + L->kernarg_bytes;
    L->deepest_device.node = L->deepest_cross.node = L->deepest_total.node = -1;
    return L;
}
void sim_launch_free(Launch *L) {
    free(L->prof); free(L->poll_prof); free(L->streamed); free(L->executed);
    free(L->kernarg_alloc->polls); free(L->kernarg_alloc);
    free(L);
}
// Execution counts of every instruction; poll: of the failed poll passes alone.
void sim_launch_counts(const Launch *L, int poll, int64_t *out) {
    const int64_t *d = poll ? L->poll_prof : L->prof;
    int64_t n = 0;
    for (uint32_t k = 0; k < L->p->count; k++) { n += d[k]; out[k] = n; }
}
void sim_launch_groups(const Launch *L, uint64_t *streamed, uint64_t *executed) {
    memcpy(streamed, L->streamed, 8 * (size_t)L->ngroups);
    memcpy(executed, L->executed, 8 * (size_t)L->ngroups);
}
// out: barriers, device hops, cross hops, total hops, node of the total chain
void sim_launch_stats(const Launch *L, int64_t *out) {
    out[0] = (int64_t)L->barriers;
    out[1] = L->deepest_device.device;
    out[2] = L->deepest_cross.cross;
    out[3] = L->deepest_total.total;
    out[4] = L->deepest_total.node;
}
int sim_node(const Machine *m, int32_t k, int32_t *out) {
    if (k < 0 || (uint32_t)k >= m->nnodes) return 0;
    out[0] = m->nodes[k].parent; out[1] = m->nodes[k].alloc; out[2] = m->nodes[k].region; out[3] = m->nodes[k].cross;
    return 1;
}
void sim_fault(const Machine *m, int64_t *out) {
    const Fault *f = &m->fault;
    out[0] = f->kind;
    out[1] = f->rank;
    out[2] = f->launch;
    out[3] = f->group;
    out[4] = f->wave;
    out[5] = f->lane;
    out[6] = f->pc;
    out[7] = f->bytes;
    out[8] = (int64_t)f->address;
    out[9] = f->write;
    out[10] = (int64_t)m->stalled;
    out[11] = (int64_t)m->icount;
    out[12] = (int64_t)m->clock_jumps;
}
// Live waves after a deadlock: rank, launch, group, wave, pc, state.
int sim_waiting(const Machine *m, int64_t *out, int room) {
    int n = 0;
    for (uint32_t g = 0; g < m->ngroups; g++) {
        const Group *G = m->groups[g];
        for (uint32_t k = 0; G && k < G->nwaves; k++) {
            const Wave *w = &G->waves[k];
            if (w->state == WAVE_ENDED) continue;
            if (n < room) {
                int64_t *o = out + 6 * n;
                o[0] = G->L->rank;
                o[1] = G->L->index;
                o[2] = G->id;
                o[3] = w->id;
                o[4] = w->pc - G->L->p->ins;
                o[5] = w->state;
            }
            n++;
        }
    }
    return n;
}

// ---- workgroups ----
static size_t align_up(size_t x, size_t a) { return (x + a - 1) / a * a; }

static void init_wave(Wave *w, Group *g, uint32_t id, uint8_t *base, size_t vbytes) {
    Launch *L = g->L;
    const Program *p = L->p;
    memset(w, 0, sizeof *w);
    w->v = (vrow *)base;
    w->s = (uint32_t *)(base + vbytes);
    w->crows = (const vrow *)p->crows;
    w->g = g; w->L = L; w->m = L->m; w->id = id;
    w->lds = g->lds;
    w->lds_size = L->lds_bytes;
    w->pc = w->seg = p->ins;
    w->last = L->kernarg_alloc;
    w->depth.node = -1;
    w->poll_age = 255;
    w->mode = (uint32_t)(p->round32 | p->round64 << 2 | (p->flush32 ? 0 : 3) << 4 | (p->flush64 ? 0 : 3) << 6 |
                         p->dx10_clamp << 8 | p->ieee << 9);
    uint32_t *words = (uint32_t *)w->v;
    for (size_t k = 0; k < (size_t)p->vgprs * LANES; k++) words[k] = POISON;
    for (uint32_t k = 0; k < S_CONST; k++) w->s[k] = POISON;
    memcpy(w->s + S_CONST, p->consts, 4 * (size_t)p->nconst);
    if (p->scratch_bytes) {
        w->scratch = (uint8_t *)(w->s + S_CONST + p->nconst + 16);
        words = (uint32_t *)w->scratch;
        for (size_t k = 0; k < (size_t)p->scratch_bytes * LANES / 4; k++) words[k] = POISON;
    }
    // scalar inputs, in the order of the kernel descriptor
    if (L->sgpr_kernarg >= 0) put64(w->s, (uint32_t)L->sgpr_kernarg, L->kernarg_alloc->dev);
    if (L->sgpr_dispatch >= 0) put64(w->s, (uint32_t)L->sgpr_dispatch, L->kernarg_alloc->dev + L->kernarg_bytes);
    if (L->sgpr_queue >= 0) put64(w->s, (uint32_t)L->sgpr_queue, 0);
    if (L->sgpr_dispatch_id >= 0) put64(w->s, (uint32_t)L->sgpr_dispatch_id, L->m->serial);
    if (L->sgpr_flat >= 0) put64(w->s, (uint32_t)L->sgpr_flat, 0);
    if (L->sgpr_private_size >= 0) w->s[L->sgpr_private_size] = p->scratch_bytes;
    if (L->sgpr_preload >= 0)
        memcpy(&w->s[L->sgpr_preload], L->kernargs + 4 * L->preload_offset, 4 * (size_t)L->preload_length);
    uint32_t k = L->user_sgprs;
    for (int d = 0; d < 3; d++) if (L->wg_id_enable >> d & 1) w->s[k++] = g->gid[d];
    w->s[S_M0] = 0;
    put64(w->s, S_VCC, 0);
    // work-item ids, packed 10 bits a dimension; lanes past the end are off
    const uint32_t total = L->dim[0] * L->dim[1] * L->dim[2];
    uint64_t exec = 0;
    for (uint32_t l = 0; l < LANES; l++) {
        const uint32_t t = id * LANES + l;
        if (t >= total) continue;
        exec |= 1ull << l;
        uint32_t x = t % L->dim[0], y = t / L->dim[0] % L->dim[1], z = t / L->dim[0] / L->dim[1];
        w->v[0][l] = x | (L->workitem_id_mode > 0 ? y << 10 : 0) | (L->workitem_id_mode > 1 ? z << 20 : 0);
    }
    set_exec(w, exec);
    if (L->m->nstalls && watch_start(w)) { w->state = WAVE_STALLED; L->m->stalled++; }
    if (L->m->adversarial) adv_wave_init(w);
}

static Group *start_group(Launch *L, uint32_t id) {
    Machine *m = L->m;
    const Program *p = L->p;
    Group *g = calloc(1, sizeof *g);
    if (!g) return NULL;
    g->L = L;
    g->id = id;
    g->serial = m->next_serial++;
    g->gid[0] = id % L->grid[0]; g->gid[1] = id / L->grid[0] % L->grid[1]; g->gid[2] = id / L->grid[0] / L->grid[1];
    g->nwaves = g->live = L->nwaves;
    const size_t vbytes = align_up((size_t)(p->vgprs ? p->vgprs : 1) * sizeof(vrow), 64);
    const size_t sbytes = align_up(4 * (size_t)(S_CONST + p->nconst + 16) + (size_t)p->scratch_bytes * LANES, 64);
    const size_t lds = align_up(L->lds_bytes + 64, 64), waves = align_up(g->nwaves * sizeof(Wave), 64);
    g->block_bytes = waves + lds + g->nwaves * (vbytes + sbytes);
    g->block = mmap(NULL, g->block_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (g->block == MAP_FAILED) { free(g); return NULL; }
    g->waves = g->block;
    g->lds = (uint8_t *)g->block + waves;
    uint32_t *words = (uint32_t *)g->lds;
    for (size_t k = 0; k < lds / 4; k++) words[k] = POISON;
    uint8_t *base = g->lds + lds;
    for (uint32_t k = 0; k < g->nwaves; k++, base += vbytes + sbytes) init_wave(&g->waves[k], g, k, base, vbytes);
    return g;
}
static void retire_group(Group *g) {
    Launch *L = g->L;
    L->streamed[g->id] = g->streamed;
    for (uint32_t k = 0; k < g->nwaves; k++) {
        const Depth *d = &g->waves[k].depth;
        L->executed[g->id] += g->waves[k].icount;
        if (d->device > L->deepest_device.device) L->deepest_device = *d;
        if (d->cross > L->deepest_cross.cross) L->deepest_cross = *d;
        if (d->total > L->deepest_total.total) L->deepest_total = *d;
    }
    if (L->m->adversarial) adv_group_free(g);
    munmap(g->block, g->block_bytes);
    free(g);
}

void release_barrier(Group *g) {
    Depth d = {0, 0, 0, -1};
    for (uint32_t k = 0; k < g->nwaves; k++) {
        const Depth *x = &g->waves[k].depth;
        if (x->total > d.total) { d.total = x->total; d.node = x->node; }
        if (x->device > d.device) d.device = x->device;
        if (x->cross > d.cross) d.cross = x->cross;
    }
    g->at_barrier = 0;
    g->L->m->version++;
    if (g->adv) adv_after_barrier(g);
    for (uint32_t k = 0; k < g->nwaves; k++) {
        if (g->waves[k].state == WAVE_BARRIER) g->waves[k].state = WAVE_READY;
        if (d.total) g->waves[k].depth = d;
        g->waves[k].npolls = g->waves[k].poll_runs = 0;
    }
}
void wave_ended(Wave *w) {
    Group *g = w->g;
    w->state = WAVE_ENDED;
    w->m->version++;
    g->live--;
    if (w->adv) adv_wave_end(w);
    if (g->live && g->at_barrier == g->live) release_barrier(g);
}

// ---- running one wave ----
static void set_float_mode(const Wave *w) {
#if defined(__x86_64__)
    unsigned csr = 0x1f80; // all exceptions masked
    if (!(w->mode >> 4 & 3)) csr |= 0x8040; // FTZ, DAZ
    static const unsigned rounding[4] = {0, 2, 1, 3}; // nearest, +inf, -inf, zero
    csr |= rounding[w->mode & 3] << 13;
    _mm_setcsr(csr);
#elif defined(__aarch64__)
    uint64_t fpcr = 0;
    static const uint64_t rounding[4] = {0, 1, 2, 3};
    if (!(w->mode >> 4 & 3)) fpcr |= 1ull << 24;
    fpcr |= rounding[w->mode & 3] << 22;
    __asm__ volatile("msr fpcr, %0" ::"r"(fpcr));
#else
    (void)w;
#endif
}

static void run_wave(Wave *w, int64_t limit) {
    const Ins *i = w->pc, *cur = i;
    w->seg = i;
    w->slept = w->read_clock = w->yield = 0;
    if (limit < 0) {
        do { cur = i; i = cur->fn(w, cur); } while (likely(i != NULL));
    } else {
        do { cur = i; i = cur->fn(w, cur); } while (i && --limit > 0 && !w->yield);
        if (i) { // preempted between two instructions
            end_run(w, cur == i - 1 ? cur : w->seg - 1);
            w->pc = w->seg = i;
            return;
        }
    }
    if (w->m->fault.kind && w->m->fault.pc < 0) w->m->fault.pc = (int32_t)(cur - w->L->p->ins);
    if (w->state == WAVE_STALLED) { if (w->seg <= cur - 1) end_run(w, cur - 1); w->pc = w->seg = cur; }
}

// A digest of everything that decides what a wave does next.
static uint64_t wave_hash(const Wave *w) {
    uint64_t h = (uint64_t)(w->pc - w->L->p->ins) * 0x9e3779b97f4a7c15ull + w->scc;
    const uint64_t *v = (const uint64_t *)w->v;
    uint64_t h2 = 1, h3 = 2, h4 = 3;
    const size_t n = (size_t)w->L->p->vgprs * LANES / 2;
    for (size_t k = 0; k + 4 <= n; k += 4) {
        h = (h ^ v[k]) * 0x100000001b3ull; h2 = (h2 ^ v[k + 1]) * 0x100000001b3ull;
        h3 = (h3 ^ v[k + 2]) * 0x100000001b3ull; h4 = (h4 ^ v[k + 3]) * 0x100000001b3ull;
    }
    for (int k = 0; k < S_CONST; k++) h = (h ^ w->s[k]) * 0x100000001b3ull;
    return h ^ h2 * 3 ^ h3 * 5 ^ h4 * 7;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int fill_slots(Machine *m) { // makes waiting workgroups resident; 0: out of memory
    for (uint32_t k = 0; k < m->nlaunches; k++) {
        Launch *L = m->launches[k];
        uint32_t resident = 0;
        for (uint32_t g = 0; g < m->ngroups; g++) resident += m->groups[g]->L == L;
        while (L->next_group < L->ngroups && resident < L->slots) {
            if (m->ngroups == m->groups_room) {
                m->groups_room = m->groups_room ? 2 * m->groups_room : 256;
                Group **p = realloc(m->groups, m->groups_room * sizeof *p);
                if (!p) return 0;
                m->groups = p;
            }
            Group *g = start_group(L, L->next_group);
            if (!g) return 0;
            L->next_group++;
            m->groups[m->ngroups++] = g;
            resident++;
        }
    }
    return 1;
}

static void set_fault(Machine *m, uint32_t kind) {
    if (m->fault.kind) return;
    memset(&m->fault, 0, sizeof m->fault);
    m->fault.kind = kind;
    m->fault.rank = m->fault.launch = m->fault.group = m->fault.wave = m->fault.lane = m->fault.pc = -1;
}

static void shuffle(Machine *m, uint32_t *order, uint32_t n) {
    for (uint32_t k = n; k > 1; k--) {
        const uint32_t j = (uint32_t)(next_random(m) % k), t = order[k - 1];
        order[k - 1] = order[j];
        order[j] = t;
    }
}

// Lets a random half of the starved waves go on, at least one.
static void wake_some(Machine *m) {
    for (int woken = 0; !woken;)
        for (uint32_t k = 0; k < m->ngroups; k++)
            for (uint32_t j = 0; j < m->groups[k]->nwaves; j++) {
                Wave *w = &m->groups[k]->waves[j];
                if (w->state != WAVE_READY || !(next_random(m) & 1)) continue;
                w->starve = 0;
                woken = 1;
            }
}

// Marks the instructions where a stall may strike.
static void arm_watches(Machine *m, int on) {
    for (uint32_t k = 0; k < m->nstalls; k++) {
        const Stall *s = &m->stalls[k];
        if (s->at != STALL_LINE) continue;
        for (uint32_t j = 0; j < m->nlaunches; j++) {
            Program *p = m->launches[j]->p;
            if ((s->launch >= 0 && (uint32_t)s->launch != j) || s->pc >= p->count) continue;
            Ins *i = &p->ins[s->pc];
            if (on) { i->fn = op_watched; continue; }
            i->fn = op_handler(i);
        }
    }
}

// Runs all launches together. 0: finished; otherwise see sim_fault. stalled workgroups that can go no further are left
// behind.
int sim_run(Machine *m, Launch **launches, uint32_t n, int track_unique) {
    const double start = now();
    uint32_t *order = NULL, order_room = 0;
    m->launches = launches;
    m->nlaunches = n;
    m->serial++;
    m->next_serial = 0;
    m->nnodes = 0;
    m->icount = 0;
    m->clock_jumps = 0;
    m->stalled = 0;
    memset(&m->fault, 0, sizeof m->fault);
    m->fault.pc = -1;
    memory_reset_counters(m, track_unique);
    for (uint32_t k = 0; k < n; k++) launches[k]->index = k;
    arm_watches(m, 1);
    if (m->adversarial) adv_start(m);
    if (!fill_slots(m)) set_fault(m, FAULT_MEMORY);
#if defined(__x86_64__)
    const unsigned saved = _mm_getcsr();
#endif

    uint32_t idle = 0;    // rounds in which nothing changed that another wave could see
    uint32_t polling = 0; // of these the latest in which every wave ran and only polled
    uint32_t waited = 0;  // rounds that a jump has waited for waves to read the clock
    uint32_t calm = 0;    // rounds since anything changed; past CALM_ROUNDS no further wave is starved
    uint32_t round = 0;
    uint64_t changed = m->clock; // when anything changed last
    while (!m->fault.kind && m->ngroups) {
        if (order_room < m->ngroups) {
            order_room = m->groups_room;
            free(order);
            order = malloc(order_room * sizeof *order);
        }
        for (uint32_t k = 0; k < m->ngroups; k++) order[k] = k;
        shuffle(m, order, m->ngroups);
        round++;
        const uint64_t version = m->version;
        uint64_t longest = 0;
        uint32_t ran = 0, working = 0, timed = 0, unchecked = 0, stuck = 0, starved = 0;
        const int hashing = idle >= 2 && (idle & (idle - 1)) == 0;
        uint32_t retired = 0;
        for (uint32_t k = 0; k < m->ngroups && !m->fault.kind; k++) {
            Group *g = m->groups[order[k]];
            const uint32_t first = m->adversarial ? (uint32_t)(next_random(m) % g->nwaves) : 0;
            for (uint32_t j = 0; j < g->nwaves && !m->fault.kind; j++) {
                Wave *w = &g->waves[(first + j) % g->nwaves];
                if (w->state != WAVE_READY) continue;
                int64_t limit = -1;
                if (m->adversarial) {
                    if (w->starve) { w->starve--; starved++; continue; }
                    adv_slice(w);
                    if (calm >= CALM_ROUNDS) w->starve = 0;
                    if (w->starve) { starved++; continue; }
                    const uint64_t r = next_random(m);
                    limit = r & 3 ? (int64_t)(16 + (r >> 8) % 200) : (int64_t)(200 + (r >> 8) % 4000);
                }
                const uint64_t before = m->version, icount = w->icount;
                w->budget = SLICE_BRANCHES;
                set_float_mode(w);
                run_wave(w, limit);
                ran++;
                const uint64_t did = w->icount - icount;
                m->icount += did;
                if (did > longest) longest = did;
                const int effect = m->version != before || w->state != WAVE_READY;
                if (w->slept || w->read_clock) w->poll_age = 0;
                else if (w->poll_age < 255) w->poll_age++;
                int polled = !effect && w->poll_age < (calm < LONG_CALM ? POLL_AGE : POLL_AGE_CALM);
                if (w->read_clock) { w->uses_clock = 1; w->clock_seen = m->clock_serial; }
                if (w->state == WAVE_READY && w->uses_clock) { timed++; unchecked += w->clock_seen != m->clock_serial; }
                // A wave whose whole state repeats while nothing around it changes is stuck.
                if (!effect && hashing) {
                    const uint64_t h = wave_hash(w);
                    w->stuck = w->stuck_version == m->version && h == w->stuck_hash;
                    w->stuck_hash = h;
                    w->stuck_version = m->version;
                }
                if (!effect && w->stuck && w->stuck_version == m->version) { polled = 1; stuck++; }
                if (!polled) working++;
            }
            if (g->live == 0 && (!m->adversarial || adv_group_quiet(g))) { g->done = 1; retired++; }
        }
        m->clock += 1 + longest / INSTRUCTIONS_PER_TICK;
        if (m->nlate && next_late_store(m) <= m->clock) drain_late_stores(m);
        if (retired) {
            uint32_t kept = 0;
            for (uint32_t k = 0; k < m->ngroups; k++) {
                if (m->groups[k]->done) retire_group(m->groups[k]); else m->groups[kept++] = m->groups[k];
            }
            m->ngroups = kept;
            if (!m->fault.kind && !fill_slots(m)) set_fault(m, FAULT_MEMORY);
        }
        if (m->fault.kind || !m->ngroups) break;
        if (m->icount_limit && m->icount > m->icount_limit) { set_fault(m, FAULT_LIMIT); break; }
        if (m->wall_limit > 0 && (round & 15) == 0 && now() - start > m->wall_limit) {
            set_fault(m, FAULT_LIMIT);
            break;
        }
        if (m->version != version || retired) {
            idle = polling = calm = waited = 0;
            changed = m->clock;
            m->clock_serial++;
            continue;
        }
        if (ran == 0 && !starved) { // nothing can run: barriers and injected stalls only
            if (m->adversarial && adv_force_drain(m)) continue;
            if (m->nlate) { m->clock = next_late_store(m); drain_late_stores(m); continue; }
            uint32_t runnable = 0, stopped = 0;
            for (uint32_t k = 0; k < m->ngroups; k++)
                for (uint32_t j = 0; j < m->groups[k]->nwaves; j++) {
                    runnable += m->groups[k]->waves[j].state == WAVE_READY;
                    stopped += m->groups[k]->waves[j].state == WAVE_STALLED;
                }
            if (runnable) continue;
            if (!stopped) set_fault(m, FAULT_DEADLOCK);
            break; // injected stalls: what could end has ended
        }
        idle++;
        calm++;
        if (starved && !working &&
            idle >= STARVED_ROUNDS) { // the others only poll: the starved waves go on, or first a store comes out
            if (next_random(m) & 31 || !adv_force_drain(m)) wake_some(m);
            idle = 0;
        }
        if (starved || working) { polling = 0; continue; }
        polling++;
        if (polling < (m->adversarial ? IDLE_ROUNDS_DRAIN : IDLE_ROUNDS)) continue;
        // every wave only polls
        if (m->adversarial && adv_force_drain(m)) { idle = polling = 0; continue; }
        if (m->adversarial && polling < IDLE_ROUNDS_ADVERSARIAL) continue;
        if (m->nlate) { // the next event
            const uint64_t due = next_late_store(m);
            const uint64_t step = (m->clock - changed) / JUMP_PART + FIRST_JUMP;
            if (due > m->clock + step && timed) {
                if (unchecked && waited++ < PATIENCE) continue;
                m->clock += step;
                waited = 0;
            } else m->clock = due;
            m->clock_jumps++;
            m->clock_serial++;
            drain_late_stores(m);
            polling = 0;
            continue;
        }
        if (!timed) {
            if (stuck == ran) { set_fault(m, FAULT_DEADLOCK); break; }
            continue; // a bounded loop may still end
        }
        // Every wave has looked at the clock since the last jump: no deadline is passed over unseen.
        if (unchecked && waited++ < PATIENCE) continue;
        waited = 0;
        const uint64_t elapsed = m->clock - changed;
        if (elapsed > CLOCK_HORIZON) { set_fault(m, FAULT_DEADLOCK); break; }
        m->clock += elapsed / JUMP_PART > FIRST_JUMP ? elapsed / JUMP_PART : FIRST_JUMP;
        m->clock_jumps++;
        m->clock_serial++;
        polling = m->adversarial ? IDLE_ROUNDS_ADVERSARIAL - 1 : IDLE_ROUNDS - 1;
    }
    if (m->adversarial) adv_finish(m);
    if (m->nlate) { // stores that were put off arrive after the launch
        for (uint32_t k = 0; k < m->nlate; k++) m->late[k].due = 0;
        drain_late_stores(m);
    }
#if defined(__x86_64__)
    _mm_setcsr(saved);
#endif
    arm_watches(m, 0);
    free(order);
    return (int)m->fault.kind;
}
// Frees what sim_run left for inspection.
void sim_run_end(Machine *m) {
    for (uint32_t k = 0; k < m->ngroups; k++) retire_group(m->groups[k]);
    m->ngroups = 0;
    m->launches = NULL;
    m->nlaunches = 0;
}
void sim_set_limits(Machine *m, uint64_t instructions, double seconds) {
    m->icount_limit = instructions;
    m->wall_limit = seconds;
}
