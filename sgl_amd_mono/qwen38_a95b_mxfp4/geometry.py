# SPDX-License-Identifier: Apache-2.0
"""Sizes of Qwen3.8-2.4T-A95B per tensor-parallel rank, and what the two launches derive from them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sgl_amd_mono.common.geometry import BaseGeometry, divide, require

MFMA_ROWS = 16  # weight rows of one MFMA tile (16x16x32 bf16)
MFMA_K = 32  # columns of one bf16 MFMA step
MX_BLOCK = 32  # columns that share one e8m0 scale
MAX_ROWS = 8  # most rows of a decode step that the launches serve
NORM_COLUMNS = 128  # columns of one partial of a norm's sum of squares
Z_SUM_COLUMNS = 8  # columns of one sum of squares that a layer tail leaves to the next layer's norm
GDN_UNIT_ROWS = 8  # value (V) rows of the state that one wave updates


@dataclass(frozen=True)
class Geometry(BaseGeometry):
    """One rank's sizes. Counts named `*_total` are the model's, all others are per rank.

    Use `Geometry.a95b(tp=8)` (the true model) or `Geometry.small(tp)` (the same structure for fast tests).
    A size that does not divide raises `GeometryError` with the sum in its message.
    """

    name: str = "qwen38-a95b"
    tp: int = 8
    blocks: int = 256  # workgroups of a launch = compute units used
    threads: int = 512
    hidden: int = 8192
    layers: int = 92
    attention_interval: int = 4  # every 4th layer is full attention, the others GDN
    vocab: int = 248320
    eps: float = 1e-6
    # gated delta net
    key_heads_total: int = 16
    value_heads_total: int = 128
    head_dim: int = 128  # of keys and of values
    conv_width: int = 4
    # full attention
    q_heads_total: int = 64
    kv_heads_total: int = 2
    attn_head_dim: int = 256
    # experts
    experts: int = 512
    top_k: int = 10
    moe_intermediate_total: int = 2048
    shared_intermediate_total: int = 2048

    @classmethod
    def a95b(cls, tp: int = 8) -> Geometry:
        """The true model; `tp` 8 is the one that is served."""
        return cls(tp=tp)

    @classmethod
    def small(cls, tp: int = 1) -> Geometry:
        """The same structure at sizes that simulate in a fraction of a second; `tp` 1 or 2."""
        return cls(
            name="small",
            tp=tp,
            blocks=32,
            hidden=1024,
            layers=4,
            vocab=512,
            key_heads_total=2,
            value_heads_total=16,
            q_heads_total=8,
            kv_heads_total=2,
            experts=32,
            top_k=4,
            moe_intermediate_total=512,
            shared_intermediate_total=512,
        )

    def with_(self, **changes: object) -> Geometry:
        """The same geometry with some sizes changed (tests)."""
        return replace(self, **changes)

    def check(self) -> None:
        """Raise GeometryError where a size does not fit the launches."""
        waves = self.waves
        require(self.threads == 512, f"threads = {self.threads}, the kernels need 512 (8 waves of 64)")
        require(self.head_dim == 128, f"head_dim = {self.head_dim}, the GDN stage is written for 128")
        require(self.conv_width == 4, f"conv_width = {self.conv_width}, the conv update is written for 4 taps")
        divide("hidden / (8 waves x 128 columns of a norm partial)", self.hidden, waves * NORM_COLUMNS)
        partials = self.norm_partials
        require(partials <= 64, f"hidden / 128 = {partials} norm partials, one wave sums at most 64")
        sums, lanes = self.z_sums, 64
        require(
            sums & (sums - 1) == 0 and sums >= lanes, f"hidden / 8 = {sums} sums of z^2, a wave adds 2^n >= {lanes}"
        )
        divide("key heads / tp", self.key_heads_total, self.tp)
        divide("value heads / tp", self.value_heads_total, self.tp)
        divide("value heads / key heads", self.value_heads_total, self.key_heads_total)
        divide("in_proj_qkvz rows / 16", self.qkvz_rows, MFMA_ROWS)
        divide("in_proj_ba rows / 16", self.ba_rows, MFMA_ROWS)
        divide("query heads / tp", self.q_heads_total, self.tp)
        require(
            self.q_heads * self.attn_head_dim == self.core_width,
            f"attention core {self.q_heads} x {self.attn_head_dim} != GDN core {self.core_width}: "
            "out_proj and o_proj must have one width",
        )
        divide("experts / tp", self.experts, self.tp)
        divide("moe_intermediate / tp / 32", self.moe_intermediate_total, self.tp * MX_BLOCK)
        divide("shared_intermediate / tp / 16", self.shared_intermediate_total, self.tp * MFMA_ROWS)
        require(1 <= self.top_k <= self.experts, f"top_k = {self.top_k} of {self.experts} experts")
        left = self.leftover_groups
        if left:
            divide("workgroups / left-over in_proj groups", self.blocks, left)
            divide("32-column steps of a wave / slices of a left-over group", self.wave_steps, self.leftover_slices)
            require(
                self.leftover_slices in (1, 2, 4, 8),
                f"{self.blocks} workgroups / {left} left-over groups = {self.leftover_slices} slices, need 1, 2, 4, 8",
            )
            first = self.whole_tasks * self.blocks * MFMA_ROWS
            require(
                first >= self.z_offset,
                f"left-over rows start at {first}, before z at {self.z_offset}: only z rows may be left over",
            )
        require(
            self.ba_groups * self.ba_slices <= self.blocks,
            f"{self.ba_groups} ba groups x {self.ba_slices} slices > {self.blocks} workgroups",
        )
        require(
            self.ba_slices in (2, 4, 8, 16),
            f"hidden / 8 waves / 32 = {self.wave_steps} steps give {self.ba_slices} ba slices, need 2, 4, 8 or 16",
        )
        divide("32-column steps of a wave / slices of a ba group", self.wave_steps, self.ba_slices)
        readers = self.heads_per_key * self.units_per_head
        require(readers in (16, 32, 64, 128, 256), f"{readers} units read one conv window, need a power of two")
        divide("waves of the grid / GDN units of a row", self.blocks * waves, self.gdn_units)

    # ---- shape of a launch
    @property
    def waves(self) -> int:
        """Waves of a workgroup."""
        return self.threads // 64

    @property
    def norm_partials(self) -> int:
        """Partial sums (of 128 columns) of a norm."""
        return self.hidden // NORM_COLUMNS

    @property
    def z_sums(self) -> int:
        """Sums of squares a row that a layer tail leaves to the next layer's norm."""
        return self.hidden // Z_SUM_COLUMNS

    # ---- layers
    def is_attention(self, layer: int) -> bool:
        """True where `layer` is a full-attention layer, False for GDN."""
        return layer % self.attention_interval == self.attention_interval - 1

    # ---- gated delta net, per rank
    @property
    def key_heads(self) -> int:
        return self.key_heads_total // self.tp

    @property
    def value_heads(self) -> int:
        return self.value_heads_total // self.tp

    @property
    def heads_per_key(self) -> int:
        """Value heads that share one key head."""
        return self.value_heads_total // self.key_heads_total

    @property
    def key_width(self) -> int:
        return self.key_heads * self.head_dim

    @property
    def value_width(self) -> int:
        return self.value_heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """q, k and v channels."""
        return 2 * self.key_width + self.value_width

    @property
    def qkvz_rows(self) -> int:
        """Rows of in_proj_qkvz: q, k, v, z."""
        return self.conv_channels + self.value_width

    @property
    def k_offset(self) -> int:
        return self.key_width

    @property
    def v_offset(self) -> int:
        return 2 * self.key_width

    @property
    def z_offset(self) -> int:
        return self.conv_channels

    @property
    def ba_rows(self) -> int:
        """Rows of in_proj_ba: b of each value head, then a."""
        return 2 * self.value_heads

    @property
    def core_width(self) -> int:
        """Columns of the gated core, the input of out_proj and o_proj."""
        return self.value_width

    # ---- in_proj tasks of K1
    @property
    def qkvz_groups(self) -> int:
        """16-row groups of in_proj_qkvz."""
        return self.qkvz_rows // MFMA_ROWS

    @property
    def whole_tasks(self) -> int:
        """Whole 16-row groups that every workgroup computes."""
        return self.qkvz_groups // self.blocks

    @property
    def leftover_groups(self) -> int:
        """Groups past the whole tasks; each is cut in K slices over several workgroups."""
        return self.qkvz_groups % self.blocks

    @property
    def leftover_slices(self) -> int:
        """K slices of one left-over group (0: none is left over)."""
        return self.blocks // self.leftover_groups if self.leftover_groups else 0

    @property
    def wave_columns(self) -> int:
        """Columns of hidden that one wave of a workgroup owns."""
        return self.hidden // self.waves

    @property
    def wave_steps(self) -> int:
        """32-column MFMA steps of one wave over its columns."""
        return self.wave_columns // MFMA_K

    @property
    def ba_groups(self) -> int:
        return self.ba_rows // MFMA_ROWS

    @property
    def ba_slices(self) -> int:
        """K slices of one ba group, at most 16 (the consumer sums them in 16 lanes)."""
        return min(16, self.wave_steps)

    @property
    def gdn_units(self) -> int:
        """(value head, 8 state rows) units of one row of the step; a wave computes one."""
        return self.value_width // GDN_UNIT_ROWS

    @property
    def units_per_head(self) -> int:
        return self.head_dim // GDN_UNIT_ROWS

    # ---- attention, per rank
    @property
    def q_heads(self) -> int:
        return self.q_heads_total // self.tp

    @property
    def kv_heads(self) -> int:
        """K/V heads of a rank; replicated where tp is larger."""
        return max(1, self.kv_heads_total // self.tp)

    # ---- experts, per rank
    @property
    def moe_intermediate(self) -> int:
        return self.moe_intermediate_total // self.tp

    @property
    def shared_intermediate(self) -> int:
        return self.shared_intermediate_total // self.tp

    @property
    def router_rows(self) -> int:
        """Experts whose logits this rank computes."""
        return self.experts // self.tp
