// What is known: events in, a model out. It knows of no page.

export const ENDS = ["running", "stop", "length", "surplus", "pruned", "deferred", "failed"];
export const WORDS = {
  running: "runs", stop: "ended by itself", length: "cut at max_tokens", surplus: "stopped: the race was over",
  pruned: "stopped by its score", deferred: "stopped: deferred", failed: "failed",
};
export const MANY = {
  ...WORDS, running: "run", stop: "ended by themselves", pruned: "stopped by their scores",
};
const MOST_ROLLOUTS = 64;
const MOST_MOVES = 200;

export const newModel = () => ({ server: null, rollouts: new Map(), ranks: [], at: 0, rounds: new Map(), moves: [], sessions: new Map(), feeds: [] });

// The last ones of them; those that run are the last to go.
function bound(known, runs) {
  if (known.size <= MOST_ROLLOUTS) return;
  known.delete(([...known].find(([, each]) => !runs(each)) ?? [...known][0])[0]);
}

function rolloutOf(row) {
  return { ...row, prompts: new Map(row.prompts.map((prompt, place) => [prompt.position ?? place, prompt])) };
}

export function take(model, name, data) {
  const rollout = model.rollouts.get(data.rollout_id);
  if (name === "server") {
    Object.assign(model, newModel(), { server: data, at: data.now });
  } else if (name === "rollout") {
    model.rollouts.set(data.rollout_id, rolloutOf(data));
    bound(model.rollouts, (each) => each.state === "running");
  } else if (name === "group" && rollout) {
    const before = rollout.prompts.get(data.position)?.moves?.length ?? 0;
    for (const [seconds, rank] of (data.prompt.moves ?? []).slice(Math.max(before, 1))) {
      model.moves.push({ rollout: data.rollout_id, prompt: data.prompt.id, seconds, rank });
    }
    model.moves.splice(0, model.moves.length - MOST_MOVES);
    rollout.prompts.set(data.position, data.prompt);
  } else if (name === "rewards" && rollout) {
    const byId = new Map([...rollout.prompts.values()].map((prompt) => [prompt.id, prompt]));
    for (const { prompt_id: id, index, reward } of data.rewards) {
      const prompt = byId.get(id);
      if (prompt && index < prompt.lengths.length) {
        prompt.rewards ??= prompt.lengths.map(() => null);
        prompt.rewards[index] = reward;
      }
    }
  } else if (name === "ranks") {
    model.ranks = data.ranks;
    model.at = data.at;
  } else if (name === "round") {
    model.rounds.delete(data.run);
    model.rounds.set(data.run, data);
    if (model.rounds.size > MOST_ROLLOUTS) model.rounds.delete(model.rounds.keys().next().value);
  } else if (name === "sessions") {
    model.sessions.set(data.name, data);
    bound(model.sessions, (each) => each.status === "running");
  } else if (name === "feeds") {
    model.feeds = data.feeds;
  } else if (name === "gone") {
    for (const id of data.rollout_ids) model.rollouts.delete(id);
    for (const name of data.sessions ?? []) model.sessions.delete(name);
  }
}

// The one that runs and began first, else the last one.
export function current(model) {
  const all = [...model.rollouts.values()];
  return all.find((rollout) => rollout.state === "running") ?? all.at(-1);
}

export const secondsOf = (model, rollout) =>
  rollout.receipt?.seconds ?? rollout.seconds ?? (rollout.began ? Math.max(0, model.at - rollout.began) : null);

export function* candidatesOf(rollout) {
  for (const prompt of rollout.prompts.values()) {
    const selected = new Set(prompt.selected ?? []);
    for (let index = 0; index < prompt.lengths.length; index++) {
      yield {
        prompt, index, tokens: prompt.lengths[index], end: prompt.ends[index], selected: selected.has(index),
        from: prompt.started_s ?? null, to: prompt.ended_s?.[index] ?? null, reward: prompt.rewards?.[index] ?? null,
      };
    }
  }
}

const at = (sorted, share) => (sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] : null);
const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);

export function measures(rollout) {
  const ends = Object.fromEntries(ENDS.map((end) => [end, 0]));
  const tokens = { returned: 0, surplus: 0, pruned: 0, deferred: 0, failed: 0, "not chosen": 0, "still running": 0 };
  const lengths = [], rewards = [];
  for (const each of candidatesOf(rollout)) {
    ends[each.end] += 1;
    const kind = each.selected ? "returned" : each.end === "running" ? "still running"
      : each.end in tokens ? each.end : "not chosen";
    tokens[kind] += each.tokens;
    if (each.end === "stop" || each.end === "length") lengths.push(each.tokens);
    if (each.reward !== null) rewards.push(each.reward);
  }
  lengths.sort((a, b) => a - b);
  const complete = [...rollout.prompts.values()].filter((prompt) => prompt.status === "complete").length;
  const generated = Object.values(tokens).reduce((sum, value) => sum + value, 0);
  return {
    ends, tokens, generated, complete, lengths, meanLength: mean(lengths), p50: at(lengths, 0.5), p99: at(lengths, 0.99),
    longest: lengths.at(-1) ?? null, reward: mean(rewards), numRewards: rewards.length,
  };
}

// [from, to, rank] for each rank that a candidate was on; its group's first one is told only if it ever moved.
export function* spansOf({ prompt, from, to }, until) {
  const places = prompt.moves?.length ? prompt.moves : [[from, prompt.rank ?? 0]];
  for (let i = 0; i < places.length; i++) {
    const begin = i ? Math.max(from, places[i][0]) : from;
    const over = Math.min(to ?? until, places[i + 1]?.[0] ?? Infinity);
    if (over > begin) yield [begin, over, places[i][1]];
  }
}

// [[seconds], [how many ran] per rank]: a step at each begin and end.
export function runningOver(rollout, until) {
  const changes = new Map();
  const ranks = new Map();
  const change = (seconds, rank, by) => {
    if (!ranks.has(rank)) ranks.set(rank, 0);
    if (!changes.has(seconds)) changes.set(seconds, []);
    changes.get(seconds).push([rank, by]);
  };
  for (const candidate of candidatesOf(rollout)) {
    if (candidate.from === null) continue;
    for (const [begin, over, rank] of spansOf(candidate, until)) {
      change(begin, rank, 1);
      change(over, rank, -1);
    }
  }
  const numbers = [...ranks.keys()].sort((a, b) => a - b);
  const running = new Map(numbers.map((rank) => [rank, 0]));
  const seconds = [], columns = numbers.map(() => []);
  for (const moment of [...changes.keys()].sort((a, b) => a - b)) {
    for (const [rank, by] of changes.get(moment)) running.set(rank, running.get(rank) + by);
    seconds.push(moment);
    numbers.forEach((rank, i) => columns[i].push(running.get(rank)));
  }
  return { ranks: numbers, seconds, columns };
}
