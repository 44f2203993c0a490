// SPDX-License-Identifier: Apache-2.0
#ifndef SIM_LDS_H
#define SIM_LDS_H

#include "sim.h"

enum { DS_READ, DS_READ2, DS_WRITE, DS_WRITE2, DS_ATOMIC, DS_READ_TR, DS_BPERMUTE, DS_PERMUTE, DS_SWIZZLE, DS_NOP };

int lds_check(Wave *w, const Ins *i, const uint32_t *addr, uint64_t mask);
void lds_execute(Wave *w, const Ins *i, const uint32_t *addr, const vrow *d0, const vrow *d1, uint64_t mask);
uint32_t lds_result_rows(const Ins *i);
uint64_t atomic_result(uint32_t op, int wide, uint64_t m, uint64_t x, uint64_t y); // vmem.c

#endif
