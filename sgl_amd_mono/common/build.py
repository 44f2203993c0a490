# SPDX-License-Identifier: Apache-2.0
"""Build keys, compilation through FlyDSL, the on-disk cache and the resource table.

A **build key** is a frozen dataclass that knows everything a kernel is specialised on and how to trace it::

    @dataclass(frozen=True)
    class GdnKey(BuildKey):
        geometry: Geometry
        width: int
        model: ClassVar[str] = "qwen38_a95b"     # names the kernel
        launch: ClassVar[str] = "gdn"
        abi: ClassVar[Abi] = ABI                 # ordered (name, "ptr" | "i64" | "i32")

        def body(self): ...                      # -> function(**kernel arguments) that traces the kernel
        @property
        def grid(self): ...                      # workgroups;  block: threads of one

``build(key)`` returns an ``Artifact``: ISA text, ABI, resources, compile seconds. It compiles at most once a machine:
the cache entry's name covers the key, the source of every file that its code reaches by import, FlyDSL's version and
the target; one process compiles while others wait on a file lock; entries appear by atomic
rename, so a killed builder leaves nothing behind but its lock file, which the next one takes over.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import errno
import fcntl
import functools
import hashlib
import importlib.util
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from sgl_amd_mono.common import build_pool
from sgl_amd_mono.common.flydsl_version import installed

Abi = tuple[tuple[str, str], ...]
ARGUMENT_BYTES = {"ptr": 8, "i64": 8, "i32": 4}

TARGET = "gfx950"
VGPR_MAX = 256  # 512 threads = 2 waves a SIMD, which share 512 registers
LDS_MAX = 160 * 1024
CACHE_ENV = "SGLANG_AMD_MONO_CACHE_DIR"
CACHE_FORMAT = 1
CODE_ENVIRONMENT = ("FLYDSL_COMPILE_OPT_LEVEL", "FLYDSL_DEBUG_ENABLE_DEBUG_INFO")  # FlyDSL's variables that change code
LOCK_LIMIT_S = 1800.0  # a build takes seconds; a lock held this long has a stopped holder
LOCK_POLL_S = 0.05
MOST_PROCESSES = 16  # of half a GiB each


class BuildError(RuntimeError):
    """A kernel that cannot be built or must not run; the message names found, needed and the fix."""


@dataclass(frozen=True)
class BuildKey:
    """Base of the build keys; subclasses are frozen dataclasses whose fields are scalars or frozen dataclasses."""

    model: ClassVar[str] = ""
    launch: ClassVar[str] = ""
    abi: ClassVar[Abi] = ()
    slot_base: ClassVar[int] = 0  # first tag slot of this launch; its layer is added
    slot_launch: ClassVar[str] = ""  # the launch that fault records name for these slots, where it is not `launch`
    region_names: ClassVar[tuple[str, ...]] = ()  # names of its mailbox regions, by Region.number
    readonly: ClassVar[frozenset[str]] = frozenset()  # pointer arguments that the kernel never writes

    def scratch_regions(self) -> dict[str, tuple[int, int]]:
        """Name -> (byte offset, bytes) of the mailbox regions inside the argument ``scratch``."""
        return {}

    def regions_of(self, argument: str) -> dict[str, tuple[int, int]]:
        """The same of any argument; empty where it holds no mailboxes."""
        return self.scratch_regions() if argument == "scratch" else {}

    def peer_regions(self) -> dict[str, tuple[int, int]]:
        """Name -> (byte offset, bytes) of the regions inside a peer buffer."""
        return {}

    @property
    def grid(self) -> int:
        """Workgroups of the launch, all resident."""
        raise NotImplementedError

    @property
    def block(self) -> int:
        """Threads of a workgroup."""
        raise NotImplementedError

    def body(self) -> Callable[..., None]:
        """Function that traces the kernel; called with the ABI's names as keywords."""
        raise NotImplementedError

    @property
    def hints(self) -> dict[str, Any]:
        """FlyDSL compile hints (``waves_per_eu``, ``maxnreg``)."""
        return {}

    @property
    def name(self) -> str:
        """Kernel name: model, launch, width, variant, and a digest of the whole key."""
        parts = [self.model, self.launch]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "width":
                parts.append(f"s{value}")
            elif isinstance(value, bool):
                parts.extend([field.name] if value else [])
            elif isinstance(value, (int, str)):
                parts.append(f"{field.name}_{value}")
        text = "_".join(str(p) for p in parts if p)
        return re.sub(r"[^0-9A-Za-z_]", "_", text) + "_" + self.digest()[:8]

    def digest(self) -> str:
        """SHA-256 of the key's class and all its fields."""
        text = json.dumps([type(self).__module__, type(self).__qualname__, _plain(self)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def _plain(value: Any) -> Any:
    """JSON form of a key's field; refuses what has no stable one."""
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise BuildError(
        f"a build key holds {value!r} of type {type(value).__name__}; needed: scalars, tuples or frozen dataclasses"
    )


@dataclass(frozen=True)
class Resources:
    """What a kernel occupies, read from its metadata; ``vgprs`` counts AGPRs too."""

    vgprs: int
    agprs: int
    sgprs: int
    vgpr_spills: int
    sgpr_spills: int
    lds_bytes: int
    scratch_bytes: int
    instructions: int

    def refusals(self) -> list[str]:
        """Why this kernel must not run, each with found and needed."""
        found = []
        if self.vgprs > VGPR_MAX:
            found.append(f"{self.vgprs} VGPRs, needed <= {VGPR_MAX} (two waves a SIMD)")
        if self.vgpr_spills:
            found.append(f"{self.vgpr_spills} spilled VGPRs, needed 0")
        if self.scratch_bytes:
            found.append(f"{self.scratch_bytes} B of scratch memory a lane, needed 0")
        if self.lds_bytes > LDS_MAX:
            found.append(f"{self.lds_bytes} B of LDS, needed <= {LDS_MAX}")
        return found


@dataclass(frozen=True)
class Argument:
    """One kernel argument in the argument block."""

    name: str
    type: str
    offset: int
    size: int


@dataclass(frozen=True)
class Artifact:
    """A built kernel. ``binary`` is FlyDSL's module text with the linked code object (GPU builds only)."""

    name: str
    isa: str
    arguments: tuple[Argument, ...]
    kernarg_bytes: int
    grid: int
    block: int
    resources: Resources
    compile_seconds: float
    binary: str | None = None

    def pack(self, values: Sequence[int]) -> bytes:
        """Kernel argument block from integers in ABI order."""
        if len(values) != len(self.arguments):
            raise BuildError(f"{self.name} takes {len(self.arguments)} arguments, got {len(values)}")
        block = bytearray(self.kernarg_bytes)
        for argument, value in zip(self.arguments, values, strict=True):
            low, high = -(1 << (8 * argument.size - 1)), 1 << (8 * argument.size)
            if not low <= value < high:
                raise BuildError(f"{self.name}: '{argument.name}' = {value} does not fit {argument.size} bytes")
            raw = (value % high).to_bytes(argument.size, "little")
            block[argument.offset : argument.offset + argument.size] = raw
        return bytes(block)


def build(key: BuildKey, *, binary: bool = False, cache_dir: Path | None = None) -> Artifact:
    """Compile ``key`` or take it from the cache. ``binary`` also links a code object for the GPU (needs ``ld.lld``).

    Raises ``BuildError`` for an ABI that differs from the emitted one and for resources beyond the limits.
    """
    folder = cache_dir or default_cache_dir()
    entry = cache_entry(key, binary=binary, folder=folder)
    artifact = _load(entry)
    if artifact is None:
        with _named_folder(folder):
            folder.mkdir(parents=True, exist_ok=True)
            lock = contextlib.ExitStack()
            lock.enter_context(_locked(entry.with_suffix(".lock")))
        with lock:
            artifact = _load(entry)
            if artifact is None:
                artifact = compile_artifact(key, binary=binary)
                with _named_folder(folder):
                    _write(entry, artifact)
    refuse_resources(artifact)
    return artifact


def compile_artifact(key: BuildKey, *, binary: bool = False) -> Artifact:
    """Compile without the cache; checks the ABI, not the resources."""
    from sgl_amd_mono.common import _flydsl

    started = time.perf_counter()
    isa, module = _flydsl.compile_kernel(
        key.body(), key.name, key.abi, key.grid, key.block, hints=key.hints, binary=binary
    )
    arguments, kernarg_bytes = checked_arguments(key.name, key.abi, isa)
    return Artifact(
        name=key.name,
        isa=isa,
        arguments=arguments,
        kernarg_bytes=kernarg_bytes,
        grid=key.grid,
        block=key.block,
        resources=read_resources(isa),
        compile_seconds=time.perf_counter() - started,
        binary=module,
    )


def build_all(
    keys: Sequence[BuildKey],
    *,
    binary: bool = False,
    cache_dir: Path | None = None,
    processes: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> list[Artifact]:
    """Build many keys, the missing ones in parallel processes (default: one a core); order as given."""
    unique = list(dict.fromkeys(keys))
    folder = cache_dir or default_cache_dir()
    missing = [k for k in unique if not cache_entry(k, binary=binary, folder=folder).exists()]
    count = min(len(missing), processes or build_pool.cores(), MOST_PROCESSES)
    if any(type(key).__module__ == "__main__" for key in missing):
        count = 1  # another process cannot import them
    if count > 1:
        # the widest first: the last to be taken is a short one
        missing.sort(key=lambda key: getattr(key, "width", 0), reverse=True)
        done = build_pool.build_parallel(missing, count, binary=binary, folder=folder)
        for number, key in enumerate(done, 1):
            if progress:
                progress(f"built {number}/{len(missing)}: {key.name}")
    artifacts = {}
    for key in unique:
        artifacts[key] = build(key, binary=binary, cache_dir=folder)
        if progress and count <= 1 and key in missing:
            progress(f"built {key.name}")
    return [artifacts[k] for k in keys]


def refuse_resources(artifact: Artifact) -> None:
    """Raise ``BuildError`` when the kernel's resources exceed what one resident workgroup a CU may use."""
    found = artifact.resources.refusals()
    if found:
        raise BuildError(
            f"{artifact.name} must not run: {'; '.join(found)}; fix: fewer values in flight in the stage that needs "
            f"them (see the ISA), or a smaller width"
        )


def resource_table(artifacts: Sequence[Artifact]) -> str:
    """One line a kernel: registers, spills, LDS, scratch, instructions, compile time."""
    head = (
        f"{'kernel':<56} {'VGPR':>4} {'AGPR':>4} {'SGPR':>4} {'vspill':>6} {'sspill':>6} {'LDS':>7} {'scratch':>7} "
        f"{'instr':>6} {'s':>5}"
    )
    lines = [head]
    for a in artifacts:
        r = a.resources
        lines.append(
            f"{a.name:<56} {r.vgprs:>4} {r.agprs:>4} {r.sgprs:>4} {r.vgpr_spills:>6} {r.sgpr_spills:>6} "
            f"{r.lds_bytes:>7} {r.scratch_bytes:>7} {r.instructions:>6} {a.compile_seconds:>5.1f}"
        )
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------
# ISA metadata
# ---------------------------------------------------------------------------------------------------------------


def _metadata(isa: str) -> str:
    match = re.search(r"^\s*\.amdgpu_metadata\n(.*?)^\s*\.end_amdgpu_metadata", isa, re.M | re.S)
    if not match:
        raise BuildError("the ISA text carries no .amdgpu_metadata; needed: the output of gpu-module-to-binary")
    return match.group(1)


def _field(metadata: str, name: str) -> int:
    match = re.search(rf"\.{name}:\s+(\d+)", metadata)
    if not match:
        raise BuildError(f"the kernel's metadata lacks .{name}")
    return int(match.group(1))


def read_resources(isa: str) -> Resources:
    """Resources of the one kernel in ``isa``."""
    metadata = _metadata(isa)
    return Resources(
        vgprs=_field(metadata, "vgpr_count"),
        agprs=_field(metadata, "agpr_count"),
        sgprs=_field(metadata, "sgpr_count"),
        vgpr_spills=_field(metadata, "vgpr_spill_count"),
        sgpr_spills=_field(metadata, "sgpr_spill_count"),
        lds_bytes=_field(metadata, "group_segment_fixed_size"),
        scratch_bytes=_field(metadata, "private_segment_fixed_size"),
        instructions=len(instruction_lines(isa)),
    )


_INSTRUCTION = re.compile(r"^\s*((?:s|v|ds|global|buffer|flat|scratch)_[a-z0-9_]+)(\s|$)")


def instruction_lines(isa: str) -> list[str]:
    """The instructions of the ISA text, in order, stripped."""
    return [line.strip() for line in isa.splitlines() if _INSTRUCTION.match(line)]


def checked_arguments(name: str, abi: Abi, isa: str) -> tuple[tuple[Argument, ...], int]:
    """Argument block of ``isa`` matched against ``abi``; raises ``BuildError`` where they differ."""
    metadata = _metadata(isa)
    found = re.findall(r"\.offset:\s+(\d+)\s+\.size:\s+(\d+)\s+\.value_kind:\s+(\w+)", metadata)
    explicit = [(int(o), int(s)) for o, s, kind in found if not kind.startswith("hidden_")]
    if len(explicit) != len(found):
        hidden = [kind for _, _, kind in found if kind.startswith("hidden_")]
        raise BuildError(f"{name}: the kernel asks for hidden arguments {hidden}; pass such values as arguments")
    if len(explicit) != len(abi):
        raise BuildError(f"{name}: the ABI has {len(abi)} arguments, the emitted kernel {len(explicit)}")
    arguments = []
    for (arg_name, arg_type), (offset, size) in zip(abi, explicit, strict=True):
        if ARGUMENT_BYTES[arg_type] != size:
            raise BuildError(f"{name}: argument '{arg_name}' is {arg_type} in the ABI, {size} bytes in the kernel")
        arguments.append(Argument(arg_name, arg_type, offset, size))
    return tuple(arguments), _field(metadata, "kernarg_segment_size")


# ---------------------------------------------------------------------------------------------------------------
# Cache
# ---------------------------------------------------------------------------------------------------------------


def cache_root() -> Path:
    """``$SGLANG_AMD_MONO_CACHE_DIR``, else ``$XDG_CACHE_HOME/sgl_amd_mono`` or ``~/.cache/sgl_amd_mono``."""
    named = os.environ.get(CACHE_ENV)
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "sgl_amd_mono"


def default_cache_dir() -> Path:
    """Folder of built kernels: ``kernels`` below ``cache_root()``."""
    return cache_root() / "kernels"


def cache_key(key: BuildKey) -> str:
    """SHA-256 over the key, the sources it can reach and the target; FlyDSL's version stands beside it in the name."""
    digest = hashlib.sha256()
    options = [f"{name}={os.environ.get(name, '')}" for name in CODE_ENVIRONMENT]
    for part in (str(CACHE_FORMAT), TARGET, *options, key.digest(), sources_digest(type(key).__module__)):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def cache_entry(key: BuildKey, *, binary: bool = False, folder: Path | None = None) -> Path:
    """File of ``key`` in the cache, there or not.

    Kernels built ahead of time serve a machine without FlyDSL: there, an entry of any FlyDSL version counts.
    """
    folder = folder or default_cache_dir()
    start, end = f"{key.name}-{cache_key(key)[:24]}-flydsl", f"{'-bin' if binary else ''}.json"
    version = installed()
    if version is None:
        pattern = re.compile(re.escape(start) + r"[\w.+]+" + re.escape(end))
        found = sorted(p for p in folder.glob(f"{start}*{end}") if pattern.fullmatch(p.name))
        if found:
            return found[-1]
    return folder / f"{start}{version or '-none'}{end}"


def source_files(module_name: str) -> list[Path]:
    """Every file that the code of ``module_name`` can reach by import statements, wherever in a module they stand.

    Followed are imports from this package and from the module's own top-level package.
    """
    followed = {__name__.split(".")[0], module_name.split(".")[0]}
    waiting, seen, files = [module_name, __name__], set(), set()
    while waiting:
        name = waiting.pop()
        if name in seen or name.split(".")[0] not in followed:
            continue
        seen.add(name)
        path = _module_file(name)
        if path is None:
            continue
        files.add(path)
        waiting.extend(_imports(str(path), path.stat().st_mtime_ns, name, path.name == "__init__.py"))
        if "." in name:
            waiting.append(name.rpartition(".")[0])
    return sorted(files)


def _module_file(name: str) -> Path | None:
    """Source file of a module, None where there is none (a name that is no module). Imports nothing."""
    loaded = getattr(sys.modules.get(name), "__file__", None)
    if loaded:
        return Path(loaded)
    top, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # a module without a spec, such as __main__
        return None
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return None
    path = Path(spec.origin)
    for part in rest:
        if path.name != "__init__.py":
            return None
        package, module = path.parent / part / "__init__.py", path.parent / f"{part}.py"
        path = package if package.exists() else module
        if not path.exists():
            return None
    return path


@functools.lru_cache(maxsize=256)
def _imports(path: str, mtime_ns: int, name: str, is_package: bool) -> tuple[str, ...]:
    """Module names that the file's import statements can mean (``from a import b``: ``a`` and ``a.b``)."""
    found = []
    for node in ast.walk(ast.parse(Path(path).read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = name.split(".")
                parts = parts[: len(parts) - node.level + is_package]
                base = ".".join([*parts, *([base] if base else [])])
            found += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return tuple(found)


@functools.lru_cache(maxsize=64)
def _file_digest(path: str, mtime_ns: int, size: int) -> bytes:
    return hashlib.sha256(Path(path).read_bytes()).digest()


def sources_digest(module_name: str) -> str:
    """SHA-256 over names and contents of ``source_files``."""
    digest = hashlib.sha256()
    for path in source_files(module_name):
        status = path.stat()
        digest.update(path.name.encode() + b"\0" + _file_digest(str(path), status.st_mtime_ns, status.st_size))
    return digest.hexdigest()


def _load(entry: Path) -> Artifact | None:
    """Artifact of a cache entry, or None where there is none or it cannot be read."""
    try:
        data = json.loads(entry.read_text())
        data["arguments"] = tuple(Argument(**a) for a in data["arguments"])
        data["resources"] = Resources(**data["resources"])
        return Artifact(**data)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, OSError):
        with contextlib.suppress(OSError):
            entry.unlink()
        return None


def _write(entry: Path, artifact: Artifact) -> None:
    """Write an entry by atomic rename."""
    handle, temporary = tempfile.mkstemp(dir=entry.parent, prefix=".building-", suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(dataclasses.asdict(artifact), file)
        os.replace(temporary, entry)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


@contextlib.contextmanager
def _locked(path: Path, limit_s: float = LOCK_LIMIT_S) -> Iterator[None]:
    """Exclusive file lock; the system drops it when its holder dies. ``BuildError`` when it stays held for
    ``limit_s`` seconds."""
    end = time.monotonic() + limit_s
    with open(path, "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise BuildError(
                        f"another process has been building for {limit_s:g} s and holds {path}; needed: that it ends; "
                        f"fix: look for a stopped process (fuser {path}), or set {CACHE_ENV} to another folder"
                    ) from None
                time.sleep(LOCK_POLL_S)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


@contextlib.contextmanager
def _named_folder(folder: Path) -> Iterator[None]:
    """Turn the system's refusal to write the cache into a ``BuildError`` that names folder and fix."""
    try:
        yield
    except (PermissionError, FileExistsError, FileNotFoundError, NotADirectoryError) as error:
        raise BuildError(
            f"the kernel cache {folder} cannot be written ({error.strerror}); needed: a writable folder; "
            f"fix: set {CACHE_ENV} to one"
        ) from error
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.ENOSPC):
            raise
        raise BuildError(
            f"the kernel cache {folder} cannot be written ({error.strerror}); needed: a writable folder with room; "
            f"fix: set {CACHE_ENV} to one"
        ) from error
