// Groups of sessions: a row per conversation, its turns over time, with the tools between them.
import { fit, palette, strip } from "./draw.js";
import { el, foreign, number, percent, safe, table, tiles } from "./dom.js";

export const STATES = {
  turn: "generates", between_turns: "waits for its tool", finished: "finished", truncated: "cut by a limit",
  void: "void", pruned: "stopped by its score", surplus: "stopped: the race was over", deferred: "stopped: deferred",
};
// A state drawn as the end of a candidate that it is like.
const LIKE = {
  turn: "running", between_turns: "running", finished: "stop", truncated: "length", void: "failed", pruned: "pruned",
  surplus: "surplus", deferred: "deferred",
};
const STOPPED = ["surplus", "pruned", "deferred"];
const MOST_GROUPS = 16, MOST_ROWS = 32, MOST_TURNS = 64, MARK = 12, LEAST_S = 1, INSTANT_S = 0.001, AT_ONCE_S = 0.02;
const FLAT = { row: 8, high: 6 }, TALL = { row: 14, high: 11, axis: 16 };

const secondsOf = (model, group) => (group.seconds === null ? Math.max(LEAST_S, model.at - group.began) : Math.max(INSTANT_S, group.seconds));
const drawable = (group) => group.sessions.slice(0, MOST_ROWS).map((session, index) => ({ session, index }));
const more = (group) => (group.sessions.length > MOST_ROWS ? `; the first ${MOST_ROWS} are drawn` : "");

const told = (group) => {
  const counts = Object.keys(STATES).map((state) => [group.sessions.filter((each) => each.state === state).length, STATES[state]]);
  const turns = group.sessions.reduce((sum, each) => sum + each.num_turns, 0);
  return ` · ${group.status}${group.reason ? ` (${safe(group.reason)})` : ""}, ${number(group.group_size)} wanted, ${number(turns)} turns; `
    + [...counts, [group.num_to_begin, "not begun"]].filter(([count]) => count).map(([count, word]) => `${number(count)} ${word}`).join(", ");
};

function drawGroup(canvas, group, until, { row: pitch, high, axis = 0 }) {
  const width = canvas.parentElement.clientWidth, colors = palette(), sessions = drawable(group);
  const ground = Math.max(1, sessions.length) * pitch, pen = fit(canvas, width, ground + axis);
  const x = (seconds) => ((width - MARK) * Math.min(seconds, until)) / until;
  const selected = new Set(group.selected);
  sessions.forEach(({ index, session }, row) => {
    const y = row * pitch, { turns, state } = session, end = LIKE[state], is_open = session.ended_s === null;
    if (!turns.length && is_open) return;
    const first = turns.length ? turns[0][0] : session.ended_s, last = is_open ? until : session.ended_s;
    pen.fillStyle = is_open ? colors.soft : colors[end];
    pen.fillRect(x(first), y + high / 2, Math.max(1, x(last) - x(first)), 1);
    turns.forEach(([from, to], turn) => {
      const ends_it = !is_open && turn === turns.length - 1 && (to ?? until) > session.ended_s - AT_ONCE_S;
      const how = to === null && is_open ? "running" : ends_it ? end : "stop";
      strip(pen, x(from), y, Math.max(1, x(to ?? until) - x(from)), high, how);
    });
    if (!is_open) {
      pen.fillStyle = colors[end] ?? colors.text;
      pen.fillRect(x(last), y, 1.5, high);
    }
    if (selected.has(index)) {
      pen.fillStyle = colors.text;
      pen.fillRect(width - MARK + 5, y + high / 2 - 1.5, 3, 3);
    }
  });
  if (!axis) return;
  const numTicks = Math.max(1, Math.min(5, Math.floor(width / 90)));
  pen.font = '11px system-ui, "DejaVu Sans", sans-serif';
  pen.fillStyle = colors.soft;
  for (let tick = 0; tick <= numTicks; tick++) {
    const at = (until * tick) / numTicks;
    pen.fillText(`${number(at, 1)} s`, Math.min(x(at), width - 44), ground + axis - 4);
  }
}

