// SPDX-License-Identifier: Apache-2.0
// Shared declarations of the gfx950 functional simulator: instruction records, waves, workgroups, machine.
#ifndef SIM_H
#define SIM_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define LANES 64
#define ALIGN64 __attribute__((aligned(64)))
#define NOINLINE __attribute__((noinline))
#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)

typedef uint32_t vrow[LANES]; // one VGPR: 64 lanes

// A register that was never written reads as this: a NaN as f32, bf16 and f16, and an address that is never mapped.
#define POISON 0xFFA5FFA5u

typedef struct Ins Ins;
typedef struct Wave Wave;
typedef struct Group Group;
typedef struct Launch Launch;
typedef struct Machine Machine;
typedef const Ins *(*op_fn)(Wave *w, const Ins *i);

// Where a source operand comes from. SRC_VGPR is 0: the fast path is one compare.
enum { SRC_VGPR = 0, SRC_SGPR = 1, SRC_CONST = 2, SRC_NONE = 3, SRC_WRAPPED = 4 };

// Ins.flags
enum {
    F_DPP = 1u << 0,
    F_SDWA = 1u << 1,
    F_POST = 1u << 2,     // clamp, omod or a 16-bit half destination
    F_EXEC_WRITE = 1u << 3, // a scalar destination that overlaps EXEC
    F_DST_HI = 1u << 4,   // 16-bit result goes to the high half
    F_KEEP_HI = 1u << 5,  // 16-bit result keeps the other half of the destination
    F_SEXT0 = 1u << 6,
    F_SEXT1 = 1u << 7,
    F_SC0 = 1u << 8,
    F_SC1 = 1u << 9,
    F_NT = 1u << 10,
    F_LDS = 1u << 11,
    F_OFFEN = 1u << 12,
    F_IDXEN = 1u << 13,
    F_SADDR = 1u << 14,
    F_VADDR = 1u << 15,
    F_WATCH = 1u << 16,   // a fault-injection point
    F_DPP_BOUND = 1u << 17,
    F_MULTI_DST = 1u << 18,
    F_INDEXED = 1u << 19, // may run under s_set_gpr_idx
    F_SKIPPABLE = 1u << 20, // a vector instruction of a program that has s_setvskip
};

// One decoded instruction, 64 bytes, written by decode.py (numpy dtype of the same layout) and completed by program.c.
struct Ins {
    op_fn fn;
    uint16_t op;
    uint8_t nsrc;
    uint8_t cls;
    uint32_t flags;
    uint16_t dst;   // VGPR row or scalar index
    uint16_t sdst;  // second destination: carry or lane mask (scalar index)
    uint16_t src[4]; // VGPR row, scalar index or constant index
    uint8_t kind[4];
    uint8_t neg, abs, omod, clamp;
    uint8_t op_sel, op_sel_hi, neg_lo, neg_hi;
    uint16_t dpp_ctrl;
    uint8_t dpp_masks; // row_mask | bank_mask << 4
    uint8_t mem_bytes; // access size of one lane
    uint8_t sdwa_dst, sdwa_unused, sdwa_sel[2];
    int32_t imm;    // offset, immediate, branch target (instruction index)
    uint32_t aux;
    const void *ext; // MFMA or conversion descriptor
};

// Instruction classes of the counters.
enum {
    CLS_VALU,
    CLS_SALU,
    CLS_VMEM,
    CLS_LDS,
    CLS_SMEM,
    CLS_MFMA,
    CLS_CONVERT,
    CLS_BRANCH,
    CLS_WAIT,
    CLS_BARRIER,
    CLS_OTHER,
    CLS_COUNT
};

// Scalar register file indices (hardware encoding); program constants follow at S_CONST.
enum { S_FLAT_LO = 102, S_XNACK_LO = 104, S_VCC = 106, S_M0 = 124, S_EXEC = 126, S_CONST = 128 };

