// ---- memory over time, of the stage that is chosen ----

const TALL = 170, SLACK = course.categories.length;
/** From the bottom: what is there all the time first. */
const STACK = ["context", "communication", "buffers", "parameters", "optimizer", "gathered", "gradients", "activations", "temporary"]
  .map((name) => [name, course.categories.indexOf(name)]).filter(([, category]) => category >= 0).concat([["slack", SLACK]]);

function drawMemory() {
  const most = Math.max(...course.stages.map((own) => totalBytes(own.memory)));
  const canvas = timeChart("memory over the time of a step", { height: () => AXIS + TALL + 6, draw: (chart) => paintMemory(chart, most), find: atMemory });
  const there = STACK.filter(([name]) => course.stages.some((own) => own.memory[name] > 0));
  const cut = course.most_moments ? ` Of each pass ${course.most_moments} moments are drawn, the highest of each stretch of time.` : "";
  at("memory").append(element("h2", {}, "Memory over time"),
    element("p", {}, `Of each device${isPipeline ? " of the stage that is chosen above" : ""}, on the same axis of time; every column shows its highest moment.${cut}`),
    element("div.tools", {}, element("button", { onclick: showPeak }, "go to the peak"), element("span.soft", { id: "peak" })), canvas,
    legend(there.map(([name]) => [MEMORY_COLOURS[name], name])), element("h3", {}, peakTitle()), peakTable());
}

const peakTitle = () => `The largest at the peak${isPipeline ? ` of stage ${course.fullest}, the fullest` : ""}: ${course.stages[course.fullest].peak_at}`;

/** What a value at the peak is called, leading to the operator or parameter of the tree that it is named after. */
function linked({ label, blocks }) {
  const block = (blocks.match(/^[^\s,–]*/) || [""])[0], words = label.split(" ");
  const own = words.find((word) => treeName(word, block).includes(".") && byName(treeName(word, block)).size);
  return own ? shownInTree(own, block, label) : label;
}

/** Values at the peak, of which the largest are shown first. */
function peakTable(all = false) {
  const MOST = 12, values = all ? plan.peak : plan.peak.slice(0, MOST), largest = plan.peak[0].num_bytes, rest = plan.peak.slice(values.length);
  const rows = values.map((value) => ({ cells: [element("span", {}, element("i.dot", { style: `background:${colour(MEMORY_COLOURS[value.category])}` }), value.category), linked(value),
    value.blocks, value.num_values > 1 ? `${value.num_values} ×` : "", bar([[value.num_bytes, MEMORY_COLOURS[value.category], bytes(value.num_bytes)]], largest, { thin: true }), bytes(value.num_bytes)] }));
  const made = element("div", {}, table([["category"], ["what"], ["in"], ["", true], ["", false, true], ["together", true]], rows));
  if (rest.length) made.append(element("button", { onclick: () => made.replaceChildren(peakTable(true)) }, `show ${rest.length} more, ${bytes(rest.reduce((sum, value) => sum + value.num_bytes, 0))}`));
  return made;
}

/** By column of pixels, what is in memory at its highest moment. */
function columnsOf(chart, stage) {
  const columns = new Array(Math.ceil(chart.wide)).fill(null), totals = new Float64Array(columns.length);
  const fill = (from, to, held) => {
    const total = summed(held), first = Math.max(0, Math.floor(chart.x(from) - GUTTER)), last = Math.min(columns.length - 1, Math.floor(chart.x(to) - GUTTER));
    for (let i = first; i <= last; i++) if (columns[i] === null || total > totals[i]) [columns[i], totals[i]] = [held, total];
  };
  let since = shown.from, after = null;
  const plus = (held, more) => held.map((n, category) => n + more[category]);
  eachShown(chart, stage, (round) => {  // too many to draw one by one: the highest item of each
    for (let i = 0; i < columns.length; i++) {
      const now = chart.time(GUTTER + i + 0.5), times = Math.floor((now - round.begin) / round.seconds);
      if (times < 0 || times >= round.times) continue;
      const left = round.left.map((n, category) => n + times * round.held[category]);
      for (const item of round.items) fill(now, now, plus(plus(left, item.left), mostOf(item.segment)));
    }
  }, (place, segment) => {
    const left = place.left();
    fill(Math.max(since, place.round.begin), place.begin, left);  // nothing changes between two segments
    since = Math.max(since, place.begin + segment.ready_s);
    after = plus(left, course.nets[segment.net]);
    if (chart.pixels(segment.ready_s) < 2) {
      fill(place.begin, since, plus(left, mostOf(segment)));
      return;
    }
    let from = place.begin, held = left;
    for (const [moment, more] of momentsOf(segment)) {
      fill(from, place.begin + moment, held);
      from = Math.max(from, place.begin + moment);
      held = plus(left, more);
    }
    fill(from, Math.max(from, since), held);
  });
  if (after) fill(since, course.step_s, after);
  return columns.map((held) => held && withSlack(held, stage));
}

function paintMemory(chart, most) {
  const { pen } = chart, { memory, peak_s, peak_at, device_bytes } = course.stages[shown.stage], limit = Math.min(plan.limit_bytes, device_bytes);
  const top = 1.06 * (limit < 2 * most ? Math.max(most, limit) : most), y = (n) => AXIS + TALL * (1 - n / top);
  chart.columns = columnsOf(chart, shown.stage);
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    pen.fillStyle = ink("line");
    pen.fillRect(GUTTER, y(share * most), chart.wide, 1);
    pen.fillStyle = ink("soft");
    pen.textAlign = "right";
    pen.fillText(bytes(share * most), GUTTER - 6, y(share * most));
    pen.textAlign = "left";
  }
  const below = new Float64Array(chart.columns.length);
  for (const [name, category] of STACK) {
    pen.fillStyle = ink(MEMORY_COLOURS[name]);
    chart.columns.forEach((held, i) => {
      if (!held || held[category] <= 0) return;
      pen.fillRect(GUTTER + i, y(below[i] + held[category]), 1, y(below[i]) - y(below[i] + held[category]));
      below[i] += held[category];
    });
    pen.fillStyle = ink("card");  // a line between the categories, so that not colour alone tells them apart
    chart.columns.forEach((held, i) => { if (held && (held[category] * TALL) / top > 4) pen.fillRect(GUTTER + i, y(below[i]), 1, 1); });
  }
  if (limit < top) {
    pen.fillStyle = ink("bad");
    pen.fillRect(GUTTER, y(limit), chart.wide, 1.5);
    pen.fillText(`limit ${bytes(limit)}`, GUTTER + 4, y(limit) - 7);
  }
  const left = chart.x(peak_s);
  if (left >= GUTTER && left <= GUTTER + chart.wide) {
    pen.fillStyle = ink("ink");
    pen.fillRect(left - 0.5, AXIS, 1, TALL);
  }
  at("peak").textContent = `peak ${bytes(totalBytes(memory))} of ${bytes(device_bytes)}, after ${time(peak_s)}: ${peak_at}`;
}

function atMemory(chart, x) {
  const held = chart.columns && chart.columns[Math.floor(x - GUTTER)];
  if (!held) return null;
  const lines = [...STACK].reverse().filter(([, category]) => held[category] > 0).map(([name, category]) => `${name} ${bytes(held[category])}`);
  return { text: [`${bytes(summed(held))} at most, ${moment(chart.time(x))}`, ...lines].join("\n") };
}
