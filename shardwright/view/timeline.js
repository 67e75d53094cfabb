// ---- charts over the time of a step: they share the part of it that is shown, and the stage ----

const GUTTER = 118, AXIS = 18, LEAST_S = 1e-7;
const shown = { from: 0, to: course.step_s, stage: course.fullest };
const charts = [];
let inks = {};
/** A colour of the style, read once for each painting. */
const ink = (name) => inks[name] || (inks[name] = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());

/** A canvas: `height()` in pixels, `draw(chart)`, and `find(chart, x, y)`, what is there: a text, a stage or a span to zoom to. */
function timeChart(name, { height, draw, find }) {
  const canvas = element("canvas", { tabindex: 0, role: "img", "aria-label": name }), chart = { canvas, height, draw, drag: null };
  const found = (event) => find(chart, event.offsetX, event.offsetY) || {};
  canvas.addEventListener("mousedown", (event) => { chart.drag = [event.offsetX, event.offsetX]; });
  canvas.addEventListener("mousemove", (event) => { if (chart.drag) { chart.drag[1] = event.offsetX; paint(chart); } });
  canvas.addEventListener("mouseup", (event) => {
    const [from, to] = (chart.drag || [0, 0]).sort((a, b) => a - b), { stage, span } = found(event);
    chart.drag = null;
    if (to - from > 4) zoomTo(chart.time(from), chart.time(to));
    else if (stage !== undefined && stage !== shown.stage) chooseStage(stage);
    else if (span) zoomTo(span[0] - 0.04 * (span[1] - span[0]), span[1] + 0.04 * (span[1] - span[0]));
  });
  canvas.addEventListener("mouseleave", () => { if (chart.drag) { chart.drag = null; paint(chart); } });
  canvas.addEventListener("dblclick", showAll);
  canvas.addEventListener("wheel", (event) => {
    if (event.ctrlKey || event.metaKey) zoomBy(event.deltaY > 0 ? 1.25 : 0.8, chart.time(event.offsetX));
    else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) moveBy(event.deltaX / 800);
    else return;
    event.preventDefault();
  });
  canvas.addEventListener("keydown", (event) => {
    if (!(event.key in KEYS)) return;
    event.preventDefault();
    KEYS[event.key]();
  });
  tip(canvas, (event) => found(event).text);
  charts.push(chart);
  return canvas;
}

const shownFor = () => shown.to - shown.from;
/** A time of the step, to as many digits as tell it apart from one that lies `apart_s` from it: `3.00012 s`. */
function moment(at_s, apart_s = shownFor() / 100) {
  const [scale, unit] = shown.to >= 0.9995 ? [1, "s"] : shown.to >= 0.9995e-3 ? [1e-3, "ms"] : [1e-6, "µs"];
  return `${(at_s / scale).toFixed(Math.max(0, Math.ceil(Math.log10(scale / apart_s) - 1e-9)))} ${unit}`;
}
const showAll = () => zoomTo(0, course.step_s);
const KEYS = { ArrowLeft: () => moveBy(-0.2), ArrowRight: () => moveBy(0.2), ArrowUp: () => chooseStage(shown.stage - 1),
  ArrowDown: () => chooseStage(shown.stage + 1), "+": () => zoomBy(0.5), "=": () => zoomBy(0.5), "-": () => zoomBy(2), 0: showAll,
  Escape: showAll, p: showPeak };

function zoomTo(from, to) {
  const wide = Math.min(Math.max(to - from, LEAST_S), course.step_s);
  shown.from = Math.min(Math.max((from + to - wide) / 2, 0), course.step_s - wide);
  shown.to = shown.from + wide;
  paintAll();
}

const zoomBy = (factor, around = (shown.from + shown.to) / 2) => zoomTo(around - (around - shown.from) * factor, around + (shown.to - around) * factor);
const moveBy = (share) => {
  const by = Math.min(Math.max(share * shownFor(), -shown.from), course.step_s - shown.to);
  zoomTo(shown.from + by, shown.to + by);
};

function chooseStage(stage) {
  if (!(stage in course.stages)) return;
  shown.stage = stage;
  paintAll();
}

