// Lines over steps, as SVG: several runs over one another, in colours that colour-blind people tell apart.

export const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];
const [WIDTH, HEIGHT, LEFT, BOTTOM, TOP] = [480, 190, 56, 22, 8];

const make = (name, attributes, text) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
};

function ticks(low, high, most) {
  const raw = (high - low || Math.abs(high) || 1) / most;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= raw);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  return found;
}

const shown = (value) => (value !== 0 && (Math.abs(value) < 0.001 || Math.abs(value) >= 1e6) ? value.toExponential(1) : String(Number(value.toPrecision(4))));

/** lines: {name, colour, dashed, x, y, marks}; null in y: a gap. */
export function chart(box, lines, name) {
  const state = JSON.stringify(lines.map((line) => [line.name, line.x.length, line.x.at(-1), line.y.at(-1), line.marks.length]));
  if (box.dataset.state === state) return;
  box.dataset.state = state;
  const xs = lines.flatMap((line) => line.x);
  const ys = lines.flatMap((line) => line.y.filter((value) => value !== null));
  if (!ys.length) {
    box.replaceChildren(Object.assign(document.createElement("p"), { className: "soft", textContent: "Nothing yet." }));
    return;
  }
  // Not Math.min(...ys): thousands of arguments overflow the stack.
  const [x0, x1] = [xs.reduce((a, b) => Math.min(a, b)), xs.reduce((a, b) => Math.max(a, b))];
  let [y0, y1] = [ys.reduce((a, b) => Math.min(a, b)), ys.reduce((a, b) => Math.max(a, b))];
  if (name !== "loss") y0 = Math.min(0, y0);
  if (y0 === y1) [y0, y1] = [y0 - (Math.abs(y0) || 1) / 10, y1 + (Math.abs(y1) || 1) / 10];
  const x = (value) => LEFT + ((WIDTH - LEFT - 6) * (value - x0)) / (x1 - x0 || 1);
  const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - (value - y0) / (y1 - y0));
  const last = lines.map((line) => `${line.name}: ${line.y.length ? shown(line.y.at(-1) ?? NaN) : "nothing"} at step ${line.x.at(-1) ?? 0}`);
  const svg = make("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": last.join("; ") });
  const few = ticks(y0, y1, 4);
  for (const value of few.length > 2 ? few : ticks(y0, y1, 8)) {
    svg.append(make("line", { x1: LEFT, x2: WIDTH, y1: y(value), y2: y(value), stroke: "var(--line)" }),
      make("text", { x: LEFT - 7, y: y(value) + 4, "text-anchor": "end" }, shown(value)));
  }
  for (const value of ticks(x0, x1, 5).filter(Number.isInteger)) {
    svg.append(make("text", { x: x(value), y: HEIGHT - 4, "text-anchor": x(value) > WIDTH - 24 ? "end" : "middle" }, String(value)));
  }
  for (const line of lines) {
    let path = "";
    let pen = false;
    line.y.forEach((value, at) => {
      if (value === null) { pen = false; return; }
      path += `${pen ? "L" : "M"}${x(line.x[at]).toFixed(1)} ${y(value).toFixed(1)}`;
      pen = true;
    });
    const drawn = make("path", { d: path, fill: "none", stroke: line.colour, "stroke-width": 1.8, "stroke-linejoin": "round", "stroke-linecap": "round" });
    if (line.dashed) drawn.setAttribute("stroke-dasharray", "5 4");
    drawn.append(make("title", {}, line.name));
    svg.append(drawn);
    for (const [step, value] of line.marks) {
      if (value < y0 || value > y1 || step < x0 || step > x1) continue;
      const dot = make("circle", { cx: x(step), cy: y(value), r: 3.5, fill: "var(--paper)", stroke: line.colour, "stroke-width": 2 });
      dot.append(make("title", {}, `${line.name}: held-out loss ${shown(value)} at step ${step}`));
      svg.append(dot);
    }
  }
  box.replaceChildren(svg);
}