typedef struct { // 8-byte stamp of a mailbox word
    uint32_t serial; // launch group that wrote it
    uint32_t node;   // index into Machine.nodes: chain of hand-offs behind the writer
    uint32_t group;  // global workgroup number of the writer
    uint16_t rank;
    uint16_t device, cross, total; // hand-offs behind the writer
} Stamp;

typedef struct { // one hand-off in a chain
    int32_t parent;
    uint16_t alloc, region; // allocation id and region number
    uint8_t cross;
} Node;

typedef struct { uint64_t offset, size; } Region;

enum { KIND_PLAIN = 0, KIND_READONLY = 1, KIND_MAILBOX = 2, KIND_PEER = 3 };
#define POLICIES 8 // sc0 | sc1 << 1 | nt << 2

typedef struct Alloc {
    uint64_t dev, size;
    uint8_t *host;
    uint32_t id;
    uint8_t kind;
    uint8_t shared; // the same host bytes are mapped on another rank too
    int32_t rank;
    uint32_t nregions;
    Region *regions;
    uint64_t *polls; // a region each, the last entry for the rest
    uint64_t bytes_read[POLICIES], bytes_written[POLICIES];
    Stamp *stamps;   // host-keyed, shared by every mapping of the block
    uint64_t *touched; // optional bitmap, one bit a byte
} Alloc;

typedef struct { // address space of one rank
    Alloc **allocs; // sorted by dev
    uint32_t count, room;
} Space;

typedef struct Program {
    Ins *ins;
    uint32_t count;
    uint32_t nconst;
    uint32_t *consts;
    vrow *crows; // constants splatted over the lanes
    uint32_t vgprs, sgprs;
    uint32_t lds_bytes, scratch_bytes;
    uint8_t flush32, flush64, ieee, dx10_clamp, round32, round64;
    struct HazardRegs *hazards;
} Program;

enum { WAVE_READY, WAVE_BARRIER, WAVE_ENDED, WAVE_STALLED };

// Hand-offs behind a wave.
typedef struct { uint16_t device, cross, total; int32_t node; } Depth;

// A load that was seen since the wave's last effect: the same load of the same addresses again is a failed poll pass.
#define POLL_SLOTS 8
#define POLL_RUNS 48
typedef struct { const Ins *pc; uint64_t hash; uint32_t run; } PollSlot;

struct Wave {
    vrow *v;
    uint32_t *s;
    const vrow *crows;
    uint32_t scc;
    uint32_t full;         // EXEC is all ones
    const uint32_t *dpp_row; // permuted source of a DPP instruction
    uint32_t em[LANES] ALIGN64; // EXEC expanded: 0 or ~0 a lane
    const Ins *pc;
    const Ins *seg;        // first instruction of the current straight run
    Group *g;
    Launch *L;
    Machine *m;
    uint8_t *lds;
    uint32_t lds_size;
    int32_t budget;        // backward branches left in this slice
    uint8_t state;
    uint8_t slept, read_clock;
    uint8_t yield;         // ends the slice behind this instruction (adversarial mode)
    uint8_t uses_clock;    // it has read the clock at some time
    uint64_t clock_seen;   // Machine.clock_serial when it read the clock last
    uint8_t poll_age;      // slices since the wave last slept or read the clock
    uint8_t gpr_idx;       // s_set_gpr_idx_on: bits src0, src1, src2, dst
    uint32_t gpr_idx_value;
    uint8_t vskip;         // s_setvskip: vector instructions are not issued
    uint32_t id;           // wave in workgroup
    uint32_t mode;
    Alloc *last;
    uint8_t *scratch;
    uint64_t icount;
    uint64_t stuck_hash, stuck_version; // digest of the wave's state, and Machine.version when it was taken
    uint8_t stuck;
    Depth depth;
    PollSlot polls[POLL_SLOTS]; // recent synchronising loads, and the straight runs since
    uint32_t npolls, poll_runs;
    uint32_t poll_log[POLL_RUNS][2];
    uint64_t stall_pass;
    uint64_t stall_until;
    struct AdvWave *adv;
    uint32_t starve;
};