function showPeak() {
  const peak = course.stages[shown.stage].peak_s, wide = Math.min(shownFor(), course.step_s / 20);
  zoomTo(peak - wide / 2, peak + wide / 2);
}

function paintAll() {
  inks = {};
  charts.forEach(paint);
  const part = shownFor() < 0.9999 * course.step_s ? `${moment(shown.from)} to ${moment(shown.to)} of ${time(course.step_s)}` : `the whole step, ${time(course.step_s)}`;
  const together = charts[0].together ? `; ${charts[0].together} passes too short to tell apart are drawn as shares of their time` : "";
  at("shown").textContent = (isPipeline ? `stage ${shown.stage}, ` : "") + part + together;
  if (isPipeline) at("stage").value = String(shown.stage);
}

function paint(chart) {
  const { canvas } = chart, ratio = globalThis.devicePixelRatio || 1, width = canvas.clientWidth || 1100, height = chart.height();
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d"), wide = width - GUTTER - 1;
  Object.assign(chart, { pen, wide, time: (x) => shown.from + ((x - GUTTER) / wide) * shownFor(),
    x: (seconds) => GUTTER + ((seconds - shown.from) / shownFor()) * wide, pixels: (seconds) => (seconds / shownFor()) * wide });
  pen.scale(ratio, ratio);
  pen.font = "11px system-ui, sans-serif";
  pen.textBaseline = "middle";
  paintTimes(chart, height);
  chart.draw(chart);
  if (chart.drag) box(chart, chart.time(Math.min(...chart.drag)), chart.time(Math.max(...chart.drag)), 0, height, "selected");
}

/** Lines at round times. */
function paintTimes({ pen, x, wide }, height) {
  const least = (shownFor() * 90) / wide, power = 10 ** Math.floor(Math.log10(least));
  const distance = power * [1, 2, 5, 10].find((n) => n * power >= least);
  for (let number = Math.ceil(shown.from / distance); number * distance <= shown.to; number++) {
    const left = Math.round(x(number * distance));
    pen.fillStyle = ink("line");
    pen.fillRect(left, AXIS - 4, 1, height);
    pen.fillStyle = ink("soft");
    const text = number ? moment(number * distance, distance) : "0";
    if (left + 3 + pen.measureText(text).width < GUTTER + wide) pen.fillText(text, left + 3, AXIS / 2);
  }
}

/** A box from one time to another; its text is shown whole, or not. `filled`: a colour, or a pattern. */
function box({ pen, x, wide }, from, to, top, tall, filled, text = "") {
  const left = Math.max(x(from), GUTTER), right = Math.min(x(to), GUTTER + wide), gap = right - left > 4 ? 1 : 0;
  if (right <= left) return;
  pen.fillStyle = filled in STRIPES ? striped(pen, filled) : ink(filled);
  pen.fillRect(left, top, Math.max(right - left - gap, 0.5), tall);
  if (!text || right - left < 14 || tall < 9 || pen.measureText(text).width > right - left - 6) return;
  pen.fillStyle = onto(ink(filled));
  pen.fillText(text, left + 3, top + tall / 2 + 0.5);
}

/** What can be read on a colour such as `#4a8fe0`: white, or nearly black. */
function onto(colourName) {
  const [red, green, blue] = [1, 3, 5].map((at) => (parseInt(colourName.slice(at, at + 2), 16) / 255) ** 2.2);
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.2 ? "#10151d" : "#fff";
}

function striped(pen, name) {
  const size = 6, key = `pattern ${name}`;
  if (inks[key]) return inks[key];
  const tile = element("canvas"), own = tile.getContext("2d");
  tile.width = tile.height = size;
  own.strokeStyle = ink(STRIPES[name]);
  own.lineWidth = name === "bubble" ? 0.8 : 2;
  own.beginPath();
  for (const shift of [-size, 0, size]) {
    own.moveTo(shift, size);
    own.lineTo(shift + size, 0);
  }
  own.stroke();
  return (inks[key] = pen.createPattern(tile, "repeat"));
}

function rowName({ pen }, top, tall, text, strong = false) {
  pen.fillStyle = ink(strong ? "ink" : "soft");
  pen.fillText(text, 2, top + tall / 2 + 0.5, GUTTER - 8);
}

