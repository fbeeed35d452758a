// A group's candidates side by side: what each said, why it ended, its score, its reward.
import { MOST_CHARACTERS, el, foreign, number } from "./dom.js";
import { get } from "./feed.js";
import { sessionGroup } from "./sessions.js";
import { WORDS } from "./state.js";

// So often those that run are asked what they say.
const EVERY_MS = 1000;

function candidate(prompt, index, told) {
  const end = prompt.ends[index], score = prompt.scores?.[index], reward = prompt.rewards?.[index];
  const selected = prompt.selected?.includes(index);
  const facts = [
    `${number(prompt.lengths[index])} tokens`, WORDS[end] ?? end, selected ? "comes back" : null,
    score === null || score === undefined ? null : `score ${number(score, 3)}`,
    reward === null || reward === undefined ? null : `reward ${number(reward, 3)}`,
    prompt.reward_status?.[index] && prompt.reward_status[index] !== "ok" ? prompt.reward_status[index] : null,
  ].filter(Boolean);
  return el("article", { className: `candidate ${selected ? "selected" : ""} ${end === "running" ? "runs" : ""}` },
    el("div", {}, el("b", { textContent: `${index} ` }), facts.join(" · ")),
    told ? el("pre", { tabIndex: 0 }, told.offset ? "… " : null, foreign(told.text, MOST_CHARACTERS)) : null);
}

// One of sessions, if it is named so, or there is nothing else.
function sessionsOf({ args, model }) {
  return model.sessions.get(args[0]) ?? (args.length || model.rollouts.size ? null : [...model.sessions.values()].at(-1));
}

export function show(root, context) {
  const parts = [el("div"), el("div")], drawRollout = ofRollout(parts[0], context), drawSessions = sessionGroup(parts[1], context);
  root.append(...parts);
  return function draw() {
    const group = sessionsOf(context);
    parts[0].hidden = Boolean(group);
    parts[1].hidden = !group;
    group ? drawSessions(group) : drawRollout();
  };
}

function ofRollout(root, context) {
  const head = el("div"), body = el("div", { className: "candidates" }), looks = [];
  root.append(head, body);
  let texts = null, why = "", shown = "", asked = "", askedAt = 0, asks = 0, answered = 0, drawn = "";

  async function ask(rollout, position, state) {
    const number = (asks += 1), group = shown;
    asked = state;
    askedAt = Date.now();
    let told = null, reason = "";
    try {
      const answer = await get(`v1/rollouts/watch/${encodeURIComponent(rollout)}/${position}`);
      told = await answer.json();
    } catch (error) {
      reason = error.message;
    }
    if (group !== shown || number < answered) return;
    [texts, why, answered] = [told, reason, number];
    context.redraw();
  }

  function none(why) {
    [shown, asked, drawn, looks.length] = ["", "", "", 0];
    body.replaceChildren();
    head.replaceChildren(why);
  }

  // Whoever looks the same stays, with the focus and as far as it was scrolled; of one that runs the newest text is seen.
  function put(index, element) {
    const before = body.children[index], now = element.outerHTML;
    if (before && looks[index] === now) return;
    looks[index] = now;
    before ? before.replaceWith(element) : body.append(element);
    const text = element.querySelector(".runs pre");
    if (text) text.scrollTop = text.scrollHeight;
  }

  return function draw() {
    const rollout = context.rollout();
    const position = Number(context.args[1] ?? Math.min(...(rollout?.prompts.keys() ?? [0])));
    const prompt = rollout?.prompts.get(position);
    if (rollout?.prompts.size === 0) return none("No group of this rollout has begun.");
    if (!prompt) return none("There is no such group here. Choose one in the view now: arrow keys, then Enter.");
    if (shown !== `${rollout.rollout_id} ${position}`) [shown, texts, why] = [`${rollout.rollout_id} ${position}`, null, ""];
    const ended = prompt.ends.filter((end) => end !== "running").length;
    const state = `${rollout.rollout_id} ${position} ${ended} ${prompt.status}`;
    const runs = prompt.status === "running" && Date.now() - askedAt > EVERY_MS;
    if (asked !== state || runs) ask(rollout.rollout_id, position, state);
    const now = `${state} ${JSON.stringify(prompt.lengths)} ${JSON.stringify(prompt.rewards)} ${why} ${answered}`;
    if (now === drawn) return;
    drawn = now;
    const others = [...rollout.prompts.keys()].sort((a, b) => a - b), place = others.indexOf(position);
    const link = (to, word) => to === undefined ? null
      : el("a", { href: `#group/${encodeURIComponent(rollout.rollout_id)}/${to}`, textContent: word });
    head.replaceChildren(
      el("h2", {}, foreign(prompt.id), ` · ${prompt.status ?? "over"}`),
      el("p", {}, link(others[place - 1], "before"), " ", link(others[place + 1], "after")),
      texts?.prompt ? el("pre", {}, foreign(texts.prompt, 2000)) : el("p", { className: "soft", textContent: why }));
    const byIndex = new Map((texts?.candidates ?? []).map((told) => [told.index, told]));
    prompt.lengths.forEach((_, index) => put(index, candidate(prompt, index, byIndex.get(index))));
    while (body.children.length > prompt.lengths.length) body.lastChild.remove();
  };
}
