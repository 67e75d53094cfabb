// ---- tables ----

function table(columns, rows) {
  return element("table", {}, element("tr", {}, ...columns.map(([title, right]) => element(right ? "th.right" : "th", {}, title))),
    ...rows.map(({ cells, own }) => element(own ? "tr.own" : "tr", {}, ...cells.map((cell, i) =>
      element(columns[i][1] ? "td.right" : columns[i][2] ? "td.barred" : "td", {}, cell)))));
}

/** A button for every section that has a title. */
function drawNav() {
  at("nav").append(...["running", "step", "timeline", "memory", "where", "modules", "parameters", "compare", "answers", "profile", "rewrites", "communication", "unsplit"].filter((id) => at(id).children.length).map((id) =>
    element("button", { onclick: () => at(id).scrollIntoView({ behavior: "smooth" }) }, at(id).children[0].textContent)));
}

/** Bars end at so many times the plan's step, or what may be used of the memory; longer ones are cut, and have an arrow. */
const MOST_TIMES = 3;

function drawCompare() {
  const own = { name: "this plan", mesh: plan.mesh, num_microbatches: plan.num_microbatches, lifetimes: plan.lifetimes, again: plan.again, fits: plan.fits, faster: "",
    remark: plan.unfit, step: plan.step, prediction: plan.prediction };
  const used = (a) => totalBytes(a.prediction.memory), fitting = plan.alternatives.filter((a) => a.fits), unfit = plan.alternatives.filter((a) => !a.fits);
  const scale = (values, measure) => Math.min(Math.max(...values), MOST_TIMES * measure);
  const longest = scale([own, ...fitting].map((a) => a.prediction.step_s), plan.prediction.step_s);
  const largest = scale([own, ...plan.alternatives].map(used), plan.usable_bytes), cuts = [own, ...plan.alternatives].some((a) => used(a) > largest || (a.fits && a.prediction.step_s > longest));
  const row = (a) => ({ own: a === own, cells: [a.name, element("code", {}, a.mesh), String(a.num_microbatches), element("span.short", {}, a.lifetimes), element("span.short", {}, a.again),
    ...(a === own || a.fits ? [bar(timeParts(a.step.parts), longest), time(a.prediction.step_s), a.faster] : ["", element("span.soft", {}, time(a.prediction.step_s)), a.faster]),
    bar(memoryParts(a.prediction.memory), largest, { mark: plan.usable_bytes }), bytes(used(a)), element(a === own || a.fits ? "span" : "span.bad", {}, a.remark)] });
  const columns = (...step) => [["plan"], ["mesh"], ["mb.", true], ["weights"], ["again"], step, ["", true], ["", true], ["memory of a device", false, true], ["", true], [""]];
  at("compare").append(element("h2", {}, "Compared with"),
    element("p", {}, "Plans that people choose by hand, each tuned by the same search within its restriction, and the best plan of every other mesh; all by the same cost model. " + plan.legend + "." +
      (cuts ? ` Bars with an arrow are cut at ${MOST_TIMES} times this plan's step, or what may be used of the memory.` : "")),
    table(columns("time of a step", false, true), [own, ...fitting].map(row)), legend(COMPARED_PARTS));
  if (unfit.length) at("compare").append(element("h3", {}, `Do not fit in ${bytes(plan.usable_bytes)}`), table(columns(""), [...unfit].sort((a, b) => used(a) - used(b)).map(row)));
}

const COMPARED_PARTS = [["compute", "compute"], ["communication", "exposed communication"], ["gathered", "slowdown and overheads"], ["optimizer", "optimizer"], ["whole", "bubble"]];

/** Why not, and what if: the answers that were kept and given to the page. */
function drawAnswers() {
  if (!plan.answers.length) return;
  at("answers").append(element("h2", {}, "Questions"), ...plan.answers.flatMap((own) => [element("h3", {}, own.title), ...own.lines.map((line) => element("p", {}, line)),
    own.columns.length ? table(own.columns.map((title) => [title.replace(/^>/, ""), title.startsWith(">")]), own.rows.map((cells) => ({ cells: cells.map(indented) }))) : "",
    ...own.notes.map((note) => element("p.note", {}, note))]));
}

/** A cell of a printed table, whose leading spaces say what it is a part of. */
const indented = (text) => element("span", { style: `padding-left:${9 * text.search(/\S|$/)}px` }, text.trim());