// ---- the rows of the timeline ----

const DETAIL = 20, GAP = 3;
const overview = Math.min(20, Math.max(7, Math.floor(320 / course.stages.length)));
/** From top to bottom: all stages, where there are several, then what the chosen one does on each stream. */
const timelineRows = [];
let nextTop = AXIS;
function addRow(kind, tall, gap) {
  timelineRows.push({ ...kind, tall, top: nextTop });
  nextTop += tall + gap;
}
if (isPipeline) {
  course.stages.forEach((_, stage) => addRow({ stage }, overview, overview > 9 ? GAP : 1));
  nextTop += 12;
}
const detailTop = nextTop;
for (const kind of [{ segments: true }, { blocks: true }, ...course.streams.map((name, stream) => ({ name, stream }))]) addRow(kind, DETAIL, GAP);
const streamName = (name) => (name === "compute" || name === "copy" ? name : name === "stages" ? "between stages" : `collectives of ${name}`);

function drawTimeline() {
  const canvas = timeChart("timeline: stages and streams over the time of a step",
    { height: () => nextTop + 2, draw: paintRows, find: atRow });
  const several = isPipeline ? [element("select", { id: "stage", "aria-label": "stage", onchange: (event) => chooseStage(Number(event.target.value)) },
    ...course.stages.map((_, stage) => element("option", { value: stage }, `stage ${stage}`)))] : [];
  const streams = course.streams.length > 1 ? [["communication", "collectives and copies"]] : [];
  const phases = [...new Set(course.segments.map((segment) => segment.direction))].map((way) => [way, PHASES[way]]);
  at("timeline").append(element("h2", {}, "Timeline"),
    element("p", {}, `Simulated from the list of actions that runs. ${isPipeline ? `All ${course.stages.length} stages, then the streams of one` : "The streams of each device"}; ` +
      "drag over a part or click to zoom down to a kernel, double click for all. Keys: ← → + − 0" + (isPipeline ? ", ↑ ↓ for the stage." : ".")),
    element("div.tools", {}, ...several, element("button", { onclick: showAll }, "whole step"), element("button", { onclick: () => zoomBy(0.5), "aria-label": "closer" }, "+"),
      element("button", { onclick: () => zoomBy(2), "aria-label": "further away" }, "−"), element("button", { onclick: () => moveBy(-0.5), "aria-label": "earlier" }, "◂"),
      element("button", { onclick: () => moveBy(0.5), "aria-label": "later" }, "▸"),
      saved("save the trace", `${plan.model}.trace.json`, () => JSON.stringify(traceOf())), element("span.soft", { id: "shown", "aria-live": "polite" })), canvas,
    legend([...phases, ...streams, ["exposed", `compute waits for communication${isPipeline ? "; at the foot of a stage's passes, too" : ""}`], ...(isPipeline ? [["bubble", "bubble: nothing to do"]] : [])]), isPipeline ? stageTable() : "");
}

/** What each stage has, and what it does, in seconds that add up to the step. */
function stageTable() {
  const rows = plan.stages.map((own) => ({ cells: [String(own.number), own.has.join(" | "), bytes(own.sent_bytes),
    bar([[own.compute_s, "compute", ""], [own.exposed_s, "communication", ""], [own.bubble_s, "whole", ""]], course.step_s), time(own.compute_s), time(own.exposed_s),
    `${time(own.bubble_s)} (${percent(own.bubble_s / course.step_s)})`, bytes(own.memory_bytes)] }));
  return element("details", { open: rows.length <= 8 ? "" : undefined }, element("summary", {}, "what each stage has and does"),
    table([["stage", true], ["has"], ["sends", true], ["", false, true], ["compute", true], ["exposed", true], ["bubble", true], ["peak memory", true]], rows),
    element("p.note", {}, "Sends: to the next stage, by each device, of one microbatch; its gradient comes back the same way."));
}

