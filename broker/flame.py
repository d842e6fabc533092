"""A flame graph as one SVG file, without scripts: the wider, the longer; below is who called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from html import escape
from typing import Final

_WIDTH: Final = 1200
_ROW: Final = 17
_LETTER: Final = 6.6  # width of one, about
_COLORS: Final = {
    "transport": "#fca5a5",
    "hash": "#fdba74",
    "rebuild": "#fde68a",
    "broker": "#5eead4",
    "forward": "#93c5fd",
    "schedule": "#d8b4fe",
    "idle": "#e2e8f0",
}


class _Node:
    def __init__(self) -> None:
        self.count = 0
        self.kinds: Counter[str] = Counter()
        self.children: dict[str, _Node] = {}


def draw(stacks: Mapping[tuple[str, ...], int], title: str) -> str:
    """`stacks`: kind, then frames from root to leaf; with their samples. A frame has its commonest kind's colour."""
    root = _Node()
    for (kind, *frames), count in stacks.items():
        node = root
        for frame in (None, *frames):
            if frame is not None:
                node = node.children.setdefault(frame, _Node())
            node.count += count
            node.kinds[kind] += count
    height = (_depth(root) + 3) * _ROW
    boxes: list[str] = []
    _boxes(root, "all", 0.0, _WIDTH / max(1, root.count), height - 2 * _ROW, root.count, boxes)
    keys = "".join(
        f'<rect x="{8 + at * 110}" y="{height - 13}" width="10" height="10" fill="{color}"/>'
        f'<text x="{22 + at * 110}" y="{height - 4}">{kind}</text>'
        for at, (kind, color) in enumerate(_COLORS.items())
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="monospace" '
        'font-size="11">\n'
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>\n'
        f'<text x="8" y="13" font-weight="bold">{escape(title)}</text>\n'
        + "\n".join(boxes)
        + f"\n{keys}\n</svg>\n"
    )


def _depth(node: _Node) -> int:
    return 1 + max(map(_depth, node.children.values()), default=0)


def _boxes(node: _Node, name: str, x: float, scale: float, y: int, total: int, out: list[str]) -> None:
    width = node.count * scale
    if width < 0.3:
        return
    color = _COLORS[node.kinds.most_common(1)[0][0]] if node.kinds else "#ffffff"
    share = node.count / max(1, total)
    fits = int((width - 6) / _LETTER)
    shown = name if len(name) <= fits else name[: max(0, fits - 2)] + ".." if fits > 4 else ""
    out.append(
        f"<g><title>{escape(name)}: {share:.1%}</title>"
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_ROW - 1}" fill="{color}" stroke="#ffffff"/>'
        f'<text x="{x + 3:.1f}" y="{y + 12}">{escape(shown)}</text></g>'
    )
    for child, below in sorted(node.children.items()):
        _boxes(below, child, x, scale, y - _ROW, total, out)
        x += below.count * scale