struct Group {
    Launch *L;
    uint32_t id;      // linear workgroup id in its launch
    uint32_t serial;  // workgroup number over all launches of the group
    uint32_t gid[3];
    uint32_t nwaves, live, at_barrier;
    Wave *waves;
    uint8_t *lds;
    void *block;      // registers of all waves
    size_t block_bytes;
    uint64_t streamed;
    struct AdvGroup *adv;
    uint8_t done;
};

struct Launch {
    Machine *m;
    Program *p;
    uint32_t rank, index;
    uint32_t grid[3], dim[3];
    uint32_t ngroups, nwaves;
    uint32_t lds_bytes;
    uint8_t *kernargs;
    uint32_t kernarg_bytes;
    uint32_t user_sgprs;
    int32_t sgpr_kernarg, sgpr_dispatch, sgpr_queue, sgpr_dispatch_id, sgpr_flat, sgpr_private_size, sgpr_private_seg;
    int32_t sgpr_preload, preload_length, preload_offset;
    uint32_t wg_id_enable, workitem_id_mode;
    uint32_t persistent, slots;
    uint32_t next_group;
    Alloc *kernarg_alloc;
    int64_t *prof;      // difference array of execution counts, count + 1 entries
    int64_t *poll_prof; // the same for failed poll passes
    uint64_t *streamed;   // a workgroup each
    uint64_t *executed;   // wave-instructions a workgroup
    uint64_t barriers;
    Depth deepest_device, deepest_cross, deepest_total;
    uint8_t *dispatch_packet;
};

enum {
    FAULT_NONE,
    FAULT_OOB,
    FAULT_READONLY,
    FAULT_GPU,
    FAULT_DEADLOCK,
    FAULT_LIMIT,
    FAULT_MISALIGNED,
    FAULT_TRAP,
    FAULT_HAZARD,
    FAULT_LDS,
    FAULT_INTERNAL,
    FAULT_MEMORY
};

typedef struct {
    uint32_t kind;
    int32_t rank, launch, group, wave, lane;
    int32_t pc;
    uint32_t bytes;
    uint64_t address;
    uint32_t write;
    uint32_t extra;
} Fault;

enum { STALL_START = 0, STALL_STORE = 1, STALL_LINE = 2, STALL_LOAD = 3 };
typedef struct {
    uint32_t active;
    int32_t rank, launch, group, wave; // -1: any
    uint32_t at;
    uint32_t alloc, region; // store or load
    uint32_t pc;            // line
    uint32_t pass;
    uint64_t hits;
} Stall;

typedef struct {
    uint32_t active;
    int32_t rank, to_rank, alloc, region; // -1: any
    uint64_t ticks; // 0: dropped
    uint64_t hits;
} StoreFault;

typedef struct { // a delayed store
    uint64_t due;
    uint8_t *host;
    uint32_t bytes;
    uint8_t data[16];
} LateStore;

struct Machine {
    uint32_t ranks, cus, adversarial, hazards;
    uint64_t rng;
    uint64_t clock, clock_fraction;
    uint64_t version; // counts every effect that another wave could see
    uint64_t icount, icount_limit;
    double wall_limit;
    uint32_t serial; // launch group number
    Space *spaces;
    Launch **launches;
    uint32_t nlaunches;
    Group **groups; // resident
    uint32_t ngroups, groups_room;
    uint32_t next_serial;
    Fault fault;
    Stall *stalls;
    uint32_t nstalls;
    StoreFault *store_faults;
    uint32_t nstore_faults;
    int32_t starve_rank;    // whose waves begin starve_rounds late; -1: every rank's
    uint32_t starve_rounds; // 0: none
    LateStore *late;
    uint32_t nlate, late_room;
    Node *nodes;
    uint32_t nnodes, nodes_room;
    uint64_t clock_jumps;
    uint64_t clock_serial; // changes with every jump and every visible effect
    uint32_t track_unique, has_mail;
    uint64_t stalled;
    struct AdvMachine *adv;
    struct Trace *trace; // NULL: no trace
};

