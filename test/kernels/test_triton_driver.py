# SPDX-License-Identifier: Apache-2.0
"""The Triton driver of the simulator: arguments, memory, stated configurations, and errors that say what to do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sgl_amd_mono.sim import CodeObject, SimError, SimFault
from sgl_amd_mono.sim.triton_driver import SimulatorDriver, activate, activated, deactivate, use_configuration


@pytest.fixture
def driver() -> Iterator[SimulatorDriver]:
    yield activate()
    deactivate()


def _fresh_tuned() -> object:
    """An autotuned kernel whose configurations no other test has stated."""
    import triton
    from helpers.triton_kernels import tuned_double

    return triton.autotune(
        configs=[triton.Config({"BLOCK": 64}, num_warps=1), triton.Config({"BLOCK": 256}, num_warps=4)], key=["n"]
    )(tuned_double.fn)


def _double(kernel: object, n: int = 200) -> torch.Tensor:
    x, out = torch.arange(n, dtype=torch.float32), torch.zeros(n)
    kernel[lambda meta: (-(-n // meta["BLOCK"]),)](x, out, n)
    assert torch.equal(out, 2 * x)
    return out


def test_an_autotuned_kernel_takes_the_stated_configuration(driver: SimulatorDriver) -> None:
    kernel = _fresh_tuned()
    with pytest.raises(SimError, match=r"tuned_double is autotuned over 2 .* use_configuration"):
        _double(kernel)
    use_configuration(kernel, BLOCK=256)
    _double(kernel)
    assert [(ran.grid, ran.threads) for ran in driver.launches] == [((1, 1, 1), 256)]


def test_a_configuration_that_the_kernel_does_not_have_is_refused(driver: SimulatorDriver) -> None:
    with pytest.raises(SimError, match="0 configurations have"):
        use_configuration(_fresh_tuned(), BLOCK=128)
    with pytest.raises(SimError, match="2 configurations have"):
        use_configuration(_fresh_tuned())
    from helpers.triton_kernels import vector_add

    with pytest.raises(SimError, match="not autotuned"):
        use_configuration(vector_add, BLOCK=64)


def test_counting_takes_the_configuration_with_the_fewest_instructions() -> None:
    with activated(autotune="count") as driver:
        _double(_fresh_tuned())
        assert len(driver.launches) == 3, "two trials and the launch"
        tried, last = driver.launches[:2], driver.launches[2]
        assert last.wave_instructions == min(ran.wave_instructions for ran in tried)


def test_a_kernel_loaded_earlier_runs_on_the_driver_that_is_active() -> None:
    from helpers.triton_kernels import vector_add

    x = torch.ones(32)
    for memory in ("consistent", "adversarial"):
        with activated(memory, keep_reports=True) as driver:
            vector_add[(1,)](x, x, torch.zeros(32), 29, BLOCK=32)
            assert len(driver.launches) == 1
            assert driver.launches[0].report.wave_instructions == driver.launches[0].wave_instructions > 0


def test_tuple_arguments_and_views_of_one_storage(driver: SimulatorDriver) -> None:
    from helpers.triton_kernels import add_pair

    whole = torch.arange(400, dtype=torch.float32)
    alias = torch.from_numpy(whole.numpy())  # another storage over the same memory
    out = torch.zeros(100)
    add_pair[(1,)]((whole[100:], alias[200:], 3.0), out, 100, BLOCK=128)
    assert torch.equal(out, whole[100:200] + 3 * whole[200:300])


def test_memory_that_no_argument_names_is_a_fault(driver: SimulatorDriver) -> None:
    from helpers.triton_kernels import vector_add

    x = torch.ones(64)
    with pytest.raises(SimFault, match="outside registered memory"):
        vector_add[(1,)](x, x, torch.zeros(64), 4096, BLOCK=4096)


def test_an_unknown_instruction_names_the_kernel_and_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from helpers.triton_kernels import vector_add

    parse = CodeObject.parse
    monkeypatch.setattr(CodeObject, "parse", lambda text: parse(text.replace("s_endpgm", "v_from_the_future v0, v1")))
    x = torch.ones(32)
    out = torch.full((32,), 7.0)
    with activated(), pytest.raises(SimError, match=r"vector_add.*line \d+: v_from_the_future v0, v1"):
        vector_add[(1,)](x, x, out, 31, BLOCK=32, num_warps=1)
    assert torch.equal(out, torch.full((32,), 7.0)), "the kernel ran in part"


def test_what_is_not_there_is_said(driver: SimulatorDriver) -> None:
    from helpers.triton_kernels import vector_add

    x = torch.ones(32)
    with pytest.raises(SimError, match="on meta; the simulator takes CPU tensors"):
        vector_add[(1,)](x, x, torch.empty(32, device="meta"), 30, BLOCK=32)
    with pytest.raises(SimError, match="device 0 only"):
        driver.set_current_device(1)
    with pytest.raises(SimError, match="measures times"):
        driver.get_device_interface()
    with pytest.raises(SimError, match="autotune is one of"):
        SimulatorDriver(autotune="guess")


def test_after_deactivation_triton_finds_no_gpu() -> None:
    from triton.runtime import driver as triton_driver

    with activated():
        assert triton_driver.active.get_current_target().arch == "gfx950"
    with pytest.raises(RuntimeError, match="active drivers"):
        triton_driver.active.get_current_target()
