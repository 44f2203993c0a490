// SPDX-License-Identifier: Apache-2.0
// LDS: reads, writes, atomics, transposing reads, and the lane permutes that use its crossbar.
// Ins: src[0] address row, src[1], src[2] data rows, dst result row, imm first offset, sdst second offset (bytes),
// mem_bytes element size, aux = kind | mode << 8 (load mode, atomic operation, bits a transposed element).
#include "lds.h"

static inline uint32_t kind_of(const Ins *i) { return i->aux & 255; }
static inline uint32_t mode_of(const Ins *i) { return i->aux >> 8 & 255; }

static uint32_t swizzle_source(uint32_t o, uint32_t l) {
    const uint32_t half = l & 32, in = l & 31;
    if (o >= 0xe000) { // FFT: bits reversed within 32 lanes, masked
        const uint32_t m = o & 31;
        uint32_t r = 0;
        for (int k = 0; k < 5; k++) r |= (in >> k & 1) << (4 - k);
        return half | (in & m) | (r & ~m & 31);
    }
    if (o >= 0xc000) { // rotate
        const uint32_t m = o & 31, n = o >> 5 & 31;
        const uint32_t r = o >> 10 & 1 ? in - n : in + n;
        return half | (in & m) | (r & ~m & 31);
    }
    if (o & 0x8000) return (l & ~3u) | (o >> (2 * (l & 3)) & 3);
    return half | ((((in & (o & 31)) | (o >> 5 & 31)) ^ (o >> 10 & 31)) & 31);
}

// Checks every lane of an LDS operation; 0: fault raised.
int lds_check(Wave *w, const Ins *i, const uint32_t *addr, uint64_t mask) {
    const uint32_t kind = kind_of(i), bytes = i->mem_bytes;
    if (kind == DS_BPERMUTE || kind == DS_PERMUTE || kind == DS_SWIZZLE || kind == DS_NOP) return 1;
    const uint32_t last =
        (kind == DS_READ2 || kind == DS_WRITE2) && i->sdst > (uint32_t)i->imm ? i->sdst : (uint32_t)i->imm;
    uint32_t top = 0;
    for (int l = 0; l < LANES; l++) top = (mask >> l & 1) && addr[l] > top ? addr[l] : top;
    if ((uint64_t)top + last + bytes <= w->lds_size) return 1;
    for (uint64_t m = mask; m; m &= m - 1) {
        const int l = __builtin_ctzll(m);
        if ((uint64_t)addr[l] + last + bytes > w->lds_size) {
            raise_fault(w, i, FAULT_LDS, l, (uint64_t)addr[l] + last, bytes,
                kind == DS_WRITE || kind == DS_WRITE2 || kind == DS_ATOMIC);
            return 0;
        }
    }
    return 1;
}

static void put_element(vrow *d, int l, const uint8_t *h, uint32_t bytes, uint32_t mode) {
    if (bytes >= 4) { for (uint32_t k = 0; k < bytes / 4; k++) memcpy(&d[k][l], h + 4 * k, 4); return; }
    uint32_t x;
    if (bytes == 1) x = mode == 1 ? (uint32_t)(int8_t)*h : mode >= 4 ? (uint16_t)(int8_t)*h : *h;
    else { uint16_t u; memcpy(&u, h, 2); x = mode == 1 ? (uint32_t)(int16_t)u : u; }
    if (mode == 2 || mode == 4) x |= d[0][l] & 0xffff0000u;
    if (mode == 3 || mode == 5) x = (d[0][l] & 0xffffu) | x << 16;
    d[0][l] = x;
}
static void get_element(const vrow *s, int l, uint8_t *h, uint32_t bytes, uint32_t hi) {
    if (bytes >= 4) { for (uint32_t k = 0; k < bytes / 4; k++) memcpy(h + 4 * k, &s[k][l], 4); return; }
    const uint32_t x = hi ? s[0][l] >> 16 : s[0][l];
    memcpy(h, &x, bytes);
}

// Transposing read within 16 lanes: the lanes' data form a matrix of rows of 16 elements of `bits` bits, row r held by
// the lanes [r * 16 * bits / (8 * bytes) ..]; lane c receives column c.
static void read_transposed(Wave *w, const Ins *i, const uint32_t *addr, uint64_t mask) {
    const uint32_t bits = mode_of(i), bytes = i->mem_bytes, per_lane = 8 * bytes / bits,
                   lanes_per_row = 16 / per_lane ? 16 / per_lane : 1;
    uint8_t data[LANES][16], out[LANES][16];
    memset(out, 0, sizeof out);
    for (int l = 0; l < LANES; l++)
        if (mask >> l & 1) memcpy(data[l], w->lds + addr[l] + i->imm, bytes); else memset(data[l], 0, bytes);
    for (int l = 0; l < LANES; l++) {
        const uint32_t block = (uint32_t)l & ~15u, c = (uint32_t)l & 15u;
        for (uint32_t r = 0; r < per_lane; r++) {
            const uint32_t from = block + r * lanes_per_row + c / per_lane, at = c % per_lane * bits;
            for (uint32_t b = 0; b < bits; b++) {
                const uint32_t x = data[from][(at + b) / 8] >> ((at + b) % 8) & 1u, o = r * bits + b;
                out[l][o / 8] |= (uint8_t)(x << (o % 8));
            }
        }
    }
    for (uint64_t m = mask; m; m &= m - 1) {
        const int l = __builtin_ctzll(m);
        for (uint32_t k = 0; k < bytes / 4; k++) memcpy(&w->v[i->dst + k][l], out[l] + 4 * k, 4);
    }
}

