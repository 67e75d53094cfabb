// ---- the tree of modules ----

let query = "", named = new Set();

const LAYOUT_PX = { least: 64, chip: 14, letter: 6.7 };
/** As wide as the longest layout of an axis, such as S(0,2048). */
function layoutWidth(axis) {
  let longest = 0;
  walk(root, (module) => { for (const row of module.rows) longest = Math.max(longest, row.layouts[axis].length); });
  return `${Math.max(LAYOUT_PX.least, Math.ceil(LAYOUT_PX.chip + LAYOUT_PX.letter * longest))}px`;
}
const treeColumns = () => `minmax(240px,1.6fr) ${devices.map(layoutWidth).join(" ")} minmax(150px,1fr) minmax(150px,.8fr) minmax(180px,1.1fr) 72px`;

function drawModules() {
  const columns = treeColumns();
  const list = element("div.tree", { id: "tree", role: "tree", style: `--columns:${columns}` });
  const search = element("input", { id: "search", type: "search", placeholder: "search modules, operators, layouts, collectives  ( / )",
    "aria-label": "search", value: query, oninput: (event) => { query = event.target.value.trim().toLowerCase(); drawTree(list); } });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || document.activeElement === search) return;
    event.preventDefault();
    search.focus();
  });
  const all = (open) => () => { walk(root, (module) => { module.open = open || module === root; }); drawTree(list); };
  at("modules").append(element("h2", {}, "Modules"),
    element("p", {}, `Times: ${plan.modules_note}; bytes likewise. Blocks fold only if they are alike in everything shown here. Keys: ↑ ↓ ← → and Enter.`),
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

/** What has this dotted name, though equal blocks are folded: from the root of the model or from any module on. */
function byName(name, module = root) {
  const found = new Set();
  resolve(module, name, found);
  for (const child of module.children) if (!found.size) byName(name, child).forEach((item) => found.add(item));
  return found;
}

function resolve(module, rest, found) {
  module.rows.filter((row) => [row.name, row.name.split("#")[0]].some((name) => name.toLowerCase() === rest)).forEach((row) => found.add(row));
  for (const child of module.children) {
    for (const member of child.members.map((m) => m.toLowerCase())) {
      if (rest === member) found.add(child);
      else if (rest.startsWith(`${member}.`)) resolve(child, rest.slice(member.length + 1), found);
    }
  }
}

function matches(item) {
  if (!query || named.has(item)) return true;
  const moves = (item.steps || []).map((s) => `${s.before}→${s.after} ${COLLECTIVES[s.forward] || ""} ${COLLECTIVES[s.backward] || ""}`);
  const text = [item.label || item.name, item.source || "", ...(item.layouts || []), ...(item.use || []), ...moves,
    item.again ? "made again in backward" : "", item.lifetime || "", item.uses ? `${path(item)} ${item.members.join(" ")}` : ""].join(" ").toLowerCase();
  return query.split(/\s+/).every((word) => text.includes(word));
}

/** What the tree calls `mlp.up:linear/combine` of a block, as the timeline has it. */
const treeName = (name, block = "") => `${block ? `${block}.` : ""}${name.split("/")[0].replace(":", ".")}`.toLowerCase();

/** A text that leads to where something is in the tree. */
function shownInTree(name, block = "", text = name) {
  return element("button.link", { title: "show it among the modules", onclick: () => {
    query = treeName(name, block);
    at("search").value = query;
    drawTree(at("tree"));
    at("modules").scrollIntoView({ behavior: "smooth" });
  } }, text);
}

function drawTree(list) {
  redrawn(list, () => fillTree(list));
}

function fillTree(list) {
  list.replaceChildren(element("div.row.head", {}, element("span", {}, "module or operator"),
    ...devices.map((axis) => element("span", {}, `axis ${axes[axis].name}`)), element("span", {}, "shape, and what shards it"),
    element("span", {}, "time"), element("span", {}, "communication"), element("span.right", {}, "weights")));
  const hits = { count: 0 };
  named = /[.:]/.test(query) ? byName(treeName(query)) : new Set();
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
  const own = { ...module.own, times: module.times };
  return element("div.row.module", clickable(toggle, module.ownOpen),
    element("span.name.soft", { style: `padding-left:${18 * level}px` }, element("span.twist", {}, module.ownOpen ? "▾" : "▸"),
      own.label),
    ...devices.map((axis) => usesBar(ownUses(module.rows, axis))), element("span"), timed(own), sent(own),
    element("span.right.soft", {}, weights(own)));
}

const clickable = (toggle, open) => ({ tabindex: 0, role: "treeitem", "aria-expanded": String(open), onclick: toggle,
  onkeydown: (event) => {
    const rows = [...at("tree").querySelectorAll("[tabindex]")], go = (by) => () => rows[rows.indexOf(event.currentTarget) + by]?.focus();
    const act = { Enter: toggle, " ": toggle, ArrowDown: go(1), ArrowUp: go(-1), ArrowRight: open ? go(1) : toggle, ArrowLeft: open ? toggle : go(-1) }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  } });

function moduleRow(list, module, level) {
  const toggle = () => { module.open = !module.open; drawTree(list); };
  const repeated = module.count > 1 ? element("span.tag", {}, `${module.count} alike`) : null;
  const row = element("div.row.module", clickable(toggle, module.open),
    element("span.name", { style: `padding-left:${18 * level}px` }, element("span.twist", {}, module.open || query ? "▾" : "▸"),
      element("b", {}, module.label), " ", repeated),
    ...devices.map((axis) => usesBar(module.uses[axis])), element("span.faint", {}, plural(module.times * module.num_operators, "operator")),
    timed(module), sent(module), element("span.right.soft", {}, weights(module)),
    module.differs ? element("span.differs", { style: `padding-left:${18 * level + 16}px` }, `differs ${module.differs}`) : "");
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
      element("span.faint", {}, item.source + (item.again ? ", made again in backward" : "")),
      item.lifetime ? element("span.tag", {}, item.lifetime) : ""),
    ...devices.map((axis) => element("span", {}, element("span.chip", { title: `${axes[axis].name}: ${item.use[axis]}`,
      style: `background:${colour(item.kind === "constant" ? "whole" : item.use[axis])}` }, item.layouts[axis]))),
    shape(item), weight && !item.communication_s ? element("span") : timed(item), moves(item),
    element("span.right.soft", {}, weights(item)));
  if (query && matches(item)) row.classList.add("hit");
  return row;
}

