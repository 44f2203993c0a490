# SPDX-License-Identifier: Apache-2.0
"""The only module that touches names of FlyDSL that its ``docs/api_stability.md`` does not promise.

Two groups live here: raw builders (LLVM, SCF and GPU operations of ``flydsl._mlir``) that ``device.py`` turns into
the kernels' vocabulary, and the compile driver (trace, lower, emit ISA text or a loadable binary) that ``build.py``
calls. When FlyDSL moves, this file is the one to read.

Kernel bodies are plain Python that runs once, while the kernel is traced: no AST is rewritten, control flow is
written with the functions below (``if_``, ``for_range``, ``loop_while``).
"""

from __future__ import annotations

import ctypes
import operator
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import flydsl.expr as fx
from flydsl._mlir import ir
from flydsl._mlir.dialects import arith, gpu, llvm, scf
from flydsl._mlir.dialects import func as func_dialect
from flydsl._mlir.passmanager import PassManager
from flydsl.compiler.backends import get_backend
from flydsl.compiler.jit_executor import CompiledArtifact, build_abi_storage
from flydsl.compiler.jit_function import _create_mlir_context
from flydsl.compiler.kernel_function import (
    CompilationContext,
    KernelFunction,
    create_gpu_func,
    create_gpu_module,
    get_gpu_module_body,
)
from flydsl.expr.meta import tracing_context

from sgl_amd_mono.common.flydsl_version import flydsl_reasons

TARGET = "gfx950"  # named in every call: a build does not depend on the machine's GPU or environment

# ---------------------------------------------------------------------------------------------------------------
# Values
# ---------------------------------------------------------------------------------------------------------------


def raw(value: Any) -> ir.Value:
    """The MLIR value under a FlyDSL value (or a Python literal)."""
    return fx.as_ir_value(value)


def vector_type(element: Any, lanes: int) -> ir.Type:
    """``vector<lanes x element>``; ``element`` is a FlyDSL numeric class."""
    return ir.VectorType.get([lanes], element.ir_type)


def wrap(value: ir.Value, like: Any) -> Any:
    """Wrap a raw value as ``like``: a numeric class, or a ``(numeric class, lanes)`` pair for a vector."""
    if isinstance(like, tuple):
        return fx.Vector(value, dtype=like[0])
    return like(value)


def type_of(like: Any) -> ir.Type:
    """MLIR type of ``like`` (see ``wrap``)."""
    return vector_type(*like) if isinstance(like, tuple) else like.ir_type


def kind_of(value: Any) -> Any:
    """The ``like`` of an existing FlyDSL value."""
    if isinstance(value, fx.Vector):
        return (value.dtype, value.numel)
    return type(value)


def poison(like: Any) -> Any:
    """A value nobody may read: the initial content of a loop-carried register."""
    return wrap(llvm.PoisonOp(type_of(like)).result, like)


def intrinsic(name: str, like: Any, args: Sequence[Any]) -> Any:
    """Call an LLVM intrinsic; ``like`` is its result (``None``: void)."""
    result = llvm.call_intrinsic(None if like is None else type_of(like), name, [raw(a) for a in args], [], [])
    return None if like is None else wrap(result, like)


def intrinsic_pair(name: str, args: Sequence[Any]) -> tuple[Any, Any]:
    """Call an LLVM intrinsic that returns ``{i32, i32}``."""
    pair = llvm.call_intrinsic(ir.Type.parse("!llvm.struct<(i32, i32)>"), name, [raw(a) for a in args], [], [])
    i32 = fx.Int32.ir_type
    return fx.Int32(llvm.ExtractValueOp(i32, pair, [0]).result), fx.Int32(llvm.ExtractValueOp(i32, pair, [1]).result)


def inline_asm(text: str, constraints: str, like: Any = None, args: Sequence[Any] = ()) -> Any:
    """Inline assembly with side effects."""
    result = llvm.inline_asm(
        None if like is None else type_of(like), [raw(a) for a in args], text, constraints, has_side_effects=True
    )
    return None if like is None else wrap(result, like)


def bitcast(value: Any, like: Any) -> Any:
    """Reinterpret the bits of ``value`` as ``like``."""
    source = raw(value)
    target = type_of(like)
    if source.type == target:
        return wrap(source, like)
    return wrap(llvm.BitcastOp(target, source).result, like)


def zext(value: Any, like: Any) -> Any:
    """Zero-extend an integer."""
    return wrap(arith.ExtUIOp(type_of(like), raw(value)).result, like)