function paintRows(chart) {
  chart.together = 0;
  for (const row of timelineRows) {
    const { top, tall, stage } = row, chosen = stage === shown.stage;
    if (stage !== undefined) {
      if (tall > 9 || chosen || stage % 8 === 0) rowName(chart, top, tall, `stage ${stage}${chosen ? " ◂" : ""}`, chosen);
      paintSegments(chart, stage, top, tall);
    } else if (row.segments) {
      rowName(chart, top, tall, isPipeline ? `stage ${shown.stage}` : "passes", true);
      paintSegments(chart, shown.stage, top, tall);
    } else if (row.blocks) {
      rowName(chart, top, tall, "blocks");
      paintBlocks(chart, row);
    } else {
      rowName(chart, top, tall, streamName(row.name));
      paintStream(chart, row);
    }
  }
}

const tooSmall = (chart, round) => round.times > 1 && chart.pixels(round.seconds) < 3 * round.items.length;
/** Of a stage's rounds: those that are too small to tell apart, as one, and the places of the others. */
function eachShown(chart, stage, dense, single) {
  for (const round of roundsOf(stage)) {
    const until = round.begin + round.times * round.seconds;
    if (until < shown.from || round.begin > shown.to) continue;
    if (tooSmall(chart, round)) dense(round, round.begin, until);
  }
  for (const place of placesOf(stage, shown.from, shown.to, (round) => tooSmall(chart, round))) single(place, place.segment);
}

function paintSegments(chart, stage, top, tall) {
  const thin = Math.max(2, tall * 0.28), [sumsBegin, sumsEnd] = totalsOf(stage).sums;
  if (isPipeline) box(chart, 0, course.step_s, top, tall, "bubble");
  box(chart, sumsBegin, sumsEnd, top, tall, "exposed");
  eachShown(chart, stage, (round, begin, end) => {
    let down = top;
    for (const way of Object.keys(PHASES)) {
      const own = round.items.filter(({ segment }) => segment.direction === way);
      const share = own.reduce((sum, { segment }) => sum + segment.ready_s, 0) / round.seconds;
      if (share) box(chart, begin, end, down, share * tall, way, `${round.times * own.length} × ${PHASES[way]}`);
      down += share * tall;
    }
    if (top === detailTop) chart.together += round.times * round.items.length;
  }, (place, segment) => {
    const end = place.begin + segment.ready_s;
    box(chart, place.begin, end, top, tall, segment.direction, nameOf(place, true));
    if (chart.pixels(segment.ready_s) > 30) waitsOf(segment).forEach(([from, to]) => box(chart, place.begin + from, place.begin + to, top + tall - thin, thin, "communication"));
    else if (segment.waiting_s > 0) box(chart, end - segment.waiting_s, end, top + tall - thin, thin, "communication");
  });
}

/** `F3`, or in words. Microbatches are counted from one. */
function nameOf({ segment, microbatch }, short = false) {
  const { direction, chunk } = segment, several = course.segments.some((other) => other.chunk > 0);
  if (direction === "end") return short ? "end" : PHASES.end;
  return short ? `${LETTERS[direction]}${microbatch + 1}${several ? `·${chunk}` : ""}` : `${PHASES[direction]} of microbatch ${microbatch + 1}${several ? `, chunk ${chunk}` : ""}`;
}

function paintBlocks(chart, { top, tall }) {
  eachShown(chart, shown.stage, () => {}, (place, segment) => {
    for (const [number, run] of tasksOf(segment).runs.entries()) {
      if (chart.pixels(run.end - run.begin) < 1 || place.begin + run.end < shown.from || place.begin + run.begin > shown.to) continue;
      const name = blockOf(segment, run.block);
      box(chart, place.begin + run.begin, place.begin + run.end, top, tall, name ? ["block", "next"][number % 2] : "whole", name.split(".").slice(-2).join("."));
    }
  });
}

