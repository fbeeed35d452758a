// Feeds: the bound on staleness, what the next batch waits for, and whether training sees shorter answers than started.
import { el, foreign, number, table, tiles } from "./dom.js";

const FATES = ["admitted", "trained", "complete", "running", "filtered", "dropped", "failed"];
const WAITS = {
  groups: "more groups to complete", older_groups: "older groups, which would become too old",
  prompts: "prompts", weights: "weights with a new name", trainer: "the trainer: a batch is complete",
  harness: "a harness, which runs the sessions", fields: "fields that the server can serve",
};

function feedOf(feed) {
  const { meter, capacity } = feed, shown = FATES.filter((fate) => meter[fate].num_groups || fate === "admitted");
  return el("section", {},
    el("h2", {}, "feed ", foreign(feed.id)),
    tiles([
      ["batches", number(feed.num_batches)], ["updates of the weights", number(feed.version)],
      [`groups are complete. A batch takes ${number(feed.batch)}`, number(feed.num_complete)],
      ["groups run", number(feed.num_running)], ["prompts wait", number(feed.num_waiting)],
    ]),
    el("p", { className: "soft", textContent: `Staleness is at most ${number(feed.max_staleness)} (${feed.on_stale}). `
      + `The next batch waits for ${WAITS[feed.waits_for]}. `
      + `${capacity ? number(capacity) : "No"} more ${capacity === 1 ? "group" : "groups"} may start before the next update.` }),
    table(["groups", "number", "mean tokens", "mean reward"], shown.map((fate) => [
      fate, number(meter[fate].num_groups), number(meter[fate].mean_tokens, 1), number(meter[fate].mean_reward, 3)])),
    feed.warning ? el("p", { textContent: `warning: ${feed.warning}` }) : "");
}

export const showFeeds = (place, model) => place.replaceChildren(...model.feeds.map(feedOf));
