// What the server has learned of its candidates, and what rewards say of lengths.
import { chart, palette } from "./draw.js";
import { el, foreign, number, percent, table } from "./dom.js";
import { get } from "./feed.js";
import { candidatesOf } from "./state.js";

const EVERY_MS = 5000;

function byLength(model) {
  const graded = [...model.rollouts.values()].flatMap((rollout) => [...candidatesOf(rollout)])
    .filter(({ reward }) => reward !== null).sort((a, b) => a.tokens - b.tokens);
  if (graded.length < 8) return el("p", { className: "soft", textContent: "Fewer than 8 rewards are known." });
  // Equal lengths stay together, so a quarter may be empty.
  const most = [0.25, 0.5, 0.75, 1].map((share) => graded[Math.ceil(share * graded.length) - 1].tokens);
  const quarters = most.map((to, i) => graded.filter(({ tokens }) => tokens <= to && !(i && tokens <= most[i - 1])));
  const range = (from, to) => (from === to ? `${number(to)} tokens` : `${number(from)} to ${number(to)} tokens`);
  return table(["lengths", "candidates", "mean reward"], quarters.filter((each) => each.length).map((each) => [
    range(each[0].tokens, each.at(-1).tokens), number(each.length),
    number(each.reduce((sum, { reward }) => sum + reward, 0) / each.length, 3)]));
}

function signals(report) {
  const rows = Object.entries(report.signals ?? {}).map(([name, of]) => [
    name, number(of.auc, 3), number(of.within_group_auc, 3), number(of.brier, 3), number(of.num_positive), number(of.num_negative)]);
  return rows.length ? table(["signal", "AUC", "within groups", "Brier", "right", "wrong"], rows)
    : el("p", { className: "soft", textContent: "No labels yet." });
}

function audits({ num_labels: n, positive_ratio: all, raced_positive_ratio: others }) {
  return el("p", { textContent: n ? `Audits, where no candidate is stopped: ${percent(all)} of ${number(n)} labels are right, `
    + `${percent(others)} elsewhere.` : "No audit has labels yet." });
}

function trial({ lengths, recommended, reason }) {
  return lengths.length ? [el("h2", { textContent: "detection lengths that were tried" }),
    table(["tokens", "AUC", "its error", "tokens saved", "worth"], lengths.map((of) => [
      number(of.detection_length), number(of.auc, 3), number(of.auc_error, 3), percent(of.saving_ratio), number(of.value, 2)])),
    el("p", { textContent: `Best: ${number(recommended)} (${reason})` })] : [];
}

function hardest({ data }) {
  const known = data.filter(({ success }) => success);
  return known.length ? [el("h2", { textContent: "prompts that succeed least" }),
    table(["prompt", "successes", "rewards", "mean length"], known.map((of) => [foreign(of.id ?? of.key),
      percent(of.success.rate), number(of.success.num_rewarded, 1), number(of.lengths?.mean)]))] : [];
}

function reliability(parent, report) {
  for (const [name, of] of Object.entries(report.signals ?? {})) {
    const bins = (of.bins ?? []).filter((bin) => bin.mean_predicted !== null && bin.mean_observed !== null);
    if (bins.length < 2) continue;
    const place = el("div", { className: "chart" });
    parent.append(el("h2", { textContent: `${name}: said and true` }), place);
    const { accent, soft } = palette(), x = bins.map((bin) => bin.mean_predicted);
    chart(place, [{ label: "true", stroke: accent, width: 2 }, { label: "if it were exact", stroke: soft, dash: [4, 4] }],
      [x, bins.map((bin) => bin.mean_observed), x], "probability that was said");
  }
}

export function show(root, context) {
  const lengths = el("div"), learned = el("div", {}, el("p", { className: "soft", textContent: "asking the server" })),
    tried = el("div"), prompts = el("div");
  root.append(el("h2", { textContent: "reward by length, of all rollouts on this page" }), lengths,
    el("h2", { textContent: "scores" }), learned, tried, prompts);
  let next = 0, counted = -1;

  async function part(place, path, shown) {
    try {
      place.replaceChildren(...shown(await (await get(path)).json()));
    } catch (error) {
      place.replaceChildren(el("p", { className: "soft", textContent: error.message }));
    }
  }

  async function ask() {
    part(tried, "v1/quality_head/detection_lengths", trial);
    part(prompts, "v1/rollouts/prompts?sort=success&limit=20", hardest);
    try {
      const detection = context.rollout()?.detection_length;
      const report = await (await get(`v1/quality_head/report${detection ? `?detection_length=${detection}` : ""}`)).json();
      learned.replaceChildren(signals(report), audits(report.audit),
        el("p", { textContent: report.advice?.reason ?? "" }));
      reliability(learned, report);
    } catch (error) {
      learned.replaceChildren(el("p", { className: "soft", textContent: error.message }));
    }
  }

  return function draw() {
    const known = [...context.model.rollouts.values()].reduce((sum, rollout) => sum + rollout.prompts.size, 0);
    if (known !== counted || Date.now() >= next) lengths.replaceChildren(byLength(context.model));
    counted = known;
    if (Date.now() >= next && context.model.server?.live !== false) {
      next = Date.now() + EVERY_MS;
      ask();
    } else if (context.model.server?.live === false) {
      learned.replaceChildren(el("p", { className: "soft", textContent: "A file does not have what was learned." }));
    }
  };
}
