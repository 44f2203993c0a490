// SPDX-License-Identifier: Apache-2.0
// The adversarial memory model: whatever the scopes and waits of the code do not forbid may happen.
//
// Levels: a write-back cache per workgroup without coherence (it stands for the L1 and an XCD's L2); a cache per rank
// for memory that several ranks map; memory itself. A store enters its workgroup's view at once and leaves the wave's
// queue late, out of order where addresses differ: then a plain store is dirty in the workgroup's cache, an sc1 store
// is at agent level, an sc0 sc1 store is in memory. buffer_wbl2 writes dirty bytes back, buffer_inv drops clean ones,
// each by its scope. A load without sc1 may be served by the workgroup's cache however old, an sc1 load by the rank's,
// an sc0 sc1 load by memory only; the workgroup's own unwritten bytes are always seen. A line that is not in such a
// cache may be served as it was before a store of this launch, as if it had been cached then, unless an invalidation
// lies in between. Results (vector, scalar and LDS) stay poison until s_waitcnt covers them; LDS operations and LDS DMA
// take effect then as well.
#include <stdlib.h>

#include "lds.h"

#define LINE 64
#define VM_DEPTH 63
#define LGKM_DEPTH 15
#define CACHE_LINES 2048      // a workgroup
#define RANK_CACHE_LINES 65536

void deliver_lane(Wave *w, const Ins *i, int l, const uint8_t *h); // vmem.c

// ---- caches ----
typedef struct {
    uint64_t key; // device address / LINE
    uint64_t valid, dirty; // a bit each byte
    uint32_t pendings, next;
    Alloc *al;
    uint8_t data[LINE];       // the owner's view
    uint8_t dirty_data[LINE]; // bytes that wait for a write-back
    uint8_t pending[LINE];    // stores of the waves' queues on each byte
} CacheLine;
typedef struct {
    CacheLine *lines;
    uint32_t *bucket;
    uint32_t count, room, nbuckets, limit;
    uint64_t evicted; // Machine.version when a line last had to make room: nothing older may come back
} Cache;
#define NO_LINE 0xffffffffu

static uint32_t hash_key(uint64_t key) { return (uint32_t)((key * 0x9e3779b97f4a7c15ull) >> 40); }
static void cache_free(Cache *c) {
    free(c->lines);
    free(c->bucket);
    memset(c, 0, sizeof *c);
}
static CacheLine *cache_find(Cache *c, uint64_t key) {
    if (!c->nbuckets) return NULL;
    for (uint32_t k = c->bucket[hash_key(key) & (c->nbuckets - 1)]; k != NO_LINE; k = c->lines[k].next)
        if (c->lines[k].key == key) return &c->lines[k];
    return NULL;
}
static void cache_link(Cache *c, uint32_t k) {
    uint32_t *b = &c->bucket[hash_key(c->lines[k].key) & (c->nbuckets - 1)];
    c->lines[k].next = *b;
    *b = k;
}
static void cache_unlink(Cache *c, uint32_t k) {
    uint32_t *b = &c->bucket[hash_key(c->lines[k].key) & (c->nbuckets - 1)];
    while (*b != k) b = &c->lines[*b].next;
    *b = c->lines[k].next;
}
static void cache_grow(Cache *c) {
    c->room = c->room ? 2 * c->room : 64;
    c->lines = realloc(c->lines, c->room * sizeof *c->lines);
    c->nbuckets = 2 * c->room;
    c->bucket = realloc(c->bucket, c->nbuckets * sizeof *c->bucket);
    if (!c->lines || !c->bucket) abort();
    memset(c->bucket, 0xff, c->nbuckets * sizeof *c->bucket);
    for (uint32_t k = 0; k < c->count; k++) cache_link(c, k);
}
// The line of the key; a full cache gives up a clean one.
static CacheLine *cache_get(Machine *m, Cache *c, uint64_t key, Alloc *al) {
    CacheLine *line = cache_find(c, key);
    if (line) return line;
    uint32_t k = c->count;
    if (c->count >= c->limit) {
        for (int tries = 0; tries < 16; tries++) {
            const uint32_t j = (uint32_t)(next_random(m) % c->count);
            if (!c->lines[j].dirty && !c->lines[j].pendings) {
                k = j;
                cache_unlink(c, j);
                c->evicted = m->version;
                break;
            }
        }
    }
    if (k == c->count) {
        if (c->count == c->room) cache_grow(c);
        c->count++;
    }
    line = &c->lines[k];
    memset(line, 0, sizeof *line);
    line->key = key;
    line->al = al;
    cache_link(c, k);
    return line;
}
static inline uint64_t byte_mask(uint32_t at, uint32_t n) { return (n >= 64 ? ~0ull : (1ull << n) - 1) << at; }

// ---- queues ----
enum { E_LOAD, E_STORE, E_WRITEBACK, E_DONE, E_SCALAR, E_LDS };
typedef struct Entry {
    uint8_t kind, sampled, drained, nrows;
    uint32_t flags, lds_base;
    uint64_t serial; // order of issue over the machine
    Ins ins; // sizes, modes and registers of the access
    Alloc *al;
    uint64_t mask, bloom;
    struct Entry *next_free;
    uint64_t addr[LANES];
    vrow rows[8] ALIGN64; // loaded or stored data by lane (16 bytes a lane), or the rows of an LDS operation
} Entry;

struct AdvWave {
    Entry *vm[VM_DEPTH + 1], *lgkm[LGKM_DEPTH + 1];
    uint32_t nvm, nlgkm;
    uint64_t drained_by; // the last forced drain that took a store of this wave
};
struct AdvGroup {
    Cache cache;
    uint64_t last_inv;  // Machine.version at the last invalidation (or eviction)
    uint32_t laggard;   // a wave that is held back at the start and behind barriers
    uint64_t unsampled; // bloom of loads that have not read memory yet
};
typedef struct Orphan {
    struct Orphan *next;
    Cache cache;
    uint32_t rank;
} Orphan;
// What lines of memory held before they were written in this launch: as it began, and before the latest store.
#define HISTORY_LINES 65536 // a power of two; beyond three quarters no more is recorded
typedef struct {
    uint64_t key; // host address / LINE, 0: free
    uint64_t first_time, last_time; // Machine.version at the store that ended the first and the latest version
    uint8_t first[LINE], last[LINE];
} Past;