def trunc(value: Any, like: Any) -> Any:
    """Keep the low bits of an integer."""
    return wrap(arith.TruncIOp(type_of(like), raw(value)).result, like)


def compare(predicate: str, a: Any, b: Any) -> Any:
    """Integer comparison by MLIR predicate name (``eq ne slt ult ...``) -> ``Boolean``."""
    return fx.Boolean(arith.CmpIOp(getattr(arith.CmpIPredicate, predicate), raw(a), raw(b)).result)


def select(condition: Any, a: Any, b: Any) -> Any:
    """``a`` where ``condition`` holds, else ``b`` (same type)."""
    return wrap(arith.SelectOp(raw(condition), raw(a), raw(b)).result, kind_of(a))


def shift_right_logical(value: Any, amount: Any) -> Any:
    """Unsigned shift right."""
    return wrap(arith.ShRUIOp(raw(value), raw(amount)).result, kind_of(value))


def unsigned_quotient(value: Any, divisor: Any) -> Any:
    """Unsigned integer division."""
    return wrap(arith.DivUIOp(raw(value), raw(divisor)).result, kind_of(value))


def convert(value: Any, like: Any) -> Any:
    """Round a wider float (or float vector) to ``like``, nearest even."""
    return wrap(arith.TruncFOp(type_of(like), raw(value)).result, like)


def vector_from(elements: Sequence[Any]) -> Any:
    """Vector from scalars of one type."""
    return fx.Vector.from_elements(list(elements), type(elements[0]))


def vector_element(vector: Any, index: int) -> Any:
    """Element ``index`` (a Python int) of a vector."""
    position = arith.ConstantOp(ir.IntegerType.get_signless(32), index).result
    return vector.dtype(llvm.ExtractElementOp(raw(vector), position).result)


# ---------------------------------------------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------------------------------------------

GLOBAL_SPACE = 1
LDS_SPACE = 3
BUFFER_SPACE = 8

_ORDERING = llvm.AtomicOrdering


def kernel_arguments() -> fx.Int64:
    """Address of the kernel's argument block."""
    pointer = llvm.call_intrinsic(ir.Type.parse("!llvm.ptr<4>"), "llvm.amdgcn.kernarg.segment.ptr", [], [], [])
    return fx.Int64(llvm.PtrToIntOp(fx.Int64.ir_type, pointer).result)


def _pointer_type(space: int) -> ir.Type:
    return ir.Type.parse(f"!llvm.ptr<{space}>")


def pointer(address: Any, space: int = GLOBAL_SPACE) -> ir.Value:
    """``!llvm.ptr`` from an integer address."""
    return llvm.IntToPtrOp(_pointer_type(space), raw(address)).result


_DYNAMIC = -(2**31)  # marks a run-time index in llvm.getelementptr


def offset_pointer(base: ir.Value, byte_offset: Any) -> ir.Value:
    """``base + byte_offset``; an ``Int32`` offset is taken as unsigned, so that it folds into the address register."""
    if isinstance(byte_offset, int):
        if byte_offset == 0:
            return base
        return llvm.GEPOp(base.type, base, [], [byte_offset], ir.IntegerType.get_signless(8), 0).result
    offset = raw(byte_offset)
    i64 = ir.IntegerType.get_signless(64)
    is_lds = str(base.type).endswith(f"<{LDS_SPACE}>")
    if not is_lds and offset.type != i64:
        offset = arith.ExtUIOp(i64, offset).result
    return llvm.GEPOp(base.type, base, [offset], [_DYNAMIC], ir.IntegerType.get_signless(8), 0).result


def load(
    ptr: ir.Value,
    like: Any,
    *,
    align: int,
    scope: str | None = None,
    nontemporal: bool = False,
    invariant: bool = False,
) -> Any:
    """Load ``like`` from a pointer; with ``scope`` a relaxed atomic (``""`` = system)."""
    if scope is None:
        op = llvm.LoadOp(type_of(like), ptr, alignment=align, nontemporal=nontemporal, invariant=invariant)
    else:
        op = llvm.LoadOp(type_of(like), ptr, alignment=align, ordering=_ORDERING.monotonic, syncscope=scope or None)
    return wrap(op.result, like)


def store(
    value: Any,
    ptr: ir.Value,
    *,
    align: int,
    scope: str | None = None,
    volatile: bool = False,
    nontemporal: bool = False,
) -> None:
    """Store to a pointer; with ``scope`` a relaxed atomic (``""`` = system)."""
    if scope is None:
        llvm.StoreOp(raw(value), ptr, alignment=align, volatile_=volatile, nontemporal=nontemporal)
    else:
        llvm.StoreOp(raw(value), ptr, alignment=align, ordering=_ORDERING.monotonic, syncscope=scope or None)


