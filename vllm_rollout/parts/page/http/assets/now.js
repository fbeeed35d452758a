// Groups that race, as they do it: a cell per group, a bar per candidate.
import { bar, fit, legend, palette } from "./draw.js";
import { el, foreign, number, safe, table, tiles } from "./dom.js";
import { showFeeds } from "./feeds.js";
import { sessionsView } from "./sessions.js";
import { ENDS, MANY, WORDS, measures, secondsOf } from "./state.js";

const CELL = 78, LABEL = 15, GAP = 12, MARKS = 9;
// Rows that are drawn at most: a browser draws nothing on a canvas of some ten thousand pixels.
const MOST_ROWS = 48;

function ranksOf(model) {
  return el("div", { className: "ranks" }, ...model.ranks.map((rank) => {
    const fill = el("i");
    fill.style.width = `${100 * (rank.kv ?? 0)}%`;
    const said = `rank ${rank.rank}: ${rank.state}, ${number(rank.running)} run`
      + (rank.waiting ? `, ${number(rank.waiting)} wait` : "") + (rank.weights ? `, weights ${safe(rank.weights)}` : "");
    return el("div", { className: `rank ${rank.state}`, title: `KV cache ${number(100 * (rank.kv ?? 0))} %` },
      el("div", { textContent: said }), el("div", { className: "bar" }, fill));
  }));
}

function toldOf(prompt) {
  const counts = ENDS.map((end) => [prompt.ends.filter((each) => each === end).length, end]).filter(([n]) => n);
  const where = prompt.rank === null || prompt.rank === undefined ? "" : `, rank ${prompt.rank}`;
  const why = prompt.reason ? ` (${safe(prompt.reason)})` : "";
  return `${where}: ${prompt.status ?? "over"}${why}, longest ${number(Math.max(...prompt.lengths))} tokens; `
    + counts.map(([n, end]) => `${n} ${(n > 1 ? MANY : WORDS)[end]}`).join(", ")
    + (prompt.audit ? "; an audit: no candidate is stopped" : "");
}

// As many as there is room for, those that run first, in the order in which they were given.
function drawable(prompts, most) {
  if (prompts.length <= most) return prompts;
  const [run, ended] = [true, false].map((is) => prompts.filter(([, prompt]) => (prompt.status === "running") === is));
  return [...run, ...ended].slice(0, most).sort(([a], [b]) => a - b);
}

