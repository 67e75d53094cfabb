"use strict";

const plan = JSON.parse(document.getElementById("plan").textContent);
const axes = plan.axes;
const USES = ["batch", "sequence", "features", "whole"];
const USE_WORDS = { batch: "the batch", sequence: "the sequence", features: "features", whole: "not split" };
const STORAGE_WORDS = { whole: "whole", sharded: "sharded as used", gathered: "sharded, gathered for use (ZeRO-3)" };
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

const at = (id) => document.getElementById(id);
const digits = (x) => (x < 9.995 ? x.toFixed(2) : x < 99.95 ? x.toFixed(1) : x.toFixed(0));

function scaled(value, units) {
  if (value <= 0) return "0";
  const [scale, unit] = units.find(([s]) => value >= 0.9995 * s) || units[units.length - 1];
  return `${digits(value / scale)} ${unit}`;
}

const time = (s) => scaled(s, [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]]);
const bytes = (n) => (n > 0 && n < 999.5 ? `${Math.round(n)} B` : scaled(n, [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]));
const percent = (x) => (x <= 0 ? "0 %" : x < 0.001 ? "<0.1 %" : x > 0.995 && x < 1 ? ">99 %" : `${(100 * x).toFixed(x < 0.0995 ? 1 : 0)} %`);
const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
const colour = (name) => `var(--${name})`;

/** A stacked bar of [value, colour, label] parts; `total` is what its full width stands for. */
function bar(parts, total, { thin = false, mark } = {}) {
  const made = element(thin ? "div.bar.thin" : "div.bar");
  for (const [value, name, label] of parts) {
    if (value <= 0) continue;
    made.append(element("i", { style: `width:${(100 * value) / total}%;background:${colour(name)}`, title: label }));
  }
  if (mark !== undefined && mark <= total) made.append(element("b", { style: `left:${(100 * mark) / total}%`, title: "limit" }));
  return made;
}

function legend(parts) {
  return element("div.legend", {}, ...parts.map(([name, label]) =>
    element("span", {}, element("i", { style: `background:${colour(name)}` }), label)));
}

const timeParts = (p) => [[p.compute_s, "compute", `compute ${time(p.compute_s)}`],
  [p.communication_s, "communication", `communication ${time(p.communication_s)}`],
  [p.optimizer_s || 0, "optimizer", `optimizer ${time(p.optimizer_s || 0)}`]];

const MEMORY = [["parameters", "batch"], ["gradients", "sequence"], ["optimizer", "optimizer"], ["activations", "compute"],
  ["gathered", "gathered"], ["buffers", "whole"], ["communication", "communication"]];
const memoryParts = (m) => MEMORY.map(([key, name]) => [m[`${key}_bytes`], name, `${key} ${bytes(m[`${key}_bytes`])}`]);
const totalBytes = (m) => MEMORY.reduce((sum, [key]) => sum + m[`${key}_bytes`], 0);

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

// ---- summary ----

function drawHead() {
  const theme = element("button.push", { title: "light or dark", onclick: switchTheme }, "◐ theme");
  at("head").append(element("h1", {}, plan.model),
    element("span.soft", {}, `on ${plan.cluster.num_devices} × ${plan.cluster.device}, ${plan.cluster.name}`),
    ...axes.map((axis) => element("span.tag", { title: axis.is }, `${axis.name} = ${axis.size}`)), theme);
  at("foot").append(`plan of graph ${plan.fingerprint} · Shardwright ${plan.version} · cost figures: ${plan.cluster.provenance}`);
}

function switchTheme() {
  const page = document.documentElement;
  page.dataset.theme = page.dataset.theme === "dark" ? "light" : "dark";
}