def compare_exchange(ptr: ir.Value, expected: Any, value: Any, *, align: int, scope: str) -> Any:
    """Relaxed compare-and-swap; returns the value found before it."""
    kind = kind_of(value)
    op = llvm.AtomicCmpXchgOp(
        ptr,
        raw(expected),
        raw(value),
        _ORDERING.monotonic,
        _ORDERING.monotonic,
        syncscope=scope or None,
        alignment=align,
    )
    return wrap(llvm.ExtractValueOp(type_of(kind), op.results[0], [0]).result, kind)


def fence(ordering: str, scope: str) -> None:
    """Memory fence (``acquire``, ``release``, ``acq_rel``) at an LLVM scope."""
    llvm.FenceOp(getattr(_ORDERING, ordering), syncscope=scope or None)


def make_buffer(base: Any, num_bytes: Any, flags: int) -> ir.Value:
    """Raw buffer descriptor (``ptr addrspace(8)``) over ``num_bytes`` at a wave-uniform base address."""
    i16 = ir.IntegerType.get_signless(16)
    i64 = ir.IntegerType.get_signless(64)
    count = raw(num_bytes)
    if count.type != i64:
        count = arith.ExtUIOp(i64, count).result
    zero = arith.ConstantOp(i16, 0).result
    args = [pointer(base), zero, count, raw(fx.Int32(flags))]
    return llvm.call_intrinsic(_pointer_type(BUFFER_SPACE), "llvm.amdgcn.make.buffer.rsrc", args, [], [])


def lds_allocate(num_bytes: int, align: int) -> ir.Value:
    """One static LDS block of the kernel being traced, through FlyDSL's ``SharedAllocator``."""
    storage = fx.SharedAllocator(static=True).allocate(num_bytes, align)
    return fx.to_llvm_ptr(storage._ptr)


# ---------------------------------------------------------------------------------------------------------------
# Structured control flow
# ---------------------------------------------------------------------------------------------------------------


@contextmanager
def if_(condition: Any) -> Iterator[None]:
    """``with if_(cond):`` runs its body where ``cond`` holds; the body yields no value."""
    op = scf.IfOp(raw(condition))
    with ir.InsertionPoint(op.then_block):
        yield
        scf.YieldOp([])


def if_else(
    condition: Any, then: Callable[[], Sequence[Any]], otherwise: Callable[[], Sequence[Any]], like: Sequence[Any]
) -> list[Any]:
    """Values of the branch taken; ``like`` names their types (see ``wrap``)."""
    op = scf.IfOp(raw(condition), [type_of(k) for k in like], has_else=True)
    with ir.InsertionPoint(op.then_block):
        scf.YieldOp([raw(v) for v in then()])
    with ir.InsertionPoint(op.else_block):
        scf.YieldOp([raw(v) for v in otherwise()])
    return [wrap(r, k) for r, k in zip(op.results, like, strict=True)]


def for_range(
    start: Any, stop: Any, step: Any, init: Sequence[Any], body: Callable[..., Sequence[Any] | None]
) -> list[Any]:
    """``for i in range(start, stop, step)`` over ``Int32``; ``body(i, *carried)`` returns the next carried values."""
    kinds = [kind_of(v) for v in init]
    op = scf.ForOp(raw(fx.Int32(start)), raw(fx.Int32(stop)), raw(fx.Int32(step)), [raw(v) for v in init])
    with ir.InsertionPoint(op.body):
        carried = [wrap(a, k) for a, k in zip(op.inner_iter_args, kinds, strict=True)]
        out = body(fx.Int32(op.induction_variable), *carried)
        scf.YieldOp([raw(v) for v in (out or [])])
    return [wrap(r, k) for r, k in zip(op.results, kinds, strict=True)]


def loop_while(init: Sequence[Any], body: Callable[..., tuple[Any, Sequence[Any]]]) -> list[Any]:
    """Do-while: ``body(*carried)`` returns (again, next carried); leaves when ``again`` is false in a lane."""
    kinds = [kind_of(v) for v in init]
    types = [type_of(k) for k in kinds]
    op = scf.WhileOp(types, [raw(v) for v in init])
    before = op.before.blocks.append(*types)
    after = op.after.blocks.append(*types)
    with ir.InsertionPoint(before):
        again, out = body(*[wrap(a, k) for a, k in zip(before.arguments, kinds, strict=True)])
        scf.ConditionOp(raw(again), [raw(v) for v in out])
    with ir.InsertionPoint(after):
        scf.YieldOp(list(after.arguments))
    return [wrap(r, k) for r, k in zip(op.results, kinds, strict=True)]


