"""A Timeline of pipeline ranks as SVG: a row for each rank, a box for each piece of work, its micro-batch inside.

Boxes carry dark text on colours of middling lightness, all else is in a grey between, so that a picture can be read on
white and on black.
"""

from headway.timeline import Timeline

COLOURS = {
    "forward": ("forward", "#6ea8e0", "#a9cdf0"),
    "backward": ("backward (inputs and weights)", "#e8a04c", "#f3c894"),
    "backward_input": ("gradients of inputs", "#e07b7b", "#f0b3b3"),
    "backward_weight": ("gradients of weights", "#7dbb72", "#b4dbac"),
}
"""Phase -> what it is, its colour on a rank's first stage and on its second."""
GREY = "#808080"
INK = "#1b1b1b"
LEFT, TOP, ROW, GAP = 58, 46, 26, 6
FONT = "font-family='DejaVu Sans, Verdana, Helvetica, sans-serif'"


def draw(timeline: Timeline, title: str, *, width: int, window_ns: int) -> str:
    """SVG text, ``width`` pixels wide; ``window_ns``: what the width stands for, the same for pictures to compare."""
    ranks = timeline.ranks()
    scale = (width - LEFT - 8) / window_ns
    height = TOP + len(ranks) * (ROW + GAP) + 26
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' viewBox='0 0 {width} {height}' "
        f"role='img' aria-label='{title}'>",
        f"<text x='{LEFT}' y='18' {FONT} font-size='13' font-weight='bold' fill='{GREY}'>{title}</text>",
    ]
    end = int(timeline.end_ns.max())
    for row, rank in enumerate(ranks):
        y = TOP + row * (ROW + GAP)
        parts.append(f"<text x='4' y='{y + 17}' {FONT} font-size='12' fill='{GREY}'>rank {rank}</text>")
        parts.append(
            f"<rect x='{LEFT}' y='{y}' width='{end * scale:.1f}' height='{ROW}' fill='{GREY}' fill-opacity='0.18'/>"
        )
        parts += _boxes(timeline.of_rank(rank), y, scale)
    parts += _legend(timeline, height - 10)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _boxes(own: Timeline, y: int, scale: float) -> list[str]:
    stages = sorted({int(lane.removeprefix("stage ")) for lane in own.text("lane")})
    columns = zip(own.text("lane"), own.text("name"), own.text("phase"), own.start_ns, own.duration_ns, strict=True)
    boxes = []
    for lane, name, phase, start, duration in columns:
        shade = stages.index(int(lane.removeprefix("stage ")))
        fill = COLOURS[phase][1 + shade]
        x, w = LEFT + int(start) * scale, int(duration) * scale
        number = name.removeprefix("micro-batch ")
        boxes.append(
            f"<rect x='{x:.1f}' y='{y}' width='{w:.1f}' height='{ROW}' fill='{fill}' stroke='{INK}' "
            "stroke-width='0.6'/>"
        )
        boxes.append(
            f"<text x='{x + w / 2:.1f}' y='{y + 17}' {FONT} font-size='11' text-anchor='middle' "
            f"fill='{INK}'>{number}</text>"
        )
    return boxes


def _legend(timeline: Timeline, y: int) -> list[str]:
    used = set(timeline.text("phase"))
    entries = [(label, colour) for phase, (label, colour, _) in COLOURS.items() if phase in used]
    if len(set(timeline.text("lane"))) > len(timeline.ranks()):
        entries.append(("paler: the rank's second stage", "none"))
    entries.append(("idle", f"{GREY}' fill-opacity='0.18"))
    parts, x = [], LEFT
    for label, colour in entries:
        if colour != "none":
            parts.append(f"<rect x='{x}' y='{y - 10}' width='12' height='12' fill='{colour}' stroke='{GREY}'/>")
            x += 17
        parts.append(f"<text x='{x}' y='{y}' {FONT} font-size='11' fill='{GREY}'>{label}</text>")
        x += 8 + round(6.4 * len(label)) + 10
    return parts