function drawSummary() {
  const p = plan.prediction, used = totalBytes(p.memory);
  const nonzero = memoryParts(p.memory).filter(([n]) => n > 0);
  at("summary").append(
    element("div.card", {}, element("div.soft", {}, "Predicted step"), element("div.big", {}, time(p.step_s)),
      bar(timeParts(p), p.step_s), legend(timeParts(p).map(([, name, label]) => [name, label]))),
    element("div.card", {}, element("div.soft", {}, `Memory of each device, of ${bytes(plan.cluster.memory_bytes)}`),
      element("div.big", {}, bytes(used), plan.fits ? "" : element("span.bad", {}, " does not fit")),
      bar(nonzero, Math.max(plan.cluster.memory_bytes, used), { mark: plan.limit_bytes }),
      legend(nonzero.map(([, name, label]) => [name, label]))),
    element("div.card", {}, element("div.soft", {}, "How good it is"), ...verdict()));
}

/** Against the baselines that people choose by hand, and the proven bound. */
function verdict() {
  const rivals = plan.alternatives.filter((a) => a.fits && !a.name.startsWith("search"));
  const best = rivals.reduce((least, a) => (least && least.prediction.step_s <= a.prediction.step_s ? least : a), null);
  const ratio = best ? best.prediction.step_s / plan.prediction.step_s : 1;
  const same = Math.abs(ratio - 1) < 5e-4;
  const headline = !best ? "no rival" : same ? "as fast" : beside(1 / ratio);
  const than = best ? `${same ? "as" : "than"} the best plan by hand that fits: ${best.name}, ${time(best.prediction.step_s)}`
    : "no plan that people make by hand fits";
  const rewritten = plan.rewrites ? `; rewritten by certified rules: ${plan.rewrites}` : "";
  return [element("div.big", {}, headline), element("div", {}, than),
    element("div.soft", { style: "margin-top:8px" }, plan.quality + rewritten)];
}

/** How a step time that is `ratio` times another compares with it. */
function beside(ratio) {
  if (Math.abs(ratio - 1) < 5e-4) return "the same";
  const [factor, word] = ratio > 1 ? [ratio, "slower"] : [1 / ratio, "faster"];
  return factor >= 2 ? `${digits(factor)} × ${word}` : `${percent(factor - 1)} ${word}`;
}

function drawAxes() {
  for (const axis of axes) {
    const operators = Object.values(axis.num_operators).reduce((a, b) => a + b, 0);
    const uses = USES.filter((use) => axis.num_operators[use]);
    const stored = Object.entries(axis.num_weights).filter(([, n]) => n);
    const weights = stored.reduce((sum, [, n]) => sum + n, 0);
    at("axes").append(element("div.card", {},
      element("h2", {}, `${axis.name} · ${axis.size} devices · ${axis.is}`), element("p", {}, `over ${axis.links}`),
      element("div.soft", {}, `compute, by what the axis splits in ${operators} operators`),
      bar(uses.map((use) => [axis.share_of_compute[use], use, `${USE_WORDS[use]}: ${percent(axis.share_of_compute[use])}`]), 1),
      legend(uses.map((use) => [use, `${USE_WORDS[use]} ${percent(axis.share_of_compute[use])} (${axis.num_operators[use]})`])),
      element("div.soft", { style: "margin-top:10px" }, `${weights} weights, by how they are stored`),
      bar(stored.map(([kind, n]) => [n, kind, `${n} ${STORAGE_WORDS[kind]}`]), weights || 1),
      legend(stored.map(([kind, n]) => [kind, `${n} ${STORAGE_WORDS[kind]}`]))));
  }
}

// ---- where the time goes: an icicle of modules and operators ----

let colourAxis = 0;

