# SPDX-License-Identifier: Apache-2.0
"""Every SGLang name that the package reads is declared in one place and exists in the installed SGLang."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import re
from importlib import metadata
from pathlib import Path

import pytest
import torch
from helpers.spec_scan import (
    attributes_read,
    imported_names,
    library_names,
    own_names,
    package_root,
    undeclared_imports,
)

from sgl_amd_mono.common import sglang_names
from sgl_amd_mono.common.sglang_names import declared, leaf, missing, sglang_root

ROOT = package_root()
FILES = sorted(ROOT.rglob("*.py"))
#: Entry-point groups: they look like module paths and name none that is read.
GROUPS = ("sglang.srt.plugins",)
#: The modules that hold SGLang objects; every attribute they read is either declared, their own, or a library's.
READERS = ("common/state.py", "qwen38_a95b_mxfp4/spec.py", "qwen38_a95b_mxfp4/step.py")


@pytest.mark.parametrize("module", sorted(declared()))
def test_sglang_provides_every_declared_name(module: str) -> None:
    assert missing({module: declared()[module]}) == []


@pytest.mark.parametrize(
    ("module", "name", "why"),
    [
        ("sglang.srt.no_such_module", "x", "no such module"),
        ("sglang.srt.models.qwen3_5", "no_such_function", "no such name"),
        ("sglang.srt.models.qwen3_5", "NoSuchClass.attn", "no class NoSuchClass"),
        ("sglang.srt.models.qwen3_5", "Qwen3_5GatedDeltaNet.no_such_weight", "no such name"),
        ("sglang.srt.models.qwen3_5", "Qwen3_5AttentionDecoderLayer._prepare_qkv_gate(rows)", "no parameter rows"),
        ("sglang.srt.mem_cache.memory_pool", "MambaPool.State.no_such_state", "no such name"),
        # the name exists, but in another class
        ("sglang.srt.models.qwen3_5", "Qwen3_5GatedDeltaNet.rotary_emb", "no such name"),
    ],
)
def test_a_name_that_sglang_lacks_is_reported(module: str, name: str, why: str) -> None:
    (line,) = missing({module: (name,)})
    assert why in line and module in line


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_import_of_sglang_is_declared(path: Path) -> None:
    assert undeclared_imports(path.read_text(), sglang_root(), declared(), GROUPS) == []


@pytest.mark.parametrize(
    "planted",
    [
        "from sglang.srt.models.qwen3_5 import Qwen3_5GatedDeltaNet as G, Qwen3_5VisionConfig",
        "import sglang.srt.utils",
        "from sglang.srt.environ import temp_set_env",
        "from sglang.srt import environ\nprint(environ.EnvField)",
        "import importlib\nimportlib.import_module('sglang.srt.managers.scheduler')",
        "hook = 'sglang.srt.models.qwen3_5.cached_get_processor'",
    ],
)
def test_an_undeclared_import_is_seen(planted: str) -> None:
    assert undeclared_imports(planted, sglang_root(), declared(), GROUPS) != []


def allowed_attributes() -> set[str]:
    names = {leaf(name) for all_names in declared().values() for name in all_names}
    names |= own_names(path.read_text() for path in FILES)
    names |= set(sglang_names.AITER_NAMES)
    # a torch module's own methods are not SGLang's
    libraries = (torch, torch.Tensor, torch.nn, torch.nn.Module, torch.distributed, torch.dtype, torch.device)
    return names | library_names(*libraries, logging, logging.Logger, hashlib, hashlib.sha256(), dataclasses)


@pytest.mark.parametrize("name", READERS)
def test_every_attribute_read_is_declared(name: str) -> None:
    allowed = allowed_attributes()
    wrong = [
        f"line {line}: .{attr}" for line, attr in attributes_read((ROOT / name).read_text()) if attr not in allowed
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "planted", ["gdn.alt_stream", "getattr(layer, 'rotary_emb', None)", "experts.dispatcher.topk_ids"]
)
def test_an_undeclared_attribute_is_seen(planted: str) -> None:
    allowed = allowed_attributes()
    source = (ROOT / "common/state.py").read_text() + f"\n\ndef planted(gdn, layer, experts):\n    return {planted}\n"
    assert [attr for _, attr in attributes_read(source) if attr not in allowed]


def test_every_replacement_of_the_harness_is_declared() -> None:
    """What `simulate` puts in SGLang's place, by path and name."""
    from sgl_amd_mono.simulate import harness

    names = declared()
    for replacement in harness.REPLACEMENTS:
        assert replacement.attribute in names[replacement.module]
    assert missing({"sglang.srt.distributed": ("tensor_model_parallel_no_such",)})  # a star import hides nothing


