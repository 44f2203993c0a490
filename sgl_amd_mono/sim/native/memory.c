// SPDX-License-Identifier: Apache-2.0
// Address spaces, allocations, hand-off stamps, fault injection on stores.
#include <stdlib.h>

#include "sim.h"

uint64_t next_random(Machine *m) { // splitmix64
    uint64_t z = (m->rng += 0x9e3779b97f4a7c15ull);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}

static uint32_t first_above(
    const Space *sp, uint64_t address) { // index of the first allocation whose start is above address
    uint32_t lo = 0, hi = sp->count;
    while (lo < hi) {
        const uint32_t mid = (lo + hi) / 2;
        if (sp->allocs[mid]->dev > address) hi = mid; else lo = mid + 1;
    }
    return lo;
}
Alloc *find_alloc(Machine *m, uint32_t rank, uint64_t address) {
    const Space *sp = &m->spaces[rank];
    const uint32_t k = first_above(sp, address);
    if (k == 0) return NULL;
    Alloc *al = sp->allocs[k - 1];
    return address - al->dev < al->size ? al : NULL;
}

// 0 ok, -1 overlaps another allocation, -2 no memory.
int sim_map(Machine *m, uint32_t rank, uint64_t dev, uint64_t size, uint8_t *host, uint32_t kind, uint32_t id,
    uint32_t nregions, const uint64_t *regions) {
    Space *sp = &m->spaces[rank];
    const uint32_t k = first_above(sp, dev);
    if (k > 0 && dev - sp->allocs[k - 1]->dev < sp->allocs[k - 1]->size) return -1;
    if (k < sp->count && sp->allocs[k]->dev - dev < size) return -1;
    if (sp->count == sp->room) {
        sp->room = sp->room ? 2 * sp->room : 64;
        Alloc **p = realloc(sp->allocs, sp->room * sizeof *p);
        if (!p) return -2;
        sp->allocs = p;
    }
    Alloc *al = calloc(1, sizeof *al);
    if (!al) return -2;
    al->dev = dev; al->size = size; al->host = host; al->kind = (uint8_t)kind; al->id = id; al->rank = (int32_t)rank;
    al->nregions = nregions;
    al->regions = calloc(nregions + 1, sizeof(Region));
    al->polls = calloc(nregions + 1, 8);
    if (!al->regions || !al->polls) return -2;
    for (uint32_t r = 0; r < nregions; r++) al->regions[r] = (Region){regions[2 * r], regions[2 * r + 1]};
    for (uint32_t r = 0; r < m->ranks; r++) {
        for (uint32_t j = 0; j < m->spaces[r].count; j++) {
            Alloc *o = m->spaces[r].allocs[j];
            if (o->host >= host + size || host >= o->host + o->size) continue;
            if (r != rank) o->shared = al->shared = 1;
            if (o->stamps && o->host == host && o->size >= size) al->stamps = o->stamps;
        }
    }
    if (kind == KIND_MAILBOX) {
        m->has_mail = 1;
        if (!al->stamps) al->stamps = calloc(size / 8 + 2, sizeof(Stamp));
        if (!al->stamps) return -2;
    }
    memmove(sp->allocs + k + 1, sp->allocs + k, (sp->count - k) * sizeof *sp->allocs);
    sp->allocs[k] = al;
    sp->count++;
    return 0;
}