function drawWhere(focus = root) {
  const chart = element("div", { id: "icicle" });
  const depth = fill(chart, focus, 0, 100, 0);
  chart.style.height = `${26 * (depth + 1)}px`;
  const crumbs = [];
  for (let module = focus; module; module = module.parent) crumbs.unshift(module);
  const buttons = axes.map((axis, index) => element("button", { "aria-pressed": String(index === colourAxis),
    onclick: () => { colourAxis = index; drawWhere(focus); } }, `colour by ${axis.name}`));
  at("where").replaceChildren(element("h2", {}, "Where the time goes"),
    element("p", {}, `Width is the time of compute and communication on one device; the orange foot of a cell is communication. ` +
      `The optimizer's ${time(plan.prediction.optimizer_s)} are not shown. Click to zoom.`),
    element("div.tools.crumbs", {}, ...crumbs.map((module) =>
      element("button", { onclick: () => drawWhere(module) }, module.label + (module.count > 1 ? ` ×${module.count}` : ""))),
      element("span.push", {}), ...(axes.length > 1 ? buttons : [])),
    chart, legend([...USES.filter((use) => root.uses[colourAxis][use]).map((use) => [use,
      `${axes[colourAxis].name} splits ${use === "whole" ? "nothing" : USE_WORDS[use]}`]), ["communication", "communication"]]));
}

/** Draw an item over [left, left + width] percent and what is inside below it; returns the depth reached. */
function fill(chart, item, left, width, level) {
  const moved = item.kind === "weight" ? "communication" : "whole";
  const use = item.uses ? mainUse(item.uses[colourAxis]) : item.kind === "operator" ? item.use[colourAxis] : moved;
  const name = item.label || item.name, repeated = item.count > 1 ? ` ×${item.count}` : "";
  const share = item.communication_s / (item.compute_s + item.communication_s || 1);
  const cell = element(width > 1.2 ? "div.cell" : "div.cell.narrow", { style: `left:${left}%;width:${width}%;top:${26 * level}px;background:${colour(use)}`,
    onclick: () => drawWhere(item.uses ? item : item.parent) }, width > 1.2 ? name + repeated : "");
  if (share > 0) cell.append(element("i", { style: `width:${100 * share}%` }));
  tip(cell, () => `${item.uses ? path(item) : `${path(item.parent)}: ${name}`}${repeated}\n${time(cost(item))}, of which ` +
    `communication ${percent(share)}\n` + axes.map((axis, i) => `${axis.name}: ` + (item.uses ? usesText(item.uses[i])
    : `${item.use[i]}, ${item.layouts[i]}`)).join("\n"));
  chart.append(cell);
  if (!item.uses) return level;
  let deepest = level, x = left;
  for (const part of [...item.children, ...item.rows].sort((a, b) => cost(b) - cost(a))) {
    const wide = (width * cost(part)) / (cost(item) || 1);
    if (wide > 0.08) deepest = Math.max(deepest, fill(chart, part, x, wide, level + 1));
    x += wide;
  }
  return deepest;
}

function usesText(uses) {
  const total = USES.reduce((sum, use) => sum + uses[use], 0) || 1;
  return USES.filter((use) => uses[use] / total > 0.005).map((use) => `${USE_WORDS[use]} ${percent(uses[use] / total)}`).join(", ") || "–";
}

function tip(target, text) {
  const box = at("tip");
  target.addEventListener("mousemove", (event) => {
    box.textContent = text();
    box.hidden = false;
    box.style.left = `${Math.min(event.clientX + 14, innerWidth - box.offsetWidth - 8)}px`;
    box.style.top = `${Math.min(event.clientY + 14, innerHeight - box.offsetHeight - 8)}px`;
  });
  target.addEventListener("mouseleave", () => { box.hidden = true; });
}

// ---- the tree of modules ----

let query = "";

