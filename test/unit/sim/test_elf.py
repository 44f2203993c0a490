# SPDX-License-Identifier: Apache-2.0
"""ELF code objects: what is read of them against the text that they were assembled from, and every refusal.

The code objects are made here, by LLVM's assembler and linker (the copies in Triton) from the harness's kernel. They
need llvm-objdump of LLVM 20 or newer; without one these tests fail with the line that says how to install it.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import stat
import struct
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from helpers.isa import kernel_text, link

from sgl_amd_mono.sim import CodeObject, Launch, Machine, SimError, disassembler
from sgl_amd_mono.sim.disassembler import OBJDUMP_VARIABLE, assembly_text, find_objdump
from sgl_amd_mono.sim.elf import ElfCodeObject, parse_descriptor

BODY = [
    "s_load_dwordx2 s[4:5], s[0:1], 0x0",
    "v_lshlrev_b32_e32 v1, 2, v0",
    "v_mov_b32_e32 v2, 0",
    "s_movk_i32 s6, 5",
    "s_waitcnt lgkmcnt(0)",
    ".Lagain:",
    "v_add_u32_e32 v2, s6, v2",
    "s_sub_u32 s6, s6, 1",
    "s_cmp_lg_u32 s6, 0",
    "s_cbranch_scc1 .Lagain",
    "s_cbranch_execz .Lend_of_it",
    "v_accvgpr_write_b32 a3, v2",
    "v_accvgpr_read_b32 v3, a3",
    "v_add_f32_e64 v4, |v3|, -v3 mul:2",
    "v_fma_f32 v5, v3, 0.15915494, -v4 clamp",
    "v_mul_f32_e32 v6, 0x3f9d70a4, v3",
    "global_store_dword v1, v3, s[4:5] offset:256 sc0 sc1 nt",
    "s_branch .Lend_of_it",
    "s_trap 2",
    ".Lend_of_it:",
    "s_nop 0",
]


@cache
def code_object(lds: int = 0, scratch: int = 0) -> bytes:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return link(kernel_text(BODY, lds_bytes=lds, scratch_bytes=scratch), Path(folder))


def facts(code: CodeObject) -> tuple[object, ...]:
    numbers = (code.kernarg_size, code.lds_bytes, code.scratch_bytes, code.spills, code.max_threads, code.user_sgprs())
    args = [dataclasses.astuple(arg)[1:] for arg in code.args]
    directives = [code.directive(name, -1) for name in ("ieee_mode", "dx10_clamp", "float_denorm_mode_32")]
    return (code.name, *numbers, args, directives)


@pytest.mark.parametrize(("lds", "scratch"), [(0, 0), (4096, 64)])
def test_reads_what_the_text_says(lds: int, scratch: int) -> None:
    """Records, constants, resources and arguments: the same as those of the text."""
    text = CodeObject.parse(kernel_text(BODY, lds_bytes=lds, scratch_bytes=scratch))
    read = CodeObject.load(code_object(lds, scratch))
    assert facts(read) == facts(text)
    assert [i.mnemonic for i in read.instructions] == [i.mnemonic for i in text.instructions]
    assert (read.decoded.records == text.decoded.records).all()
    assert (read.decoded.constants == text.decoded.constants).all()
    assert (read.vgprs, read.agprs) == (text.vgprs, text.agprs)


def test_a_wrong_branch_target_would_be_seen() -> None:
    """The comparison above has teeth: a branch that goes one instruction further gives other records."""
    text = assembly_text(code_object())
    label = next(line for line in text.splitlines() if line.startswith(".L_"))
    lines = text.splitlines()
    at = lines.index(label)
    lines[at], lines[at + 1] = lines[at + 1], lines[at]
    moved, right = CodeObject.parse("\n".join(lines)), CodeObject.parse(text)
    assert (moved.decoded.records != right.decoded.records).any()


def test_runs(tmp_path: Path) -> None:
    """From a file: the loop's sum in every lane, and a report that names the instruction's address."""
    file = tmp_path / "kernel.co"
    file.write_bytes(code_object())
    code = CodeObject.load(file)
    out = np.zeros(128, np.uint32)
    machine = Machine()
    machine.map_tensor(0, out, "out")
    machine.launch([Launch(rank=0, code=code, grid=1, block=64, kernargs=struct.pack("<Q", out.ctypes.data))])
    assert (out == [0] * 64 + [15] * 64).all()
    store = code.find("global_store")[0]
    assert f"// {ElfCodeObject(file.read_bytes()).kernels[0].entry:012X}" in assembly_text(file.read_bytes())
    assert code.replace("offset:256", "offset:0").find("global_store")[0].line == store.line


def test_descriptor_fields() -> None:
    """Every field of a descriptor that was written by hand, and the entry's offset."""
    rsrc1 = 29 | 12 << 6 | 1 << 12 | 2 << 14 | 3 << 16 | 1 << 18 | 1 << 21 | 0 << 23 | 1 << 26
    rsrc2 = 1 | 9 << 1 | 1 << 7 | 0 << 8 | 1 << 9 | 1 << 10 | 2 << 11
    raw = struct.pack("<III", 35840, 16, 448) + bytes(4) + struct.pack("<q", 4352) + bytes(20)
    raw += struct.pack("<III", 43 | 1 << 16, rsrc1, rsrc2) + struct.pack("<HH", 1 << 3 | 1 << 4, 5 | 2 << 7) + bytes(4)
    directives, offset = parse_descriptor(raw)
    assert len(raw) == 64 and offset == 4352
    wanted = {
        "group_segment_fixed_size": 35840, "private_segment_fixed_size": 16, "kernarg_size": 448,
        "next_free_vgpr": 240, "next_free_sgpr": 112, "accum_offset": 176, "tg_split": 1,
        "float_round_mode_32": 1, "float_round_mode_16_64": 2, "float_denorm_mode_32": 3,
        "float_denorm_mode_16_64": 1, "dx10_clamp": 1, "ieee_mode": 0, "fp16_overflow": 1,
        "enable_private_segment": 1, "user_sgpr_count": 9, "system_sgpr_workgroup_id_x": 1,
        "system_sgpr_workgroup_id_y": 0, "system_sgpr_workgroup_id_z": 1, "system_sgpr_workgroup_info": 1,
        "system_vgpr_workitem_id": 2, "user_sgpr_kernarg_segment_ptr": 1, "user_sgpr_dispatch_id": 1,
        "user_sgpr_dispatch_ptr": 0, "user_sgpr_queue_ptr": 0, "user_sgpr_private_segment_buffer": 0,
        "user_sgpr_flat_scratch_init": 0, "user_sgpr_private_segment_size": 0, "uses_dynamic_stack": 0,
        "user_sgpr_kernarg_preload_length": 5, "user_sgpr_kernarg_preload_offset": 2,
    }  # fmt: skip
    assert directives == wanted