static void free_alloc(Machine *m, Alloc *al) {
    int used = 0;
    for (uint32_t r = 0; r < m->ranks; r++)
        for (uint32_t j = 0; j < m->spaces[r].count; j++) used |= m->spaces[r].allocs[j]->stamps == al->stamps;
    if (!used) free(al->stamps);
    free(al->regions); free(al->polls); free(al->touched);
    free(al);
}
int sim_unmap(Machine *m, uint32_t rank, uint64_t dev) {
    Space *sp = &m->spaces[rank];
    for (uint32_t k = 0; k < sp->count; k++) {
        if (sp->allocs[k]->dev != dev) continue;
        Alloc *al = sp->allocs[k];
        memmove(sp->allocs + k, sp->allocs + k + 1, (sp->count - k - 1) * sizeof *sp->allocs);
        sp->count--;
        free_alloc(m, al);
        return 0;
    }
    return -1;
}
void memory_free(Machine *m) {
    trace_free(m);
    for (uint32_t r = 0; r < m->ranks; r++) {
        while (m->spaces[r].count) sim_unmap(m, r, m->spaces[r].allocs[m->spaces[r].count - 1]->dev);
        free(m->spaces[r].allocs);
    }
}
void memory_reset_counters(Machine *m, int track_unique) {
    m->track_unique = (uint32_t)track_unique;
    if (track_unique & TRACK_TRACE) trace_start(m); else trace_free(m);
    for (uint32_t r = 0; r < m->ranks; r++)
        for (uint32_t k = 0; k < m->spaces[r].count; k++) {
            Alloc *al = m->spaces[r].allocs[k];
            memset(al->bytes_read, 0, sizeof al->bytes_read);
            memset(al->bytes_written, 0, sizeof al->bytes_written);
            memset(al->polls, 0, 8 * (al->nregions + 1));
            free(al->touched);
            al->touched = track_unique & TRACK_UNIQUE ? calloc(al->size / 256 + 1, 8) : NULL; // one bit a 4-byte word
        }
}
// Counters of the k-th allocation of a rank: id, policies read, policies written, unique bytes. Returns 0 past the end.
int sim_alloc_counters(Machine *m, uint32_t rank, uint32_t k, uint32_t *id, uint64_t *read, uint64_t *written,
    uint64_t *unique, uint64_t *polls, uint32_t max_polls) {
    if (k >= m->spaces[rank].count) return 0;
    const Alloc *al = m->spaces[rank].allocs[k];
    *id = al->id;
    memcpy(read, al->bytes_read, sizeof al->bytes_read);
    memcpy(written, al->bytes_written, sizeof al->bytes_written);
    *unique = 0;
    if (al->touched)
        for (uint64_t j = 0; j < al->size / 256 + 1; j++)
            *unique += 4ull * (uint64_t)__builtin_popcountll(al->touched[j]);
    for (uint32_t r = 0; r <= al->nregions && r < max_polls; r++) polls[r] = al->polls[r];
    return 1;
}

uint32_t region_of(const Alloc *al, uint64_t offset) {
    for (uint32_t r = 0; r < al->nregions; r++) if (offset - al->regions[r].offset < al->regions[r].size) return r;
    return al->nregions;
}

// ---- hand-offs ----
static int32_t add_node(Machine *m, int32_t parent, const Alloc *al, uint64_t offset, int cross) {
    if (m->nnodes == m->nodes_room) {
        const uint32_t room = m->nodes_room ? 2 * m->nodes_room : 4096;
        Node *n = realloc(m->nodes, room * sizeof *n);
        if (!n) return parent;
        m->nodes = n;
        m->nodes_room = room;
    }
    m->nodes[m->nnodes] = (Node){parent, (uint16_t)al->id, (uint16_t)region_of(al, offset), (uint8_t)cross};
    return (int32_t)m->nnodes++;
}
void mailbox_read(Wave *w, Alloc *al, uint64_t offset, uint32_t bytes) {
    Machine *m = w->m;
    for (uint64_t k = offset / 8; k <= (offset + bytes - 1) / 8; k++) {
        const Stamp *st = &al->stamps[k];
        if (st->serial != m->serial) continue;
        Depth *d = &w->depth;
        if (st->group == w->g->serial) { // inside the workgroup: no hop
            if (st->total > d->total) { d->total = st->total; d->node = (int32_t)st->node; }
            if (st->device > d->device) d->device = st->device;
            if (st->cross > d->cross) d->cross = st->cross;
            continue;
        }
        const int cross = st->rank != w->L->rank;
        const uint16_t device = (uint16_t)(st->device + !cross), crosses = (uint16_t)(st->cross + cross),
                       total = (uint16_t)(st->total + 1);
        if (device > d->device) d->device = device;
        if (crosses > d->cross) d->cross = crosses;
        if (total > d->total) { d->total = total; d->node = add_node(m, (int32_t)st->node, al, offset, cross); }
    }
}
void mailbox_write(Wave *w, Alloc *al, uint64_t offset, uint32_t bytes) {
    for (uint64_t k = offset / 8; k <= (offset + bytes - 1) / 8; k++)
        al->stamps[k] = (Stamp){w->m->serial, (uint32_t)w->depth.node, w->g->serial, (uint16_t)w->L->rank,
            w->depth.device, w->depth.cross, w->depth.total};
}