struct AdvMachine {
    Past *past;
    uint32_t npast;
    uint64_t *rank_inv; // a rank's last system-scope invalidation
    Cache *rank_cache;
    Orphan *orphans;
    Entry *free_entries;
    uint64_t serial;
    uint32_t drain_chance, evict_chance, starve_chance, late_sample, lag; // of 256; lag: rounds, drawn from the seed
};

static Entry *new_entry(Machine *m, uint8_t kind) {
    Entry *e = m->adv->free_entries;
    if (e) m->adv->free_entries = e->next_free;
    else e = aligned_alloc(64, (sizeof *e + 63) / 64 * 64);
    if (!e) abort();
    e->kind = kind;
    e->serial = m->adv->serial++;
    e->sampled = e->drained = e->nrows = 0;
    e->flags = 0;
    e->mask = e->bloom = 0;
    e->al = NULL;
    return e;
}
static void drop_entry(Machine *m, Entry *e) {
    e->next_free = m->adv->free_entries;
    m->adv->free_entries = e;
}
static uint64_t bloom_of(const uint64_t *addr, uint64_t mask, uint32_t bytes) {
    uint64_t b = 0;
    for (; mask; mask &= mask - 1) {
        const uint64_t a = addr[__builtin_ctzll(mask)];
        b |= 1ull << (hash_key(a / LINE) & 63) | 1ull << (hash_key((a + bytes - 1) / LINE) & 63);
    }
    return b;
}

void adv_start(Machine *m) {
    if (!m->adv) {
        m->adv = calloc(1, sizeof *m->adv);
        m->adv->rank_cache = calloc(m->ranks, sizeof(Cache));
        for (uint32_t r = 0; r < m->ranks; r++) m->adv->rank_cache[r].limit = RANK_CACHE_LINES;
        m->adv->past = calloc(HISTORY_LINES, sizeof(Past));
        m->adv->rank_inv = calloc(m->ranks, 8);
        if (!m->adv->rank_cache || !m->adv->past || !m->adv->rank_inv) abort();
    }
    if (m->adv->npast) memset(m->adv->past, 0, HISTORY_LINES * sizeof(Past));
    m->adv->npast = 0;
    for (uint32_t r = 0; r < m->ranks; r++) m->adv->rank_inv[r] = m->version;
    // Most seeds hold stores back until they are waited for; some let them trickle out.
    const uint64_t r = next_random(m);
    static const uint32_t drain[8] = {0, 0, 0, 0, 0, 0, 1, 3}, starve[4] = {1, 2, 4, 8};
    m->adv->drain_chance = drain[r & 7];
    m->adv->evict_chance = (r >> 32 & 31) == 0 ? 8 : 0;
    m->adv->starve_chance = starve[r >> 6 & 3];
    m->adv->lag = (r >> 16 & 15) ? 64 : 0;
    m->adv->late_sample = 64 + (r >> 8 & 127);
}
void adv_free(Machine *m) {
    if (!m->adv) return;
    for (uint32_t r = 0; r < m->ranks; r++) cache_free(&m->adv->rank_cache[r]);
    while (m->adv->free_entries) {
        Entry *e = m->adv->free_entries;
        m->adv->free_entries = e->next_free;
        free(e);
    }
    free(m->adv->rank_cache);
    free(m->adv->past);
    free(m->adv->rank_inv);
    free(m->adv);
}
void adv_wave_init(Wave *w) {
    w->adv = calloc(1, sizeof *w->adv);
    if (!w->g->adv) {
        w->g->adv = calloc(1, sizeof *w->g->adv);
        w->g->adv->cache.limit = CACHE_LINES;
        w->g->adv->last_inv = w->m->version;
        w->g->adv->laggard = w->g->nwaves > 1 ? 1 + (uint32_t)(next_random(w->m) % (w->g->nwaves - 1)) : 0;
    }
    if (w->id == w->g->adv->laggard && w->m->adv->lag) w->starve = (uint32_t)(next_random(w->m) % w->m->adv->lag);
    const Machine *m = w->m;
    if (m->starve_rounds && (m->starve_rank < 0 || (uint32_t)m->starve_rank == w->L->rank)) w->starve = m->starve_rounds;
    if (!w->adv || !w->g->adv) abort();
}

// ---- the levels; no access crosses a line ----
static void fill_line(Machine *m, uint32_t rank, CacheLine *line, Alloc *al, int from_rank_cache, uint64_t since);

static Past *find_past(Machine *m, const uint8_t *host, int create) {
    const uint64_t key = (uint64_t)(uintptr_t)host / LINE;
    for (uint32_t k = hash_key(key) & (HISTORY_LINES - 1);; k = (k + 1) & (HISTORY_LINES - 1)) {
        Past *p = &m->adv->past[k];
        if (p->key == key) return p;
        if (p->key) continue;
        if (!create || m->adv->npast > HISTORY_LINES / 4 * 3) return NULL;
        m->adv->npast++;
        p->key = key;
        return p;
    }
}
// Keeps what the line of a store held. The host line may reach beyond the allocation; only bytes inside are ever read
// back.
static void remember(Machine *m, const Alloc *al, const uint8_t *host) {
    Past *p = find_past(m, host, 1);
    if (!p) return;
    const uint8_t *line = (const uint8_t *)((uintptr_t)host & ~(uintptr_t)(LINE - 1));
    const uint8_t *lo = line < al->host ? al->host : line, *end = al->host + al->size;
    const uint8_t *hi = line + LINE < end ? line + LINE : end;
    const int fresh = p->first_time == 0;
    if (fresh) { memcpy(p->first + (lo - line), lo, (size_t)(hi - lo)); p->first_time = m->version; }
    memcpy(p->last + (lo - line), lo, (size_t)(hi - lo));
    p->last_time = m->version;
}
// A former value of n bytes at host that may still sit in a cache last invalidated at `since`; 0: there is none.
static int past_value(Machine *m, const uint8_t *host, uint32_t n, uint64_t since, uint8_t *x) {
    if (!m->adv->npast || !(next_random(m) & 15)) return 0;
    const uint32_t at = (uint32_t)((uintptr_t)host % LINE);
    const Past *p = find_past(m, host, 0);
    if (!p || at + n > LINE) return 0;
    if (p->first_time > since) memcpy(x, p->first + at, n);
    else if (p->last_time > since) memcpy(x, p->last + at, n);
    else return 0;
    return 1;
}