/** Measured against predicted, where a profile was given: kinds, blocks and operators, the most off first. */
function drawProfile() {
  const own = plan.profile;
  if (!own) return;
  const sheet = (title, what, all) => {
    const longest = Math.max(...all.flatMap((r) => [r.measured_s, r.predicted_s]), 1e-12), list = element("div");
    const fill = (most) => {
      const rows = all.slice(0, most).map((r) => ({ cells: [r.name, bar([[r.measured_s, "communication", `measured ${time(r.measured_s)}`]], longest, { thin: true }),
        bar([[r.predicted_s, "compute", `predicted ${time(r.predicted_s)}`]], longest, { thin: true }), time(r.measured_s), time(r.predicted_s),
        r.predicted_s > 0 ? fixed(r.measured_s / r.predicted_s, 2) : "–", (r.measured_s >= r.predicted_s ? "+" : "−") + time(Math.abs(r.measured_s - r.predicted_s))] }));
      list.replaceChildren(table([[what], ["measured", false, true], ["predicted", false, true], ["measured", true], ["predicted", true], ["ratio", true], ["off", true]], rows));
      if (all.length > most) list.append(element("button", { onclick: () => fill(4 * most) }, `${all.length - most} more`));
    };
    fill(20);
    return [element("h3", {}, title), list];
  };
  const { measured_s, predicted_s } = own.step;
  at("profile").append(element("h2", {}, "Predicted against measured"),
    element("p", {}, `A step took ${time(measured_s)} at the median, without a profiler, and is predicted to take ${time(predicted_s)}: ${fixed(measured_s / predicted_s, 2)} times. Below are ` +
      `${plural(own.num_steps, "step")} under torch.profiler of ${time(own.profiled_step_s)} on ${own.num_ranks} ranks (${own.device}, torch ${own.torch}), ${percent(own.covered)} of it by name; ` +
      "the mean of all ranks, forward and backward together. What is sent includes the wait for others, and may lie beside compute. The most off comes first."),
    ...sheet("By kind", "kind", own.kinds), ...sheet("By block", "block", own.blocks), ...sheet("One by one, equal blocks together", "operator", own.places));
}

/** Which certified rules changed the model's operators, where, and what their certificates say. */
function drawRewrites() {
  const { applied, certificates, none } = plan.trace, scopes = [...new Set(certificates.map((c) => c.scope).filter(Boolean))];
  const rows = applied.map((a) => ({ cells: [String(a.count), element("code", {}, a.rule), a.blocks || "in no block", a.between] }));
  const proofs = certificates.map((c) => ({ cells: [element("code", {}, c.rule), c.how, element("span.hash", {}, c.sha256), element("details", {}, element("summary", {}, "equation"), element("code", {}, c.equation))] }));
  at("rewrites").append(element("h2", {}, "Rewrites"), element("p", {}, rows.length ? "Certified rules changed the model's own operators." : `${none}.`),
    ...(rows.length ? [table([["times", true], ["rule"], ["blocks"], ["between"]], rows), element("h3", {}, "Certificates"), ...scopes.map((scope) => element("p.note", {}, `Proven ${scope}.`)),
      table([["rule"], ["proven by"], ["SHA-256"], [""]], proofs)] : []));
}

function drawCommunication() {
  const longest = Math.max(...plan.communication.map((t) => t.seconds), 1e-12);
  const rows = plan.communication.map((t) => ({ cells: [`${t.count} ${t.what}${t.count > 1 ? "s" : ""}`, element("code", {}, `${t.axis}: ${t.before} → ${t.after}`),
    t.text, bar([[t.seconds, "communication", time(t.seconds)]], longest), time(t.seconds), bytes(t.sent_bytes)] }));
  at("communication").append(element("h2", {}, "Communication"),
    element("p", {}, `Each device sends ${bytes(plan.prediction.communication_bytes)} per step, taking ${time(plan.prediction.communication_s)}, of which compute waits for ${time(plan.prediction.exposed_s)}.${plan.stages.length > 1 ? ` That is an equal share; listed is one device of each of the ${plan.stages.length} stages, added up.` : ""}`),
    rows.length ? table([["what"], ["layout"], ["how"], ["time", false, true], ["", true], ["sent", true]], rows) : "None.");
}

function drawUnsplit() {
  const rows = plan.unsplit.map((u) => ({ cells: [u.axis, `${u.count} × ${u.op}`, u.reason, time(u.compute_s), element("span.soft", {}, u.example)] }));
  at("unsplit").append(element("h2", {}, "Operators that run whole along an axis"),
    element("p", {}, rows.length ? "Every device of the axis, or every microbatch, does the same work here." : "None: every operator shares its work along every axis."),
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
drawRunning();
drawStep();
drawTimeline();
drawMemory();
drawWhere();
drawModules();
drawParameters();
drawCompare();
drawAnswers();
drawProfile();
drawRewrites();
drawCommunication();
drawUnsplit();
drawNav();
paintAll();
addEventListener("resize", paintAll);
