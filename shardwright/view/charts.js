// ---- summary ----

function drawHead() {
  const theme = element("button.push", { title: "light or dark", onclick: switchTheme }, "◐ theme");
  at("head").append(element("h1", {}, plan.model),
    element("span.soft", {}, `on ${plan.cluster.num_devices} × ${plan.cluster.device}, ${plan.cluster.name}${plan.idle && `; ${plan.idle}`}`),
    ...axes.map((axis) => element("span.tag", { title: axis.is }, axis.is_time ? `${axis.size} microbatches` : `${axis.name} = ${axis.size}`)), theme);
  at("foot").append(`plan of graph ${plan.fingerprint} · Shardwright ${plan.version} · cost figures: ${plan.cluster.provenance}`);
}

function switchTheme() {
  const page = document.documentElement;
  page.dataset.theme = page.dataset.theme === "dark" ? "light" : "dark";
  paintAll();
}

function drawSummary() {
  const p = plan.prediction, used = totalBytes(p.memory);
  const nonzero = memoryParts(p.memory).filter(([n]) => n > 0);
  at("summary").append(
    element("div.card", {}, element("div.soft", {}, "Predicted step"), element("div.big", {}, time(p.step_s)),
      element("div", {}, plan.throughput.text), bar(timeParts(plan.step.parts), p.step_s), legend(timeParts(plan.step.parts).map(([, name, label]) => [name, label])),
      element("div.soft", { style: "margin-top:8px" }, `one by one, without overlap: ${time(p.serial_s)}, of which ` +
        timeParts(plan.step.serial).map(([, , label]) => label).join(", "))),
    element("div.card", {}, element("div.soft", {}, `Memory of each device, of ${bytes(plan.prediction.device_bytes)}`),
      element("div.big", {}, bytes(used), plan.fits ? "" : element("span.bad", {}, ` ${plan.memory}`)),
      bar(nonzero, Math.max(plan.prediction.device_bytes, used), { mark: plan.limit_bytes }),
      legend(nonzero.map(([, name, label]) => [name, label]))),
    element("div.card", {}, element("div.soft", {}, "How good it is"), ...verdict()));
}

/** Beside the other plans, and the proven bound. */
function verdict() {
  const rewritten = plan.rewrites ? `; rewritten by certified rules: ${plan.rewrites}` : "";
  return [element("div.big", {}, plan.standing.headline), element("div", {}, plan.standing.text),
    element("div.soft", { style: "margin-top:8px" }, plan.quality + rewritten),
    ...plan.remedies.map((remedy) => element("div", {}, `would fit: ${remedy}`))];
}

function drawAxes() {
  for (const axis of axes) {
    const operators = Object.values(axis.num_operators).reduce((a, b) => a + b, 0);
    const uses = USES.filter((use) => axis.num_operators[use]);
    const stored = axis.is_time ? [] : Object.entries(axis.stored).map(([kind, text]) => [axis.num_weights[kind], kind, text]);
    const weights = stored.reduce((sum, [n]) => sum + n, 0);
    at("axes").append(element("div.card", {},
      element("h2", {}, `${axis.name} · ${axis.size}${axis.is_time ? "" : " devices"} · ${axis.is}`), axis.is_time ? null : element("p", {}, `over ${axis.links}`),
      element("div.soft", {}, `compute, by what the axis splits in ${operators} operators`),
      bar(uses.map((use) => [axis.share_of_compute[use], use, `${USE_WORDS[use]}: ${percent(axis.share_of_compute[use])}`]), 1),
      legend(uses.map((use) => [use, `${USE_WORDS[use]} ${percent(axis.share_of_compute[use])} (${axis.num_operators[use]})`])),
      ...(axis.is_time ? [] : [element("div.soft", { style: "margin-top:10px" }, `${weights} weights, by how they are stored`),
        bar(stored, weights || 1), legend(stored.map(([, kind, text]) => [kind, text]))])));
  }
}

/** Microbatches, lifetimes of gathered weights, what backward makes again, precision. */
function drawRunning() {
  const gathered = plan.gathered.map((g) => ({ cells: [String(g.count), g.where, element("b", { style: "white-space:nowrap" }, g.name), g.words, g.axis,
    g.copies.join(", "), bytes(g.stored_bytes), bytes(g.gathered_bytes)] }));
  const again = plan.remade.map((r) => ({ cells: [r.blocks || "in no block", r.text, String(r.num_operators), time(r.compute_s),
    time(r.communication_s)] }));
  const away = plan.on_host.map((r) => ({ cells: [r.blocks || "in no block", r.text, String(r.num_values), bytes(r.num_bytes), time(r.copies_s)] }));
  const rounding = plan.precision.rounding.map((r) => ({ cells: [r.what, r.dtype, String(r.count), r.rounded] }));
  at("running").append(element("h2", {}, "How a step is run"), element("p", {}, plan.way), element("p.note", {}, `precision: ${plan.precision.text}`),
    plan.statistics ? element("p.note", {}, `not exact: ${plan.statistics}`) : "",
    ...(gathered.length ? [element("h3", {}, "Weights that are stored in slices and gathered for use"),
      table([["weights", true], ["of"], ["lifetime"], [""], ["slices over"], ["copies over"], ["slices", true], ["gathered", true]], gathered),
      plan.copies ? element("p.note", {}, plan.copies) : ""] : []),
    ...(again.length ? [element("h3", {}, "Made again in backward"), element("p.note", {}, plan.saving),
      table([["blocks"], ["what"], ["operators", true], ["adds compute", true], ["adds communication", true]], again),
      copyable("copy as recompute=", plan.recompute)] : []),
    ...(away.length ? [element("h3", {}, "Waits on the host until backward"),
      table([["blocks"], ["values in"], ["number", true], ["bytes of a microbatch", true], ["copies of a step", true]], away),
      copyable("copy as offload=", plan.offload)] : []),
    element("h3", {}, "What is exact and what is rounded"),
    table([["what"], ["in"], ["number", true], ["rounded"]], rounding));
}