// Draws into `root` what is known; the groups that run first.
export function sessionsView(root, context) {
  const known = new Map();
  let drawn = "";
  return function draw() {
    const { model } = context;
    const all = [...model.sessions.values()].reverse();
    const groups = [...all.filter((group) => group.status === "running"), ...all.filter((group) => group.status !== "running")];
    root.hidden = !groups.length;
    if (root.hidden) return;
    for (const name of known.keys()) if (!model.sessions.has(name)) known.delete(name);
    const shown = groups.slice(0, MOST_GROUPS).map((group) => {
      if (!known.has(group.name)) {
        const parts = { said: el("span"), canvas: el("canvas", { role: "img" }) };
        const opens = el("a", { href: `#group/${encodeURIComponent(group.name)}` }, foreign(group.id));
        const listed = el("details", { ontoggle: context.redraw }, el("summary", { textContent: "as a table" }), el("div"));
        known.set(group.name, { ...parts, listed, box: el("section", {}, el("p", { className: "told" }, opens, parts.said), parts.canvas, listed) });
      }
      return [group, known.get(group.name)];
    });
    const there = `${groups.length} ${shown.map(([group]) => group.name)}`, focused = document.activeElement;
    if (there !== drawn) {
      const others = groups.length - shown.length;
      root.replaceChildren(
        el("h2", { textContent: "groups of sessions" }),
        el("p", { className: "soft" }, "A row is a session, a bar a turn, a line the tool between two turns; ● comes back."),
        ...shown.map(([, { box }]) => box),
        ...(others ? [el("p", { textContent: `${number(others)} more groups are not drawn.` })] : []));
      if (root.contains(focused)) focused.focus({ preventScroll: true });
      drawn = there;
    }
    for (const [group, { said, canvas, listed }] of shown) {
      const until = secondsOf(model, group), words = told(group);
      said.textContent = `${words}; ${number(until, 1)} s${more(group)}`;
      canvas.setAttribute("aria-label", `${group.id.slice(0, 80)}${words}`);
      drawGroup(canvas, group, until, FLAT);
      if (listed.open) {
        listed.lastChild.replaceChildren(table(["session", "turns", "tokens", "reward", "state"], group.sessions.map((session) => [
          foreign(session.id), number(session.num_turns), number(session.num_tokens), number(session.reward, 3), STATES[session.state] ?? session.state])));
      }
    }
  };
}

// Each turn with the tool before it.
function turnsOf({ turns, num_turns: all }) {
  const shown = turns.slice(-MOST_TURNS), runs = turns.at(-1)[1] === null, before = all + runs - shown.length;
  const rows = shown.map(([from, to, tokens, prompt, cached, history], place) => [
    number(before + place + 1), number(from, 1), number(to === null ? null : to - from, 1),
    number(place ? from - shown[place - 1][1] : null, 1), number(prompt), number(cached), number(tokens), foreign(history ?? "–")]);
  return table(["turn", "at s", "took s", "tool s", "prompt", "cached", "tokens", "its prompt"], rows);
}

function session({ session: its, index }, selected) {
  const comesBack = selected.has(index);
  const facts = [
    STATES[its.state] ?? its.state, STOPPED.includes(its.state) || !its.ended_by ? null : `by ${its.ended_by}`, its.ended_s === null ? null : `at ${number(its.ended_s, 1)} s`,
    its.num_turns === 1 ? "1 turn" : `${number(its.num_turns)} turns`, `${number(its.num_tokens)} tokens`, comesBack ? "comes back" : null,
    its.reward === null ? null : `reward ${number(its.reward, 3)}`,
  ].filter(Boolean);
  return el("article", { className: `candidate ${comesBack ? "selected" : ""}` },
    el("div", {}, el("b", { textContent: `${index} ` }), foreign(its.id), ` · ${facts.join(" · ")}`), its.turns.length ? turnsOf(its) : null);
}

// One group, with each turn of its sessions: `draw(group)`.
export function sessionGroup(root, context) {
  const head = el("div"), said = el("p", { className: "told" }), canvas = el("canvas", { role: "img" });
  const body = el("div", { className: "candidates wide" });
  root.append(head, said, canvas, body);
  let drawn = "";
  return function draw(group) {
    const { model } = context, until = secondsOf(model, group), words = told(group);
    drawGroup(canvas, group, until, TALL);
    said.textContent = `${words.replace(" · ", "")}; ${number(until, 1)} s${(group.rank ?? null) === null ? "" : `, rank ${group.rank}`}${more(group)}`;
    canvas.setAttribute("aria-label", `${group.id.slice(0, 80)}${words}`);
    const names = [...model.sessions.keys()], place = names.indexOf(group.name), selected = new Set(group.selected);
    const state = JSON.stringify([group, names]);
    if (state === drawn) return;
    drawn = state;
    const link = (to, word) => to === undefined ? null : el("a", { href: `#group/${encodeURIComponent(to)}`, textContent: word });
    const sum = (sessions, of) => sessions.reduce((total, each) => total + of(each), 0);
    const turns = group.sessions.flatMap((each) => each.turns), known = turns.filter((turn) => Number.isFinite(turn[4]));
    const generated = sum(group.sessions, (each) => each.num_tokens);
    const returned = sum(group.sessions.filter((_, index) => selected.has(index)), (each) => each.num_tokens);
    const stopped = sum(group.sessions.filter((each) => STOPPED.includes(each.state)), (each) => each.num_tokens);
    const prompts = sum(known, (turn) => turn[3]);
    head.replaceChildren(
      el("h2", {}, foreign(group.id)),
      el("p", {}, link(names[place - 1], "before"), " ", link(names[place + 1], "after")),
      tiles([
        ["tokens", number(generated)], ["came back", percent(generated ? returned / generated : null)],
        ["tokens of those stopped", number(stopped)], ["of prompts were cached", percent(prompts ? sum(known, (turn) => turn[4]) / prompts : null)],
      ]));
    body.replaceChildren(...drawable(group).map((each) => session(each, selected)));
  };
}
