// The page: which view is open, and when it is drawn.
import { connect } from "./feed.js";
import { el } from "./dom.js";
import { whenColorsChange } from "./draw.js";
import { current, newModel, take } from "./state.js";
import * as now from "./now.js";
import * as step from "./step.js";
import * as group from "./group.js";
import * as learned from "./learned.js";
import * as compare from "./compare.js";

const VIEWS = { now, step, group, learned, compare };
const MOST_OFTEN_MS = 100;
const root = document.getElementById("view"), select = document.getElementById("rollout");
const status = document.getElementById("status");
const model = newModel();
let name = "now", args = [], draw = () => {}, waiting = false;

const place = (view, words) => `#${[view, ...words.map((word) => encodeURIComponent(word))].join("/")}`;
const context = {
  model,
  get args() { return args; },
  rollout: () => (args[0] && name !== "compare" && !model.sessions.has(args[0]) ? model.rollouts.get(args[0]) : current(model)),
  go: (view, ...words) => { location.hash = place(view, words); },
  redraw,
};

function redraw() {
  if (waiting) return;
  waiting = true;
  setTimeout(() => requestAnimationFrame(() => {
    waiting = false;
    draw();
    choices();
  }), MOST_OFTEN_MS);
}

function choices() {
  const known = [...model.rollouts.values()], state = known.map((one) => `${one.rollout_id} ${one.state}`).join();
  if (select.dataset.state === `${state} ${args[0]}`) return;
  select.dataset.state = `${state} ${args[0]}`;
  select.replaceChildren(el("option", { value: "", textContent: "the newest" }), ...known.reverse().map((one) =>
    el("option", { value: one.rollout_id, selected: one.rollout_id === args[0], textContent: `${one.rollout_id} · ${one.state}` })));
}

function open() {
  let words = [];
  try {
    words = location.hash.slice(1).split("/").map(decodeURIComponent);
  } catch { /* a hash that nobody of us wrote */ }
  [name, ...args] = Object.hasOwn(VIEWS, words[0]) ? words : ["now"];
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.view === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
    if (name !== "compare") link.hash = place(link.dataset.view, args[0] && link.dataset.view !== "compare" ? [args[0]] : []);
  }
  root.replaceChildren();
  draw = VIEWS[name].show(root, context);
  redraw();
}

select.addEventListener("change", () => context.go(name === "compare" ? "now" : name, ...(select.value ? [select.value] : [])));
document.addEventListener("keydown", (event) => {
  const view = Object.keys(VIEWS)[Number(event.key) - 1];
  if (view && !event.ctrlKey && !event.metaKey && !event.altKey && !/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) {
    context.go(view, ...(args[0] && name !== "compare" && view !== "compare" ? [args[0]] : []));
  }
});
addEventListener("hashchange", open);
addEventListener("resize", redraw);
whenColorsChange(open);
open();
connect(
  (event, data) => {
    take(model, event, data);
    if (event === "server") say(true, "");
    redraw();
  },
  say,
);

function say(connected, why) {
  const file = model.server?.file;
  status.textContent = !connected ? `not connected: ${why}` : file ? `of the file ${file}` : "live";
  status.classList.toggle("lost", !connected);
}