static void memory_write(Wave *w, Alloc *al, uint64_t a, uint32_t n, const uint8_t *x) {
    Machine *m = w->m;
    m->version++;
    if (m->nstore_faults && al->shared && n <= 16 && store_faulted(m, w, al, a - al->dev, n, x)) return;
    remember(m, al, al->host + (a - al->dev));
    memcpy(al->host + (a - al->dev), x, n);
}
// Agent level: memory, or the rank's cache where several ranks map it.
static void agent_write(Wave *w, Alloc *al, uint64_t a, uint32_t n, const uint8_t *x) {
    if (!al->shared) { memory_write(w, al, a, n, x); return; }
    CacheLine *line = cache_get(w->m, &w->m->adv->rank_cache[w->L->rank], a / LINE, al);
    memcpy(line->data + a % LINE, x, n);
    memcpy(line->dirty_data + a % LINE, x, n);
    line->valid |= byte_mask(a % LINE, n);
    line->dirty |= byte_mask(a % LINE, n);
    w->m->version++;
}
static void system_write(Wave *w, Alloc *al, uint64_t a, uint32_t n, const uint8_t *x) {
    memory_write(w, al, a, n, x);
    if (!al->shared) return;
    CacheLine *line =
        cache_get(w->m, &w->m->adv->rank_cache[w->L->rank], a / LINE, al); // the rank's own agent level sees it too
    memcpy(line->data + a % LINE, x, n);
    line->valid |= byte_mask(a % LINE, n);
    line->dirty &= ~byte_mask(a % LINE, n);
}
static void agent_read(Machine *m, uint32_t rank, Alloc *al, uint64_t a, uint32_t n, uint8_t *x) {
    if (!al->shared) { memcpy(x, al->host + (a - al->dev), n); return; }
    CacheLine *line = cache_get(m, &m->adv->rank_cache[rank], a / LINE, al);
    const uint64_t want = byte_mask(a % LINE, n);
    if ((line->valid & want) != want) {
        const Cache *c = &m->adv->rank_cache[rank];
        fill_line(m, rank, line, al, 0, c->evicted > m->adv->rank_inv[rank] ? c->evicted : m->adv->rank_inv[rank]);
    }
    memcpy(x, line->data + a % LINE, n);
}
// Fills the invalid bytes of the line, as far as the allocation reaches.
static void fill_line(Machine *m, uint32_t rank, CacheLine *line, Alloc *al, int from_rank_cache, uint64_t since) {
    const uint64_t base = line->key * LINE;
    const uint32_t lo = base < al->dev ? (uint32_t)(al->dev - base) : 0;
    const uint64_t end = al->dev + al->size;
    const uint32_t hi = base + LINE > end ? (uint32_t)(end - base) : LINE;
    uint8_t x[LINE];
    if (from_rank_cache) agent_read(m, rank, al, base + lo, hi - lo, x + lo);
    else memcpy(x + lo, al->host + (base + lo - al->dev), hi - lo);
    const uint64_t fill = byte_mask(lo, hi - lo) & ~line->valid;
    const uint8_t *host = al->host + (base + lo - al->dev); // former values where device and host lines coincide
    if ((uintptr_t)host % LINE == (base + lo) % LINE) past_value(m, host, hi - lo, since, x + lo);
    for (uint32_t k = lo; k < hi; k++) if (fill >> k & 1) line->data[k] = x[k];
    line->valid |= fill;
}
static void overlay(const CacheLine *line, uint32_t at, uint32_t n, uint8_t *x) { // the workgroup's own unwritten bytes
    if (!line->dirty && !line->pendings) return;
    for (uint32_t k = 0; k < n; k++)
        if ((line->dirty >> (at + k) & 1) || line->pending[at + k]) x[k] = line->data[at + k];
}
static void read_piece(Wave *w, Alloc *al, uint32_t flags, uint64_t a, uint32_t n, uint8_t *x) {
    Machine *m = w->m;
    Cache *c = &w->g->adv->cache;
    const uint32_t rank = w->L->rank;
    if (al->kind == KIND_READONLY) { memcpy(x, al->host + (a - al->dev), n); return; }
    if (!(flags & F_SC1)) { // wave or workgroup scope
        CacheLine *line = cache_get(m, c, a / LINE, al);
        const uint64_t want = byte_mask(a % LINE, n);
        if ((line->valid & want) != want)
            fill_line(m, rank, line, al, 1, c->evicted > w->g->adv->last_inv ? c->evicted : w->g->adv->last_inv);
        memcpy(x, line->data + a % LINE, n);
        return;
    }
    if (!(flags & F_SC0)) agent_read(m, rank, al, a, n, x);
    else {
        memcpy(x, al->host + (a - al->dev), n);
        CacheLine *line = al->shared ? cache_find(&m->adv->rank_cache[rank], a / LINE) : NULL;
        if (line)
            for (uint32_t k = 0; k < n; k++)
                if (line->dirty >> (a % LINE + k) & 1) x[k] = line->data[a % LINE + k];
    }
    const CacheLine *own = cache_find(c, a / LINE);
    if (own) overlay(own, a % LINE, n, x);
}
// One lane's access; only at a line's edge is it more than one piece.
static void read_bytes(Wave *w, Alloc *al, uint32_t flags, uint64_t a, uint32_t n, uint8_t *x) {
    const uint32_t first = LINE - (uint32_t)(a % LINE) < n ? LINE - (uint32_t)(a % LINE) : n;
    read_piece(w, al, flags, a, first, x);
    if (first < n) read_piece(w, al, flags, a + first, n - first, x + first);
}

