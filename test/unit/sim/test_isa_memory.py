# SPDX-License-Identifier: Apache-2.0
"""Memory instructions: LDS, global, flat, scratch, buffer and scalar accesses, their atomics, and DMA to LDS."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import pytest
from helpers.isa import ALL_LANES, LANES, PARTIAL_EXEC, Outcome, covers, registers, run
from helpers.isa_reference import BF16, F16, F32, F64, M32, M64, NAN, add, minimum_number, signed

from sgl_amd_mono.sim import Machine, SimError, SimFault

LANE = np.arange(LANES, dtype=np.uint32)
OLD = 0xC0FFEE00
SPACES = ("global", "flat", "buffer", "scratch")


def _is_on(mask: int, lane: int) -> bool:
    return bool(mask >> lane & 1)


def _bytes(size: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def with_memory(
    lines: Sequence[str], memory: np.ndarray, s: dict[int, object] | None = None, **more: object
) -> Outcome:
    """Run with an array at the address in s[40:41]; s[44:47] is a raw buffer descriptor of all its bytes."""
    address = memory.ctypes.data
    scalars = {
        40: address & M32,
        41: address >> 32,
        44: address & M32,
        45: address >> 32 & 0xFFFF,
        46: memory.nbytes,
        47: 0x27000,
        **(s or {}),
    }
    return run(lines, s=scalars, map_more=lambda machine: _map(machine, memory), **more)  # type: ignore[arg-type]


def _map(machine: Machine, memory: np.ndarray) -> None:
    machine.map_tensor(0, memory, "memory")


# ---- LDS -----------------------------------------------------------------------------------------------------------

LDS_BYTES = 4096


def _fill_lds(seed: int) -> tuple[list[str], dict[int, object], np.ndarray]:
    """Lines and registers that fill the LDS with known bytes: 16 bytes a lane, four times."""
    image = _bytes(LDS_BYTES, seed)
    words = image.view(np.uint32).reshape(4, LANES, 4)
    v: dict[int, object] = {100: 16 * LANE}
    lines = []
    for part in range(4):
        for k in range(4):
            v[110 + 4 * part + k] = words[part, :, k]
        lines.append(f"ds_write_b128 v100, {registers('v', 110 + 4 * part, 4)} offset:{1024 * part}")
    return [*lines, "s_waitcnt lgkmcnt(0)"], v, image


def _dwords(image: np.ndarray, address: int, count: int) -> list[int]:
    return (
        image[address : address + 4 * count].view(np.uint32).tolist()
        if address % 4 == 0
        else np.frombuffer(image[address : address + 4 * count].tobytes(), np.uint32).tolist()
    )


NARROW: dict[str, tuple[int, bool, str]] = {  # suffix -> bytes, signed, where it goes
    "u8": (1, False, "word"),
    "i8": (1, True, "word"),
    "u16": (2, False, "word"),
    "i16": (2, True, "word"),
    "u8_d16": (1, False, "low"),
    "u8_d16_hi": (1, False, "high"),
    "i8_d16": (1, True, "low"),
    "i8_d16_hi": (1, True, "high"),
    "u16_d16": (2, False, "low"),
    "u16_d16_hi": (2, False, "high"),
}


def _narrow(image: np.ndarray, address: int, kind: tuple[int, bool, str], old: int) -> int:
    size, is_signed, place = kind
    x = int.from_bytes(image[address : address + size].tobytes(), "little", signed=is_signed)
    if place == "word":
        return x & M32
    half = x & 0xFFFF
    return old & 0xFFFF0000 | half if place == "low" else old & 0xFFFF | half << 16


@covers(*(f"ds_read_{k}" for k in NARROW))
def test_lds_narrow_reads() -> None:
    fill, v, image = _fill_lds(1)
    for suffix, kind in NARROW.items():
        out = run(
            [*fill, f"ds_read_{suffix} v10, v20 offset:6"],
            v={**v, 10: OLD, 20: 2 * LANE + 7 * kind[0] % 2},
            out_v=[10],
            lds_bytes=LDS_BYTES,
            exec_mask=ALL_LANES,
        )
        for lane, got in enumerate(out.v["v10"].tolist()):
            assert got == _narrow(image, 2 * lane + 7 * kind[0] % 2 + 6, kind, OLD), f"ds_read_{suffix}: lane {lane}"


@covers(
    "ds_read_b32",
    "ds_read_b64",
    "ds_read_b96",
    "ds_read_b128",
    "ds_read2_b32",
    "ds_read2_b64",
    "ds_read2st64_b32",
    "ds_read2st64_b64",
    "ds_write_b128",
)
def test_lds_wide_reads() -> None:
    fill, v, image = _fill_lds(2)
    for suffix, words in (("b32", 1), ("b64", 2), ("b96", 3), ("b128", 4)):
        out = run(
            [*fill, f"s_mov_b64 exec, {PARTIAL_EXEC >> 32:#x}",
            f"ds_read_{suffix} {registers('v', 10, words)}, v20 offset:48"],
            v={**v, **{10 + k: OLD + k for k in range(4)}, 20: 16 * LANE[::-1]}, out_v=range(10, 10 + words),
            lds_bytes=LDS_BYTES,
        )  # fmt: skip
        for lane in range(LANES):
            want = (
                _dwords(image, 16 * (63 - lane) + 48, words)
                if _is_on(PARTIAL_EXEC >> 32, lane)
                else [OLD + k for k in range(words)]
            )
            assert [int(out.v[f"v{10 + k}"][lane]) for k in range(words)] == want, f"ds_read_{suffix}: lane {lane}"
    for suffix, words, stride in (
        ("read2_b32", 1, 4),
        ("read2_b64", 2, 8),
        ("read2st64_b32", 1, 256),
        ("read2st64_b64", 2, 512),
    ):
        first, second = (5, 200) if "st64" not in suffix else (1, 3)
        out = run(
            [*fill, f"ds_{suffix} {registers('v', 10, 2 * words)}, v20 offset0:{first} offset1:{second}"],
            v={**v, 20: 8 * LANE},
            out_v=range(10, 10 + 2 * words),
            lds_bytes=LDS_BYTES,
        )
        for lane in range(LANES):
            want = _dwords(image, 8 * lane + first * stride, words) + _dwords(image, 8 * lane + second * stride, words)
            assert [int(out.v[f"v{10 + k}"][lane]) for k in range(2 * words)] == want, f"ds_{suffix}: lane {lane}"


@covers(
    "ds_write_b8", "ds_write_b16", "ds_write_b8_d16_hi", "ds_write_b16_d16_hi", "ds_write_b32", "ds_write_b64",
    "ds_write_b96", "ds_write2_b32",
    "ds_write2_b64", "ds_write2st64_b32", "ds_write2st64_b64",
)  # fmt: skip
def test_lds_writes() -> None:
    fill, v, image = _fill_lds(3)
    data = {30 + k: np.random.default_rng(40 + k).integers(0, 2**32, LANES, dtype=np.uint32) for k in range(4)}
    read_back = [f"ds_read_b128 {registers('v', 60 + 4 * part, 4)}, v100 offset:{1024 * part}" for part in range(4)]

    def word_bytes(first: int, count: int, lane: int) -> bytes:
        return b"".join(int(data[first + k][lane]).to_bytes(4, "little") for k in range(count))

    forms: list[tuple[str, Callable[[int], list[tuple[int, bytes]]]]] = [
        ("ds_write_b8 v20, v30 offset:3", lambda lane: [(16 * lane + 3, word_bytes(30, 1, lane)[:1])]),
        ("ds_write_b16 v20, v30 offset:2", lambda lane: [(16 * lane + 2, word_bytes(30, 1, lane)[:2])]),
        ("ds_write_b8_d16_hi v20, v30", lambda lane: [(16 * lane, word_bytes(30, 1, lane)[2:3])]),
        ("ds_write_b16_d16_hi v20, v30 offset:6", lambda lane: [(16 * lane + 6, word_bytes(30, 1, lane)[2:])]),
        ("ds_write_b32 v20, v30 offset:1024", lambda lane: [(16 * lane + 1024, word_bytes(30, 1, lane))]),
        ("ds_write_b64 v20, v[30:31] offset:8", lambda lane: [(16 * lane + 8, word_bytes(30, 2, lane))]),
        ("ds_write_b96 v20, v[30:32]", lambda lane: [(16 * lane, word_bytes(30, 3, lane))]),
        ("ds_write_b128 v20, v[30:33] offset:2048", lambda lane: [(16 * lane + 2048, word_bytes(30, 4, lane))]),
        (
            "ds_write2_b32 v20, v30, v31 offset0:1 offset1:3",
            lambda lane: [(16 * lane + 4, word_bytes(30, 1, lane)), (16 * lane + 12, word_bytes(31, 1, lane))],
        ),
        (
            "ds_write2_b64 v20, v[30:31], v[32:33] offset1:129",
            lambda lane: [(16 * lane, word_bytes(30, 2, lane)), (16 * lane + 1032, word_bytes(32, 2, lane))],
        ),
        (
            "ds_write2st64_b32 v20, v30, v31 offset0:4 offset1:8",
            lambda lane: [(16 * lane + 1024, word_bytes(30, 1, lane)), (16 * lane + 2048, word_bytes(31, 1, lane))],
        ),
        (
            "ds_write2st64_b64 v20, v[30:31], v[32:33] offset0:2 offset1:4",
            lambda lane: [(16 * lane + 1024, word_bytes(30, 2, lane)), (16 * lane + 2048, word_bytes(32, 2, lane))],
        ),
    ]
    for line, places in forms:
        lines = [
            *fill,
            f"s_mov_b32 exec_hi, {PARTIAL_EXEC >> 32:#x}",
            line,
            "s_mov_b64 exec, -1",
            "s_waitcnt lgkmcnt(0)",
            *read_back,
        ]
        out = run(lines, v={**v, **data, 20: 16 * LANE}, out_v=range(60, 76), lds_bytes=LDS_BYTES)
        want = image.copy()
        for lane in range(LANES):
            if lane < 32 or _is_on(PARTIAL_EXEC, lane):
                for address, content in places(lane):
                    want[address : address + len(content)] = np.frombuffer(content, np.uint8)
        rows = [np.stack([out.v[f"v{60 + 4 * part + k}"] for k in range(4)], axis=1) for part in range(4)]
        got = np.concatenate([r.reshape(-1) for r in rows]).view(np.uint8)
        assert (got == want).all(), f"{line}: bytes {np.nonzero(got != want)[0][:8]}"


@covers("ds_bpermute_b32", "ds_permute_b32")
def test_lds_lane_permutes() -> None:
    value = 1000 + LANE
    target = (7 * LANE + 3) % 64
    offset = 8
    mask = PARTIAL_EXEC
    out = run(
        [f"ds_bpermute_b32 v10, v20, v21 offset:{offset}", f"ds_permute_b32 v11, v20, v21 offset:{offset}",
        "ds_permute_b32 v12, v22, v21"],
        v={10: OLD, 11: OLD, 12: OLD, 20: 4 * target + 0x100, 21: value, 22: 4 * (LANE % 3)}, out_v=[10, 11, 12],
        exec_mask=mask, lds_bytes=64,
    )  # fmt: skip
    pushed: dict[int, int] = {}
    crowded: dict[int, int] = {}
    for lane in range(LANES):
        if _is_on(mask, lane):
            pushed[(int(target[lane]) + 2) % 64] = int(value[lane])
            crowded[lane % 3] = int(value[lane])  # the highest lane wins
    for lane in range(LANES):
        source = (int(target[lane]) + 2) % 64
        on = _is_on(mask, lane)
        assert out.v["v10"][lane] == ((int(value[source]) if _is_on(mask, source) else 0) if on else OLD)
        assert out.v["v11"][lane] == (pushed.get(lane, 0) if on else OLD)
        assert out.v["v12"][lane] == (crowded.get(lane, 0) if on else OLD)


SWIZZLES: dict[str, Callable[[int], int]] = {
    "swizzle(SWAP,16)": lambda lane: lane ^ 16,
    "swizzle(SWAP,1)": lambda lane: lane ^ 1,
    "swizzle(REVERSE,8)": lambda lane: lane ^ 7,
    "swizzle(BROADCAST,4,2)": lambda lane: lane // 4 * 4 + 2,
    "swizzle(QUAD_PERM,3,1,0,2)": lambda lane: lane // 4 * 4 + (3, 1, 0, 2)[lane % 4],
    'swizzle(BITMASK_PERM,"01pip")': lambda lane: lane // 32 * 32 + (0b01000 | (lane & 5) | (~lane & 2)),
    "0x1F": lambda lane: lane,
    "0xC029": lambda lane: (
        lane // 32 * 32 + (((lane % 32) + 1) % 32 & ~9 & 31 | lane & 9)
    ),  # rotate by one lane among the bits outside the mask
}


@pytest.mark.parametrize("pattern", SWIZZLES)
@covers("ds_swizzle_b32")
def test_swizzle_patterns(pattern: str) -> None:
    for mask in (ALL_LANES, PARTIAL_EXEC):
        out = run(
            [f"ds_swizzle_b32 v10, v20 offset:{pattern}"],
            v={10: OLD, 20: 1000 + LANE},
            out_v=[10],
            exec_mask=mask,
            lds_bytes=64,
        )
        for lane in range(LANES):
            source = SWIZZLES[pattern](lane)
            want = (1000 + source if _is_on(mask, source) else 0) if _is_on(mask, lane) else OLD
            assert out.v["v10"][lane] == want, f"{pattern}: lane {lane}"


@covers("ds_read_b64_tr_b16", "ds_read_b64_tr_b8", "ds_read_b64_tr_b4", "ds_read_b96_tr_b6")
def test_lds_transposing_reads() -> None:
    """In 16 lanes the loaded bytes are a matrix with rows of 16 elements; lane c gets column c."""
    fill, v, image = _fill_lds(4)
    for name, bits, size in (
        ("ds_read_b64_tr_b16", 16, 8),
        ("ds_read_b64_tr_b8", 8, 8),
        ("ds_read_b64_tr_b4", 4, 8),
        ("ds_read_b96_tr_b6", 6, 12),
    ):
        address = 16 * ((5 * LANE) % 64)
        words = size // 4
        out = run(
            [*fill, f"{name} {registers('v', 10, words)}, v20 offset:16"],
            v={**v, 20: address},
            out_v=range(10, 10 + words),
            lds_bytes=LDS_BYTES,
        )
        for group in range(4):
            stream = b"".join(image[int(address[16 * group + lane]) + 16 :][:size].tobytes() for lane in range(16))
            number = int.from_bytes(stream, "little")
            elements = [number >> bits * n & ((1 << bits) - 1) for n in range(16 * size * 8 // bits)]
            for column in range(16):
                want = sum(x << bits * r for r, x in enumerate(elements[column::16]))
                got = sum(int(out.v[f"v{10 + k}"][16 * group + column]) << 32 * k for k in range(words))
                assert got == want, f"{name}: lane {16 * group + column}"


# ---- atomics: new value from memory, data and (cmpswap, mskor) a second datum --------------------------------------

Atomic = Callable[[int, int, int, int], int]


def _float_add(fmt, a: int, b: int) -> int:
    r = add(fmt, a, b)
    assert r != NAN
    return int(r)


def _packed_add(fmt, a: int, b: int) -> int:
    return _float_add(fmt, a & 0xFFFF, b & 0xFFFF) | _float_add(fmt, a >> 16, b >> 16) << 16


def _mask(bits: int) -> int:
    return (1 << bits) - 1


ATOMICS: dict[str, Atomic] = {  # (memory, data, second, bits)
    "swap": lambda m, x, y, n: x,
    "cmpswap": lambda m, x, y, n: x if m == y else m,
    "add": lambda m, x, y, n: (m + x) & _mask(n),
    "sub": lambda m, x, y, n: (m - x) & _mask(n),
    "smin": lambda m, x, y, n: min((m, x), key=lambda z: signed(z, n)),
    "umin": lambda m, x, y, n: min(m, x),
    "smax": lambda m, x, y, n: max((m, x), key=lambda z: signed(z, n)),
    "umax": lambda m, x, y, n: max(m, x),
    "and": lambda m, x, y, n: m & x,
    "or": lambda m, x, y, n: m | x,
    "xor": lambda m, x, y, n: m ^ x,
    "inc": lambda m, x, y, n: 0 if m >= x else m + 1,
    "dec": lambda m, x, y, n: x if m == 0 or m > x else m - 1,
}
FLOAT_ATOMICS: dict[str, tuple[int, Atomic]] = {
    "add_f32": (32, lambda m, x, y, n: _float_add(F32, m, x)),
    "pk_add_f16": (32, lambda m, x, y, n: _packed_add(F16, m, x)),
    "pk_add_bf16": (32, lambda m, x, y, n: _packed_add(BF16, m, x)),
    "add_f64": (64, lambda m, x, y, n: _float_add(F64, m, x)),
    "min_f64": (64, lambda m, x, y, n: int(minimum_number(F64, m, x))),
    "max_f64": (64, lambda m, x, y, n: int(minimum_number(F64, m, x, True))),
}
WORDS = (0, 1, 5, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x12345678)
LONGS = (0, 1, M32, 0x7FFFFFFFFFFFFFFF, 0x8000000000000000, M64, 0x123456789ABCDEF0)


def _float_values(name: str, count: int, seed: int) -> list[int]:
    rng = np.random.default_rng(seed)
    numbers = [Fraction(int(x), 8) for x in rng.integers(-200, 201, 2 * count)]
    if name in ("pk_add_f16", "pk_add_bf16"):
        fmt = F16 if name.endswith("_f16") else BF16
        return [fmt.round(a) | fmt.round(b) << 16 for a, b in zip(numbers[::2], numbers[1::2], strict=True)]
    return [(F64 if name.endswith("f64") else F32).round(x) for x in numbers[:count]]


def _operands(name: str, bits: int) -> tuple[list[int], list[int], list[int]]:
    """(memory, data, second) of 64 lanes."""
    if name in FLOAT_ATOMICS:
        return _float_values(name, LANES, 1), _float_values(name, LANES, 2), [0] * LANES
    pool = WORDS if bits == 32 else LONGS
    memory, data = [pool[lane % 7] for lane in range(LANES)], [pool[lane // 7 % 7] for lane in range(LANES)]
    return memory, data, [m if lane % 2 else m ^ 1 for lane, m in enumerate(memory)]


def _split(values: Sequence[int], first: int, words: int) -> dict[int, object]:
    return {first + k: np.array([x >> 32 * k & M32 for x in values], dtype=np.uint32) for k in range(words)}


def _memory_atomics(space: str) -> list[tuple[str, str, int, Atomic]]:
    """(mnemonic, operation, bits, definition)."""
    out = [(f"{space}_atomic_{op}", op, 32, f) for op, f in ATOMICS.items()]
    out += [(f"{space}_atomic_{op}_x2", op, 64, f) for op, f in ATOMICS.items()]
    out += [(f"{space}_atomic_{op}", op, bits, f) for op, (bits, f) in FLOAT_ATOMICS.items()]
    return out


MEMORY_ATOMICS = {row[0]: row for space in ("global", "flat", "buffer") for row in _memory_atomics(space)}


@pytest.mark.parametrize("name", MEMORY_ATOMICS)
def test_memory_atomics(name: str) -> None:
    _, operation, bits, function = MEMORY_ATOMICS[name]
    words = bits // 32
    memory, data, second = _operands(operation, bits)
    pair = operation == "cmpswap"  # source, then compare value
    v = {**_split(data, 20, words), **(_split(second, 20 + words, words) if pair else {})}
    source = registers("v", 20, words * (2 if pair else 1))
    for returns in (False, True):
        dtype = np.uint32 if bits == 32 else np.uint64
        array = np.array(memory, dtype=dtype)
        address = array.ctypes.data + np.arange(LANES, dtype=np.uint64) * np.uint64(bits // 8)
        v[30], v[31] = (address & np.uint64(M32)).astype(np.uint32), (address >> np.uint64(32)).astype(np.uint32)
        v[32] = (LANE * (bits // 8)).astype(np.uint32)
        result = registers("v", 20 if name.startswith("buffer") else 10, words)
        v[10] = v[11] = np.full(LANES, OLD, dtype=np.uint32)
        tail = " sc0" if returns else ""
        first = f"{result}, " if returns else ""
        line = {
            "global": f"{name} {first}v[30:31], {source}, off{tail}",
            "flat": f"{name} {first}v[30:31], {source}{tail}",
            "buffer": f"{name} {source}, v32, s[44:47], 0 offen{tail}",
        }[name.split("_")[0]]
        out_first = 20 if name.startswith("buffer") else 10
        out = with_memory([line], array, v=v, out_v=range(out_first, out_first + words), exec_mask=PARTIAL_EXEC)
        for lane in range(LANES):
            on = _is_on(PARTIAL_EXEC, lane)
            want = function(memory[lane], data[lane], second[lane], bits) if on else memory[lane]
            assert int(array[lane]) == want, (
                f"{line}: lane {lane}: {memory[lane]:#x}, {data[lane]:#x}: {int(array[lane]):#x}, expected {want:#x}"
            )
            if returns:
                got = sum(int(out.v[f"v{out_first + k}"][lane]) << 32 * k for k in range(words))
                untouched = data[lane] if out_first == 20 else OLD | (OLD << 32 if words == 2 else 0)
                assert got == (memory[lane] if on else untouched), f"{line}: returned value of lane {lane}"


@covers("global_atomic_add", "global_atomic_add_x2", "buffer_atomic_add")
def test_atomics_on_one_word_act_for_every_lane() -> None:
    array = np.zeros(4, dtype=np.uint32)
    lines = [
        "global_atomic_add v10, v20, v21, s[40:41] offset:4 sc0",
        "global_atomic_add_x2 v22, v[24:25], s[40:41] offset:8",
        "buffer_atomic_add v21, off, s[44:47], 0",
    ]
    out = with_memory(lines, array, v={20: 0, 21: 3, 22: 0, 24: M32, 25: 1, 10: 0}, out_v=[10])
    assert out.v["v10"].tolist() == [3 * lane for lane in range(LANES)], "lanes act in ascending order"
    assert array.tolist()[:2] == [192, 192]
    assert int(array[2:].view(np.uint64)[0]) == LANES * (M32 | 1 << 32)


LDS_ATOMICS: dict[str, tuple[int, Atomic, bool]] = {}
for _bits, _suffix in ((32, "32"), (64, "64")):
    for _name, _op in (("add_u", "add"), ("sub_u", "sub"), ("min_i", "smin"), ("max_i", "smax"), ("min_u", "umin"),
    ("max_u", "umax"),
                       ("and_b", "and"), ("or_b", "or"), ("xor_b", "xor"), ("inc_u", "inc"), ("dec_u",
                       "dec")):  # fmt: skip
        LDS_ATOMICS[f"ds_{_name}{_suffix}"] = (_bits, ATOMICS[_op], False)
    LDS_ATOMICS[f"ds_rsub_u{_suffix}"] = (_bits, lambda m, x, y, n: (x - m) & _mask(n), False)
    # ds_cmpst: the first datum is compared, the second one stored.
    LDS_ATOMICS[f"ds_cmpst_b{_suffix}"] = (_bits, lambda m, x, y, n: y if m == x else m, True)
    LDS_ATOMICS[f"ds_mskor_b{_suffix}"] = (_bits, lambda m, x, y, n: m & ~x | y, True)
LDS_FLOATS: dict[str, tuple[int, str, Atomic]] = {
    "ds_add_f32": (32, "add_f32", FLOAT_ATOMICS["add_f32"][1]),
    "ds_min_f32": (32, "add_f32", lambda m, x, y, n: int(minimum_number(F32, m, x))),
    "ds_max_f32": (32, "add_f32", lambda m, x, y, n: int(minimum_number(F32, m, x, True))),
    "ds_pk_add_f16": (32, "pk_add_f16", FLOAT_ATOMICS["pk_add_f16"][1]),
    "ds_pk_add_bf16": (32, "pk_add_bf16", FLOAT_ATOMICS["pk_add_bf16"][1]),
    "ds_add_f64": (64, "add_f64", FLOAT_ATOMICS["add_f64"][1]),
    "ds_min_f64": (64, "add_f64", FLOAT_ATOMICS["min_f64"][1]),
    "ds_max_f64": (64, "add_f64", FLOAT_ATOMICS["max_f64"][1]),
}


def _returning(name: str) -> str:
    stem, kind = name.rsplit("_", 1)
    return f"{stem}_rtn_{kind}"


ALL_LDS_ATOMICS = [*LDS_ATOMICS, *LDS_FLOATS, "ds_wrxchg_b32", "ds_wrxchg_b64"]


@pytest.mark.parametrize("name", ALL_LDS_ATOMICS)
def test_lds_atomics(name: str) -> None:
    if name in LDS_FLOATS:
        bits, kind, function = LDS_FLOATS[name]
        two = False
        memory, data, second = _operands(kind, bits)
    elif "wrxchg" in name:
        bits, function, two = int(name[-2:]), ATOMICS["swap"], False
        memory, data, second = _operands("swap", bits)
    else:
        bits, function, two = LDS_ATOMICS[name]
        memory, data, second = _operands("", bits)
        if "cmpst" in name:
            data, second = second, data
    words = bits // 32
    v = {
        **_split(data, 20, words),
        **_split(second, 24, words),
        **_split(memory, 40, words),
        30: LANE * (bits // 8),
        10: OLD,
        11: OLD,
    }
    texts = registers("v", 20, words) + (f", {registers('v', 24, words)}" if two else "")
    place = registers("v", 40, words)
    for returns in (True,) if "wrxchg" in name else (False, True):
        line = (
            f"{_returning(name)} {registers('v', 10, words)}, v30, {texts} offset:64"
            if returns
            else f"{name} v30, {texts} offset:64"
        )
        lines = [
            f"ds_write_b{bits} v30, {place} offset:64", "s_waitcnt lgkmcnt(0)",
            f"s_mov_b32 exec_lo, {PARTIAL_EXEC & M32:#x}", line, "s_waitcnt lgkmcnt(0)",
            "s_mov_b64 exec, -1", f"ds_read_b{bits} {registers('v', 12, words)}, v30 offset:64",
        ]  # fmt: skip
        out = run(lines, v=v, out_v=range(10, 12 + words), lds_bytes=64 + 8 * LANES)
        for lane in range(LANES):
            on = lane >= 32 or _is_on(PARTIAL_EXEC, lane)
            want = function(memory[lane], data[lane], second[lane], bits) if on else memory[lane]
            got = sum(int(out.v[f"v{12 + k}"][lane]) << 32 * k for k in range(words))
            assert got == want, f"{line}: lane {lane}: {memory[lane]:#x}, {data[lane]:#x}: {got:#x}, expected {want:#x}"
            old = sum(int(out.v[f"v{10 + k}"][lane]) << 32 * k for k in range(words))
            assert old == (memory[lane] if returns and on else OLD | (OLD << 32 if words == 2 else 0)), (
                f"{line}: returned value"
            )


def test_lds_access_beyond_its_end_is_a_fault() -> None:
    with pytest.raises(SimFault):
        run(["ds_read_b32 v10, v20 offset:4"], v={20: 124}, lds_bytes=128)
    run(["ds_read_b32 v10, v20 offset:4"], v={20: 120, 10: 0}, lds_bytes=128)


# ---- global, flat, scratch and buffer loads and stores -------------------------------------------------------------

LOADS: dict[str, tuple[int, bool, str]] = {
    "ubyte": (1, False, "word"),
    "sbyte": (1, True, "word"),
    "ushort": (2, False, "word"),
    "sshort": (2, True, "word"),
    "ubyte_d16": (1, False, "low"),
    "ubyte_d16_hi": (1, False, "high"),
    "sbyte_d16": (1, True, "low"),
    "sbyte_d16_hi": (1, True, "high"),
    "short_d16": (2, False, "low"),
    "short_d16_hi": (2, False, "high"),
    "dword": (4, False, "word"),
    "dwordx2": (8, False, "word"),
    "dwordx3": (12, False, "word"),
    "dwordx4": (16, False, "word"),
}
STORES: dict[str, tuple[int, int]] = {  # bytes, first byte of the register
    "byte": (1, 0),
    "byte_d16_hi": (1, 2),
    "short": (2, 0),
    "short_d16_hi": (2, 2),
    "dword": (4, 0),
    "dwordx2": (8, 0),
    "dwordx3": (12, 0),
    "dwordx4": (16, 0),
}


def _addresses(memory: np.ndarray, offsets: np.ndarray) -> dict[int, object]:
    address = memory.ctypes.data + offsets.astype(np.uint64)
    return {30: address & np.uint64(M32), 31: address >> np.uint64(32), 32: offsets.astype(np.uint32)}


def _access(space: str, operation: str, data: str, offset: int) -> list[str]:
    """The access in each addressing form of a space; v[30:31] are full addresses, v32 byte offsets from s[40:41]."""
    load = "load" in operation
    name = f"{space}_{operation}"

    def line(address: str, tail: str = "") -> str:
        first, second = (data, address) if load or space == "buffer" else (address, data)
        return f"{name} {first}, {second}{tail} offset:{offset}"

    if space == "global":
        return [line("v[30:31]", ", off"), line("v32", ", s[40:41]")]
    if space == "flat":
        return [line("v[30:31]")]
    return [line("v32", ", s[44:47], 0 offen"), line("v32", ", s[44:47], s48 offen")]


@pytest.mark.parametrize("space", ["global", "flat", "buffer"])
def test_loads_of_every_size(space: str) -> None:
    memory = _bytes(4096, 7)
    offsets = (LANE[::-1] * 37 % 1000).astype(np.uint32)
    for name, kind in LOADS.items():
        size = kind[0]
        aligned = offsets - offsets % min(size, 4)
        words = max(1, size // 4)
        for line in _access(space, f"load_{name}", registers("v", 10, words), 52):
            extra = 100 if "s48" in line else 0
            out = with_memory(
                [line],
                memory,
                v={**_addresses(memory, aligned), **{10 + k: OLD + k for k in range(4)}},
                s={48: 100},
                out_v=range(10, 10 + words),
                exec_mask=PARTIAL_EXEC,
            )
            for lane in range(LANES):
                at = int(aligned[lane]) + 52 + extra
                want = [OLD + k for k in range(words)]
                if _is_on(PARTIAL_EXEC, lane):
                    want = _dwords(memory, at, words) if size >= 4 else [_narrow(memory, at, kind, OLD)]
                assert [int(out.v[f"v{10 + k}"][lane]) for k in range(words)] == want, f"{line}: lane {lane}"


@pytest.mark.parametrize("space", ["global", "flat", "buffer"])
def test_stores_of_every_size(space: str) -> None:
    data = {20 + k: np.random.default_rng(60 + k).integers(0, 2**32, LANES, dtype=np.uint32) for k in range(4)}
    offsets = (LANE[::-1] * 16).astype(np.uint32)
    for name, (size, first) in STORES.items():
        words = max(1, size // 4)
        for line in _access(space, f"store_{name}", registers("v", 20, words), 48):
            memory = _bytes(2048, 8)
            want = memory.copy()
            for lane in range(LANES):
                if _is_on(PARTIAL_EXEC, lane):
                    content = b"".join(int(data[20 + k][lane]).to_bytes(4, "little") for k in range(words))[
                        first : first + size
                    ]
                    at = int(offsets[lane]) + 48 + (100 if "s48" in line else 0)
                    want[at : at + size] = np.frombuffer(content, np.uint8)
            with_memory([line], memory, v={**_addresses(memory, offsets), **data}, s={48: 100}, exec_mask=PARTIAL_EXEC)
            assert (memory == want).all(), line


def test_negative_and_wide_offsets() -> None:
    memory = _bytes(16384, 9)
    out = with_memory(
        ["global_load_dword v10, v20, s[42:43] offset:-4096", "global_load_dword v11, v20, s[42:43] offset:4095",
        "s_waitcnt vmcnt(0)"],
        memory, v={20: 4 * LANE}, s={42: (memory.ctypes.data + 4096) & M32, 43: (memory.ctypes.data + 4096) >> 32},
        out_v=[10, 11],
    )  # fmt: skip
    assert out.v["v10"].tolist() == [_dwords(memory, 4 * lane, 1)[0] for lane in range(LANES)]
    assert out.v["v11"].tolist() == [_dwords(memory, 8191 + 4 * lane, 1)[0] for lane in range(LANES)]


def test_an_access_outside_the_memory_is_a_fault_that_names_the_lane() -> None:
    memory = _bytes(256, 10)
    with pytest.raises(SimFault) as caught:
        with_memory(["global_load_dword v10, v20, s[40:41]"], memory, v={20: np.where(LANE == 37, 0x1000000, 0)})
    assert caught.value.lane == 37
    with_memory(
        ["global_load_dword v10, v20, s[40:41]"],
        memory,
        v={20: np.where(LANE == 37, 0x1000000, 0)},
        exec_mask=ALL_LANES ^ 1 << 37,
    )


def test_buffer_bounds() -> None:
    """Beyond num_records loads give 0 and stores are dropped, dword by dword; nothing outside is touched."""
    memory = _bytes(1024, 11)
    s = {46: 250}
    offsets = 4 * LANE
    out = with_memory(
        ["buffer_load_dword v10, v20, s[44:47], 0 offen", "buffer_load_dwordx4 v[12:15], v20, s[44:47], 0 offen",
        "buffer_load_ubyte v11, v20, s[44:47], 0 offen offset:1"],
        memory, v={10: OLD, 11: OLD, 12: OLD, 13: OLD, 14: OLD, 15: OLD, 20: offsets}, s=s, out_v=range(10, 16),
    )  # fmt: skip
    for lane in range(LANES):
        at = 4 * lane
        assert int(out.v["v10"][lane]) == (_dwords(memory, at, 1)[0] if at + 4 <= 250 else 0)
        assert int(out.v["v11"][lane]) == (int(memory[at + 1]) if at + 2 <= 250 else 0)
        want = [_dwords(memory, at + 4 * k, 1)[0] if at + 4 * k + 4 <= 250 else 0 for k in range(4)]
        assert [int(out.v[f"v{12 + k}"][lane]) for k in range(4)] == want
    image = memory.copy()
    with_memory(["buffer_store_dword v21, v20, s[44:47], 0 offen"], memory, v={20: offsets, 21: 5000 + LANE}, s=s)
    for lane in range(LANES):
        if 4 * lane + 4 <= 250:
            image[4 * lane : 4 * lane + 4] = np.frombuffer((5000 + lane).to_bytes(4, "little"), np.uint8)
    assert (memory == image).all()


def test_structured_buffers() -> None:
    """idxen: index times stride; the index alone counts against num_records, a record may be narrower."""
    memory = _bytes(4096, 12)
    s = {45: (memory.ctypes.data >> 32 & 0xFFFF) | 24 << 16, 46: 50}
    out = with_memory(
        ["buffer_load_dword v10, v20, s[44:47], 0 idxen offset:8",
        "buffer_load_dword v11, v[20:21], s[44:47], 0 idxen offen"],
        memory, v={20: LANE, 21: 4 * (LANE % 3), 10: OLD, 11: OLD}, s=s, out_v=[10, 11],
    )  # fmt: skip
    for lane in range(LANES):
        assert int(out.v["v10"][lane]) == (_dwords(memory, 24 * lane + 8, 1)[0] if lane < 50 else 0)
        assert int(out.v["v11"][lane]) == (_dwords(memory, 24 * lane + 4 * (lane % 3), 1)[0] if lane < 50 else 0)
    narrow = {**s, 45: (memory.ctypes.data >> 32 & 0xFFFF) | 4 << 16}
    loads = ["buffer_load_dwordx4 v[10:13], v20, s[44:47], 0 idxen"]
    out = with_memory(loads, memory, v={20: 4 * LANE}, s=narrow, out_v=range(10, 14))
    for lane in range(LANES):
        want = _dwords(memory, 16 * lane, 4) if 4 * lane < 50 else [0] * 4
        assert [int(out.v[f"v{10 + k}"][lane]) for k in range(4)] == want, f"lane {lane}"


def test_without_an_index_num_records_counts_bytes_whatever_the_stride() -> None:
    """gfx9: a descriptor with a stride, read without idxen, is a raw buffer of num_records bytes."""
    memory = _bytes(4096, 12)
    s = {45: (memory.ctypes.data >> 32 & 0xFFFF) | 4 << 16, 46: 100}
    loads = ["buffer_load_dword v10, v20, s[44:47], 0 offen", "buffer_load_dword v11, off, s[44:47], s40"]
    out = with_memory(loads, memory, v={20: 4 * LANE}, s={**s, 40: 96}, out_v=[10, 11])
    for lane in range(LANES):
        assert int(out.v["v10"][lane]) == (_dwords(memory, 4 * lane, 1)[0] if 4 * lane + 4 <= 100 else 0)
        assert int(out.v["v11"][lane]) == _dwords(memory, 96, 1)[0]


LDS_LOADS = {
    "global_load_lds_dword": ("global_load_lds_dword v20, s[40:41] offset:16", 4),
    "global_load_lds_dwordx3": ("global_load_lds_dwordx3 v20, s[40:41]", 12),
    "global_load_lds_dwordx4": ("global_load_lds_dwordx4 v20, s[40:41]", 16),
    "buffer_load_dword": ("buffer_load_dword v20, s[44:47], 0 offen lds", 4),
    "buffer_load_dwordx4": ("buffer_load_dwordx4 v20, s[44:47], 0 offen lds", 16),
}


@pytest.mark.parametrize("name", LDS_LOADS)
@covers("ds_read_b32")
def test_loads_straight_to_lds(name: str) -> None:
    """LDS address: M0 plus the instruction's offset plus lane times size, whatever the lanes' memory addresses."""
    memory = _bytes(4096, 13)
    line, size = LDS_LOADS[name]
    offset = 16 if "offset" in line else 0
    source = (size * ((11 * LANE) % 64)).astype(np.uint32)
    lines = [
        "s_movk_i32 m0, 0x100",
        line,
        "s_waitcnt vmcnt(0)",
        *(f"ds_read_b32 v{10 + k}, v21 offset:{256 + offset + 4 * k}" for k in range(size // 4)),
    ]
    out = with_memory(lines, memory, v={20: source, 21: size * LANE}, out_v=range(10, 10 + size // 4), lds_bytes=2048)
    for lane in range(LANES):
        want = _dwords(memory, int(source[lane]) + offset, size // 4)
        assert [int(out.v[f"v{10 + k}"][lane]) for k in range(size // 4)] == want, f"{line}: lane {lane}"


def test_narrow_loads_to_lds_are_refused() -> None:
    for line in ("global_load_lds_ubyte v20, s[40:41]", "buffer_load_ushort v20, s[44:47], 0 offen lds"):
        with pytest.raises(SimError, match="only dword"):
            with_memory([line], _bytes(64, 14), lds_bytes=256)


# ---- scratch, scalar loads -----------------------------------------------------------------------------------------


@covers("s_load_dword", "s_load_dwordx2", "s_load_dwordx4", "s_load_dwordx8", "s_load_dwordx16")
def test_scalar_loads() -> None:
    memory = _bytes(512, 15)
    lines = [
        "s_load_dword s50, s[40:41], 0x4",
        "s_load_dwordx2 s[52:53], s[40:41], 0x8",
        "s_load_dwordx4 s[56:59], s[40:41], s48",
        "s_load_dwordx8 s[60:67], s[40:41], 0x20",
        "s_waitcnt lgkmcnt(0)",
    ]
    out = with_memory(lines, memory, s={48: 100}, out_s=[50, 52, 53, *range(56, 68)])
    assert [int(out.s[f"s{k}"][0]) for k in (50, 52, 53)] == _dwords(memory, 4, 3)
    assert [int(out.s[f"s{k}"][0]) for k in range(56, 60)] == _dwords(memory, 100, 4)
    assert [int(out.s[f"s{k}"][0]) for k in range(60, 68)] == _dwords(memory, 32, 8)
    out = with_memory(["s_load_dwordx16 s[60:75], s[40:41], 0x40", "s_waitcnt lgkmcnt(0)"], memory, out_s=range(60, 76))
    assert [int(out.s[f"s{k}"][0]) for k in range(60, 76)] == _dwords(memory, 64, 16)


@covers(
    "s_buffer_load_dword",
    "s_buffer_load_dwordx2",
    "s_buffer_load_dwordx4",
    "s_buffer_load_dwordx8",
    "s_buffer_load_dwordx16",
)
def test_scalar_buffer_loads_stop_at_the_end() -> None:
    memory = _bytes(512, 16)
    for suffix, words in (("", 1), ("x2", 2), ("x4", 4), ("x8", 8), ("x16", 16)):
        out = with_memory(
            [f"s_buffer_load_dword{suffix} {registers('s', 60, words)}, s[44:47], 0x28", "s_waitcnt lgkmcnt(0)"],
            memory,
            s={46: 72},
            out_s=range(60, 60 + words),
        )
        want = [_dwords(memory, 40 + 4 * k, 1)[0] if 40 + 4 * k + 4 <= 72 else 0 for k in range(words)]
        assert [int(out.s[f"s{60 + k}"][0]) for k in range(words)] == want, suffix


COVERED = (
    *MEMORY_ATOMICS,
    *ALL_LDS_ATOMICS[:-2],
    *(_returning(name) for name in ALL_LDS_ATOMICS),
    *(f"{space}_load_{name}" for space in ("global", "flat", "buffer") for name in LOADS),
    *(f"{space}_store_{name}" for space in ("global", "flat", "buffer") for name in STORES),
    *(name for name in LDS_LOADS if name.startswith("global")),
)