const weights = (item) => (item.stored_bytes ? bytes(item.stored_bytes * item.times) : "");

const inEach = (item) => (item.kind !== "weight" && plan.num_microbatches > 1 ? " in each microbatch" : "");

/** The logical shape; a dimension that an axis shards is marked with it: 64/x × 4096. */
function shape(item) {
  const made = element("span.mono.name", { title: `${item.dtype}, on a device ${item.local_shape.join(" × ") || "a number"}${inEach(item)}` });
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
  const parts = timeParts({ compute: item.compute_s * item.times, communication: item.communication_s * item.times });
  return element("div.timed", {}, bar(parts, cost(root) || 1, { thin: true }), element("span", {}, time(cost(item))));
}

const sent = (item) => element("span.soft", {}, item.sent_bytes ? `${bytes(item.sent_bytes * item.times)} sent` : "");

/** How often in a step a collective is done, where that is not once. */
const often = (count) => (count > 1 ? ` × ${count}` : "");

function moves(item) {
  return element("span.moves", {}, ...item.steps.map((step) => {
    const there = COLLECTIVES[step.forward], back = COLLECTIVES[step.backward];
    const how = [there && there + often(step.num_forward), back && step.backward !== "slice" ? `${back}${often(step.num_backward)} in backward` : null]
      .filter(Boolean).join(", ") || "no traffic";
    return element("div", { title: `${time(step.seconds * item.times)}, ${bytes(step.sent_bytes * item.times)}` },
      element("code", {}, `${step.axis}: ${step.before} → ${step.after} `), element("span.soft", {}, how));
  }));
}
