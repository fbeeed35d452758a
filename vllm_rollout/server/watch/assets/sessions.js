// Groups of sessions: a row per conversation, its turns over time, with the tools between them.
import { fit, palette, strip } from "./draw.js";
import { el, foreign, number, table } from "./dom.js";

export const STATES = {
  turn: "generates", between_turns: "waits for its tool", finished: "finished", truncated: "cut by a limit",
  void: "void", pruned: "stopped by its score", surplus: "stopped: the race was over", deferred: "stopped: deferred",
};
// A state drawn as the end of a candidate that it is like.
const LIKE = {
  turn: "running", between_turns: "running", finished: "stop", truncated: "length", void: "failed", pruned: "pruned",
  surplus: "surplus", deferred: "deferred",
};
const MOST_GROUPS = 16, MOST_ROWS = 32, ROW = 8, HIGH = 6, MARK = 12, LEAST_S = 1, AT_ONCE_S = 0.02;

const told = (group) => {
  const counts = Object.keys(STATES).map((state) => [group.sessions.filter((each) => each.state === state).length, STATES[state]]);
  const turns = group.sessions.reduce((sum, each) => sum + each.num_turns, 0);
  return ` · ${group.status}${group.reason ? ` (${group.reason})` : ""}, ${number(group.group_size)} wanted, ${number(turns)} turns; `
    + [...counts, [group.num_to_begin, "not begun"]].filter(([count]) => count).map(([count, word]) => `${number(count)} ${word}`).join(", ");
};

function drawGroup(canvas, group, sessions, until) {
  const width = canvas.parentElement.clientWidth, colors = palette();
  const pen = fit(canvas, width, Math.max(1, sessions.length) * ROW);
  const x = (seconds) => ((width - MARK) * Math.min(seconds, until)) / until;
  const selected = new Set(group.selected);
  sessions.forEach(({ index, session }, row) => {
    const y = row * ROW, { turns, state } = session, end = LIKE[state], is_open = session.ended_s === null;
    if (!turns.length && is_open) return;
    const first = turns.length ? turns[0][0] : session.ended_s, last = is_open ? until : session.ended_s;
    pen.fillStyle = is_open ? colors.soft : colors[end];
    pen.fillRect(x(first), y + HIGH / 2, Math.max(1, x(last) - x(first)), 1);
    turns.forEach(([from, to], turn) => {
      const ends_it = !is_open && turn === turns.length - 1 && (to ?? until) > session.ended_s - AT_ONCE_S;
      const how = to === null && is_open ? "running" : ends_it ? end : "stop";
      strip(pen, x(from), y, Math.max(1, x(to ?? until) - x(from)), HIGH, how);
    });
    if (!is_open) {
      pen.fillStyle = colors[end] ?? colors.text;
      pen.fillRect(x(last), y, 1.5, HIGH);
    }
    if (selected.has(index)) {
      pen.fillStyle = colors.text;
      pen.fillRect(width - MARK + 5, y + 2, 3, 3);
    }
  });
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
        const parts = { said: el("p", { className: "told" }), canvas: el("canvas", { role: "img" }) };
        const listed = el("details", { ontoggle: context.redraw }, el("summary", { textContent: "as a table" }), el("div"));
        known.set(group.name, { ...parts, listed, box: el("section", {}, parts.said, parts.canvas, listed) });
      }
      return [group, known.get(group.name)];
    });
    const there = `${groups.length} ${shown.map(([group]) => group.name)}`, focused = document.activeElement;
    if (there !== drawn) {
      const more = groups.length - shown.length;
      root.replaceChildren(
        el("h2", { textContent: "groups of sessions" }),
        el("p", { className: "soft" }, "A row is a session, a bar a turn, a line the tool between two turns; ● comes back."),
        ...shown.map(([, { box }]) => box),
        ...(more ? [el("p", { textContent: `${number(more)} more groups are not drawn.` })] : []));
      if (root.contains(focused)) focused.focus({ preventScroll: true });
      drawn = there;
    }
    for (const [group, { said, canvas, listed }] of shown) {
      const until = Math.max(LEAST_S, group.seconds ?? model.at - group.began);
      const sessions = group.sessions.map((session, index) => ({ session, index }));
      const words = told(group), rows = sessions.slice(0, MOST_ROWS);
      const more = sessions.length > rows.length ? `; the first ${MOST_ROWS} are drawn` : "";
      said.replaceChildren(foreign(group.id), `${words}; ${number(until, 1)} s${more}`);
      canvas.setAttribute("aria-label", `${group.id.slice(0, 80)}${words}`);
      drawGroup(canvas, group, rows, until);
      if (listed.open) {
        listed.lastChild.replaceChildren(table(["session", "turns", "tokens", "reward", "state"], sessions.map(({ session }) => [
          foreign(session.id), number(session.num_turns), number(session.num_tokens), number(session.reward, 3), STATES[session.state] ?? session.state])));
      }
    }
  };
}