// ---- where the time goes ----

/** The parts of a step, which add up to it; of what is sent, what compute waits for and what is hidden. */
function drawStep() {
  const { step_s } = plan.prediction, parts = Object.entries(plan.step.parts).flatMap(([name, s]) => (name === "exposed communication"
    ? plan.sent.map((own) => [own.text, own.exposed_s, "communication", own.hidden_s]) : [[name, s, TIME_COLOURS[name], null]]));
  const seen = parts.filter(([, s, , hidden]) => s > 1e-9 * step_s || hidden > 0), widest = Math.max(...seen.map(([, s, , hidden]) => s + hidden));
  const rows = seen.map(([name, s, own, hidden]) => ({ cells: [name, bar([[s, own, time(s)], [hidden, "hidden", `hidden ${time(hidden)}`]], widest), time(s), percent(s / step_s), hidden === null ? "" : time(hidden)] }));
  at("step").append(element("h2", {}, "Where the time goes"),
    element("p", {}, `The parts of the step of ${time(step_s)}${isPipeline ? ", of the stage that has most to do" : ""}: they add up to it. Hidden is what is sent while compute runs; in the bars it is pale.`),
    table([[""], ["", false, true], ["of the step", true], ["share", true], ["hidden", true]], rows));
}

// ---- an icicle of modules and operators ----

let colourAxis = devices[0] ?? 0, pixels = 11;
/** How wide a letter is at most on average, and the room beside a name: pixels. */
const LETTER = 7, PADDING = 16;

let redraw = () => {};
addEventListener("resize", () => redraw());

function drawWhere(focus = root) {
  redrawn(at("where"), () => fillWhere(focus));
}

function fillWhere(focus) {
  const chart = element("div", { id: "icicle" });
  pixels = ((at("where").clientWidth || 1180) - 40) / 100;  // of one percent of the chart
  redraw = () => drawWhere(focus);
  const depth = fill(chart, focus, 0, 100, 0);
  chart.style.height = `${26 * (depth + 1)}px`;
  const crumbs = [];
  for (let module = focus; module; module = module.parent) crumbs.unshift(module);
  const buttons = devices.map((index) => element("button", { "aria-pressed": String(index === colourAxis),
    onclick: () => { colourAxis = index; drawWhere(focus); } }, `colour by ${axes[index].name}`));
  at("where").replaceChildren(element("h2", {}, "Compute and communication by module"),
    element("p", {}, `Width is time: ${plan.modules_note}. The orange foot of a cell is communication. Click, or press Enter, to zoom.`),
    element("div.tools.crumbs", {}, ...crumbs.map((module) =>
      element("button", { onclick: () => drawWhere(module) }, module.label + (module.count > 1 ? ` ×${module.count}` : ""))),
      element("span.push", {}), ...(devices.length > 1 ? buttons : [])),
    chart, legend([...USES.filter((use) => root.uses[colourAxis][use]).map((use) => [use,
      `${axes[colourAxis].name} splits ${use === "whole" ? "nothing" : USE_WORDS[use]}`]), ["communication", "communication"]]));
}

/** Draw an item over [left, left + width] percent and what is inside below it; returns the depth reached. */
function fill(chart, item, left, width, level) {
  const moved = item.kind === "weight" ? "communication" : "whole";
  const use = item.uses ? mainUse(item.uses[colourAxis]) : item.kind === "operator" ? item.use[colourAxis] : moved;
  const name = item.label || item.name, repeated = item.count > 1 ? ` ×${item.count}` : "";
  const share = item.communication_s / (item.compute_s + item.communication_s || 1);
  const named = width * pixels >= LETTER * (name.length + repeated.length) + PADDING;  // a name is shown whole, or not
  const zoom = () => drawWhere(item.uses ? item : item.parent);
  const cell = element(named ? "div.cell" : "div.cell.narrow", { style: `left:${left}%;width:${width}%;top:${26 * level}px;background:${colour(use)}`,
    onclick: zoom, ...(item.uses ? { tabindex: 0, role: "button", onkeydown: (event) => { if (event.key === "Enter") zoom(); } } : {}) }, named ? name + repeated : "");
  if (share > 0) cell.append(element("i", { style: `width:${100 * share}%` }));
  tip(cell, () => `${item.uses ? path(item) : `${path(item.parent)}: ${name}`}${repeated}\n${time(cost(item))}, of which ` +
    `communication ${percent(share)}\n` + devices.map((i) => `${axes[i].name}: ` + (item.uses ? usesText(item.uses[i])
    : `${item.use[i]}, ${item.layouts[i]}`)).join("\n"), true);
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

/** `keys`: where it has the focus, too. */
function tip(target, text, keys = false) {
  const box = at("tip"), hide = () => { box.hidden = true; };
  const show = (event, x, y) => {
    box.textContent = text(event) || "";
    box.hidden = !box.textContent;
    box.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - box.offsetWidth - 8))}px`;
    box.style.top = `${Math.max(8, Math.min(y + 14, innerHeight - box.offsetHeight - 8))}px`;
  };
  target.addEventListener("mousemove", (event) => show(event, event.clientX, event.clientY));
  target.addEventListener("mouseleave", hide);
  if (!keys) return;
  target.addEventListener("focus", (event) => { const own = target.getBoundingClientRect(); show(event, own.left, own.bottom); });
  target.addEventListener("blur", hide);
}
