// ---- tables ----

function table(columns, rows) {
  return element("table", {}, element("tr", {}, ...columns.map(([title, right]) => element(right ? "th.right" : "th", {}, title))),
    ...rows.map(({ cells, own }) => element(own ? "tr.own" : "tr", {}, ...cells.map((cell, i) =>
      element(columns[i][1] ? "td.right" : columns[i][2] ? "td.barred" : "td", {}, cell)))));
}

/** Slower than this many times the plan, or too large: a plan does not set the scale of the bars. */
const ABSURD = 10;

function drawCompare() {
  const own = { name: "this plan", mesh: plan.mesh, num_microbatches: plan.num_microbatches, lifetimes: plan.lifetimes, again: plan.again, fits: plan.fits, faster: "",
    remark: plan.fits ? "" : plan.memory, step: plan.step, prediction: plan.prediction };
  const everything = [own, ...plan.alternatives];
  const sane = everything.filter((a) => a === own || (a.fits && a.prediction.step_s <= ABSURD * plan.prediction.step_s));
  const longest = Math.max(...sane.map((a) => a.prediction.step_s));
  const largest = Math.max(plan.cluster.memory_bytes, ...sane.map((a) => totalBytes(a.prediction.memory)));
  const rows = everything.map((a) => {
    const used = totalBytes(a.prediction.memory);
    return { own: a === own, cells: [a.name, element("code", {}, a.mesh), String(a.num_microbatches), a.lifetimes, a.again, bar(timeParts(a.step.parts), Math.max(longest, a.prediction.step_s)), time(a.prediction.step_s), a.faster,
      bar(memoryParts(a.prediction.memory), Math.max(largest, used), { mark: plan.limit_bytes }),
      element(a.fits ? "span" : "span.bad", {}, bytes(used), a.remark ? element("div", {}, a.remark) : "")] };
  });
  at("compare").append(element("h2", {}, "Compared with"),
    element("p", {}, "Plans that people choose by hand, each tuned by the same search within its restriction, and the best plan of every other mesh; all by the same cost model. " + plan.legend + "."),
    table([["plan"], ["mesh"], ["mb.", true], ["weights"], ["again"], ["time of a step", false, true], ["", true], ["", true], ["memory of a device", false, true], ["", true]], rows));
}

function drawCommunication() {
  const longest = Math.max(...plan.communication.map((t) => t.seconds), 1e-12);
  const rows = plan.communication.map((t) => ({ cells: [`${t.count} ${t.what}${t.count > 1 ? "s" : ""}`, element("code", {}, `${t.axis}: ${t.before} → ${t.after}`),
    t.text, bar([[t.seconds, "communication", time(t.seconds)]], longest), time(t.seconds), bytes(t.sent_bytes)] }));
  at("communication").append(element("h2", {}, "Communication"),
    element("p", {}, `Each device sends ${bytes(plan.prediction.communication_bytes)} per step, taking ${time(plan.prediction.communication_s)}, of which compute waits for ${time(plan.prediction.exposed_s)}.`),
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
drawTimeline();
drawMemory();
drawWhere();
drawModules();
drawParameters();
drawCompare();
drawCommunication();
drawUnsplit();
paintAll();
addEventListener("resize", paintAll);
