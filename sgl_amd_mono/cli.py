# SPDX-License-Identifier: Apache-2.0
"""The command ``sgl-amd-mono``: doctor, compile, simulate, cost."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

MEMORY_MODELS = ("consistent", "adversarial")
STOCK = ("triton", "torch")
MOE = ("auto", "amd", "torch")
GEOMETRIES = ("qwen38-a95b", "small")
COST_LAUNCHES = ("k1", "k2", "k2k1")
PROJECTIONS = ("in_proj_qkvz", "in_proj_ba", "out_proj", "o_proj")  # that may be MXFP4 instead of bf16
MODEL_ALIASES = {"qwen38-a95b": "qwen38_a95b_mxfp4"}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="sgl-amd-mono", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    doctor = commands.add_parser("doctor", help="check this machine: what was found, what is needed, which fix")
    doctor.add_argument("--json", action="store_true", help="print the checks as JSON")
    doctor.set_defaults(run=_doctor)

    compile_ = commands.add_parser("compile", help="build a model's kernels for gfx950 and print their resources")
    compile_.add_argument("model", nargs="?", default="qwen38_a95b_mxfp4", help="the model's folder name")
    compile_.add_argument("--geometry", choices=GEOMETRIES, default=GEOMETRIES[0], help="sizes to build for")
    compile_.add_argument("--tp", type=int, help="tensor-parallel size (default: 8, or 1 with --geometry small)")
    compile_.add_argument("--widths", type=_numbers, default=tuple(range(1, 9)), help="rows of a step, e.g. 1,2,8")
    compile_.add_argument("--state-dtype", choices=("float32", "bfloat16"), default="float32", help="SSM state")
    _add_forms(compile_)
    compile_.add_argument("--one-hop", action="store_true", help="K1 as SGLANG_AMD_MONO_ONE_HOP=1 runs it")
    compile_.add_argument("--jobs", type=_positive, help="processes (default: one a core)")
    compile_.add_argument(
        "--link", choices=("auto", "yes", "no"), default="auto", help="link code objects for a GPU (needs ld.lld)"
    )
    compile_.add_argument("--json", action="store_true", help="print the table as JSON")
    compile_.set_defaults(run=_compile)

    simulate = commands.add_parser(
        "simulate", help="decode with SGLang's own model, plugin off and on, on the simulator"
    )
    simulate.add_argument("model", nargs="?", default="qwen38_a95b_mxfp4", help="the model's folder name")
    simulate.add_argument(
        "--rows",
        type=_rows,
        default=((1, 1), (3, 4), (8, 8)),
        help="requests of each batch, e.g. 1,3:4,8; a:b pads the steps of a requests to b rows, as a graph would",
    )
    simulate.add_argument("--steps", type=_positive, default=3, help="decode steps of each batch")
    simulate.add_argument("--ranks", type=int, choices=(1, 2), default=1, help="tensor-parallel ranks, a process each")
    simulate.add_argument("--memory-model", choices=MEMORY_MODELS, default=MEMORY_MODELS[0])
    simulate.add_argument("--seed", type=int, default=0, help="seed of weights, prompts and the simulator")
    simulate.add_argument(
        "--stock",
        choices=STOCK,
        default=STOCK[0],
        help="SGLang's Triton kernels: their gfx950 code on the simulator, or PyTorch in their place",
    )
    simulate.add_argument(
        "--moe",
        choices=MOE,
        default=MOE[0],
        help="AITER's fused MoE: AMD's code object (needs its wheel and llvm-objdump), a stand-in, or what can run",
    )
    simulate.add_argument("--keep", type=Path, metavar="FOLDER", help="keep checkpoint, results and logs there")
    simulate.add_argument("--json", action="store_true", help="print the result as JSON")
    simulate.add_argument(
        "--explain", action="store_true", help="say what stands in for a GPU in SGLang, and run nothing"
    )
    simulate.set_defaults(run=_simulate)

    cost = commands.add_parser(
        "cost", help="bytes, hops and instructions of each launch, from the simulator, and modelled times"
    )
    cost.add_argument("model", nargs="?", default="qwen38_a95b_mxfp4", help="the model's folder name, or qwen38-a95b")
    cost.add_argument("--geometry", choices=GEOMETRIES, default=GEOMETRIES[0], help="sizes to run at")
    cost.add_argument("--tp", type=int, help="tensor-parallel size (default: 8, or 2 with --geometry small)")
    cost.add_argument("--widths", type=_numbers, default=tuple(range(1, 9)), help="rows of a step, e.g. 1,2,8")
    cost.add_argument(
        "--launch",
        type=_launches,
        default=COST_LAUNCHES,
        help="k1, k2, k2k1 (K2 and the next K1 as one launch), comma-separated; all by default",
    )
    _add_forms(cost)
    cost.add_argument("--one-hop", action="store_true", help="beside it the pair in which K2 does K1's gated norm")
    cost.add_argument("--seed", type=int, default=0, help="seed of inputs, routes and the simulator's schedule")
    cost.add_argument(
        "--probe", type=Path, metavar="FILE", help="JSON with a node's own figures for the overlap model's assumptions"
    )
    cost.add_argument(
        "--host",
        action="store_true",
        help="instead: host cost of a decode step, beside SGLang's own layers",
    )
    cost.add_argument("--picture", type=_svg_file, metavar="FILE.svg", help="write the modelled time line as SVG")
    cost.add_argument("--json", action="store_true", help="print counts, models and targets as JSON")
    cost.set_defaults(run=_cost)

    parsed = parser.parse_args(arguments)
    return parsed.run(parsed)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}; needed: a positive number")
    return int(text)


def _projections(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if any(name not in PROJECTIONS for name in names):
        raise argparse.ArgumentTypeError(f"found {text!r}; needed: {' or '.join(PROJECTIONS)}, comma-separated")
    return names


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))


def _launches(text: str) -> tuple[str, ...]:
    asked = tuple(text.split(","))
    if any(name not in COST_LAUNCHES for name in asked):
        raise argparse.ArgumentTypeError(f"found {text!r}; needed: {', '.join(COST_LAUNCHES)}, comma-separated")
    return asked


def _add_forms(command: argparse.ArgumentParser) -> None:
    """The options that name what form of the weights the kernels take."""
    command.add_argument(
        "--mxfp4",
        type=_projections,
        default=(),
        metavar="NAMES",
        help=f"projections whose weights are MXFP4: {', '.join(PROJECTIONS)}, comma-separated",
    )
    command.add_argument("--fused-shared", action="store_true", help="K2 with the shared expert fused into the routed")


def _svg_file(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() != ".svg":
        raise argparse.ArgumentTypeError(f"found {text!r}; needed: a name that ends in .svg, which is what is written")
    return path


def _rows(text: str) -> tuple[tuple[int, int], ...]:
    """``1,3:4,8`` as ((1, 1), (3, 4), (8, 8)): requests, and the rows that they are padded to."""
    from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import MAX_ROWS

    pairs = []
    for part in text.split(","):
        requests, _, width = part.partition(":")
        pair = _positive(requests), _positive(width or requests)
        if not pair[0] <= pair[1] <= MAX_ROWS:
            raise argparse.ArgumentTypeError(
                f"found {part!r}; needed: requests, or requests:padded rows, at most {MAX_ROWS}, e.g. 1,3:4,8"
            )
        pairs.append(pair)
    return tuple(pairs)


def _unknown_model(model: str) -> bool:
    from sgl_amd_mono.simulate.session import MODELS

    if model in MODELS:
        return False
    _to_stderr(f"sgl-amd-mono: unknown model {model!r}; known: {', '.join(MODELS)}")
    return True


def _doctor(options: argparse.Namespace) -> int:
    from dataclasses import asdict

    from sgl_amd_mono.common.doctor import checks, render

    found = checks()
    print(json.dumps([asdict(check) for check in found], indent=1) if options.json else render(found))
    return 1 if any(check.ok is False for check in found) else 0


def _compile(options: argparse.Namespace) -> int:
    if _unknown_model(options.model):
        return 2
    from dataclasses import asdict

    from sgl_amd_mono.common.build import BuildError, build_all, resource_table
    from sgl_amd_mono.common.geometry import GeometryError
    from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import Geometry
    from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950.gdn import GdnKey, gdn_formats
    from sgl_amd_mono.qwen38_a95b_mxfp4.gfx950.layer import LayerKey, projection_formats

    linked = _links(options.link)
    try:
        geometry = (
            Geometry.a95b(options.tp or 8) if options.geometry == GEOMETRIES[0] else Geometry.small(options.tp or 1)
        )
        formats = gdn_formats(options.mxfp4) | {"one_hop": options.one_hop}
        keys = [
            key
            for width in options.widths
            for key in (
                GdnKey(geometry, width, first_layer=True, state_dtype=options.state_dtype, **formats),
                GdnKey(geometry, width, first_layer=False, state_dtype=options.state_dtype, **formats),
                *(
                    LayerKey(geometry, width, projection=form, fused_shared=options.fused_shared)
                    for form in projection_formats(options.mxfp4)
                ),
            )
        ]
        artifacts = build_all(keys, binary=linked, processes=options.jobs, progress=_to_stderr)
    except ModuleNotFoundError as error:
        _to_stderr(
            f"sgl-amd-mono compile: found no {error.name} in {sys.prefix}; needed: FlyDSL, with the torch and numpy "
            "that it imports; fix: use SGLang's ROCm image, or make venv"
        )
        return 1
    except (BuildError, GeometryError, ValueError) as error:
        _to_stderr(f"sgl-amd-mono compile: {error}")
        return 1
    built = "linked code objects for a GPU" if linked else "ISA text only, for the simulator: no ld.lld was found"
    _to_stderr(f"{len(artifacts)} kernels of {options.model}, {geometry.name}, TP {geometry.tp}: {built}")
    if options.json:
        rows = [
            {
                "kernel": a.name,
                "linked": linked,
                "grid": a.grid,
                "compile_seconds": a.compile_seconds,
                **asdict(a.resources),
            }
            for a in artifacts
        ]
        print(json.dumps(rows, indent=1))
    else:
        print(resource_table(artifacts))
    return 0


def _cost(options: argparse.Namespace) -> int:
    options.model = MODEL_ALIASES.get(options.model, options.model)
    if _unknown_model(options.model):
        return 2
    if options.host:
        return _host_cost(options)
    try:
        from sgl_amd_mono.common.build import BuildError
        from sgl_amd_mono.common.geometry import GeometryError
        from sgl_amd_mono.cost import measure, picture, report
        from sgl_amd_mono.cost.model import Assumptions
        from sgl_amd_mono.qwen38_a95b_mxfp4.geometry import Geometry
        from sgl_amd_mono.sim import SimError

        figures = json.loads(options.probe.read_text()) if options.probe else None
        if figures is not None and not isinstance(figures, dict):
            raise ValueError(f"{options.probe} holds {type(figures).__name__}; needed: a JSON object")
        assume = Assumptions() if figures is None else Assumptions.of(figures)
        geometry = (
            Geometry.a95b(options.tp or 8) if options.geometry == GEOMETRIES[0] else Geometry.small(options.tp or 2)
        )
        costs = measure.measure(
            geometry,
            options.launch,
            options.widths,
            options.seed,
            lambda text: _to_stderr(f"  .. {text}"),
            mxfp4=options.mxfp4,
            one_hop=options.one_hop,
            fused_shared=options.fused_shared,
        )
        if options.picture:
            options.picture.write_text(picture.svg(costs, assume))
    except ModuleNotFoundError as error:
        _to_stderr(
            f"sgl-amd-mono cost: found no {error.name} in {sys.prefix}; needed: torch, numpy and FlyDSL; fix: make venv"
        )
        return 1
    except (BuildError, GeometryError, SimError, ValueError, OSError) as error:
        _to_stderr(f"sgl-amd-mono cost: {error}")
        return 1
    print(json.dumps(report.as_dict(costs, assume), indent=1) if options.json else report.render(costs, assume))
    return 0


def _host_cost(options: argparse.Namespace) -> int:
    try:
        from sgl_amd_mono.simulate import host_cost

        layers = host_cost.run()
    except ModuleNotFoundError as error:
        _to_stderr(
            f"sgl-amd-mono cost --host: found no {error.name} in {sys.prefix}; needed: SGLang, torch, FlyDSL; "
            "fix: make venv"
        )
        return 1
    except RuntimeError as error:
        _to_stderr(f"sgl-amd-mono cost --host: {error}")
        return 1
    print(json.dumps(host_cost.as_dict(layers), indent=1) if options.json else host_cost.render(layers))
    wrong = host_cost.too_much(layers)
    for line in wrong:
        _to_stderr(line)
    return int(bool(wrong))


def _links(asked: str) -> bool:
    """Whether to link code objects: what a server on a GPU loads. ``auto``: where a linker is found."""
    from sgl_amd_mono.common.doctor import check_linker

    return asked == "yes" or (asked == "auto" and check_linker().ok is True)


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _simulate(options: argparse.Namespace) -> int:
    if _unknown_model(options.model):
        return 2
    try:
        from sgl_amd_mono.simulate import report, session
    except ModuleNotFoundError as error:
        _to_stderr(
            f"sgl-amd-mono simulate: found no {error.name} in {sys.prefix}; needed: SGLang 0.5.23 and what it imports; "
            "fix: make demo, which makes an environment with the tested versions"
        )
        return 1

    if options.explain:
        print(report.explain(options.stock, options.moe))
        return 0
    asked = session.Options(
        model=options.model,
        rows=options.rows,
        steps=options.steps,
        ranks=options.ranks,
        memory_model=options.memory_model,
        seed=options.seed,
        stock=options.stock,
        moe=options.moe,
        keep=options.keep,
    )
    try:
        outcome = session.run(asked, lambda text: _to_stderr(f"  .. {text}"))
    except session.SimulationFailed as error:
        _to_stderr(f"sgl-amd-mono simulate: {error}")
        return 1
    verdict = report.judge(outcome)
    print(json.dumps(report.as_dict(outcome, verdict), indent=1) if options.json else report.render(outcome, verdict))
    return 1 if verdict.problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