// ---- op table -------------------------------------------------------------------------------------------------
typedef struct {
    const char *name;
    op_fn fn;
    const char *sig; // "dst=src...": one letter an operand, see decode.py
    uint8_t cls;
} OpEntry;
extern const OpEntry salu_ops[], valu_ops[], vcmp_ops[], vhalf_ops[], vmove_ops[], vmem_ops[], lds_ops[], control_ops[],
    mfma_ops[];
extern const int salu_count, valu_count, vcmp_count, vhalf_count, vmove_count, vmem_count, lds_count, control_count,
    mfma_ops_count;
const OpEntry *op_entry(uint32_t op);

// ---- helpers shared by the handlers ---------------------------------------------------------------------------
static inline uint64_t s64(const uint32_t *s, uint32_t k) { return (uint64_t)s[k + 1] << 32 | s[k]; }
static inline void put64(uint32_t *s, uint32_t k, uint64_t x) { s[k] = (uint32_t)x; s[k + 1] = (uint32_t)(x >> 32); }
static inline uint64_t get_exec(const Wave *w) { return s64(w->s, S_EXEC); }
static inline float u2f(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
static inline uint32_t f2u(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
static inline double u2d(uint64_t u) { double f; memcpy(&f, &u, 8); return f; }
static inline uint64_t d2u(double f) { uint64_t u; memcpy(&u, &f, 8); return u; }

#if defined(__AVX512F__)
#include <immintrin.h>
static inline void expand_mask(uint64_t m, uint32_t *out) {
    const __m512i ones = _mm512_set1_epi32(-1);
    for (int k = 0; k < 4; k++)
        _mm512_store_si512(out + 16 * k, _mm512_maskz_mov_epi32((__mmask16)(m >> (16 * k)), ones));
}
static inline uint64_t pack_mask(const uint32_t *t) { // lanes with the sign bit set
    uint64_t r = 0;
    for (int k = 0; k < 4; k++) {
        __m512i x = _mm512_load_si512(t + 16 * k);
        r |= (uint64_t)_mm512_cmplt_epi32_mask(x, _mm512_setzero_si512()) << (16 * k);
    }
    return r;
}
#else
static inline void expand_mask(uint64_t m, uint32_t *out) {
    for (int h = 0; h < 2; h++) {
        const uint32_t half = (uint32_t)(m >> (32 * h));
        for (int l = 0; l < 32; l++) out[32 * h + l] = 0u - ((half >> l) & 1u);
    }
}
static inline uint64_t pack_mask(const uint32_t *t) {
    uint64_t r = 0;
    for (int l = 0; l < LANES; l++) r |= (uint64_t)(t[l] >> 31) << l;
    return r;
}
#endif

static inline void refresh_exec(Wave *w) {
    const uint64_t e = get_exec(w);
    w->full = e == ~0ull;
    expand_mask(e, w->em);
}
static inline void set_exec(Wave *w, uint64_t e) {
    put64(w->s, S_EXEC, e);
    w->full = e == ~0ull;
    expand_mask(e, w->em);
}
static inline void splat(uint32_t *t, uint32_t x) { for (int l = 0; l < LANES; l++) t[l] = x; }

// Source operand k as 64 lanes; t is a scratch row. sign: which bit neg/abs act on (31: f32 or none, 15: f16).
const uint32_t *src_other(Wave *w, const Ins *i, int k, uint32_t *t, int sign);
static inline const uint32_t *src32(Wave *w, const Ins *i, int k, uint32_t *t) {
    if (likely(i->kind[k] == SRC_VGPR)) return w->v[i->src[k]];
    return src_other(w, i, k, t, 31);
}
// Source pair (64-bit operand): low and high rows; t holds two scratch rows.
void src_pair_other(Wave *w, const Ins *i, int k, vrow *t, const uint32_t **lo, const uint32_t **hi);
static inline void src64(Wave *w, const Ins *i, int k, vrow *t, const uint32_t **lo, const uint32_t **hi) {
    if (likely(i->kind[k] == SRC_VGPR)) { *lo = w->v[i->src[k]]; *hi = w->v[i->src[k] + 1]; return; }
    src_pair_other(w, i, k, t, lo, hi);
}
const Ins *op_wrapped(Wave *w, const Ins *i);
op_fn op_handler(const Ins *i); // what runs an instruction, its flags considered

const Ins *raise_fault(
    Wave *w, const Ins *i, uint32_t kind, int lane, uint64_t address, uint32_t bytes, uint32_t write);
void end_run(Wave *w, const Ins *last); // closes the straight run [w->seg, last]
void release_barrier(Group *g);
void wave_ended(Wave *w);

// memory.c
#define SHARED_HI 0x00010000u  // high words of the LDS and private apertures of flat addresses
#define PRIVATE_HI 0x00020000u
Alloc *find_alloc(Machine *m, uint32_t rank, uint64_t address);
int watch_access(Wave *w, const Ins *i, Alloc *al, uint64_t offset, int store); // fault injection: 1 = stall here
uint32_t region_of(const Alloc *al, uint64_t offset);
void mailbox_read(Wave *w, Alloc *al, uint64_t offset, uint32_t bytes);
void mailbox_write(Wave *w, Alloc *al, uint64_t offset, uint32_t bytes);
int store_faulted(Machine *m, Wave *w, Alloc *al, uint64_t offset, uint32_t bytes, const void *data);
void drain_late_stores(Machine *m);
uint64_t next_late_store(const Machine *m);
uint64_t next_random(Machine *m);

// trace.c
enum { TRACK_UNIQUE = 1, TRACK_TRACE = 2 }; // flags of sim_run
enum { TRACE_READ = 0, TRACE_WRITE = 1, TRACE_USE = 2 };
void trace_start(Machine *m);
void trace_free(Machine *m);
void trace_access(Wave *w, const Ins *i, const Alloc *al, uint64_t offset, uint64_t bytes, int write);
void trace_mfma(Wave *w, const Ins *i);

// adversarial.c
const Ins *adv_load(Wave *w, const Ins *i, const uint64_t *addr, uint64_t mask, uint32_t lds_base);
const Ins *adv_store(Wave *w, const Ins *i, const uint64_t *addr, uint64_t mask, uint32_t data_row);
void adv_before_atomic(Wave *w, const Ins *i, const uint64_t *addr, uint64_t mask, uint32_t bytes, int system);
void adv_hold_rows(Wave *w, uint32_t row, uint32_t nrows, uint64_t mask);
const Ins *adv_smem(Wave *w, const Ins *i, uint64_t addr, uint32_t ndwords);
const Ins *adv_lds(Wave *w, const Ins *i);
void adv_wait(Wave *w, int vmcnt, int lgkmcnt);
void adv_inv(Wave *w, const Ins *i);
void adv_wbl2(Wave *w, const Ins *i);
void adv_wave_init(Wave *w);
void adv_wave_end(Wave *w);
void adv_group_free(Group *g);
void adv_slice(Wave *w);
int adv_group_quiet(Group *g);
void adv_after_barrier(Group *g);
int adv_force_drain(Machine *m);
void adv_finish(Machine *m);
void adv_start(Machine *m);
void adv_free(Machine *m);
void adv_count_vm(Wave *w);
void adv_count_lgkm(Wave *w);
void adv_hold_scalars(Wave *w, uint32_t dst, uint32_t n);

#endif