// Performs the operation. addr, d0, d1: rows, live ones or snapshots taken at issue.
void lds_execute(Wave *w, const Ins *i, const uint32_t *addr, const vrow *d0, const vrow *d1, uint64_t mask) {
    const uint32_t kind = kind_of(i), mode = mode_of(i), bytes = i->mem_bytes;
    uint8_t *lds = w->lds;
    vrow *d = &w->v[i->dst];
    switch (kind) {
    case DS_READ:
        lds += i->imm;
        if (bytes == 4)
            for (uint64_t m = mask; m; m &= m - 1) {
                const int l = __builtin_ctzll(m);
                memcpy(&d[0][l], lds + addr[l], 4);
            }
        else
            for (uint64_t m = mask; m; m &= m - 1) {
                const int l = __builtin_ctzll(m);
                put_element(d, l, lds + addr[l], bytes, mode);
            }
        return;
    case DS_READ2: {
        vrow copy ALIGN64;
        memcpy(copy, addr, sizeof copy); // the result may overwrite the address
        for (uint64_t m = mask; m; m &= m - 1) {
            const int l = __builtin_ctzll(m);
            put_element(d, l, lds + copy[l] + i->imm, bytes, 0);
            put_element(d + bytes / 4, l, lds + copy[l] + i->sdst, bytes, 0);
        }
        return;
    }
    case DS_WRITE:
        for (uint64_t m = mask; m; m &= m - 1) {
            const int l = __builtin_ctzll(m);
            get_element(d0, l, lds + addr[l] + i->imm, bytes, mode == 3);
        }
        w->m->version++;
        return;
    case DS_WRITE2:
        for (uint64_t m = mask; m; m &= m - 1) {
            const int l = __builtin_ctzll(m);
            get_element(d0, l, lds + addr[l] + i->imm, bytes, 0);
            get_element(d1, l, lds + addr[l] + i->sdst, bytes, 0);
        }
        w->m->version++;
        return;
    case DS_ATOMIC:
        for (uint64_t m = mask; m; m &= m - 1) {
            const int l = __builtin_ctzll(m);
            uint8_t *h = lds + addr[l] + i->imm;
            uint64_t old = 0, x, y = 0;
            memcpy(&old, h, bytes);
            x = bytes == 8 ? (uint64_t)d0[1][l] << 32 | d0[0][l] : d0[0][l];
            if (d1) y = bytes == 8 ? (uint64_t)d1[1][l] << 32 | d1[0][l] : d1[0][l];
            // ds_cmpst: the first data operand is the compare value
            const uint64_t r =
                mode == 1 ? atomic_result(mode, bytes == 8, old, y, x) : atomic_result(mode, bytes == 8, old, x, y);
            memcpy(h, &r, bytes);
            if (i->flags & F_SC0) { // _rtn
                d[0][l] = (uint32_t)old;
                if (bytes == 8) d[1][l] = (uint32_t)(old >> 32);
            }
        }
        w->m->version++;
        return;
    case DS_READ_TR: {
        vrow copy ALIGN64;
        memcpy(copy, addr, sizeof copy);
        read_transposed(w, i, copy, mask);
        return;
    }
    case DS_BPERMUTE: { // pull: lane l gets the data of lane (addr + offset) / 4; inactive sources give 0
        vrow t ALIGN64;
        for (int l = 0; l < LANES; l++) {
            const uint32_t from = (addr[l] + (uint32_t)i->imm) / 4 & 63;
            t[l] = mask >> from & 1 ? d0[0][from] : 0;
        }
        for (int l = 0; l < LANES; l++) d[0][l] = mask >> l & 1 ? t[l] : d[0][l];
        return;
    }
    case DS_PERMUTE: { // push: later lanes win
        vrow t ALIGN64;
        memset(t, 0, sizeof t);
        for (uint64_t m = mask; m; m &= m - 1) {
            const int l = __builtin_ctzll(m);
            t[(addr[l] + (uint32_t)i->imm) / 4 & 63] = d0[0][l];
        }
        for (int l = 0; l < LANES; l++) d[0][l] = mask >> l & 1 ? t[l] : d[0][l];
        return;
    }
    case DS_SWIZZLE: {
        vrow t ALIGN64;
        for (uint32_t l = 0; l < LANES; l++) {
            const uint32_t from = swizzle_source((uint32_t)i->imm & 0xffff, l);
            t[l] = mask >> from & 1 ? addr[from] : 0;
        }
        for (int l = 0; l < LANES; l++) d[0][l] = mask >> l & 1 ? t[l] : d[0][l];
        return;
    }
    default: return;
    }
}
// Rows that the operation writes.
uint32_t lds_result_rows(const Ins *i) {
    switch (kind_of(i)) {
    case DS_READ: case DS_READ_TR: return (i->mem_bytes + 3u) / 4;
    case DS_READ2: return 2u * i->mem_bytes / 4;
    case DS_ATOMIC: return i->flags & F_SC0 ? i->mem_bytes / 4u : 0;
    case DS_BPERMUTE: case DS_PERMUTE: case DS_SWIZZLE: return 1;
    default: return 0;
    }
}

static const Ins *op_ds(Wave *w, const Ins *i) {
    const uint64_t mask = get_exec(w);
    const uint32_t *addr = w->v[i->src[0]];
    if (!lds_check(w, i, addr, mask)) return NULL;
    if (unlikely(w->adv != NULL)) return adv_lds(w, i);
    lds_execute(w, i, addr, &w->v[i->src[1]], i->kind[2] == SRC_NONE ? NULL : &w->v[i->src[2]], mask);
    return i + 1;
}
const OpEntry lds_ops[] = {{"ds", op_ds, "ds", CLS_LDS}};
const int lds_count = 1;