def barrier() -> None:
    """``s_barrier`` with the LDS wait in front; it does not wait for global stores."""
    gpu.barrier()


# ---------------------------------------------------------------------------------------------------------------
# Compile driver
# ---------------------------------------------------------------------------------------------------------------

_TYPES = {"ptr": lambda: fx.Int64, "i64": lambda: fx.Int64, "i32": lambda: fx.Int32}
_compile_lock = threading.Lock()


class _TracedKernel:
    """Stands where FlyDSL expects its ``KernelFunction`` while a body is traced; ``SharedAllocator`` registers here."""

    def __init__(self) -> None:
        self._allocated = False

    def register_shared_allocator(self, allocator: Any) -> None:
        """Called by ``SharedAllocator``; one a kernel."""
        if self._allocated:
            raise RuntimeError("one Lds a kernel: a second one would not share its bytes; take regions of the first")
        self._allocated = True


def _trace(body: Callable[..., None], name: str, abi: Sequence[tuple[str, str]], grid: int, block: int) -> ir.Module:
    """Module with the kernel ``name`` and a host function ``launch_<name>`` that launches it on a stream."""
    module = ir.Module.create()
    module.operation.attributes["gpu.container_module"] = ir.UnitAttr.get()
    backend = get_backend("rocm", arch=TARGET)
    arg_types = [_TYPES[t]().ir_type for _, t in abi]
    with ir.InsertionPoint(module.body):
        gpu_module = create_gpu_module("kernels", targets=backend.gpu_module_targets())
        with CompilationContext.create() as context:
            context.gpu_module_op = gpu_module
            context.gpu_module_body = get_gpu_module_body(gpu_module)
            previous = KernelFunction._current
            KernelFunction._current = _TracedKernel()
            try:
                with ir.InsertionPoint(context.gpu_module_body):
                    kernel = create_gpu_func(
                        name, ir.TypeAttr.get(ir.FunctionType.get(arg_types, [])), known_block_size=[block, 1, 1]
                    )
                kernel.regions[0].blocks.append(*arg_types)
                entry = kernel.regions[0].blocks[0]
                with ir.InsertionPoint(entry), tracing_context(body, known_block_size=(block, 1, 1)):
                    body(**{n: _TYPES[t]()(a) for a, (n, t) in zip(entry.arguments, abi, strict=True)})
                    gpu.ReturnOp([])
            finally:
                KernelFunction._current = previous
        stream_type = gpu.AsyncTokenType.get()
        host = func_dialect.FuncOp(f"launch_{name}", ([*arg_types, stream_type], []))
        host.attributes["llvm.emit_c_interface"] = ir.UnitAttr.get()
        with ir.InsertionPoint(host.add_entry_block()):
            *kernel_args, stream = host.regions[0].blocks[0].arguments
            one = raw(fx.Index(1))
            gpu.LaunchFuncOp(
                ["kernels", name],
                (raw(fx.Index(grid)), one, one),
                (raw(fx.Index(block)), one, one),
                list(kernel_args),
                async_dependencies=[stream],
                dynamic_shared_memory_size=None,
            )
            func_dialect.ReturnOp([])
    module.operation.verify()
    # Printing and parsing again normalises attributes that the builders leave in two places.
    return ir.Module.parse(module.operation.get_asm(enable_debug_info=False))


def _lowered(
    body: Callable[..., None], name: str, abi: Sequence[tuple[str, str]], grid: int, block: int, hints: dict[str, Any]
) -> tuple[ir.Module, str]:
    module = _trace(body, name, abi, grid, block)
    backend = get_backend("rocm", arch=TARGET)
    backend.lower_compile_hints(module, compile_hints=hints)
    passes, binary_pass = backend.external_binary_pipeline_fragments(compile_hints=hints)
    PassManager.parse(f"builtin.module({','.join(passes)})").run(module.operation)
    return module, binary_pass


def _isa_text(module: ir.Module, binary_pass: str) -> str:
    """ISA text of a lowered module, by the pass that makes the code object; needs no linker."""
    isa_pass = binary_pass.replace("format=fatbin", "format=isa")
    if isa_pass == binary_pass:
        raise RuntimeError(f"FlyDSL's binary pass has another form: {binary_pass}")
    copy = ir.Module.parse(module.operation.get_asm())
    PassManager.parse(f"builtin.module({isa_pass})").run(copy.operation)
    for op in copy.body.operations:
        if op.operation.name == "gpu.binary":
            return _unescape(str(op.operation.attributes["objects"]))
    raise RuntimeError("FlyDSL's gpu-module-to-binary left no gpu.binary operation")


