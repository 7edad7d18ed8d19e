// Lanes of spans on a canvas over an axis of time, which is zoomed by the wheel and keys and moved by dragging.
// A lane has columns: start and end (ns), colour (number of a colour), text (number of one of its texts).

const canvas = $("canvas"), pen = canvas.getContext("2d");
const RIGHT = 12, AXIS = 26, LANE = 24;

// The first place whose value is wanted or more; values ascend.
function firstAfter(values, wanted) {
  let low = 0, high = values.length;
  while (low < high) { const middle = (low + high) >> 1; if (values[middle] < wanted) low = middle + 1; else high = middle; }
  return low;
}
// A round distance between marks, of which about so many as wanted lie on the span.
function apart(span, wanted) {
  const rough = span / Math.max(wanted, 1), power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
}

class TimeAxis {
  // `length`: of all that can be seen, ns. `draw()` is called after each change, `tell(event)` as the pointer moves.
  constructor(length, left, draw, tell) {
    Object.assign(this, { length, left, draw, from: 0, to: length, dragged: null });
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const at = this.atPointer(event), factor = Math.exp(event.deltaY / 400);
      this.move(at - (at - this.from) * factor, (this.to - this.from) * factor);
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      this.dragged = { x: event.clientX, from: this.from };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointerup", () => { this.dragged = null; });
    canvas.addEventListener("pointerleave", hideTip);
    canvas.addEventListener("pointermove", (event) => {
      if (this.dragged) this.move(this.dragged.from - (event.clientX - this.dragged.x) * this.perPixel(), this.to - this.from);
      $("tip").replaceChildren();
      tell(event);
      showTip(event);
    });
    canvas.addEventListener("keydown", (event) => this.key(event));
    $("whole").addEventListener("click", () => this.move(0, length));
    addEventListener("resize", draw);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  }
  perPixel() { return (this.to - this.from) / (canvas.clientWidth - this.left - RIGHT); }
  x(ns) { return this.left + (ns - this.from) / this.perPixel(); }
  atPointer(event) { return this.from + (event.clientX - canvas.getBoundingClientRect().left - this.left) * this.perPixel(); }
  move(start, wanted) {
    const size = Math.min(Math.max(wanted, 100), this.length);
    this.from = Math.min(Math.max(start, 0), this.length - size);
    this.to = this.from + size;
    this.draw();
  }
  key(event) {
    const size = this.to - this.from, centre = (this.from + this.to) / 2;
    if (event.key === "ArrowLeft") this.move(this.from - size / 8, size);
    else if (event.key === "ArrowRight") this.move(this.from + size / 8, size);
    else if (event.key === "+" || event.key === "=") this.move(centre - size / 4, size / 2);
    else if (event.key === "-") this.move(centre - size, size * 2);
    else return;
    event.preventDefault();
  }
  // A clean canvas with the marks of the axis.
  begin() {
    const ratio = devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    pen.textAlign = "center";
    const step = apart(this.to - this.from, (width - this.left) / 110);
    for (let at = Math.ceil(this.from / step) * step; at <= this.to; at += step) {
      pen.fillStyle = colour("grid");
      pen.fillRect(this.x(at), AXIS - 6, 1, height);
      pen.fillStyle = colour("quiet");
      pen.fillText(seconds(at / 1e9), Math.min(Math.max(this.x(at), this.left + 14), width - RIGHT - 20), AXIS / 2 - 2);
    }
  }
  // What `paint` paints does not leave the part of the canvas over the axis.
  clipped(paint) {
    pen.save();
    pen.beginPath();
    pen.rect(this.left, 0, canvas.clientWidth - this.left - RIGHT, canvas.clientHeight);
    pen.clip();
    paint();
    pen.restore();
  }
  // `pale`: names of the colours on which text is dark.
  drawLane(lane, top, colours, pale) {
    const shades = colours.map(colour), width = canvas.clientWidth;
    pen.fillStyle = colour("grid");
    pen.fillRect(this.left, top + LANE - 2, width, 1);
    for (let place = firstAfter(lane.end, this.from); place < lane.start.length && lane.start[place] <= this.to; place++) {
      const left = Math.max(this.x(lane.start[place]), this.left - 2), right = Math.min(this.x(lane.end[place]), width);
      pen.fillStyle = shades[lane.colour[place]];
      pen.fillRect(left, top + 2, Math.max(right - left - (right - left > 4 ? 0.8 : 0), 0.6), LANE - 7);
      if (right - left > 74) {
        pen.save();
        pen.beginPath();
        pen.rect(left, top, right - left - 4, LANE);
        pen.clip();
        pen.fillStyle = pale.includes(colours[lane.colour[place]]) ? colour("text") : "#fff";
        pen.textAlign = "left";
        pen.font = "11px system-ui, sans-serif";
        pen.fillText(lane.texts[lane.text[place]], left + 5, top + LANE / 2 - 1);
        pen.restore();
      }
    }
  }
  drawLabel(name, top, most) {
    pen.textAlign = "right";
    pen.fillStyle = colour("text");
    pen.fillText(name.length > most ? name.slice(0, most - 1) + "…" : name, this.left - 10, top + LANE / 2 - 1);
  }
  // Puts what a lane runs under the pointer into the tip.
  tellSpan(lane, event, named) {
    const at = this.atPointer(event), slack = this.perPixel(), place = firstAfter(lane.end, at - slack);
    if (place >= lane.start.length || lane.start[place] > at + slack) return;
    element($("tip"), "div", lane.texts[lane.text[place]]);
    const lasts = seconds((lane.end[place] - lane.start[place]) / 1e9), begins = seconds(lane.start[place] / 1e9);
    element(element($("tip"), "div"), "em", `${named(lane.colour[place])}, ${lasts} from ${begins}`);
  }
}
