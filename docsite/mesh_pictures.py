"""The pictures of docs/how-to/meshes.md. `python -m docsite.mesh_pictures` writes them into docs/assets/meshes.

Each rank is drawn with what it holds filled in, so that one sees which ranks hold the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).parent.parent / "docs" / "assets" / "meshes"

_PAPER, _INK, _PALE, _LINE = "#fbfbfd", "#24292f", "#e4e7f2", "#8088a5"
_WEIGHTS, _ROWS, _LAYERS = "#3f51b5", "#00796b", "#b3541e"
_WIDE, _HIGH = 132, 66


@dataclass
class Picture:
    """An SVG of its own background, so that it reads on light and dark pages alike."""

    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, wide: float, high: float, fill: str, line: str = "none") -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{wide:g}" height="{high:g}" rx="4" fill="{fill}" stroke="{line}"/>'
        )

    def text(self, x: float, y: float, words: str, size: int = 13, colour: str = _INK, anchor: str = "start") -> None:
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}" text-anchor="{anchor}">'
            f"{escape(words)}</text>"
        )

    def arrow(self, x: float, y: float, to_x: float, to_y: float, colour: str) -> None:
        """With a head at each end."""
        self.parts.append(
            f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{colour}" stroke-width="2" '
            f'marker-start="url(#{colour[1:]})" marker-end="url(#{colour[1:]})"/>'
        )

    def rank(self, x: float, y: float, number: int, parts: int, held: int, colour: str) -> None:
        """A process: its number, and a bar of ``parts`` parts of which it holds one."""
        self.box(x, y, _WIDE, _HIGH, "white", _LINE)
        self.text(x + 10, y + 20, f"rank {number}")
        gap = 2
        wide = (_WIDE - 20 - gap * (parts - 1)) / parts
        for part in range(parts):
            self.box(x + 10 + part * (wide + gap), y + 29, wide, 28, colour if part == held else _PALE)

    def svg(self) -> str:
        heads = "".join(
            f'<marker id="{colour[1:]}" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0 0 10 5 0 10z" fill="{colour}"/></marker>'
            for colour in (_WEIGHTS, _ROWS, _LAYERS)
        )
        inner = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" role="img" '
            f'font-family="system-ui, sans-serif">\n<title>{escape(self.title)}</title>\n<defs>{heads}</defs>\n'
            f'<rect width="{self.width}" height="{self.height}" rx="8" fill="{_PAPER}"/>\n{inner}\n</svg>\n'
        )


def hybrid() -> Picture:
    """Two nodes of four processes: replicate 2, shard 4."""
    made = Picture(800, 300, "replicate: 2, shard: 4 on two nodes of four processes")
    for node in range(2):
        y = 40 + node * 130
        made.text(16, y + 38, f"node {node}", 14)
        for at in range(4):
            made.rank(80 + at * 150, y, 4 * node + at, 4, at, _WEIGHTS)
        made.arrow(86, y + 84, 80 + 3 * 150 + _WIDE - 6, y + 84, _WEIGHTS)
    made.text(80, 24, "filled: the quarter of weights, gradients and optimizer state that a rank holds", 12)
    made.text(312, 140, "weights are gathered within a node", 12, _WEIGHTS, "middle")
    made.arrow(700, 62, 700, 220, _ROWS)
    for line, words in enumerate(("gradients", "are summed", "between", "nodes")):
        made.text(708, 118 + 16 * line, words, 11, _ROWS)
    made.text(80, 290, "ranks 0 and 4, 1 and 5, … hold the same part and have samples of their own", 12)
    return made


def context() -> Picture:
    """Four rows, two processes each."""
    made = Picture(760, 250, "shard: 2, context: 2 on four processes: ranks divide the tokens of a row")
    made.text(150, 24, "first half of the tokens", 12)
    made.text(420, 24, "second half of the tokens", 12)
    for row in range(2):
        y = 36 + row * 100
        made.text(16, y + 38, f"samples {'AB'[row]}", 14)
        for half in range(2):
            made.rank(150 + half * 270, y, 2 * row + half, 2, half, _ROWS)
        made.arrow(150 + _WIDE + 8, y + 34, 420 - 8, y + 34, _ROWS)
        made.text(351, y + 26, "in attention", 11, _ROWS, "middle")
        made.text(351, y + 52, "heads for tokens", 11, _ROWS, "middle")
    made.arrow(600, 50, 600, 192, _WEIGHTS)
    for line, words in enumerate(("weights are sharded", "over all four, gradients", "summed over them")):
        made.text(612, 112 + 16 * line, words, 11, _WEIGHTS)
    made.text(150, 236, "within attention a rank has all tokens of half of the heads, elsewhere half of the tokens", 12)
    return made


def tensor() -> Picture:
    """Two rows of ranks, each of which has half of every layer."""
    made = Picture(760, 270, "shard: 2, tensor: 2 on four processes: ranks divide the matrices of every layer")
    made.text(150, 24, "first half of heads and inner units", 12)
    made.text(420, 24, "second half", 12)
    for row in range(2):
        y = 36 + row * 100
        made.text(16, y + 38, f"samples {'AB'[row]}", 14)
        for half in range(2):
            made.rank(150 + half * 270, y, 2 * row + half, 2, half, _LAYERS)
        made.arrow(150 + _WIDE + 8, y + 34, 420 - 8, y + 34, _LAYERS)
        made.text(351, y + 26, "hidden states", 11, _LAYERS, "middle")
        made.text(351, y + 52, "are summed", 11, _LAYERS, "middle")
    made.arrow(600, 50, 600, 192, _WEIGHTS)
    for line, words in enumerate(
        ("the same half of every", "layer: it is sharded over", "a column, its gradients", "summed along it")
    ):
        made.text(612, 104 + 16 * line, words, 11, _WEIGHTS)
    made.text(150, 236, "q, k, v, gate and up are cut by their outputs, o and down by their inputs;", 12)
    made.text(150, 254, "embeddings, norms and the head are not cut", 12)
    return made


_SLOT = 46


def pipeline() -> Picture:
    """Two stages of two ranks each, and what they do with four micro-batches."""
    made = Picture(760, 400, "pipeline: 2, replicate: 2 on four processes: ranks divide the blocks of the model")
    made.text(150, 24, "stage 1: embedding, first half of the blocks", 12)
    made.text(450, 24, "stage 2: second half, norm, head", 12)
    for row in range(2):
        y = 36 + row * 100
        made.text(16, y + 38, f"samples {'AB'[row]}", 14)
        for stage in range(2):
            made.rank(150 + stage * 300, y, 2 * stage + row, 2, stage, _LAYERS)
        made.arrow(150 + _WIDE + 8, y + 34, 450 - 8, y + 34, _LAYERS)
        made.text(366, y + 26, "hidden states", 11, _LAYERS, "middle")
        made.text(366, y + 52, "their gradients back", 11, _LAYERS, "middle")
    made.arrow(150 + _WIDE / 2, 106, 150 + _WIDE / 2, 132, _WEIGHTS)
    made.arrow(450 + _WIDE / 2, 106, 450 + _WIDE / 2, 132, _WEIGHTS)
    made.text(366, 123, "copies of a stage sum gradients", 11, _WEIGHTS, "middle")
    made.text(16, 250, "four micro-batches, where a forward and a backward take one slot each", 12)
    done = _slots(stages=2, micros=4)
    for stage, slots in enumerate(done):
        y = 264 + stage * 48
        made.text(16, y + 24, f"stage {stage + 1}", 14)
        for at in range(max(map(max, done)) + 1):
            what = slots.get(at)
            colour = _PALE if what is None else _WEIGHTS if what[0] == "forward" else _ROWS
            made.box(100 + at * _SLOT, y, _SLOT - 3, 36, colour)
            if what is not None:
                made.text(100 + at * _SLOT + 21, y + 24, f"{what[0][0].upper()}{what[1] + 1}", 14, "white", "middle")
    made.text(100, 382, "F: forward, B: backward; pale: the stage waits", 12)
    return made


def _slots(stages: int, micros: int) -> list[dict[int, tuple[str, int]]]:
    """By stage, what it does in each slot of time: an action begins when its own stage and the stage that it waits for
    have ended theirs."""
    from toolkit.training.pipeline import one_forward_one_backward

    waiting = [one_forward_one_backward(stage, stages, micros) for stage in range(stages)]
    ended: dict[tuple[int, str, int], int] = {}
    found: list[dict[int, tuple[str, int]]] = [{} for _ in range(stages)]
    now = 0
    while any(waiting):
        done = dict(ended)
        for stage, actions in enumerate(waiting):
            if not actions:
                continue
            what, micro = actions[0]
            before = (stage - 1, what, micro) if what == "forward" else (stage + 1, what, micro)
            if 0 <= before[0] < stages and before not in done:
                continue
            found[stage][now] = actions.pop(0)
            ended[stage, what, micro] = now
        now += 1
    return found


def expert() -> Picture:
    """Two rows of ranks, all with samples of their own, each of which has half of every layer's experts."""
    made = Picture(800, 270, "expert: 2, shard: 2 on four processes: ranks divide the experts of every layer")
    made.text(110, 24, "experts 1 to 4", 12)
    made.text(440, 24, "experts 5 to 8", 12)
    for row in range(2):
        y = 36 + row * 100
        for half in range(2):
            x = 110 + half * 330
            made.text(x - 94, y + 38, f"samples {'ABCD'[2 * row + half]}", 14)
            made.rank(x, y, 2 * row + half, 2, half, _LAYERS)
        made.arrow(110 + _WIDE + 8, y + 14, 440 - 8, y + 14, _LAYERS)
        made.text(341, y + 6, "tokens and results", 11, _LAYERS, "middle")
    made.arrow(620, 50, 620, 192, _WEIGHTS)
    for line, words in enumerate(("the same experts are", "sharded along a column")):
        made.text(632, 112 + 16 * line, words, 11, _WEIGHTS)
    made.text(110, 236, "attention, norms, routers, embeddings and the head are sharded over all four", 12)
    return made


PICTURES = {
    "hybrid.svg": hybrid,
    "context.svg": context,
    "tensor.svg": tensor,
    "pipeline.svg": pipeline,
    "expert.svg": expert,
}


def main() -> None:
    """Write the files."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