function drawModules() {
  const columns = `minmax(280px,1.5fr) ${axes.map(() => "78px").join(" ")} minmax(200px,1fr) minmax(170px,.8fr) minmax(250px,1.1fr) 76px`;
  const list = element("div.tree", { id: "tree", role: "tree", style: `--columns:${columns}` });
  const search = element("input", { type: "search", placeholder: "search modules, operators, layouts, collectives  ( / )",
    "aria-label": "search", value: query, oninput: (event) => { query = event.target.value.trim().toLowerCase(); drawTree(list); } });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || document.activeElement === search) return;
    event.preventDefault();
    search.focus();
  });
  const all = (open) => () => { walk(root, (module) => { module.open = open || module === root; }); drawTree(list); };
  at("modules").append(element("h2", {}, "Modules"),
    element("p", {}, "Times and bytes are one device's per step, of all repeats together. Blocks fold only if they are alike in everything shown here."),
    element("div.tools", {}, search, element("button", { onclick: all(true) }, "open all"),
      element("button", { onclick: all(false) }, "close all"), element("span.soft", { id: "hits" })), list);
  openFirst();
  drawTree(list);
}

function walk(module, visit) {
  visit(module);
  module.children.forEach((child) => walk(child, visit));
}

/** Open levels from the top while the table still fits a page. */
function openFirst() {
  let level = [root], shown = 1;
  for (;;) {
    const next = level.flatMap((module) => module.children);
    shown += next.length;
    if (!next.length || (shown > 40 && level[0] !== root)) return;
    level.forEach((module) => { module.open = module.children.length > 0; });
    level = next;
  }
}

function matches(item) {
  if (!query) return true;
  const moves = (item.steps || []).map((s) => `${s.before}→${s.after} ${COLLECTIVES[s.forward] || ""} ${COLLECTIVES[s.backward] || ""}`);
  const text = [item.label || item.name, item.source || "", ...(item.layouts || []), ...(item.use || []), ...moves,
    item.uses ? path(item) + " " + item.members : ""].join(" ").toLowerCase();
  return query.split(/\s+/).every((word) => text.includes(word));
}

function drawTree(list) {
  list.replaceChildren(element("div.row.head", {}, element("span", {}, "module or operator"),
    ...axes.map((axis) => element("span", {}, `axis ${axis.name}`)), element("span", {}, "shape, and what shards it"),
    element("span", {}, "time"), element("span", {}, "communication"), element("span.right", {}, "weights")));
  const hits = { count: 0 };
  const found = query ? search(root, hits) : null;
  drawBranch(list, root, 0, found);
  at("hits").textContent = query ? `${hits.count} found` : "";
}

/** The modules and rows that match, with the modules that lead to them. */
function search(module, hits, found = new Set()) {
  const own = [...module.rows, module].filter(matches);
  hits.count += own.length;
  own.forEach((item) => found.add(item));
  module.children.forEach((child) => search(child, hits, found));
  if (own.length || module.children.some((child) => found.has(child))) found.add(module);
  return found;
}

function drawBranch(list, module, level, found) {
  if (found && !found.has(module)) return;
  list.append(moduleRow(list, module, level));
  if (!module.open && !found) return;
  module.children.forEach((child) => drawBranch(list, child, level + 1, found));
  const rows = module.rows.filter((row) => !found || found.has(row));
  if (!found && rows.length && module.children.length) list.append(ownRow(list, module, level + 1));
  if (found || module.ownOpen) rows.forEach((row) => list.append(operatorRow(row, level + 1)));
}

/** What a module with inner modules does itself, folded. */
function ownRow(list, module, level) {
  const toggle = () => { module.ownOpen = !module.ownOpen; drawTree(list); };
  const sum = (key) => module.rows.reduce((total, row) => total + row[key], 0);
  const own = { times: module.times, compute_s: sum("compute_s"), communication_s: sum("communication_s"), sent_bytes: sum("sent_bytes") };
  return element("div.row.module", clickable(toggle, module.ownOpen),
    element("span.name.soft", { style: `padding-left:${18 * level}px` }, element("span.twist", {}, module.ownOpen ? "▾" : "▸"),
      `${plural(module.rows.length, "operator")} of its own`),
    ...axes.map((_, axis) => usesBar(ownUses(module.rows, axis))), element("span"), timed(own), sent(own),
    element("span.right.soft", {}, weights({ stored_bytes: sum("stored_bytes"), times: module.times })));
}

