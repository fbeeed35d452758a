// Elements made of words that may be anything: they are always text.

export const MOST_CHARACTERS = 100_000;

export function el(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && name !== "list") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

// What somebody else wrote: control characters are shown, the length is bounded.
export function safe(text, most = 80) {
  const cut = text.length > most ? `${text.slice(0, most)}… (${number(text.length)} characters)` : text;
  return cut.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069]/g,
    (character) => `\\u${character.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

// The same, and its direction does not leak.
export const foreign = (text, most) => el("span", { className: "isolated", textContent: safe(text, most) });

export const number = (value, digits = 0) =>
  value === null || value === undefined ? "–"
    : value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });

export const percent = (value) => (value === null || value === undefined ? "–" : `${number(100 * value, 1)} %`);

export const tiles = (entries) =>
  el("div", { className: "tiles" }, ...entries.map(([word, value]) =>
    el("div", {}, el("b", { textContent: value }), el("span", { textContent: word }))));

export function table(head, rows) {
  const cell = (tag) => (value, place) => {
    const node = value instanceof Node ? value : document.createTextNode(value);
    return el(tag, { className: place ? "number" : "" }, node);
  };
  return el("div", { className: "scrolls" }, el("table", {},
    el("thead", {}, el("tr", {}, ...head.map(cell("th")))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map(cell("td")))))));
}
