// SPDX-License-Identifier: Apache-2.0
#include "sim.h"
const Ins *adv_load(Wave *w, const Ins *i, const uint64_t *addr, uint64_t mask, uint32_t lds_base) { (void)w;(void)addr;(void)mask;(void)lds_base; return i+1; }
const Ins *adv_store(Wave *w, const Ins *i, const uint64_t *addr, uint64_t mask, uint32_t data_row) { (void)w;(void)addr;(void)mask;(void)data_row; return i+1; }
void adv_before_atomic(Wave *w, const Ins *i, const uint64_t *addr, uint64_t mask, uint32_t bytes, int system) {(void)w;(void)i;(void)addr;(void)mask;(void)bytes;(void)system;}
void adv_hold_rows(Wave *w, uint32_t row, uint32_t nrows, uint64_t mask) {(void)w;(void)row;(void)nrows;(void)mask;}
const Ins *adv_smem(Wave *w, const Ins *i, uint64_t addr, uint32_t n) {(void)w;(void)addr;(void)n; return i+1;}
const Ins *adv_lds(Wave *w, const Ins *i) {(void)w; return i+1;}
void adv_wait(Wave *w, int a, int b) {(void)w;(void)a;(void)b;}
void adv_inv(Wave *w, const Ins *i) {(void)w;(void)i;}
void adv_wbl2(Wave *w, const Ins *i) {(void)w;(void)i;}
void adv_wave_init(Wave *w) {(void)w;}
void adv_wave_end(Wave *w) {(void)w;}
void adv_group_free(Group *g) {(void)g;}
void adv_slice(Wave *w) {(void)w;}
int adv_force_drain(Machine *m) {(void)m; return 0;}
void adv_finish(Machine *m) {(void)m;}
void adv_start(Machine *m) {(void)m;}