const clickable = (toggle, open) => ({ tabindex: 0, role: "treeitem", "aria-expanded": String(open), onclick: toggle,
  onkeydown: (event) => { if (event.key === "Enter") toggle(); } });

function moduleRow(list, module, level) {
  const toggle = () => { module.open = !module.open; drawTree(list); };
  const repeated = module.count > 1 ? element("span.tag", {}, `${module.count} alike`) : null;
  const row = element("div.row.module", clickable(toggle, module.open),
    element("span.name", { style: `padding-left:${18 * level}px` }, element("span.twist", {}, module.open || query ? "▾" : "▸"),
      element("b", {}, module.label), " ", repeated),
    ...axes.map((_, axis) => usesBar(module.uses[axis])), element("span.faint", {}, plural(module.num_operators, "operator")),
    timed(module), sent(module), element("span.right.soft", {}, weights(module)));
  if (query && matches(module)) row.classList.add("hit");
  return row;
}

function usesBar(uses) {
  const total = USES.reduce((sum, use) => sum + uses[use], 0);
  const made = bar(USES.map((use) => [uses[use], use, ""]), total || 1, { thin: true });
  tip(made, () => usesText(uses));
  return made;
}

function operatorRow(item, level) {
  const weight = item.kind === "weight";
  const row = element("div.row.operator", { role: "treeitem" },
    element("span.name", { style: `padding-left:${18 * level + 16}px`, title: `${item.dtype} ${item.source}` },
      weight ? element("span.tag", {}, "weight") : "", weight ? ` ${item.name} ` : element("code", {}, item.name), " ",
      element("span.faint", {}, item.source)),
    ...item.layouts.map((layout, axis) => element("span", {}, element("span.chip", { title: `${axes[axis].name}: ${item.use[axis]}`,
      style: `background:${colour(item.kind === "constant" ? "whole" : item.use[axis])}` }, layout))),
    shape(item), weight && !item.communication_s ? element("span") : timed(item), moves(item),
    element("span.right.soft", {}, weights(item)));
  if (query && matches(item)) row.classList.add("hit");
  return row;
}

const weights = (item) => (item.stored_bytes ? bytes(item.stored_bytes * item.times) : "");

/** The logical shape; a dimension that an axis shards is marked with it: 64/x × 4096. */
function shape(item) {
  const made = element("span.mono.name", { title: `${item.dtype}, on a device ${item.local_shape.join(" × ") || "a number"}` });
  item.shape.forEach((extent, dim) => {
    made.append(dim ? " × " : "", String(extent));
    item.layouts.forEach((layout, axis) => {
      if (layout.startsWith(`S(${dim})`) || layout.startsWith(`S(${dim},`))
        made.append(element("b", { style: `color:${colour(item.use[axis])}` }, `/${axes[axis].name}`));
    });
  });
  if (!item.shape.length) made.append("number");
  const partial = axes.filter((_, axis) => item.layouts[axis] === "P").map((axis) => axis.name);
  if (partial.length) made.append(element("span.faint", {}, `  summand over ${partial.join(", ")}`));
  return made;
}

function timed(item) {
  const parts = timeParts({ compute_s: item.compute_s * item.times, communication_s: item.communication_s * item.times });
  return element("div.timed", {}, bar(parts, cost(root) || 1, { thin: true }), element("span", {}, time(cost(item))));
}

const sent = (item) => element("span.soft", {}, item.sent_bytes ? `${bytes(item.sent_bytes * item.times)} sent` : "");

function moves(item) {
  return element("span.moves", {}, ...item.steps.map((step) => {
    const there = COLLECTIVES[step.forward], back = COLLECTIVES[step.backward];
    const how = [there, back && step.backward !== "slice" ? `${back} in backward` : null].filter(Boolean).join(", ") || "no traffic";
    return element("div", { title: `${time(step.seconds * item.times)}, ${bytes(step.sent_bytes * item.times)}` },
      element("code", {}, `${step.axis}: ${step.before} → ${step.after} `), element("span.soft", {}, how));
  }));
}