// ---- injected faults ----
static int stall_matches(const Stall *s, const Wave *w) {
    return s->active && (s->rank < 0 || (uint32_t)s->rank == w->L->rank) &&
           (s->launch < 0 || (uint32_t)s->launch == w->L->index) && (s->group < 0 || (uint32_t)s->group == w->g->id) &&
           (s->wave < 0 || (uint32_t)s->wave == w->id);
}
// A store (or load) into a watched region: 1 = the wave stops here for good, before the access.
int watch_access(Wave *w, const Ins *i, Alloc *al, uint64_t offset, int store) {
    for (uint32_t k = 0; k < w->m->nstalls; k++) {
        Stall *s = &w->m->stalls[k];
        if (s->at != (store ? STALL_STORE : STALL_LOAD) || s->alloc != al->id || !stall_matches(s, w)) continue;
        if (s->region != ~0u && s->region != region_of(al, offset)) continue;
        s->hits++;
        w->state = WAVE_STALLED;
        w->pc = i;
        w->m->stalled++;
        return 1;
    }
    return 0;
}
int watch_start(Wave *w) {
    for (uint32_t k = 0; k < w->m->nstalls; k++) {
        Stall *s = &w->m->stalls[k];
        if (s->at == STALL_START && stall_matches(s, w)) { s->hits++; return 1; }
    }
    return 0;
}
// An instruction marked F_WATCH: runs it, or stalls the wave at its k-th pass.
const Ins *op_watched(Wave *w, const Ins *i) {
    const uint32_t pc = (uint32_t)(i - w->L->p->ins);
    for (uint32_t k = 0; k < w->m->nstalls; k++) {
        Stall *s = &w->m->stalls[k];
        if (s->at != STALL_LINE || s->pc != pc || !stall_matches(s, w)) continue;
        if (++w->stall_pass < s->pass) break;
        s->hits++;
        w->state = WAVE_STALLED;
        end_run(w, i - 1);
        w->pc = w->seg = i;
        w->m->stalled++;
        return NULL;
    }
    return op_handler(i)(w, i);
}

// A store to memory that other ranks map: 1 = it was dropped or put off.
int store_faulted(Machine *m, Wave *w, Alloc *al, uint64_t offset, uint32_t bytes, const void *data) {
    for (uint32_t k = 0; k < m->nstore_faults; k++) {
        StoreFault *s = &m->store_faults[k];
        if (!s->active || (s->rank >= 0 && (uint32_t)s->rank != w->L->rank) ||
            (s->alloc >= 0 && (uint32_t)s->alloc != al->id))
            continue;
        if (s->region >= 0 && (uint32_t)s->region != region_of(al, offset)) continue;
        s->hits++;
        if (s->ticks == 0) return 1;
        if (m->nlate == m->late_room) {
            m->late_room = m->late_room ? 2 * m->late_room : 256;
            LateStore *p = realloc(m->late, m->late_room * sizeof *p);
            if (!p) return 1;
            m->late = p;
        }
        LateStore *l = &m->late[m->nlate++];
        l->due = m->clock + s->ticks;
        l->host = al->host + offset;
        l->bytes = bytes;
        memcpy(l->data, data, bytes);
        return 1;
    }
    return 0;
}
uint64_t next_late_store(const Machine *m) {
    uint64_t t = ~0ull;
    for (uint32_t k = 0; k < m->nlate; k++) if (m->late[k].due < t) t = m->late[k].due;
    return t;
}
void drain_late_stores(Machine *m) { // in the order of issue
    uint32_t kept = 0;
    for (uint32_t k = 0; k < m->nlate; k++) {
        const LateStore *l = &m->late[k];
        if (l->due <= m->clock) { memcpy(l->host, l->data, l->bytes); m->version++; }
        else m->late[kept++] = *l;
    }
    m->nlate = kept;
}
