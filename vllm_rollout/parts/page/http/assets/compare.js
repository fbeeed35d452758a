// Two rollouts beside each other, or two runs; or what has run, and what a simulation says of another setting.
import { chart, palette } from "./draw.js";
import { el, foreign, number, percent, table } from "./dom.js";
import { measures, secondsOf } from "./state.js";

const WAS = "all that have run";

function sides(model) {
  const found = new Map([...model.rollouts.values()].map((rollout) => [rollout.rollout_id, [rollout]]));
  for (const rollout of model.rollouts.values()) {
    if (rollout.run) found.set(`run ${rollout.run}`, [...(found.get(`run ${rollout.run}`) ?? []), rollout]);
  }
  const all = [...model.rollouts.values()], simulated = all.filter((rollout) => rollout.setting);
  if (simulated.length && simulated.length < all.length) found.set(WAS, all.filter((rollout) => !rollout.setting));
  for (const rollout of simulated) {
    const name = `setting ${rollout.setting}`;
    found.set(name, [...(found.get(name) ?? []), rollout]);
  }
  return found;
}

function told(model, rollouts) {
  const each = rollouts.map(measures), sum = (of) => each.reduce((total, one) => total + of(one), 0);
  const lengths = each.flatMap((one) => one.lengths).sort((a, b) => a - b);
  const seconds = rollouts.map((one) => secondsOf(model, one)), rewards = sum((one) => one.numRewards), generated = sum((one) => one.generated);
  const at = (share) => lengths[Math.min(lengths.length - 1, Math.floor(share * lengths.length))];
  return {
    lengths, rows: [
      ["rollouts", number(rollouts.length)],
      ["seconds", number(seconds.includes(null) ? null : seconds.reduce((a, b) => a + b, 0), 1)],
      ["groups complete", number(sum((one) => one.complete))], ["tokens", number(generated)],
      ["came back", percent(generated ? sum((one) => one.tokens.returned) / generated : null)],
      ["mean length", number(lengths.length ? lengths.reduce((a, b) => a + b, 0) / lengths.length : null, 1)],
      ["P50, P99, longest", `${number(at(0.5))}, ${number(at(0.99))}, ${number(lengths.at(-1))}`],
      ["mean reward", number(rewards ? sum((one) => (one.reward ?? 0) * one.numRewards) / rewards : null, 3)],
    ],
  };
}

function shares(lengths, moments) {
  let place = 0;
  return moments.map((tokens) => {
    while (place < lengths.length && lengths[place] <= tokens) place++;
    return lengths.length ? place / lengths.length : null;
  });
}

export function show(root, context) {
  const chosen = el("p"), numbers = el("div"), plot = el("div", { className: "chart" });
  root.append(chosen, numbers, el("h2", { textContent: "share of candidates of at most this length, without the stopped ones" }), plot);
  let drawn = "";

  return function draw() {
    const found = sides(context.model), names = [...found.keys()];
    const pair = [context.args[0] ?? (found.has(WAS) ? WAS : names.at(-2)), context.args[1] ?? names.at(-1)];
    const state = JSON.stringify([names, pair, context.model.at > 0, root.clientWidth]);
    if (state === drawn) return;
    drawn = state;
    if (names.length < 2) return chosen.replaceChildren("Two rollouts are needed to compare.");
    chosen.replaceChildren(...pair.map((name, side) => el("select", {
      "aria-label": side ? "right" : "left",
      onchange: (event) => context.go("compare", ...(side ? [pair[0], event.target.value] : [event.target.value, pair[1]])),
    }, ...names.map((option) => el("option", { value: option, selected: option === name, textContent: option })))));
    if (!pair.every((name) => found.has(name))) return numbers.replaceChildren("One of them is not known any more.");
    const both = pair.map((name) => told(context.model, found.get(name)));
    numbers.replaceChildren(table(["", ...pair.map((name) => foreign(name))], both[0].rows.map(([word, value], place) => [word, value, both[1].rows[place][1]])));
    const moments = [...new Set(both.flatMap(({ lengths }) => lengths))].sort((a, b) => a - b);
    plot.replaceChildren();
    const { accent, failed } = palette();
    if (moments.length > 1) {
      chart(plot, pair.map((name, side) => ({ label: name, stroke: side ? failed : accent, width: 2, dash: side ? [6, 4] : [] })),
        [moments, ...both.map(({ lengths }) => shares(lengths, moments))], "tokens", 260);
    }
  };
}