def _unescape(text: str) -> str:
    """The text inside ``assembly = "..."`` of an MLIR attribute."""
    start = text.index('assembly = "') + len('assembly = "')
    out: list[str] = []
    i = start
    while text[i] != '"':
        if text[i] == "\\":
            if text[i + 1] in '\\"':
                out.append(text[i + 1])
                i += 2
            else:
                out.append(chr(int(text[i + 1 : i + 3], 16)))
                i += 3
        else:
            out.append(text[i])
            i += 1
    return "".join(out)


def compile_kernel(
    body: Callable[..., None],
    name: str,
    abi: Sequence[tuple[str, str]],
    grid: int,
    block: int,
    *,
    hints: dict[str, Any] | None = None,
    binary: bool = False,
) -> tuple[str, str | None]:
    """Trace and lower ``body`` for gfx950.

    ``abi``: ordered (name, type) with type ``ptr``, ``i64`` or ``i32``; the body is called with these as keywords.
    Returns (ISA text, module text with the linked code object or ``None``); only ``binary=True`` needs ``ld.lld``.
    """
    reasons = flydsl_reasons()
    if reasons:
        raise RuntimeError("; ".join(reasons))
    with _compile_lock, _create_mlir_context() as context, ir.Location.unknown(context):
        module, binary_pass = _lowered(body, name, abi, grid, block, hints or {})
        isa = _isa_text(module, binary_pass)
        if not binary:
            return isa, None
        try:
            PassManager.parse(f"builtin.module({binary_pass})").run(module.operation)
        except Exception as error:  # MLIR reports the linker's absence with the whole module behind it
            raise RuntimeError(
                f"{name}: the code object could not be linked ({str(error).splitlines()[0]}); needed: ld.lld in "
                f"$ROCM_PATH/llvm/bin (ROCM_PATH is {os.environ.get('ROCM_PATH', 'not set')}); fix: use ROCm's image, "
                f"or set ROCM_PATH"
            ) from error
        return isa, str(module)


class HipLauncher:
    """A compiled kernel on the GPU, run by FlyDSL's own executor."""

    def __init__(
        self,
        module_text: str,
        name: str,
        abi: Sequence[tuple[str, str]],
        run: Callable[[Any], None] | None = None,
    ) -> None:
        if run is None:
            self._artifact = CompiledArtifact.__new__(CompiledArtifact)
            self._artifact.__setstate__({"ir_text": module_text, "entry": f"launch_{name}", "source_ir": None})
            run = self._artifact._get_func_exe()
        self._run = run
        self._ctypes = [ctypes.c_int32 if t == "i32" else ctypes.c_int64 for _, t in abi]

    def __call__(self, values: Sequence[int], stream: int) -> None:
        """Launch on a raw stream handle; ``values`` in ABI order."""
        storages, packed = build_abi_storage([*self._ctypes, ctypes.c_void_p])
        for storage, value in zip(storages, [*values, stream], strict=True):
            storage.value = value
        self._run(packed)

    def prepare(self, args: list[Any], stream: ctypes.c_void_p) -> Callable[[], None]:
        """A launch with what ``args`` (ABI order, tensors and ints) and ``stream`` hold when it is called.

        The tensors' addresses are read at each call, in C: such a launch makes no Python call but its own.
        """
        tensors = [place for place, value in enumerate(args) if hasattr(value, "data_ptr")]
        numbers = [place for place in range(len(args)) if place not in tensors]
        values = (ctypes.c_int64 * len(args))()  # an i32 is the lower half of its word
        packed = (ctypes.c_void_p * (len(args) + 1))()
        for slot, place in enumerate([*tensors, *numbers]):
            packed[place] = ctypes.addressof(values) + slot * ctypes.sizeof(ctypes.c_int64)
        packed[len(args)] = ctypes.addressof(stream)
        run, count = self._run, len(tensors)
        tensors_of, numbers_of, address = _picker(tensors), _picker(numbers), operator.methodcaller("data_ptr")

        def launch() -> None:
            values[:count] = list(map(address, tensors_of(args)))
            values[count:] = numbers_of(args)
            run(packed)

        return launch


def _picker(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function that takes the values at these places of a sequence."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda values: tuple(values[place] for place in places)