// ---- write-backs ----
static void write_back_line(Wave *w, CacheLine *line) {
    for (uint32_t k = 0; k < LINE;) {
        if (!(line->dirty >> k & 1)) { k++; continue; }
        uint32_t n = 1;
        while (k + n < LINE && (line->dirty >> (k + n) & 1)) n++;
        agent_write(w, line->al, line->key * LINE + k, n, line->dirty_data + k);
        k += n;
    }
    line->dirty = 0;
}
static void write_back_rank(Machine *m, uint32_t rank, Wave *w) {
    Cache *c = &m->adv->rank_cache[rank];
    for (uint32_t j = 0; j < c->count; j++) {
        CacheLine *line = &c->lines[j];
        for (uint32_t k = 0; line->dirty && k < LINE; k++) {
            if (!(line->dirty >> k & 1)) continue;
            uint32_t n = 1;
            while (k + n < LINE && n < 16 && (line->dirty >> (k + n) & 1)) n++;
            const uint64_t offset = line->key * LINE + k - line->al->dev;
            m->version++;
            if (!(w && m->nstore_faults && store_faulted(m, w, line->al, offset, n, line->dirty_data + k)))
                memcpy(line->al->host + offset, line->dirty_data + k, n);
            k += n - 1;
        }
        line->dirty = 0;
    }
}

// ---- completing entries ----
static inline void copy_access(uint8_t *x, const uint8_t *from, uint32_t n) { // fixed sizes: no call, no string move
    switch (n) {
    case 4: memcpy(x, from, 4); break;
    case 8: memcpy(x, from, 8); break;
    case 16: memcpy(x, from, 16); break;
    default: for (uint32_t k = 0; k < n; k++) x[k] = from[k];
    }
}
// A load by which no cache line comes in: from memory, with what the rank's (r) and the workgroup's own (own) cache hold
// unwritten. Lanes mostly read one line in a row, so both are looked up once a line.
static void sample_direct(Wave *w, Entry *e) {
    const Alloc *al = e->al;
    const uint32_t n = e->ins.mem_bytes;
    const int cached = al->kind != KIND_READONLY;
    uint64_t key = ~0ull;
    const CacheLine *r = NULL, *own = NULL;
    for (uint64_t m = e->mask; m; m &= m - 1) {
        const int l = __builtin_ctzll(m);
        const uint64_t a = e->addr[l];
        uint8_t *x = (uint8_t *)e->rows + 16 * l;
        const uint32_t at = (uint32_t)(a % LINE);
        if (cached && at + n > LINE) { read_bytes(w, e->al, e->flags, a, n, x); continue; }
        copy_access(x, al->host + (a - al->dev), n);
        if (!cached) continue;
        if (a / LINE != key) {
            key = a / LINE;
            r = al->shared ? cache_find(&w->m->adv->rank_cache[w->L->rank], key) : NULL;
            own = cache_find(&w->g->adv->cache, key);
        }
        if (r && r->dirty) for (uint32_t k = 0; k < n; k++) if (r->dirty >> (at + k) & 1) x[k] = r->data[at + k];
        if (own) overlay(own, at, n, x);
    }
}
static void sample(Wave *w, Entry *e) { // reads memory for a load
    if (e->sampled) return;
    e->sampled = 1;
    const int past_rank = (e->flags & F_SC1) && (!e->al->shared || (e->flags & F_SC0));
    if (e->al->kind == KIND_READONLY || past_rank) { sample_direct(w, e); return; }
    for (uint64_t m = e->mask; m; m &= m - 1) {
        const int l = __builtin_ctzll(m);
        read_bytes(w, e->al, e->flags, e->addr[l], e->ins.mem_bytes, (uint8_t *)e->rows + 16 * l);
    }
}
static void deliver_words(Wave *w, const Entry *e) {
    const uint32_t *x = (const uint32_t *)e->rows; // 4 words a lane
    for (uint32_t k = 0; k < e->ins.mem_bytes / 4u; k++) {
        uint32_t *d = w->v[e->ins.dst + k];
        if (e->mask == ~0ull) for (int l = 0; l < LANES; l++) d[l] = x[4 * l + k];
        else for (uint64_t m = e->mask; m; m &= m - 1) { const int l = __builtin_ctzll(m); d[l] = x[4 * l + k]; }
    }
}
static void deliver(Wave *w, Entry *e) {
    if (e->kind == E_LOAD) {
        sample(w, e);
        if (!(e->flags & F_LDS) && e->ins.mem_bytes >= 4) { deliver_words(w, e); return; }
        for (uint64_t m = e->mask; m; m &= m - 1) {
            const int l = __builtin_ctzll(m);
            const uint8_t *x = (uint8_t *)e->rows + 16 * l;
            if (e->flags & F_LDS) memcpy(w->lds + e->lds_base + (uint32_t)l * e->ins.mem_bytes, x, e->ins.mem_bytes);
            else deliver_lane(w, &e->ins, l, x);
        }
        if (e->flags & F_LDS) w->m->version++;
    } else if (e->kind == E_DONE && e->nrows) { // values that were ready at issue
        for (uint32_t k = 0; k < e->nrows; k++)
            for (uint64_t m = e->mask; m; m &= m - 1) {
                const int l = __builtin_ctzll(m);
                w->v[e->ins.dst + k][l] = e->rows[k][l];
            }
    } else if (e->kind == E_SCALAR) {
        memcpy(&w->s[e->ins.dst], e->rows, 4u * e->nrows);
        if (e->ins.dst + e->nrows > S_EXEC) refresh_exec(w);
    } else if (e->kind == E_LDS) {
        const vrow *d1 = e->ins.kind[2] == SRC_NONE ? NULL : &e->rows[5];
        lds_execute(w, &e->ins, e->rows[0], &e->rows[1], d1, e->mask);
    }
}
// Moves a store out of the wave's queue.
static void drain_store(Wave *w, Entry *e) {
    if (e->drained) return;
    e->drained = 1;
    const uint32_t bytes = e->ins.mem_bytes;
    Cache *c = &w->g->adv->cache;
    for (uint64_t m = e->mask; m; m &= m - 1) {
        const int l = __builtin_ctzll(m);
        uint64_t a = e->addr[l];
        const uint8_t *x = (uint8_t *)e->rows + 16 * l;
        for (uint32_t left = bytes; left;) {
            const uint32_t at = (uint32_t)(a % LINE), n = LINE - at < left ? LINE - at : left;
            CacheLine *line = cache_find(c, a / LINE);
            if (line) {
                for (uint32_t k = 0; k < n; k++)
                    if (line->pending[at + k]) {
                        line->pending[at + k]--;
                        line->pendings--;
                    }
                if (!(e->flags & F_SC1)) {
                    memcpy(line->dirty_data + at, x, n);
                    line->dirty |= byte_mask(at, n);
                } else line->dirty &= ~byte_mask(at, n);
            }
            if (e->flags & F_SC1) {
                if (e->flags & F_SC0) system_write(w, e->al, a, n, x);
                else agent_write(w, e->al, a, n, x);
            }
            a += n; x += n; left -= n;
        }
    }
    w->m->version++;
}
// Drains entry k of the wave with everything older that may touch the same lines.
static void drain_with_order(Wave *w, uint32_t k) {
    Entry *e = w->adv->vm[k];
    for (uint32_t j = 0; j < k; j++) {
        Entry *o = w->adv->vm[j];
        if (o->kind == E_STORE && !o->drained && (o->bloom & e->bloom)) { drain_with_order(w, j); }
    }
    drain_store(w, e);
}
static void do_writeback(Wave *w, Entry *e) {
    if (e->drained) return;
    e->drained = 1;
    if (!(e->flags & F_SC1)) return; // workgroup scope: nothing to do
    Cache *c = &w->g->adv->cache;
    for (uint32_t k = 0; k < c->count; k++) if (c->lines[k].dirty) write_back_line(w, &c->lines[k]);
    if (e->flags & F_SC0) write_back_rank(w->m, w->L->rank, w);
}
static void complete_oldest_vm(Wave *w) {
    struct AdvWave *a = w->adv;
    Entry *e = a->vm[0];
    if (e->kind == E_STORE) drain_store(w, e);
    else if (e->kind == E_WRITEBACK) do_writeback(w, e);
    else deliver(w, e);
    drop_entry(w->m, e);
    a->nvm--;
    memmove(a->vm, a->vm + 1, a->nvm * sizeof *a->vm);
}
static void complete_lgkm(Wave *w, uint32_t k) {
    struct AdvWave *a = w->adv;
    Entry *e = a->lgkm[k];
    deliver(w, e);
    drop_entry(w->m, e);
    a->nlgkm--;
    memmove(a->lgkm + k, a->lgkm + k + 1, (a->nlgkm - k) * sizeof *a->lgkm);
}
// LDS operations finish in order; scalar loads in any order.
static void complete_some_lgkm(Wave *w) {
    struct AdvWave *a = w->adv;
    uint32_t pick = (uint32_t)(next_random(w->m) % a->nlgkm);
    if (a->lgkm[pick]->kind != E_SCALAR) for (pick = 0; a->lgkm[pick]->kind == E_SCALAR; pick++) {}
    complete_lgkm(w, pick);
}
static void push_vm(Wave *w, Entry *e) {
    if (w->adv->nvm == VM_DEPTH) complete_oldest_vm(w);
    w->adv->vm[w->adv->nvm++] = e;
}
static void push_lgkm(Wave *w, Entry *e) {
    if (w->adv->nlgkm == LGKM_DEPTH) complete_some_lgkm(w);
    w->adv->lgkm[w->adv->nlgkm++] = e;
}