def changed(at: int, new: bytes) -> bytes:
    data = bytearray(code_object())
    data[at : at + len(new)] = new
    return bytes(data)


def with_metadata_cut() -> bytes:
    """Its metadata's map says that it goes on behind the note."""
    data = code_object()
    at = data.index(b"AMDGPU\0\0") + len(b"AMDGPU\0\0")
    assert data[at] & 0xF0 == 0x80  # a MessagePack map of few members
    return changed(at, b"\x8f")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"not ELF", "begins with"),
        (b"", "begins with"),
        (b"\x7fELF\x01\x01" + bytes(100), "not a 64-bit"),
        (lambda: changed(18, b"\x3e\x00"), "machine 62"),
        (lambda: changed(48, b"\x4c"), "processor 0x4c"),
        (lambda: code_object()[:70], "truncated"),
        (lambda: code_object()[: len(code_object()) // 2], "truncated"),
        (lambda: code_object().replace(b"isa_test.kd", b"isa_best.kd", 1), "no kernel descriptor"),
        (lambda: code_object().replace(b"AMDGPU\0\0", b"OTHERS\0\0"), "no AMDGPU metadata"),
        (lambda: with_metadata_cut(), "truncated or damaged"),
    ],
)
def test_other_files_are_refused(data: object, message: str) -> None:
    with pytest.raises(SimError, match=message):
        CodeObject.load(data() if callable(data) else data)


