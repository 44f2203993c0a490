# SPDX-License-Identifier: Apache-2.0
"""A launch's modelled time line as SVG: memory, hops, and what each workgroup role requests and publishes."""

from __future__ import annotations

from html import escape

from sgl_amd_mono.cost.measure import Cost
from sgl_amd_mono.cost.model import Assumptions, Segment
from sgl_amd_mono.cost.report import fixed, timeline

WIDTH, LEFT, RIGHT = 1500, 270, 40
LANE, BAR, HEAD, GAP = 46, 30, 92, 34
ROLES_SHOWN = 7
CHARACTER = 6.2  # width of a character of the small type
COLOURS = ("#4e79a7", "#59a14f", "#edc948", "#b07aa1", "#76b7b2", "#ff9da7", "#9c755f")
HOP_COLOURS = {"device": "#1f4fd8", "cross": "#c81e1e"}
STYLE = "text{font-family:sans-serif;font-size:11px;fill:#222}.h{font-size:15px;font-weight:bold}.s{font-size:10px}"
HALO = "paint-order:stroke;stroke:#fff;stroke-width:3px;"


def _text(x: float, y: float, text: str, *, kind: str = "", anchor: str = "start", colour: str = "") -> str:
    fill = f' style="{HALO}fill:{colour}"' if colour else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}"{fill}>{escape(text)}</text>'


def _bar(x: float, y: float, width: float, colour: str, *lines: str) -> str:
    """A bar with up to two lines of text, cut to its width; the whole text shows when the pointer rests on it."""
    box = (
        f'<g><title>{escape("; ".join(lines))}</title><rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 1):.1f}" '
        f'height="{BAR}" fill="{colour}" fill-opacity="0.75" stroke="#333" stroke-width="0.5"/>'
    )
    room = int(width / CHARACTER) - 1
    for n, line in enumerate(lines):
        if room >= 3:
            level = y + BAR / 2 + 4 if len(lines) == 1 else y + 12 + 13 * n
            box += _text(x + 4, level, line if len(line) <= room else line[: room - 1] + "…", kind="s")
    return box + "</g>"


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.2f} MB"


def _roles(cost: Cost) -> list[tuple[str, str, dict[int, list[str]]]]:
    """(title, streams, stage -> lines) of the largest roles; the rest in one line. "> R" publishes region R."""
    lanes = []
    for role in cost.roles[:ROLES_SHOWN]:
        stages = {}
        for stage in sorted({*role.requested, *role.published}):
            asked = ", ".join(f"{b} {_megabytes(n)}" for b, n in role.requested.get(stage, {}).items())
            told = ", ".join(role.published.get(stage, ()))
            stages[stage] = [text for text in (asked, told and f"> {told}") if text]
        title = f"{role.workgroups} workgroup{'s' if role.workgroups > 1 else ''}"
        lanes.append((title, ", ".join(role.streams) or "no weights", stages))
    rest = cost.roles[ROLES_SHOWN:]
    if rest:
        lanes.append((f"{sum(r.workgroups for r in rest)} workgroups", f"in {len(rest)} smaller roles", {}))
    return lanes


def _panel(cost: Cost, assume: Assumptions, top: float, us: float) -> tuple[list[str], float]:
    line = timeline(cost, assume)
    scale = (WIDTH - LEFT - RIGHT) / us
    at = lambda t: LEFT + t * scale  # noqa: E731
    lanes = _roles(cost)
    bottom = top + HEAD + LANE * (1 + len(lanes))
    out = [
        _text(
            12,
            top + 18,
            f"{cost.launch}, width {cost.width}, {cost.geometry}, {cost.ranks} ranks (seed {cost.seed}): MODELLED "
            f"{line.end:.1f} us with overlap, {fixed(cost):.1f} us by the fixed model",
            kind="h",
        )
    ]
    for tick in range(0, int(us) + 1, 2 if us < 50 else 5):
        out.append(f'<line x1="{at(tick):.1f}" y1="{bottom}" x2="{at(tick):.1f}" y2="{bottom + 5}" stroke="#555"/>')
        out.append(_text(at(tick), bottom + 17, f"{tick} us", kind="s", anchor="middle"))
    out.append(f'<line x1="{at(0):.1f}" y1="{bottom}" x2="{at(us):.1f}" y2="{bottom}" stroke="#555"/>')

    y = top + HEAD
    out.append(_text(12, y + 13, "memory, rank 0"))
    out.append(_text(12, y + 26, f"{_megabytes(sum(s.nbytes for s in line.segments))} unique", kind="s"))
    out.append(_bar(at(0), y, at(line.stages[0]) - at(0), "#dddddd", "launch"))
    names = ["start", *(name for name, _ in cost.chain)]
    for s in line.segments:
        out.append(_bar(at(s.start), y, at(s.end) - at(s.start), COLOURS[s.issue % 7], *_segment(cost, s, names)))
    for n, (title, streams, stages) in enumerate(lanes):
        y = top + HEAD + LANE * (n + 1)
        out.append(_text(12, y + 13, title))
        out.append(_text(12, y + 26, streams if len(streams) < 44 else streams[:43] + "…", kind="s"))
        for stage, what in stages.items():
            begin = line.stages[min(stage, len(line.stages) - 1)]
            end = line.stages[stage + 1] if stage + 1 < len(line.stages) else line.end
            out.append(_bar(at(begin), y, at(end) - at(begin), COLOURS[stage % 7], *what))
    for k, ((name, kind), when) in enumerate(zip(cost.chain, line.stages[1:], strict=True)):
        x, colour = at(when), HOP_COLOURS[kind]
        out.append(
            f'<line x1="{x:.1f}" y1="{top + 40}" x2="{x:.1f}" y2="{bottom}" stroke="{colour}" stroke-width="1.6" '
            f'stroke-dasharray="{"" if kind == "cross" else "5 3"}"/>'
        )
        label = f"{name} ({kind}) {when:.1f} us"
        level = top + 38 + 14 * (k % 4)
        out.append(_text(x - 4, level + 8, label, kind="s", anchor="end", colour=colour))
    out.append(f'<line x1="{at(line.end):.1f}" y1="{top + 40}" x2="{at(line.end):.1f}" y2="{bottom}" stroke="#000"/>')
    out.append(_text(at(line.end) + 3, bottom - 4, "end", kind="s"))
    return out, bottom + GAP


def _segment(cost: Cost, segment: Segment, names: list[str]) -> tuple[str, str]:
    buffers = ", ".join(b for b, i, u, _ in cost.weights if (i, u) == (segment.issue, segment.use)) or "other"
    used = "at once" if segment.use == segment.issue else f"after {names[min(segment.use, len(names) - 1)]}"
    return f"{buffers} {_megabytes(segment.nbytes)}", f"used {used}"


def svg(costs: list[Cost], assume: Assumptions) -> str:
    """One panel a launch and width, on one scale. Dashed blue: device hop; red: cross-GPU hop."""
    us = 1.05 * max(timeline(cost, assume).end for cost in costs)
    parts: list[str] = []
    y = 30.0
    for cost in costs:
        panel, y = _panel(cost, assume, y, us)
        parts += panel
    legend = (
        "MODELLED time line (overlap model); byte counts are measured on the simulator. Dashed blue line: a device hop "
        "resolves; red line: a cross-GPU hop resolves. A bar's colour is the stage of its request; > R: publishes R."
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y:.0f}" viewBox="0 0 {WIDTH} {y:.0f}">'
        f"<style>{STYLE}</style>"
        f'<rect width="100%" height="100%" fill="white"/>{_text(12, 18, legend)}' + "\n".join(parts) + "</svg>\n"
    )