function paintStream(chart, { stream, top, tall }) {
  const kind = (segment) => (stream === COMPUTE ? segment.direction : "communication");
  const share = (begin, end, part, filled) => box(chart, begin, end, top + tall * (1 - part), tall * part, filled);
  eachShown(chart, shown.stage, (round, begin, end) => {
    let busy = round.items.reduce((sum, { segment }) => sum + tasksOf(segment)[stream].busy_s, 0) / round.seconds;
    for (const { segment } of round.items.filter((item, i) => round.items.findIndex((other) => kind(other.segment) === kind(item.segment)) === i)) {
      share(begin, end, Math.min(1, busy), kind(segment));
      busy -= round.items.reduce((sum, item) => sum + (kind(item.segment) === kind(segment) ? tasksOf(item.segment)[stream].busy_s : 0), 0) / round.seconds;
    }
  }, (place, segment) => {
    const own = tasksOf(segment)[stream];
    if (chart.pixels(segment.ready_s) < 3) {
      share(place.begin, place.begin + segment.ready_s, Math.min(1, own.busy_s / (segment.ready_s || 1)), kind(segment));
      return;
    }
    if (stream === COMPUTE) waitsOf(segment).forEach(([from, to]) => box(chart, place.begin + from, place.begin + to, top, tall, "exposed"));
    let begin = -1, end = -1;
    const flush = () => { if (end > begin) box(chart, begin, end, top, tall, kind(segment)); };
    for (let i = firstAt(own.ends, shown.from - place.begin); i < own.begins.length && place.begin + own.begins[i] < shown.to; i++) {
      const from = place.begin + own.begins[i], to = place.begin + own.ends[i], wide = chart.pixels(to - from) > 4;
      if (wide || chart.pixels(from - end) > 0.5) {  // small tasks that touch are one box
        flush();
        begin = from;
      }
      end = to;
      if (wide) {
        box(chart, from, to, top, tall, kind(segment), own.labels[i]);
        begin = end;
      }
    }
    flush();
  });
}

// ---- what is where ----

function atRow(chart, x, y) {
  const row = timelineRows.find(({ top, tall }) => y >= top && y < top + tall), now = chart.time(x);
  if (!row || x < GUTTER) return row && row.stage !== undefined ? { stage: row.stage, text: `stage ${row.stage}` } : null;
  const stage = row.stage === undefined ? shown.stage : row.stage, { stage: chosen } = row;
  let place = null;
  for (const other of placesOf(stage, now, now)) if (other.begin <= now && now <= other.begin + (row.stream ? lasting(other.segment) : other.segment.ready_s)) place = other;
  if (!place) {
    const [from, to] = totalsOf(stage).sums;
    return { stage: chosen, text: from <= now && now < to ? `waits for sums of gradients, ${time(to - from)}` : isPipeline ? `stage ${stage}: nothing to do` : "" };
  }
  const { segment } = place, offset = now - place.begin, when = (from, to) => `${time(to - from)}, from ${moment(place.begin + from)} on`;
  if (row.stream === undefined && !row.blocks) {
    return { stage: chosen, span: [place.begin, place.begin + segment.ready_s],
      text: `${isPipeline ? `stage ${stage}: ` : ""}${nameOf(place)}\n${when(0, segment.ready_s)}\ncompute ${time(segment.compute_s)}, waits ${time(segment.waiting_s)}` };
  }
  if (row.blocks) {
    const run = tasksOf(segment).runs.find((own) => own.begin <= offset && offset < own.end);
    return run && { span: [place.begin + run.begin, place.begin + run.end], text: `${blockOf(segment, run.block) || "in no block"}\n${nameOf(place)}\n${when(run.begin, run.end)}` };
  }
  const own = tasksOf(segment)[row.stream], i = firstAt(own.ends, offset);
  if (i < own.begins.length && own.begins[i] <= offset) {
    return { span: [place.begin + own.begins[i], place.begin + own.ends[i]],
      text: `${own.labels[i]}\n${blockOf(segment, own.blocks[i])}\n${when(own.begins[i], own.ends[i])}\n${nameOf(place)}`.replace("\n\n", "\n") };
  }
  const wait = row.stream === COMPUTE && waitsOf(segment).find(([from, to]) => from <= offset && offset < to);
  if (!wait) return null;
  const others = tasksOf(segment).filter((_, stream) => stream !== COMPUTE).flatMap((other) => {
    const k = firstAt(other.ends, offset);
    return k < other.begins.length && other.begins[k] <= offset ? [`${other.labels[k]} ${blockOf(segment, other.blocks[k])}`] : [];
  });
  return { span: [place.begin + wait[0], place.begin + wait[1]], text: `compute waits ${when(...wait)}\n${others.length ? `for ${others.join(", ")}` : ""}` };
}