def test_addresses_from_the_program_counter_are_refused(tmp_path: Path) -> None:
    data = link(kernel_text(["s_getpc_b64 s[4:5]", "s_nop 0"]), tmp_path)
    with pytest.raises(SimError, match=r"s_getpc_b64 s\[4:5\].*program counter"):
        CodeObject.load(data)


def test_unknown_words_are_an_error(tmp_path: Path) -> None:
    """A word that is no instruction: the disassembler prints it as data, which must not be passed over."""
    data = link(kernel_text(["s_nop 0", ".long 0xbf000000 | 0xff0000", "s_nop 0"]), tmp_path)
    with pytest.raises(SimError, match="does not know the instruction"):
        CodeObject.load(data)


def test_a_kernel_is_chosen_by_name() -> None:
    assert CodeObject.load(code_object(), "isa_test").name == "isa_test"
    with pytest.raises(SimError, match="no kernel 'other'"):
        CodeObject.load(code_object(), "other")


# ---- the disassembler ----


def tool(folder: Path, name: str, version: str, code: int = 0) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{version}'\nexit {code}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with nothing but this folder; the code object is made before."""
    code_object()
    monkeypatch.delenv(OBJDUMP_VARIABLE, raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}")
    monkeypatch.setenv("ROCM_PATH", str(tmp_path / "rocm"))
    return tmp_path


def test_no_disassembler_says_how_to_install_one(only: Path) -> None:
    with pytest.raises(SimError, match=rf"none on PATH.*apt-get install llvm-22.*{OBJDUMP_VARIABLE}"):
        CodeObject.load(code_object())


def test_an_old_disassembler_is_refused_by_name(only: Path) -> None:
    tool(only, "llvm-objdump", "Debian LLVM version 14.0.6")
    with pytest.raises(SimError, match=r"llvm-objdump is of LLVM 14"):
        find_objdump()
    tool(only, "llvm-objdump-21", "GNU objdump 2.40")
    with pytest.raises(SimError, match=r"llvm-objdump-21 does not name an LLVM version; .*llvm-objdump is of LLVM 14"):
        find_objdump()