def test_the_contract_itself() -> None:
    """The one part of SGLang that is imported here: what SPEC is written against."""
    from sgl_amd_mono.simulate import harness

    harness.prepare()
    from sglang.kernels.plugin_kernels.amd import spec as contract

    assert contract.MONOKERNEL_API_VERSION == 1
    assert contract.BACKEND == "amd"
    fields = set(contract.MonoSpec.__struct_fields__)
    named = {leaf(n) for n in sglang_names.PLUGIN_NAMES[contract.__name__] if n.startswith("MonoSpec.")}
    assert named <= fields
    # a required field that SPEC does not know would fail every start
    required = {f for f in fields if f not in ("config_disable_reasons", "load_tensor", "tokens_per_request")}
    assert required - named <= {"unread_metadata"}


def test_the_installed_sglang_is_the_one_named() -> None:
    from sgl_amd_mono.common.doctor import SGLANG_TESTED

    assert metadata.version("sglang") == SGLANG_TESTED


def test_config_fields_are_declared() -> None:
    from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import Geometry
    from sgl_amd_mono.qwen38_a95b_mxfp4.spec import expected_config

    names = {leaf(n) for n in declared()["sglang.srt.configs.qwen3_next"]}
    # SGLang reads the output gate from the config with a default, in the attention layer
    assert set(expected_config(Geometry.a95b())) - names == {"attn_output_gate"}


def test_environment_and_arguments_are_declared() -> None:
    """What the spec asks of the environment exists in this SGLang, but for the variable that later releases bring."""
    from sgl_amd_mono.qwen38_a95b_mxfp4.spec import ENVIRONMENT

    names = {leaf(n) for n in declared()["sglang.srt.environ"]}
    assert set(ENVIRONMENT) - names == {"SGLANG_ROCM_GDN_ONLINE_MXFP4"}


def test_nothing_is_declared_that_is_not_read() -> None:
    """A declaration outlives its reader only by mistake: each name occurs in the plugin's own source."""
    sources = "".join(p.read_text() for p in FILES if p.name != "sglang_names.py" and "simulate" not in p.parts)
    # the plugin relies on these without naming them: the contract calls them, or hands them over
    given = {"find_spec", "install_monokernel_forward", "monokernel_disable_reasons", "device_isa"}
    given |= {"MONOKERNEL_API_VERSION"}  # SGLang compares it with the spec's
    names = {leaf(name) for names in sglang_names.PLUGIN_NAMES.values() for name in names} - given
    assert sorted(name for name in names if not re.search(rf"\b{re.escape(name)}\b", sources)) == []


def test_sglang_is_imported_in_few_places() -> None:
    """The entry point names the spec, the spec speaks the contract, state.py reads the rest; `simulate` apart."""
    users = {str(p.relative_to(ROOT)) for p in FILES if imported_names(p.read_text(), sglang_root())}
    # names that only occur as text: the declaration itself, and the entry-point group
    users -= {"common/sglang_names.py", "common/doctor.py"}
    allowed = {"__init__.py", "common/state.py", "qwen38_a95b_mxfp4/spec.py"}
    assert {name for name in users if not name.startswith("simulate/")} == allowed