void adv_wait(Wave *w, int vmcnt, int lgkmcnt) {
    while (vmcnt < VM_DEPTH && w->adv->nvm > (uint32_t)vmcnt) complete_oldest_vm(w);
    while (lgkmcnt < LGKM_DEPTH && w->adv->nlgkm > (uint32_t)lgkmcnt) complete_some_lgkm(w);
}

// ---- issue ----
// The wave's (and the workgroup's) loads that have not read memory yet do so before anything of the workgroup
// overwrites it.
static void sample_overlapping(Wave *w, uint64_t bloom) {
    Group *g = w->g;
    if (!(g->adv->unsampled & bloom)) return;
    g->adv->unsampled = 0;
    for (uint32_t k = 0; k < g->nwaves; k++) {
        Wave *o = &g->waves[k];
        for (uint32_t j = 0; j < o->adv->nvm; j++) {
            Entry *e = o->adv->vm[j];
            if (e->kind != E_LOAD || e->sampled) continue;
            if (e->bloom & bloom) sample(o, e); else g->adv->unsampled |= e->bloom;
        }
    }
}
static void poison_result(Wave *w, const Ins *i, uint64_t mask) {
    const uint32_t rows = (i->mem_bytes + 3u) / 4, half = i->aux >= 2 && i->mem_bytes < 4;
    const uint32_t keep = !half ? 0 : i->aux == 2 || i->aux == 4 ? 0xffff0000u : 0xffffu;
    for (uint32_t k = 0; k < rows; k++) {
        uint32_t *d = w->v[i->dst + k];
        if (mask == ~0ull && !keep) for (int l = 0; l < LANES; l++) d[l] = POISON;
        else for (uint64_t m = mask; m; m &= m - 1) {
            const int l = __builtin_ctzll(m);
            d[l] = (d[l] & keep) | (POISON & ~keep);
        }
    }
}
const Ins *adv_load(Wave *w, const Ins *i, const uint64_t *addr, uint64_t mask, uint32_t lds_base) {
    Entry *e = new_entry(w->m, E_LOAD);
    e->ins = *i;
    e->flags = i->flags;
    e->lds_base = lds_base;
    e->al = w->last;
    e->mask = mask;
    memcpy(e->addr, addr, sizeof e->addr);
    e->bloom = bloom_of(addr, mask, i->mem_bytes);
    push_vm(w, e);
    if ((next_random(w->m) & 255) < w->m->adv->late_sample && e->al->kind != KIND_READONLY)
        w->g->adv->unsampled |= e->bloom;
    else sample(w, e);
    if (!(i->flags & F_LDS)) poison_result(w, i, mask);
    return i + 1;
}
// Another vector memory operation that counts but has nothing to deliver.
void adv_count_vm(Wave *w) { push_vm(w, new_entry(w->m, E_DONE)); }
void adv_count_lgkm(Wave *w) { push_lgkm(w, new_entry(w->m, E_DONE)); }

