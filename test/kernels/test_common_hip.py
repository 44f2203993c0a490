# SPDX-License-Identifier: Apache-2.0
"""The HIP side as far as it runs without a GPU: FlyDSL's own executor and our ctypes calls against a recording HIP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.rocm_stub import RocmStub, make_rocm_stub

from sgl_amd_mono.common.peer import HipApi, PeerError
from sgl_amd_mono.common.sync import FAULT_BLOCK_BYTES

ROOT = Path(__file__).parents[2]


@pytest.fixture
def rocm(tmp_path: Path) -> RocmStub:
    return make_rocm_stub(tmp_path)


def run_python(code: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    path = f"{ROOT}{os.pathsep}{ROOT / 'test'}"
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


LAUNCH = """
import ctypes, json
from helpers.common_kernels import RingKey
from sgl_amd_mono.common import _flydsl
from sgl_amd_mono.common.build import compile_artifact
key = RingKey(blocks=4)
artifact = compile_artifact(key, binary=True)
launch = _flydsl.HipLauncher(artifact.binary, artifact.name, key.abi)
values = list(range(100, 100 + len(key.abi)))
values[[n for n, _ in key.abi].index("deadline_ticks")] = 6_000_000_000
values[[n for n, _ in key.abi].index("rank")] = -1
launch(values, 77)
class Tensor:
    def __init__(self, address): self.address = address
    def data_ptr(self): return self.address
args = [Tensor(v) if kind == "ptr" else v for v, (_, kind) in zip(values, key.abi)]
stream = ctypes.c_void_p(0)
prepared = launch.prepare(args, stream)
stream.value = 78
prepared()
for arg in args[:2]:
    arg.address += 1000
args[-1] += 1
prepared()
print(json.dumps([artifact.name, values]))
"""


def test_flydsls_executor_launches_with_our_arguments_on_our_stream(rocm: RocmStub) -> None:
    from helpers.common_kernels import RingKey

    params = ",".join("4" if kind == "i32" else "8" for _, kind in RingKey.abi)
    done = run_python(LAUNCH, rocm.environment(params))
    assert done.returncode == 0, done.stderr
    name, values = json.loads(done.stdout.splitlines()[-1])
    calls = rocm.calls()
    assert f"hipModuleGetFunction {name}" in calls
    launches = [call for call in calls if call.startswith("hipModuleLaunchKernel")]
    moved = [v + 1000 * (place < 2) + (place == len(values) - 1) for place, v in enumerate(values)]
    assert launches == [
        f"hipModuleLaunchKernel grid 4 1 1 block 512 1 1 lds 0 stream {stream} args {' '.join(map(str, given))}"
        for stream, given in ((77, values), (78, values), (78, moved))
    ]


def test_a_missing_linker_is_named_with_its_fix(rocm: RocmStub) -> None:
    (rocm.folder / "llvm" / "bin" / "ld.lld").unlink()
    done = run_python(LAUNCH, rocm.environment())
    assert done.returncode != 0
    assert "could not be linked" in done.stderr and "needed: ld.lld in $ROCM_PATH/llvm/bin" in done.stderr


@pytest.fixture
def hip(rocm: RocmStub, monkeypatch: pytest.MonkeyPatch) -> HipApi:
    monkeypatch.setenv("HIP_STUB_LOG", str(rocm.log))
    return HipApi(str(rocm.library))


def test_our_hip_calls_pass_what_hip_expects(rocm: RocmStub, hip: HipApi) -> None:
    address = hip.malloc_uncached(8192)
    hip.memset_zero(address, 8192)
    handle = hip.ipc_handle(address)
    assert len(handle) == 64
    assert hip.ipc_open(handle) == address  # the stand-in keeps the address inside the handle, behind zeros
    assert hip.read(address, FAULT_BLOCK_BYTES) == bytes(FAULT_BLOCK_BYTES)
    stream = hip.stream()
    hip.write(address + 4, b"\x01\x02\x03\x04", stream)
    assert hip.read(address, 8) == bytes([0, 0, 0, 0, 1, 2, 3, 4])
    hip.ipc_close(address)
    hip.free(address)
    assert [call.split()[0] for call in rocm.calls()] == [
        "hipExtMallocWithFlags",
        "hipMemset",
        "hipDeviceSynchronize",
        "hipIpcGetMemHandle",
        "hipIpcOpenMemHandle",
        "hipMemcpy",
        "hipStreamCreateWithFlags",
        "hipMemcpyAsync",
        "hipStreamSynchronize",
        "hipMemcpy",
        "hipIpcCloseMemHandle",
        "hipFree",
    ]
    assert rocm.calls()[0] == "hipExtMallocWithFlags 8192 3"
    assert rocm.calls()[4] == "hipIpcOpenMemHandle 1"
    assert rocm.calls()[5] == f"hipMemcpy {FAULT_BLOCK_BYTES} 2"
    assert rocm.calls()[6:9] == [
        "hipStreamCreateWithFlags 1",  # waits for no other stream
        f"hipMemcpyAsync 4 1 stream {0x5555}",
        f"hipStreamSynchronize {0x5555}",
    ]


@pytest.mark.parametrize(
    "call",
    [
        "hipExtMallocWithFlags",
        "hipMemset",
        "hipDeviceSynchronize",
        "hipIpcGetMemHandle",
        "hipIpcOpenMemHandle",
        "hipMemcpy",
        "hipStreamCreateWithFlags",
        "hipMemcpyAsync",
        "hipStreamSynchronize",
        "hipIpcCloseMemHandle",
        "hipFree",
    ],
)
def test_every_failing_hip_call_is_named(call: str, hip: HipApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIP_STUB_FAIL", call)
    with pytest.raises(PeerError, match=f"{call} failed: hipErrorOutOfMemory"):
        address = hip.malloc_uncached(64)
        hip.memset_zero(address, 64)
        hip.ipc_open(hip.ipc_handle(address))
        hip.read(address, 64)
        hip.write(address, b"1234", hip.stream())
        hip.ipc_close(address)
        hip.free(address)


def test_a_missing_hip_library_is_named() -> None:
    with pytest.raises(PeerError, match=r"cannot be loaded .* needed: ROCm"):
        HipApi("libamdhip64-that-is-not-there.so")
