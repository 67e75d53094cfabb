"use strict";

const plan = JSON.parse(document.getElementById("plan").textContent);
const axes = plan.axes;
/** Numbers of the axes of devices: along the axis of time there are microbatches. */
const devices = axes.map((_, number) => number).filter((number) => !axes[number].is_time);
const USES = ["batch", "sequence", "experts", "features", "whole"];
const USE_WORDS = { batch: "the batch", sequence: "the sequence", experts: "experts", features: "features", whole: "not split" };
const COLLECTIVES = { all_gather: "all-gather", all_reduce: "all-reduce", reduce_scatter: "reduce-scatter",
  all_to_all: "all-to-all", slice: "take own slice" };

// ---- small helpers ----

/** element("div.name", {title: "…"}, child, …): strings become text, never markup. */
function element(what, attributes = {}, ...children) {
  const [tag, ...classes] = what.split(".");
  const made = document.createElement(tag || "div");
  if (classes.length) made.className = classes.join(" ");
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key === "style") made.style.cssText = value;
    else if (value !== undefined) made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** A button that puts text on the clipboard, and the text itself to be opened and selected. */
function copyable(label, text) {
  const button = element("button", { onclick: () => navigator.clipboard?.writeText(text).then(() => { button.textContent = "copied"; }, () => {}) }, label);
  return element("details", {}, element("summary", {}, button), element("pre", {}, text));
}

/** A button that saves text as a file. */
function saved(label, name, text) {
  return element("button", { onclick: () => {
    const link = element("a", { download: name, href: URL.createObjectURL(new Blob([text()], { type: "application/json" })) });
    link.click();
    URL.revokeObjectURL(link.href);
  } }, label);
}

const at = (id) => document.getElementById(id);

/** Draw what is in an element anew, and keep the focus: it goes to what takes the place of what had it. */
function redrawn(holder, draw) {
  const places = () => [...holder.querySelectorAll("button, [tabindex]")], place = places().indexOf(document.activeElement);
  draw();
  if (place >= 0) places()[place]?.focus({ preventScroll: true });
}

// ---- numbers, as reports/units.py has them: every page says what `explain` says ----

/** To so many digits after the point; what lies in the middle goes to the even one. */
function fixed(x, num) {
  const up = x.toFixed(num), inTheMiddle = /^50*$/.test(x.toFixed(60).split(".")[1].slice(num));
  return inTheMiddle && Number(up.at(-1)) % 2 ? (Number(up) - 10 ** -num).toFixed(num) : up;
}
const digits = (x) => fixed(x, x < 9.995 ? 2 : x < 99.95 ? 1 : 0);
const scaled = (value, units) => {
  const [scale, unit] = units.find(([s]) => value >= 0.9995 * s) || [];
  return scale ? `${digits(value / scale)} ${unit}` : "";
};
const hours = (minutes) => `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
const time = (s) => (s < 5e-9 ? "0" : s >= 3599.5 ? hours(Number(fixed(s / 60, 0))) : scaled(s, [[1, "s"], [1e-3, "ms"]]) || `${digits(s / 1e-6)} µs`);
const bytes = (n) => scaled(n, [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) || (n <= 0 ? "0" : `${fixed(n, 0)} B`);
function percent(share) {
  const value = 100 * share;
  if (value <= 0) return "0 %";
  if (value < 0.1) return "under 0.1 %";
  if (value > 99.9 && value < 100) return "over 99.9 %";
  return `${fixed(value, value < 9.95 || (value > 99 && value < 100) ? 1 : 0)} %`;
}
const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
const colour = (name) => `var(--${name})`;

/** A stacked bar of [value, colour, label] parts; `total` is what its full width stands for. One that is longer is cut. */
function bar(parts, total, { thin = false, mark } = {}) {
  const cut = parts.reduce((sum, [value]) => sum + value, 0) > total * (1 + 1e-9);
  const made = element(`div.bar${thin ? ".thin" : ""}${cut ? ".cut" : ""}`);
  for (const [value, name, label] of parts) {
    if (value <= 0) continue;
    made.append(element("i", { style: `width:${(100 * value) / total}%;background:${colour(name)}`, title: label }));
  }
  if (mark !== undefined && mark <= total) made.append(element("b", { style: `left:${(100 * mark) / total}%`, title: "limit" }));
  return made;
}

/** What is drawn in stripes, and in which colour: time in which compute does nothing. */
const STRIPES = { exposed: "communication", bubble: "faint" };

function legend(parts) {
  return element("div.legend", {}, ...parts.map(([name, label]) =>
    element("span", {}, element(name in STRIPES ? "i.hatched" : "i", { style: name in STRIPES ? `--stripe:${colour(STRIPES[name])}` : `background:${colour(name)}` }), label)));
}

const TIME_COLOURS = { compute: "compute", optimizer: "optimizer", communication: "communication",
  "exposed communication": "communication", "slowdown and overheads": "gathered", bubble: "whole" };
/** Seconds by what they are spent on, those that take any; of a plan's step they add up to it. */
const timeParts = (parts) => Object.entries(parts).filter(([, s]) => time(s) !== "0" && s > 0)
  .map(([name, s]) => [s, TIME_COLOURS[name], `${name} ${time(s)}`]);

const MEMORY_COLOURS = { parameters: "batch", gradients: "sequence", optimizer: "optimizer", activations: "compute",
  gathered: "gathered", buffers: "buffers", communication: "communication", temporary: "features", context: "context",
  slack: "whole" };
const memoryParts = (m) => Object.entries(m).map(([key, n]) => {
  const name = key.replace("_bytes", "");
  return [n, MEMORY_COLOURS[name] || "whole", `${name} ${bytes(n)}`];
});
const totalBytes = (m) => Object.values(m).reduce((sum, n) => sum + n, 0);

// ---- the tree: parents, costs of repeated blocks, and what each axis does in a module ----

function prepare(module, parent, times) {
  Object.assign(module, { parent, times: times * module.count, open: false, ownOpen: !module.children.length });
  module.rows = module.rows.map((index) => ({ ...plan.rows[index], parent: module, times: module.times }));
  for (const row of module.rows) {
    row.communication_s = row.steps.reduce((sum, step) => sum + step.seconds, 0);
    row.sent_bytes = row.steps.reduce((sum, step) => sum + step.sent_bytes, 0);
  }
  module.children.forEach((child) => prepare(child, module, module.times));
  module.uses = axes.map((_, axis) => {
    const uses = ownUses(module.rows, axis);
    for (const child of module.children) USES.forEach((use) => { uses[use] += child.count * child.uses[axis][use]; });
    return uses;
  });
  return module;
}

/** Seconds of compute by what an axis splits. */
function ownUses(rows, axis) {
  const uses = Object.fromEntries(USES.map((use) => [use, 0]));
  for (const row of rows) if (row.kind === "operator") uses[row.use[axis]] += row.compute_s;
  return uses;
}

const root = prepare(plan.tree, null, 1);
const cost = (item) => item.times * (item.compute_s + item.communication_s);
/** Where a module is, without the root. */
const path = (module) => (module.parent && module.parent.parent ? `${path(module.parent)}.` : "") + module.label;
const mainUse = (uses) => USES.reduce((best, use) => (uses[use] > uses[best] ? use : best), "whole");
