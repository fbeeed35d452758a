// A rollout like a profile: who ran on which rank, when, and what was wasted.
import { chart, fit, legend, palette, strip } from "./draw.js";
import { el, number, percent, table, tiles } from "./dom.js";
import { WORDS, candidatesOf, measures, runningOver, secondsOf, spansOf } from "./state.js";

const ALL_LANES = 640, LEAST_LANE = 36, MOST_ROW = 6, BETWEEN = 12, LEFT = 80;
// A rollout of more candidates is not drawn again before its end, which takes seconds.
const MOST_LIVE = 4096;

// Spans in as few rows as ran at once, so that a row is a place; that which was left last is on top.
function placesOf(spans) {
  const places = [];
  for (const span of spans.sort((a, b) => a.from - b.from || b.to - a.to)) {
    const free = places.find((place) => place.at(-1).to <= span.from);
    if (free) free.push(span);
    else places.push([span]);
  }
  return places.sort((a, b) => b.at(-1).to - a.at(-1).to);
}

// Of each rank: its places, and the share of them that stood empty, as a receipt's `bubble` counts it for all ranks.
function lanesOf(rollout, until) {
  const byRank = new Map();
  for (const candidate of candidatesOf(rollout)) {
    if (candidate.from === null) continue;
    for (const [from, to, rank] of spansOf(candidate, until)) {
      if (!byRank.has(rank)) byRank.set(rank, []);
      byRank.get(rank).push({ from, to, end: candidate.end });
    }
  }
  return [...byRank.entries()].sort(([a], [b]) => a - b).map(([rank, spans]) => {
    const places = placesOf(spans), ran = spans.reduce((sum, { from, to }) => sum + to - from, 0);
    return { rank, places, empty: Math.max(0, 1 - ran / (places.length * until)) };
  });
}

function timeline(canvas, lanes, until) {
  const width = canvas.parentElement.clientWidth, colors = palette();
  const most = Math.max(LEAST_LANE, ALL_LANES / Math.max(1, lanes.length));
  const heights = lanes.map(({ places }) => Math.max(LEAST_LANE, Math.min(most, places.length * MOST_ROW)));
  const ground = heights.reduce((sum, height) => sum + height + BETWEEN, 0);
  const pen = fit(canvas, width, ground + 18);
  const x = (seconds) => LEFT + ((width - LEFT - 4) * seconds) / until;
  pen.font = '11px system-ui, "DejaVu Sans", sans-serif';
  let top = 0;
  lanes.forEach(({ rank, places, empty }, lane) => {
    const pitch = Math.min(MOST_ROW, heights[lane] / places.length);
    const high = Math.max(0.4, pitch - (pitch > 2 ? 0.6 : 0));
    pen.fillStyle = colors.soft;
    pen.fillText(`rank ${rank}`, 0, top + 12);
    pen.fillText(`${percent(empty)} empty`, 0, top + 26);
    places.forEach((spans, row) => {
      const draw = (from, to, what) => {
        if (to > from) strip(pen, x(from), top + row * pitch, Math.max(0.5, x(to) - x(from)), high, what);
      };
      spans.forEach(({ from, to, end }, i) => {
        draw(i ? spans[i - 1].to : 0, from, "empty");
        draw(from, to, end);
      });
      draw(spans.at(-1).to, until, "empty");
    });
    top += heights[lane] + BETWEEN;
    pen.fillStyle = colors.line;
    pen.fillRect(LEFT, top - BETWEEN / 2, width - LEFT, 1);
  });
  pen.fillStyle = colors.soft;
  const numTicks = Math.max(1, Math.min(5, Math.floor((width - LEFT) / 90)));
  for (let tick = 0; tick <= numTicks; tick++) {
    const at = (until * tick) / numTicks;
    pen.fillText(`${number(at, 1)} s`, Math.min(x(at), width - 40), ground + 10);
  }
}

function receipt(told) {
  const rows = Object.entries(told).filter(([, value]) => typeof value === "number")
    .map(([name, value]) => [name.replaceAll("_", " "), number(value, Number.isInteger(value) ? 0 : 2)]);
  return [el("h2", { textContent: "receipt" }), table(["", ""], rows)];
}

export function show(root, context) {
  const summary = el("div"), note = el("p", { className: "soft" });
  const canvas = el("canvas", { role: "img", "aria-label": "candidates over time, a lane per rank" });
  const ends = legend({ ...WORDS, empty: "an empty place" }, (pen, end) => strip(pen, 0, 3, 12, 8, end));
  const plot = el("div", { className: "chart" }), sums = el("div");
  root.append(summary, note, canvas, ends, el("h2", { textContent: "how many are on their way, running or waiting for a place" }), plot, sums);
  let drawn = "";

  return function draw() {
    const rollout = context.rollout();
    if (!rollout) return note.replaceChildren(`No rollout has begun yet.${context.model.sessions.size ? " Groups of sessions are in the views now and a group." : ""}`);
    const still = `${rollout.rollout_id} ${rollout.state} ${root.clientWidth}`, isLarge = rollout.num_candidates > MOST_LIVE;
    if (isLarge && still === drawn) return;
    const seconds = secondsOf(context.model, rollout), all = measures(rollout);
    const state = isLarge ? still : `${still} ${all.generated} ${all.numRewards} ${rollout.prompts.size}`;
    if (state === drawn) return;
    drawn = state;
    const timed = seconds && [...candidatesOf(rollout)].some(({ from }) => from !== null);
    const wasted = Object.entries(all.tokens).filter(([kind, n]) => n && kind !== "returned");
    const once = isLarge && rollout.state === "running" ? "It has many candidates, so this is drawn again at its end." : "";
    note.textContent = timed ? once : "This recording has no times (it is of an earlier version, or only has lengths), so there is no timeline.";
    canvas.hidden = !timed;
    plot.replaceChildren();
    const lanes = timed ? lanesOf(rollout, seconds) : [];
    if (timed) {
      timeline(canvas, lanes, seconds);
      const { ranks, seconds: moments, columns } = runningOver(rollout, seconds);
      const looks = [palette().accent, palette().length, palette().stop, palette().pruned, palette().failed, palette().soft];
      chart(plot, ranks.map((rank, i) => ({
        label: `rank ${rank}`, stroke: looks[i % looks.length], width: 1.5, dash: i < looks.length ? [] : [6, 4],
        paths: uPlot.paths.stepped({ align: 1 }), points: { show: false },
      })), [moments, ...columns], "seconds");
    }
    summary.replaceChildren(tiles([
      ["seconds", number(seconds, 1)], ["tokens", number(all.generated)],
      ["came back", percent(all.generated ? all.tokens.returned / all.generated : null)],
      ["longest", number(all.longest)], ["mean reward", number(all.reward, 3)],
      ...lanes.map(({ rank, empty }) => [`of rank ${rank}'s places stood empty`, percent(empty)]),
    ]));
    sums.replaceChildren(
      el("h2", { textContent: "where tokens went" }),
      table(["", "tokens", "share"], [["returned", number(all.tokens.returned), percent(all.tokens.returned / (all.generated || 1))],
        ...wasted.map(([kind, n]) => [kind, number(n), percent(n / all.generated)])]),
      ...(rollout.receipt ? receipt(rollout.receipt) : []));
  };
}
