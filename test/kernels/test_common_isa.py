# SPDX-License-Identifier: Apache-2.0
"""The emitted gfx950 instructions of the hand-offs, and the proof that each check sees a mutilated kernel."""

from __future__ import annotations

import re

import pytest
from helpers import isa_text
from helpers.common_kernels import AccessKey, BulkKey, GemvKey, RingKey

from sgl_amd_mono.common.build import build
from sgl_amd_mono.common.sync import MAX_BATCH, SPINS_PER_CHECK, Region, Sync


@pytest.fixture(scope="module")
def ring() -> str:
    return build(RingKey(ranks=2)).isa


@pytest.fixture(scope="module")
def bulk() -> str:
    return build(BulkKey()).isa


def test_pairs_are_single_accesses_at_their_scope(ring: str) -> None:
    stores = [line.policy for line in isa_text.accesses(ring, "global_store_dwordx2")]
    loads = [line.policy for line in isa_text.accesses(ring, "global_load_dwordx2")]
    # Every 8-byte access of this kernel is a pair or a record: none without a scope, and those of peers are system.
    assert set(stores) == set(loads) == {"sc1", "sc0 sc1"}
    polls = isa_text.poll_loops(ring)
    scopes = {line.policy for body in polls for line in body if line.mnemonic == "global_load_dwordx2"}
    assert scopes == {"sc1", "sc0 sc1"}


def test_everything_that_crosses_gpus_is_system_scope(ring: str) -> None:
    # The only cross-GPU words of this kernel: token and exchange pairs, records, error word and claim.
    for pattern in ("global_load_dword v", "global_atomic_cmpswap"):
        found = isa_text.accesses(ring, pattern)
        scoped = [line for line in found if line.policy]
        assert scoped and all(line.policy == "sc0 sc1" for line in scoped), found
    errors = [line for line in isa_text.accesses(ring, "global_store_dword v") if line.policy]
    assert errors and all(line.policy == "sc0 sc1" for line in errors)
    broken = ring.replace(" sc0 sc1", " sc1", 1)
    assert any(
        line.policy == "sc1"
        for pattern in ("global_load_dword v", "global_atomic_cmpswap")
        for line in isa_text.accesses(broken, pattern)
    )


def test_polls_stay_in_their_loops_and_are_bounded(ring: str, bulk: str) -> None:
    for isa in (ring, bulk):
        assert isa_text.poll_loops(isa)
        assert isa_text.unbounded_polls(isa) == []
        # One look at the clock a loop: the compiler has not unrolled the tries up to the next look.
        for body in isa_text.poll_loops(isa):
            pairs = [line for line in body if line.mnemonic == "global_load_dwordx2"]
            assert len(pairs) <= MAX_BATCH < SPINS_PER_CHECK
    assert isa_text.unbounded_polls(re.sub(r"s_memrealtime.*", "s_nop 0", ring))
    assert isa_text.unbounded_polls(re.sub(r"s_sleep.*", "s_nop 0", ring))


def test_stores_are_complete_before_the_flag(bulk: str) -> None:
    assert isa_text.accesses(bulk, r"buffer_store_dwordx4 .*sc1")
    assert isa_text.flags_without_drain(bulk) == []
    assert isa_text.flags_without_drain(bulk.replace("s_waitcnt vmcnt(0)", "s_nop 0"))
    assert isa_text.flags_without_drain(bulk.replace("s_barrier", "s_nop 0"))


def test_records_are_complete_before_the_error_words(ring: str) -> None:
    lines = isa_text.lines_of(ring)
    claims = [line.number for line in lines if line.mnemonic == "global_atomic_cmpswap"]
    assert claims
    for claim in claims:
        tail = lines[claim : claim + 40]
        wait = next(i for i, line in enumerate(tail) if i and "vmcnt(0)" in line.text and "dwordx2" in tail[i - 1].text)
        error = next(i for i, line in enumerate(tail) if re.match(r"global_store_dword v.*sc0 sc1", line.text))
        assert wait < error


def test_stop_builds_fault_before_they_leave() -> None:
    stop = build(RingKey(ranks=2, stop=True)).isa
    assert isa_text.tails_of_leaving(stop)
    assert isa_text.leaves_without_fault(stop) == []
    assert isa_text.leaves_without_fault(build(RingKey(ranks=2)).isa)  # the check tells them apart
    assert isa_text.leaves_without_fault(re.sub(r"v_mov_b64_e32 (v\[\d+:\d+\]), 0\n", r"v_mov_b64_e32 \1, 1\n", stop))


def test_every_policy_of_every_width() -> None:
    isa = build(AccessKey()).isa
    policies = {"PLAIN": "", "NT": "nt", "AGENT": "sc1", "SYSTEM": "sc0 sc1"}
    width = {1: "(u|s)?byte", 2: "(u|s)?short", 4: "dword", 8: "dwordx2", 16: "dwordx4"}
    for path, size, policy in AccessKey.forms():
        if path == "lds":
            assert isa_text.accesses(isa, f"ds_write_b{8 * size}")
            continue
        for way in ("load", "store"):
            found = isa_text.accesses(isa, f"{path}_{way}_{width[size]}(_d16)?(_hi)? ")
            assert policies[policy] in {line.policy for line in found}, (path, size, policy, way)


def test_weights_stream_past_the_caches_with_shared_bases() -> None:
    isa = build(GemvKey(k=8192)).isa
    weights = isa_text.accesses(isa, "buffer_load_dwordx4 .* nt")
    assert len(weights) == 32 + 8  # bf16 and MXFP4 tiles of a wave
    descriptors = {re.search(r"s\[\d+:\d+\]", line.text).group() for line in weights}
    assert len(descriptors) <= 2  # one a matrix: what differs sits in offsets
    assert len(isa_text.accesses(isa, "v_mfma_f32_16x16x32_bf16")) == 32
    scaled = isa_text.accesses(isa, "v_mfma_scale_f32_16x16x128_f8f6f4")
    assert len(scaled) == 8 and all("cbsz:4 blgp:4" in line.text for line in scaled)
    # No address of a weight makes the compiler loop over lanes.
    assert not isa_text.loops(isa)


def test_a_kernel_must_look_at_the_error_word_first() -> None:
    sync = object.__new__(Sync)
    sync._d, sync._entered = None, False
    with pytest.raises(RuntimeError, match=r"Sync\.poll before Sync\.leave_if_failed"):
        sync.poll([(Region(0, None), 0)])
    with pytest.raises(RuntimeError, match=r"Sync\.put before Sync\.leave_if_failed"):
        sync.put(Region(0, None), 0, 1)