export function show(root, context) {
  const summary = el("div"), told = el("p", { className: "told" });
  const canvas = el("canvas", { tabIndex: 0, role: "img", "aria-label": "groups; arrow keys choose, Enter opens" });
  const listed = el("details", { ontoggle: context.redraw }, el("summary", { textContent: "as a table" }), el("div"));
  const more = el("p", { className: "soft" }), beside = el("div"), feeds = el("div"), sessions = el("div"), drawSessions = sessionsView(sessions, context);
  const marks = legend(WORDS, (pen, end) => bar(pen, 4, 13, 5, 8, end), "● comes back   ▲ right   ▽ wrong");
  root.append(feeds, summary, canvas, more, told, marks, listed, beside, sessions);
  let cells = [], chosen = 0, columns = 1, rollout = null;

  function choose(place) {
    chosen = Math.max(0, Math.min(cells.length - 1, place));
    if (cells[chosen]) canvas.setAttribute("aria-label", `${cells[chosen].prompt.id.slice(0, 80)}${toldOf(cells[chosen].prompt)}`);
    context.redraw();
  }
  const open = () => cells[chosen] && context.go("group", rollout.rollout_id, cells[chosen].position);
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[event.key];
    if (step) choose(chosen + step);
    else if (event.key === "Enter") open();
    else return;
    event.preventDefault();
  });
  const under = (event) => cells.findIndex(({ x, y, width, height }) => event.offsetX >= x && event.offsetX < x + width
    && event.offsetY >= y && event.offsetY < y + height);
  canvas.addEventListener("mousemove", (event) => {
    const place = under(event);
    if (place >= 0 && place !== chosen) choose(place);
  });
  canvas.addEventListener("click", (event) => under(event) >= 0 && (choose(under(event)), open()));

  function drawCell(pen, cell, scale, detection) {
    const { x, y, width, prompt, pitch, place } = cell;
    const ground = y + LABEL + CELL;
    const colors = palette();
    pen.fillStyle = place === chosen ? colors.text : colors.soft;
    pen.font = '11px system-ui, "DejaVu Sans", sans-serif';
    pen.save();
    pen.beginPath();
    pen.rect(x, y, width, LABEL);
    pen.clip();
    pen.fillText(prompt.id.slice(0, 40).replace(/[\u0000-\u001f\u202a-\u202e\u2066-\u2069]/g, "�"), x, y + 11);
    pen.restore();
    pen.fillStyle = place === chosen ? colors.accent : colors.line;
    pen.fillRect(x, ground, width, 1);
    const selected = new Set(prompt.selected ?? []);
    prompt.lengths.forEach((tokens, index) => {
      const left = x + index * pitch;
      bar(pen, left, ground, pitch - 1, tokens ? Math.max(1, (tokens / scale) * CELL) : 0, prompt.ends[index]);
      const middle = left + (pitch - 1) / 2, reward = prompt.rewards?.[index];
      pen.fillStyle = colors.text;
      if (reward !== null && reward !== undefined) {
        const up = reward > 0;
        pen.beginPath();
        pen.moveTo(middle, ground + (up ? 2 : 6));
        pen.lineTo(middle + 2.2, ground + (up ? 6 : 2));
        pen.lineTo(middle - 2.2, ground + (up ? 6 : 2));
        pen.closePath();
        pen.strokeStyle = colors.text;
        pen.lineWidth = 0.8;
        up ? pen.fill() : pen.stroke();
      }
      if (selected.has(index)) pen.fillRect(middle - 1, ground + 8, 2, 2);
    });
    if (detection && detection < scale) {
      pen.fillStyle = colors.pruned;
      pen.fillRect(x, ground - (detection / scale) * CELL, width, 0.7);
    }
  }

  function draw() {
    const { model } = context;
    rollout = context.rollout();
    drawSessions();
    showFeeds(feeds, model);
    for (const part of [canvas, more, told, listed, beside]) part.hidden = !rollout;
    if (!rollout) {
      const empty = el("p", { textContent: "No rollout has begun yet. This page will show it." });
      summary.replaceChildren(ranksOf(model), ...(model.sessions.size ? [] : [empty]));
      return;
    }
    const { ends, complete, generated, reward } = measures(rollout);
    const queued = rollout.state === "running" ? rollout.num_prompts - rollout.prompts.size : 0;
    const round = rollout.run ? `${rollout.kind}, ${rollout.round} of ` : null;
    summary.replaceChildren(
      model.feeds.length ? el("h2", {}, "rollout ", foreign(rollout.rollout_id)) : "",
      model.feeds.length ? el("p", { className: "soft", textContent: "Each group of a feed is a rollout of its own." }) : "",
      tiles([
        [rollout.state === "running" ? "seconds so far" : "seconds", number(secondsOf(model, rollout), 1)],
        [`of ${number(rollout.num_prompts)} ${rollout.num_prompts === 1 ? "group" : "groups"} complete`, number(complete)],
        [`of ${number(rollout.num_candidates)} candidates run`, number(ends.running)],
        ...(queued > 0 ? [["groups wait for places", number(queued)]] : []),
        ["tokens", number(generated)],
        ["mean reward", number(reward, 3)],
        ...(rollout.weight_versions?.length > 1 ? [["versions of the weights", number(rollout.weight_versions.length)]] : []),
      ]),
      round ? el("p", { className: "soft" }, `round: ${round}`, foreign(rollout.run)) : "",
      ranksOf(model),
    );
    const prompts = [...rollout.prompts.entries()].sort(([a], [b]) => a - b);
    const longest = Math.max(1, ...prompts.map(([, prompt]) => Math.max(...prompt.lengths)));
    const size = Math.max(1, ...prompts.map(([, prompt]) => prompt.lengths.length));
    const width = canvas.parentElement.clientWidth;
    const pitch = Math.max(2, Math.min(7, Math.floor((width - GAP) / size)));
    const cellWidth = Math.max(60, size * pitch);
    columns = Math.max(1, Math.floor((width + GAP) / (cellWidth + GAP)));
    const cellHeight = LABEL + CELL + MARKS + GAP;
    cells = drawable(prompts, MOST_ROWS * columns).map(([position, prompt], place) => ({
      place, position, prompt, pitch, x: (place % columns) * (cellWidth + GAP),
      y: Math.floor(place / columns) * cellHeight, width: cellWidth, height: cellHeight - 4,
    }));
    chosen = Math.max(0, Math.min(chosen, cells.length - 1));
    const pen = fit(canvas, width, Math.max(1, Math.ceil(cells.length / columns)) * cellHeight);
    for (const cell of cells) drawCell(pen, cell, longest, rollout.detection_length);
    const rest = prompts.length - cells.length;
    more.textContent = rest ? `${number(rest)} more groups are in the table.` : "";
    const cell = cells[chosen];
    told.replaceChildren(...(cell ? [foreign(cell.prompt.id), toldOf(cell.prompt)] : ["No group has begun."]));
    if (listed.open) {
      listed.lastChild.replaceChildren(table(["prompt", "rank", "status", "run", "longest"], prompts.map(([, p]) => [
        foreign(p.id), number(p.rank), p.status ?? "over", number(p.ends.filter((end) => end === "running").length),
        number(Math.max(...p.lengths))])));
    }
    const rounds = [...model.rounds.values()], moves = model.moves.filter((move) => move.rollout === rollout.rollout_id);
    beside.replaceChildren(
      ...(rounds.length ? [el("h2", { textContent: "rounds" }), table(["run", "last", "kind", "deferred", "wait", "next"],
        rounds.map((r) => [foreign(r.run), number(r.round), r.kind, number(r.deferred.length), number(r.num_waiting), r.next_round ?? "–"]))] : []),
      ...rounds.filter((r) => r.queue?.length).map((r) => el("p", {}, "for a long round of ", foreign(r.run), " wait ",
        foreign(r.queue.join(", "), 2000), r.queue.length < r.num_queued ? ` and ${number(r.num_queued - r.queue.length)} more` : "")),
      ...(moves.length ? [el("h2", { textContent: "moves" }), table(["prompt", "after", "to rank"],
        moves.slice(-12).reverse().map((move) => [foreign(move.prompt), `${number(move.seconds, 1)} s`, number(move.rank)]))] : []),
    );
  }
  return draw;
}