static void drain_overlapping(Group *g, uint64_t bloom) {
    for (uint32_t k = 0; k < g->nwaves; k++) {
        Wave *o = &g->waves[k];
        for (uint32_t j = 0; j < o->adv->nvm; j++) {
            Entry *e = o->adv->vm[j];
            if (e->kind == E_STORE && !e->drained && (e->bloom & bloom)) drain_with_order(o, j);
        }
    }
}
// A store that may pass older ones of its wave sometimes does so at once, and the wave is held back: a flag without its
// data.
static void overtake(Wave *w, Entry *e) {
    const uint64_t r = next_random(w->m);
    if (!(r & 7)) return;
    int passes = 0;
    for (uint32_t k = 0; k + 1 < w->adv->nvm; k++) {
        const Entry *o = w->adv->vm[k];
        if (o->kind == E_WRITEBACK && !o->drained) return;
        if (o->kind != E_STORE || o->drained) continue;
        if (o->bloom & e->bloom) return;
        passes = 1;
    }
    if (!passes) return;
    drain_store(w, e);
    w->starve = 8 + (uint32_t)(r >> 8 & 31);
    w->yield = 1;
}
const Ins *adv_store(Wave *w, const Ins *i, const uint64_t *addr, uint64_t mask, uint32_t data_row) {
    Entry *e = new_entry(w->m, E_STORE);
    const uint32_t bytes = i->mem_bytes, shift = bytes < 4 && i->aux ? 16 : 0;
    e->ins = *i;
    e->flags = i->flags;
    e->al = w->last;
    e->mask = mask;
    memcpy(e->addr, addr, sizeof e->addr);
    e->bloom = bloom_of(addr, mask, bytes);
    Cache *c = &w->g->adv->cache;
    sample_overlapping(w, e->bloom);
    int conflict = 0;
    for (uint64_t m = mask; m; m &= m - 1) {
        const int l = __builtin_ctzll(m);
        uint32_t *x = (uint32_t *)((uint8_t *)e->rows + 16 * l);
        for (uint32_t k = 0; k < (bytes + 3) / 4; k++) x[k] = w->v[data_row + k][l];
        x[0] >>= shift;
        const CacheLine *line = cache_find(c, addr[l] / LINE);
        if (line && line->pendings) conflict = 1;
    }
    if (conflict) { // an older store of another wave to the same line goes first
        for (uint32_t k = 0; k < w->g->nwaves; k++) {
            Wave *o = &w->g->waves[k];
            if (o == w) continue;
            for (uint32_t j = 0; j < o->adv->nvm; j++) {
                Entry *p = o->adv->vm[j];
                if (p->kind != E_STORE || p->drained || !(p->bloom & e->bloom)) continue;
                int same = 0;
                for (uint64_t a = mask; a && !same; a &= a - 1)
                    for (uint64_t b = p->mask; b && !same; b &= b - 1) {
                        const uint64_t x = addr[__builtin_ctzll(a)], y = p->addr[__builtin_ctzll(b)];
                        same = x < y + p->ins.mem_bytes && y < x + bytes;
                    }
                if (same) drain_with_order(o, j);
            }
        }
    }
    for (uint64_t m = mask; m; m &= m - 1) {
        const int l = __builtin_ctzll(m);
        const uint8_t *x = (uint8_t *)e->rows + 16 * l;
        uint64_t a = addr[l];
        for (uint32_t left = bytes; left;) {
            const uint32_t at = (uint32_t)(a % LINE), n = LINE - at < left ? LINE - at : left;
            CacheLine *line = cache_get(w->m, c, a / LINE, e->al);
            memcpy(line->data + at, x, n);
            line->valid |= byte_mask(at, n);
            for (uint32_t k = 0; k < n; k++)
                if (line->pending[at + k] < 255) {
                    line->pending[at + k]++;
                    line->pendings++;
                }
            a += n; x += n; left -= n;
        }
    }
    push_vm(w, e);
    overtake(w, e);
    return i + 1;
}
// An atomic acts on memory: what the workgroup still holds of these lines goes there first, and its copies are dropped.
void adv_before_atomic(Wave *w, const Ins *i, const uint64_t *addr, uint64_t mask, uint32_t bytes, int system) {
    (void)i; (void)system;
    const uint64_t bloom = bloom_of(addr, mask, bytes);
    sample_overlapping(w, bloom);
    drain_overlapping(w->g, bloom);
    for (uint64_t m = mask; m; m &= m - 1) {
        const uint64_t a = addr[__builtin_ctzll(m)];
        CacheLine *line = cache_find(&w->g->adv->cache, a / LINE);
        if (line) {
            if (line->dirty) write_back_line(w, line);
            if (!line->pendings) { line->valid = 0; w->g->adv->cache.evicted = w->m->version; }
        }
        CacheLine *shared = cache_find(&w->m->adv->rank_cache[w->L->rank], a / LINE);
        if (shared) {
            for (uint32_t k = 0; k < LINE; k++)
                if (shared->dirty >> k & 1)
                    shared->al->host[shared->key * LINE + k - shared->al->dev] = shared->dirty_data[k];
            shared->dirty = shared->valid = 0;
        }
    }
}
// Registers that were just written become poison until the operation is waited for.
void adv_hold_rows(Wave *w, uint32_t row, uint32_t nrows, uint64_t mask) {
    Entry *e = new_entry(w->m, E_DONE);
    e->ins.dst = (uint16_t)row;
    e->nrows = (uint8_t)nrows;
    e->mask = mask;
    memcpy(e->rows, w->v[row], nrows * sizeof(vrow));
    push_vm(w, e);
    for (uint32_t k = 0; k < nrows; k++)
        for (uint64_t m = mask; m; m &= m - 1) w->v[row + k][__builtin_ctzll(m)] = POISON;
}
// The same for scalar results (scalar loads, clocks).
void adv_hold_scalars(Wave *w, uint32_t dst, uint32_t n) {
    Entry *e = new_entry(w->m, E_SCALAR);
    e->ins.dst = (uint16_t)dst;
    e->nrows = (uint8_t)n;
    memcpy(e->rows, &w->s[dst], 4u * n);
    push_lgkm(w, e);
    for (uint32_t k = 0; k < n; k++) w->s[dst + k] = POISON;
}
// Scalar loads go past the workgroup's cache, but see what it has written back.
const Ins *adv_smem(Wave *w, const Ins *i, uint64_t addr, uint32_t ndwords) {
    Alloc *al = find_alloc(w->m, w->L->rank, addr);
    uint32_t x[16];
    if (!al) memcpy(x, w->L->kernarg_alloc->host + (addr - w->L->kernarg_alloc->dev), 4u * ndwords);
    else
        for (uint32_t k = 0; k < ndwords; k++) { // the scalar cache is not invalidated while a kernel runs
            agent_read(w->m, w->L->rank, al, addr + 4 * k, 4, (uint8_t *)(x + k));
            past_value(w->m, al->host + (addr + 4 * k - al->dev), 4, 0, (uint8_t *)(x + k));
        }
    memcpy(&w->s[i->dst], x, 4u * ndwords);
    adv_hold_scalars(w, i->dst, ndwords);
    return i + 1;
}
const Ins *adv_lds(Wave *w, const Ins *i) {
    Entry *e = new_entry(w->m, E_LDS);
    const uint32_t rows = lds_result_rows(i), data = (i->mem_bytes + 3u) / 4;
    e->ins = *i;
    e->mask = get_exec(w);
    memcpy(e->rows[0], w->v[i->src[0]], sizeof(vrow));
    if (i->kind[1] == SRC_VGPR) memcpy(e->rows[1], w->v[i->src[1]], data * sizeof(vrow));
    if (i->kind[2] == SRC_VGPR) memcpy(e->rows[5], w->v[i->src[2]], data * sizeof(vrow));
    push_lgkm(w, e);
    const uint32_t mode = i->aux >> 8 & 255, half = (i->aux & 255) == DS_READ && i->mem_bytes < 4 && mode >= 2;
    const uint32_t keep = !half ? 0 : mode == 2 || mode == 4 ? 0xffff0000u : 0xffffu;
    for (uint32_t k = 0; k < rows; k++)
        for (uint64_t m = e->mask; m; m &= m - 1) {
            uint32_t *d = &w->v[i->dst + k][__builtin_ctzll(m)];
            *d = (*d & keep) | (POISON & ~keep);
        }
    return i + 1;
}
void adv_inv(Wave *w, const Ins *i) {
    if (!(i->flags & F_SC1)) return; // workgroup scope
    Cache *c = &w->g->adv->cache;
    w->g->adv->last_inv = w->m->version;
    for (uint32_t k = 0; k < c->count; k++) {
        CacheLine *line = &c->lines[k];
        uint64_t keep = line->dirty;
        if (line->pendings) for (uint32_t b = 0; b < LINE; b++) if (line->pending[b]) keep |= 1ull << b;
        line->valid &= keep;
    }
    if (!(i->flags & F_SC0)) return;
    w->m->adv->rank_inv[w->L->rank] = w->m->version;
    c = &w->m->adv->rank_cache[w->L->rank];
    for (uint32_t k = 0; k < c->count; k++) c->lines[k].valid &= c->lines[k].dirty;
}
void adv_wbl2(Wave *w, const Ins *i) {
    Entry *e = new_entry(w->m, E_WRITEBACK);
    e->flags = i->flags;
    push_vm(w, e);
}

