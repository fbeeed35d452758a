// What all pictures share: colours, canvases of the right size, and how a candidate's end looks without colour.
import { ENDS } from "./state.js";
import { el } from "./dom.js";

let colors = null;
const textures = new Map();

// What was drawn keeps its colours when the system turns light or dark.
export function whenColorsChange(redraw) {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    colors = null;
    textures.clear();
    redraw();
  });
}

export function palette() {
  if (!colors) {
    const style = getComputedStyle(document.documentElement);
    colors = Object.fromEntries([...ENDS, "text", "soft", "line", "ground", "accent"]
      .map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  }
  return colors;
}

// A context in CSS pixels; null where there is no room.
export function fit(canvas, width, height) {
  const scale = devicePixelRatio || 1;
  const [w, h] = [Math.max(1, Math.round(width * scale)), Math.max(1, Math.round(height * scale))];
  if (canvas.width !== w) canvas.width = w;
  if (canvas.height !== h) canvas.height = h;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

// A bar from the ground up: filled when it ended by itself, hollow or striped when it was stopped.
export function bar(context, x, ground, width, height, end) {
  const color = palette()[end] ?? palette().soft;
  const top = ground - height;
  context.fillStyle = context.strokeStyle = color;
  if (end === "running") {
    context.globalAlpha = 0.45;
    context.fillRect(x, top, width, height);
    context.globalAlpha = 1;
    context.fillRect(x, top, width, Math.min(2, height));
  } else if (end === "stop") {
    context.fillRect(x, top, width, height);
  } else if (end === "length") {
    context.fillRect(x, top, width, height);
    context.fillRect(x - 1, top, width + 2, 2);
  } else if (end === "surplus" || end === "deferred") {
    const gap = end === "surplus" ? 3 : 6;
    for (let y = ground - 1; y > top; y -= gap) context.fillRect(x, y - 1, width, end === "surplus" ? 1 : 4);
    context.fillRect(x - 0.5, top - 1, width + 1, 1.5);
  } else {
    context.lineWidth = 1;
    context.strokeRect(x + 0.5, top + 0.5, Math.max(width - 1, 0.5), Math.max(height - 1, 0.5));
    context.beginPath();
    context.moveTo(x - 0.5, top - 4);
    context.lineTo(x + width + 0.5, top);
    if (end === "failed") {
      context.moveTo(x + width + 0.5, top - 4);
      context.lineTo(x - 0.5, top);
    }
    context.stroke();
  }
}

const TILE = 6, DIAGONAL = [0, 1, 2, 3, 4, 5];
const RISING = DIAGONAL.map((i) => [i, TILE - 1 - i, 1, 1]), FALLING = DIAGONAL.map((i) => [i, i, 1, 1]);
// Ground, and what is on it.
const TILES = {
  length: ["length", "text", [[0, 2, 2, 1], [3, 5, 2, 1]]],
  surplus: ["ground", "surplus", [[0, 0, 1, TILE], [3, 0, 1, TILE]]],
  pruned: ["ground", "pruned", RISING],
  deferred: ["ground", "deferred", [[0, 0, 4, TILE]]],
  failed: ["ground", "failed", [...RISING, ...FALLING]],
  empty: ["line", "soft", [[1, 1, 1, 1], [4, 4, 1, 1]]],
};

function texture(name) {
  if (!textures.has(name)) {
    const tile = el("canvas", { width: TILE, height: TILE }), pen = tile.getContext("2d");
    const [ground, color, parts] = TILES[name];
    pen.fillStyle = palette()[ground];
    pen.fillRect(0, 0, TILE, TILE);
    pen.fillStyle = palette()[color];
    for (const part of parts) pen.fillRect(...part);
    textures.set(name, pen.createPattern(tile, "repeat"));
  }
  return textures.get(name);
}

// Time from left to right: that of a candidate, with its end at the right as `bar` has it on top, or an empty place.
export function strip(context, x, y, width, height, end) {
  const { text, ...color } = palette();
  context.fillStyle = end in TILES ? texture(end) : color[end];
  context.globalAlpha = end === "running" ? 0.45 : 1;
  context.fillRect(x, y, width, height);
  context.globalAlpha = 1;
  if (end === "stop" || end === "empty") return;
  context.fillStyle = end === "length" ? text : color[end];
  context.fillRect(x + Math.max(0, width - 1.5), y, Math.min(width, 1.5), height);
}

export function legend(words, paint, more = null) {
  return el("ul", { className: "legend" }, ...Object.entries(words).map(([name, word]) => {
    const canvas = el("canvas", { "aria-hidden": "true" });
    requestAnimationFrame(() => {
      const context = fit(canvas, 12, 14);
      canvas.style.height = "";
      paint(context, name);
    });
    return el("li", {}, canvas, word);
  }), more && el("li", { textContent: more }));
}

// uPlot keeps every chart that was not destroyed, with its canvas and numbers.
const charts = new Set();

export function chart(parent, series, data, xLabel, height = 190) {
  const { soft, line } = palette();
  const axis = { stroke: soft, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 } };
  const options = {
    width: Math.max(200, parent.clientWidth), height, scales: { x: { time: false } },
    axes: [{ ...axis, label: xLabel, labelSize: 22 }, { ...axis, size: 46 }], series: [{ label: xLabel }, ...series],
  };
  for (const old of charts) {
    if (old.root.isConnected) continue;
    old.destroy();
    charts.delete(old);
  }
  charts.add(new uPlot(options, data, parent));
}
