// Draws series with their axes and units. The lines are drawings, the labels are text, so that these keep their size.
import { el } from "./dom.js";

// The least round number that is not smaller: 1, 2 or 5 times a power of ten, or a power of two for bytes.
const round = (top, isBytes) => {
  if (top <= 0) return 1;
  if (isBytes) return 2 ** Math.ceil(Math.log2(top));
  const power = 10 ** Math.floor(Math.log10(top));
  return [1, 2, 5, 10].find((n) => n * power >= top) * power;
};

// From the left: when the marks of the time axis were.
const marks = (minutes, now) => [0, 0.5, 1].map((part) => {
  if (part === 1) return "now";
  const ago = minutes * (1 - part);
  if (minutes <= 60) return `−${Number(ago.toPrecision(3))} min`;
  const at = new Date(now - ago * 60000);
  const clock = at.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
  return minutes <= 720 ? clock : `${at.toLocaleDateString([], { weekday: "short" })} ${clock}`;
});

const width = 1000;
const height = 100;

// `read`: { points, step_s } of the last minutes, the newest last; null where nothing is known. `show`: a value as text.
export const graph = ({ title, key, read, minutes, show, isBytes = false }) => {
  const points = read?.points ?? [];
  const known = points.filter((point) => point !== null);
  const top = round(Math.max(0, ...known), isBytes);
  const count = Math.max(2, Math.round((minutes * 60) / (read?.step_s ?? 1)));
  const x = (at) => width * (1 - (points.length - 1 - at) / (count - 1));
  let path = "";
  points.forEach((point, at) => {
    if (point === null || x(at) < 0) return;
    const isFirst = at === 0 || points[at - 1] === null || x(at - 1) < 0;
    // One point alone is a short line.
    path += `${isFirst ? `M${(x(at) - 1).toFixed(1)} ` : "L"}${isFirst ? "" : `${x(at).toFixed(1)} `}${(height * (1 - point / top)).toFixed(1)}`;
    if (isFirst) path += `L${x(at).toFixed(1)} ${(height * (1 - point / top)).toFixed(1)}`;
  });
  const rule = (part) => el("line", { x1: 0, x2: width, y1: height * part, y2: height * part });
  const mark = (part) => el("line", { x1: width * part, x2: width * part, y1: 0, y2: height });
  const last = known.length > 0 && points.at(-1) !== null ? points.at(-1) : known.at(-1);
  const highest = known.length > 0 ? `, at most ${show(Math.max(...known))}` : "";
  const readAt = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    const part = (event.clientX - box.left) / box.width;
    const at = Math.round(points.length - 1 - (1 - part) * (count - 1));
    const point = points[at] ?? null;
    const ago = ((points.length - 1 - at) * (read?.step_s ?? 1)) / 60;
    event.currentTarget.setAttribute("title", `${Number(ago.toPrecision(3))} min ago: ${point === null ? "not known" : show(point)}`);
  };
  return el("figure", { class: "card", key },
    el("figcaption", {}, el("span", {}, title), el("b", {}, known.length > 0 ? show(last) : read ? "no data yet" : "…")),
    el("div", { class: "plot" },
      el("div", { class: "y", "aria-hidden": "true" }, ...[1, 0.5, 0].map((part) => el("span", {}, known.length > 0 ? show(top * part) : " "))),
      el("div", { class: "drawn", onpointermove: readAt },
        el("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": `${title}, the last ${minutes} minutes${highest}` },
          el("g", { class: "rules" }, rule(0), rule(0.5), rule(1), mark(0.25), mark(0.5), mark(0.75)),
          el("path", { d: path }))),
      el("div", { class: "x", "aria-hidden": "true" }, ...marks(minutes, Date.now()).map((text) => el("span", {}, text)))));
};