// ---- tables ----

function table(columns, rows) {
  return element("table", {}, element("tr", {}, ...columns.map(([title, right]) => element(right ? "th.right" : "th", {}, title))),
    ...rows.map(({ cells, own }) => element(own ? "tr.own" : "tr", {}, ...cells.map((cell, i) =>
      element(columns[i][1] ? "td.right" : columns[i][2] ? "td.barred" : "td", {}, cell)))));
}

function drawCompare() {
  const own = { name: "this plan", mesh: `[${axes.map((a) => `${a.name}=${a.size}`).join(", ")}]`, fits: plan.fits, prediction: plan.prediction };
  const everything = [own, ...plan.alternatives];
  const longest = Math.max(...everything.map((a) => a.prediction.step_s));
  const largest = Math.max(plan.cluster.memory_bytes, ...everything.map((a) => totalBytes(a.prediction.memory)));
  const rows = everything.map((a) => {
    const ratio = a.prediction.step_s / plan.prediction.step_s, used = totalBytes(a.prediction.memory);
    return { own: a === own, cells: [a.name, element("code", {}, a.mesh), bar(timeParts(a.prediction), longest), time(a.prediction.step_s), a === own ? "" : beside(ratio),
      bar(memoryParts(a.prediction.memory), largest, { mark: plan.limit_bytes }),
      element(a.fits ? "span" : "span.bad", {}, bytes(used) + (a.fits ? "" : ", does not fit"))] };
  });
  at("compare").append(element("h2", {}, "Compared with"),
    element("p", {}, "Plans that people choose by hand, each tuned by the same search within its restriction, and the best plan of every other mesh; all by the same cost model."),
    table([["plan"], ["mesh"], ["time of a step", false, true], ["", true], ["", true], ["memory of a device", false, true], ["", true]], rows));
}

function drawCommunication() {
  const longest = Math.max(...plan.communication.map((t) => t.seconds), 1e-12);
  const rows = plan.communication.map((t) => ({ cells: [`${t.count} ${t.what}${t.count > 1 ? "s" : ""}`, element("code", {}, `${t.axis}: ${t.before} → ${t.after}`),
    t.text, bar([[t.seconds, "communication", time(t.seconds)]], longest), time(t.seconds), bytes(t.sent_bytes)] }));
  at("communication").append(element("h2", {}, "Communication"),
    element("p", {}, `Each device sends ${bytes(plan.prediction.communication_bytes)} per step, taking ${time(plan.prediction.communication_s)} if nothing overlaps.`),
    rows.length ? table([["what"], ["layout"], ["how"], ["time", false, true], ["", true], ["sent", true]], rows) : "None.");
}

function drawUnsplit() {
  const rows = plan.unsplit.map((u) => ({ cells: [u.axis, `${u.count} × ${u.op}`, u.reason, time(u.compute_s), element("span.soft", {}, u.example)] }));
  at("unsplit").append(element("h2", {}, "Operators that run whole along an axis"),
    element("p", {}, rows.length ? "Every device of the axis does the same work here." : "None: every operator shares its work along every axis."),
    rows.length ? table([["axis"], ["operators"], ["why"], ["compute", true], ["for example"]], rows) : "");
}

if (matchMedia("(prefers-color-scheme: dark)").matches) document.documentElement.dataset.theme = "dark";
// page.html#theme=dark&q=all-reduce opens it that way
const link = new URLSearchParams(location.hash.slice(1));
if (link.has("theme")) document.documentElement.dataset.theme = link.get("theme");
query = (link.get("q") || "").toLowerCase();
drawHead();
drawSummary();
drawAxes();
drawWhere();
drawModules();
drawCompare();
drawCommunication();
drawUnsplit();