// ---- time passes ----
// Before a slice: some stores leave the queue, the youngest first; now and then a wave falls asleep or a line is
// written back.
void adv_slice(Wave *w) {
    Machine *m = w->m;
    const struct AdvMachine *a = m->adv;
    const uint64_t r = next_random(m);
    if ((r & 255) < a->drain_chance)
        for (uint32_t k = w->adv->nvm; k-- > 0;) {
            Entry *e = w->adv->vm[k];
            if (e->kind != E_STORE || e->drained) continue;
            if (next_random(m) & 1) { drain_with_order(w, k); break; }
        }
    if (a->evict_chance && (r >> 8 & 255) < a->evict_chance && w->g->adv->cache.count) {
        CacheLine *line = &w->g->adv->cache.lines[(r >> 32) % w->g->adv->cache.count];
        if (line->dirty) write_back_line(w, line);
        else if (!line->pendings) { line->valid = 0; w->g->adv->cache.evicted = m->version; }
    }
    if ((r >> 16 & 255) < a->starve_chance) w->starve = 1 + (uint32_t)(r >> 40 & 31);
}
void adv_after_barrier(Group *g) {
    Machine *m = g->L->m;
    const uint64_t r = next_random(m);
    if (m->adv->lag && (r & 3) == 0) g->waves[g->adv->laggard].starve = (uint32_t)((r >> 8) % (m->adv->lag / 2));
    for (uint32_t k = 0; k < g->nwaves; k++) { // a wave that took stores through the barrier keeps them for a while;
        // wave 0 less often, because it is mostly the one that raises the flag
        Wave *w = &g->waves[k];
        int holds = 0;
        for (uint32_t j = 0; j < w->adv->nvm && !holds; j++)
            holds = w->adv->vm[j]->kind == E_STORE && !w->adv->vm[j]->drained;
        const uint64_t q = holds ? next_random(m) : 0;
        if (k ? (q & 7) != 0 : (q & 7) == 0) w->starve = 8 + (uint32_t)(q >> 8 & 31);
    }
}
// What an ended workgroup has in flight trickles out, the youngest first; 1: nothing is left.
int adv_group_quiet(Group *g) {
    Machine *m = g->L->m;
    uint32_t left = 0;
    for (uint32_t k = 0; k < g->nwaves; k++) {
        Wave *w = &g->waves[k];
        for (uint32_t j = w->adv->nvm; j-- > 0;) {
            Entry *e = w->adv->vm[j];
            if (e->kind != E_STORE || e->drained) continue;
            left++;
            if ((next_random(m) & 1023) == 0) drain_with_order(w, j);
        }
    }
    return left == 0;
}
// Every wave only polls: hardware would get its queues out. Drains some, the youngest first; 0: there is nothing to
// drain.
typedef struct { Wave *w; uint64_t serial; uint32_t slot, lds; } Candidate;
static int younger(const void *a, const void *b) {
    const uint64_t x = ((const Candidate *)a)->serial, y = ((const Candidate *)b)->serial;
    return x < y ? 1 : x > y ? -1 : 0;
}
static uint32_t candidates(Machine *m, Candidate *out, uint32_t room) {
    uint32_t n = 0;
    for (uint32_t g = 0; g < m->ngroups; g++)
        for (uint32_t k = 0; k < m->groups[g]->nwaves; k++) {
            Wave *w = &m->groups[g]->waves[k];
            for (uint32_t j = 0; j < w->adv->nvm; j++) {
                const Entry *e = w->adv->vm[j];
                if (e->drained || (e->kind != E_STORE && e->kind != E_WRITEBACK)) continue;
                if (n < room) out[n] = (Candidate){w, e->serial, j, 0};
                n++;
            }
            if (w->adv->nlgkm && w->adv->lgkm[0]->kind == E_LDS && !lds_result_rows(&w->adv->lgkm[0]->ins)) {
                if (n < room) out[n] = (Candidate){w, w->adv->lgkm[0]->serial, 0, 1};
                n++;
            }
        }
    return n;
}
int adv_force_drain(Machine *m) {
    const uint32_t n = candidates(m, NULL, 0);
    if (!n) return 0;
    Candidate *c = malloc(n * sizeof *c);
    if (!c) abort();
    candidates(m, c, n);
    qsort(c, n, sizeof *c, younger);
    const uint32_t count = n > 8 ? n / 8 : 1;
    const uint64_t call = m->adv->serial++;
    for (uint32_t k = 0, done = 0; k < n && done < count; k++) { // mostly the youngest, one a wave: flags before data
        const Candidate *x = &c[next_random(m) & 15 ? k : (uint32_t)(next_random(m) % n)];
        Wave *w = x->w;
        if (w->adv->drained_by == call) continue;
        w->adv->drained_by = call;
        done++;
        if (x->lds) { // an LDS write; its slot keeps counting until it is waited for
            Entry *e = w->adv->lgkm[0];
            if (e->kind != E_LDS) continue;
            deliver(w, e);
            e->kind = E_DONE;
            e->nrows = 0;
            continue;
        }
        Entry *e = w->adv->vm[x->slot];
        if (e->kind == E_STORE) { drain_with_order(w, x->slot); continue; }
        for (uint32_t q = 0; q < x->slot; q++) if (w->adv->vm[q]->kind == E_STORE) drain_store(w, w->adv->vm[q]);
        do_writeback(w, e);
    }
    free(c);
    m->version++;
    return 1;
}
void adv_wave_end(Wave *w) { // scalar and vector results are lost with the registers; LDS operations still happen
    while (w->adv->nlgkm) complete_lgkm(w, 0);
}
// Vector memory that an ended workgroup has in flight goes out; what is dirty in its cache stays there until the
// kernel's end.
void adv_group_free(Group *g) {
    Machine *m = g->L->m;
    for (uint32_t k = 0; k < g->nwaves; k++) {
        Wave *w = &g->waves[k];
        while (w->adv->nlgkm) { drop_entry(m, w->adv->lgkm[--w->adv->nlgkm]); }
        for (uint32_t j = 0; j < w->adv->nvm; j++) {
            Entry *e = w->adv->vm[j];
            if (e->kind == E_STORE) drain_store(w, e);
            if (e->kind == E_WRITEBACK) do_writeback(w, e);
            drop_entry(m, e);
        }
        w->adv->nvm = 0;
    }
    Cache *c = &g->adv->cache;
    uint32_t dirty = 0;
    for (uint32_t k = 0; k < c->count; k++) dirty += c->lines[k].dirty != 0;
    if (dirty) {
        Orphan *o = calloc(1, sizeof *o);
        if (!o) abort();
        o->cache = *c;
        o->rank = g->L->rank;
        o->next = m->adv->orphans;
        m->adv->orphans = o;
    } else cache_free(c);
    for (uint32_t k = 0; k < g->nwaves; k++) free(g->waves[k].adv);
    free(g->adv);
}
// The kernel's end: everything is written back and every cache is dropped. Groups that injected stalls left behind
// count too.
void adv_finish(Machine *m) {
    for (uint32_t g = 0; g < m->ngroups; g++) {
        Group *G = m->groups[g];
        for (uint32_t k = 0; k < G->nwaves; k++)
            for (uint32_t j = 0; j < G->waves[k].adv->nvm; j++) {
                Entry *e = G->waves[k].adv->vm[j];
                if (e->kind == E_STORE) drain_store(&G->waves[k], e);
            }
    }
    while (m->adv->orphans) {
        Orphan *o = m->adv->orphans;
        m->adv->orphans = o->next;
        for (uint32_t j = 0; j < o->cache.count; j++) {
            CacheLine *line = &o->cache.lines[j];
            for (uint32_t k = 0; line->dirty && k < LINE; k++)
                if (line->dirty >> k & 1) {
                    const uint64_t offset = line->key * LINE + k - line->al->dev;
                    line->al->host[offset] = line->dirty_data[k];
                    CacheLine *r = line->al->shared ? cache_find(&m->adv->rank_cache[o->rank], line->key) : NULL;
                    if (r) r->dirty &= ~(1ull << k);
                }
        }
        cache_free(&o->cache);
        free(o);
    }
    for (uint32_t g = 0; g < m->ngroups; g++) {
        Cache *c = &m->groups[g]->adv->cache;
        for (uint32_t j = 0; j < c->count; j++)
            if (c->lines[j].dirty) write_back_line(&m->groups[g]->waves[0], &c->lines[j]);
    }
    for (uint32_t r = 0; r < m->ranks; r++) {
        write_back_rank(m, r, NULL);
        cache_free(&m->adv->rank_cache[r]);
        m->adv->rank_cache[r].limit = RANK_CACHE_LINES;
    }
}
