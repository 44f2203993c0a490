/* SPDX-License-Identifier: Apache-2.0
 *
 * Matrix instructions (v_mfma_*) of gfx950 over one wave of 64 lanes.
 *
 * Registers are uint32_t[64] each (register-major); an operand is a pointer to its first register, VGPR or AGPR
 * alike. EXEC is ignored, denormals are kept, D may overlap A, B or C (results are written last), and every NaN result
 * is 0x7fc00000.
 *
 * Operand layouts (AMD CDNA3/CDNA4 ISA; dim = m for A, n for B):
 *   A, B    Lane l holds row/column l % dim of K group l / dim (of block l / dim where blocks > 1). A group's
 *           k / groups elements lie in ascending K in the lane's registers, low bits first.
 *   f8f6f4  fp8/bf8: 32 elements a lane in two runs of 16, run r at K = 16 * groups * r + 16 * group. fp6/bf6/fp4: one
 *           run of 32. The scale of row/column i and K block j (32 elements) is the selected byte of lane j * dim + i,
 *           whatever lane holds the elements.
 *   C, D    Lane l is column l % n. n == 16: register 4b + i is row 4 * (l / 16) + i of block b. n == 32: register
 *           16b + i is row 8 * (i / 4) + 4 * (l / 32) + i % 4. n == 4: register i is row i of block l / 4. f64:
 *           register pair i is row 4 * i + l / 16.
 *
 * Accumulation order (the hardware's own is not published, so this is a choice, the same on every host):
 *   f32     D = C, then for K ascending D = fma(a, b, D), one f32 rounding each.
 *   f8f6f4  For each K block of 32 ascending: s = 0, for K ascending s = fma(a, b, s) in f32 (exact for fp4 x fp4),
 *           then D = f32(D + s * 2^(scale_a + scale_b - 254)), summed in f64. Unscaled forms use 127 for both scales.
 *   i32     wraps. f64: K ascending, fma.
 * A host without a fused multiply-add rounds f32 x f32 products first (products of the other formats are exact).
 * A scale byte 0xff makes the block's sum NaN; 0 is 2^-127.
 */
#ifndef SIM_MFMA_H
#define SIM_MFMA_H

#include <stdint.h>

typedef uint32_t sim_lanes[64];

/* fp8..fp4 keep the numbers that cbsz and blgp use in f8f6f4. */
enum sim_mfma_format {
    SIM_FMT_FP8 = 0, SIM_FMT_BF8 = 1, SIM_FMT_FP6 = 2, SIM_FMT_BF6 = 3, SIM_FMT_FP4 = 4,
    SIM_FMT_BF16 = 5, SIM_FMT_F16 = 6, SIM_FMT_F32 = 7, SIM_FMT_I8 = 8, SIM_FMT_F64 = 9
};

enum sim_mfma_acc { SIM_ACC_F32 = 0, SIM_ACC_I32 = 1, SIM_ACC_F64 = 2 };

struct sim_mfma;
typedef void (*sim_mfma_fn)(const struct sim_mfma *op, sim_lanes *d, const sim_lanes *a, const sim_lanes *b,
                            const sim_lanes *c, const uint32_t *scale_a, const uint32_t *scale_b);

/* sim/mfma_table.py packs the same fields. */
struct sim_mfma {
    sim_mfma_fn fn;       /* set by sim_mfma_select */
    uint32_t c_const;     /* C where c == NULL: the bits of the inline constant (f64: of the high word) */
    uint8_t m, n, k, blocks;
    uint8_t fmt_a, fmt_b; /* enum sim_mfma_format */
    uint8_t acc;          /* enum sim_mfma_acc */
    uint8_t cbsz, abid, blgp;
    uint8_t f8f6f4;       /* 1: the 128-wide family */
    uint8_t scaled;       /* 1: reads scale_a and scale_b */
    uint8_t byte_a, byte_b;
};

/* Chooses the function for op's shape and formats. Returns 0, or -1 where no such instruction exists. */
int sim_mfma_select(struct sim_mfma *op);

/* sizeof(struct sim_mfma), so that Python can check its packing. */
int sim_mfma_size(void);

/* Runs op once over plain register blocks (tests). */
int sim_mfma_run(struct sim_mfma *op, sim_lanes *d, const sim_lanes *a, const sim_lanes *b, const sim_lanes *c,
                 const uint32_t *scale_a, const uint32_t *scale_b);

#endif