def test_the_newest_on_path_is_taken_and_the_variable_goes_first(only: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in (20, 9, 100, 22):
        tool(only, f"llvm-objdump-{version}", f"LLVM version {version}.1.0")
    tool(only, "llvm-objdump-new", "LLVM version 101.1.0")
    assert find_objdump() == str(only / "llvm-objdump-100")
    monkeypatch.setenv(OBJDUMP_VARIABLE, str(only / "llvm-objdump-20"))
    assert find_objdump() == str(only / "llvm-objdump-20")
    monkeypatch.setenv(OBJDUMP_VARIABLE, str(only / "absent"))
    with pytest.raises(SimError, match="absent is not a program"):
        find_objdump()


def test_rocm_has_one(only: Path) -> None:
    folder = only / "rocm" / disassembler.ROCM_FOLDER
    folder.mkdir(parents=True)
    tool(folder, "llvm-objdump", "AMD LLVM version 20.0.0git")
    assert find_objdump() == os.path.join(folder, "llvm-objdump")


def test_a_failing_disassembler_is_an_error(only: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = only / "objdump"
    path.write_text('#!/bin/sh\n[ "$1" = --version ] && echo LLVM version 22.0 && exit 0\necho broken >&2\nexit 3\n')
    path.chmod(0o755)
    monkeypatch.setenv(OBJDUMP_VARIABLE, str(path))
    with pytest.raises(SimError, match="broken"):
        CodeObject.load(code_object())
    path.write_text("#!/bin/sh\necho LLVM version 22.0\nprintf '\\tsomething else\\n'\n")
    with pytest.raises(SimError, match="not understood: 'something else'"):
        CodeObject.load(code_object())


# ---- what CI installs ----

SCRIPT = Path(__file__).resolve().parents[3] / ".ci" / "disassembler"
SHELL_TOOLS = ("bash", "sed", "sort", "head", "awk", "cat", "env")


def run_script(
    folder: Path, user: int, candidates: str = "", installs: str = "", old_lists: bool = False, **variables: str
) -> subprocess.CompletedProcess[str]:
    """The script with nothing on PATH but a shell and stand-ins of apt.

    installs: the tool that apt-get leaves; old_lists: only after an update. variables: of the environment.
    """
    for name in SHELL_TOOLS:
        (folder / name).symlink_to(shutil.which(name))
    tool(folder, "id", str(user))
    calls = folder / "calls"
    ready = folder / "updated"
    install = f"[ $1 = update ] && : > {ready}\n[ $1 = install ] || exit 0\n"
    install += f"[ -e {ready} ] || exit 100\n" if old_lists else ""
    install += f"cat {folder}/new > {folder}/{installs}" if installs else "true"
    for name, body in (("apt-cache", f"printf '{candidates}'"), ("apt-get", f'echo "$@" >> {calls}\n{install}')):
        (folder / name).write_text(f"#!/bin/sh\n{body}\nexit 0\n")
        (folder / name).chmod(0o755)
    if installs:
        tool(folder, "new", "LLVM version 21.1.0")
        tool(folder, installs, "LLVM version 14.0.0")
    environment = {"PATH": str(folder), "ROCM_PATH": str(folder / "rocm"), **variables}
    done = subprocess.run(
        ["bash", str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    done.stdout += calls.read_text() if calls.exists() else ""
    return done


def test_ci_keeps_a_disassembler_that_is_there(tmp_path: Path) -> None:
    tool(tmp_path, "llvm-objdump-22", "LLVM version 22.1.8")
    done = run_script(tmp_path, user=0)
    assert done.returncode == 0 and done.stdout == "" and done.stderr == ""


def test_ci_installs_the_newest_candidate(tmp_path: Path) -> None:
    names = "llvm-9 - x\\nllvm-19 - x\\nllvm-21 - x\\nllvm-20 - x\\n"
    done = run_script(tmp_path, user=0, candidates=names, installs="llvm-objdump-21")
    assert done.returncode == 0 and "install -qq -y --no-install-recommends llvm-21" in done.stdout


def test_ci_updates_old_package_lists(tmp_path: Path) -> None:
    done = run_script(tmp_path, 0, candidates="llvm-21 - x\\n", installs="llvm-objdump-21", old_lists=True)
    calls = [line.split()[0] for line in done.stdout.splitlines() if not line.startswith("==")]
    assert done.returncode == 0 and calls == ["install", "update", "install"]


def test_ci_says_that_an_install_failed(tmp_path: Path) -> None:
    done = run_script(tmp_path, user=0, candidates="llvm-21 - x\\n")
    assert done.returncode == 1 and "llvm-21 could not be installed" in done.stderr


def test_ci_names_a_variable_that_is_wrong(tmp_path: Path) -> None:
    """The variable goes first, so another tool on PATH does not help, nor does an installation."""
    tool(tmp_path, "llvm-objdump-22", "LLVM version 22.1.8")
    old = tool(tmp_path, "old", "LLVM version 14.0.6")
    done = run_script(tmp_path, 0, candidates="llvm-22 - x\\n", **{OBJDUMP_VARIABLE: str(old)})
    assert done.returncode == 1 and f"{OBJDUMP_VARIABLE}={old} is of LLVM 14" in done.stderr and done.stdout == ""


def test_ci_says_where_it_cannot(tmp_path: Path) -> None:
    tool(tmp_path, "llvm-objdump", "LLVM version 14.0.6")
    done = run_script(tmp_path, user=1000)
    assert done.returncode == 1 and "no root" in done.stderr and OBJDUMP_VARIABLE in done.stderr


def test_ci_says_where_apt_has_none(tmp_path: Path) -> None:
    done = run_script(tmp_path, user=0, candidates="llvm-14 - x\\n")
    assert done.returncode == 1 and "apt offers no LLVM" in done.stderr and "update" in done.stdout
