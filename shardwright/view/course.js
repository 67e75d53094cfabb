// ---- the step as the data has it: when every segment of a stage runs, its tasks, and the memory at that time ----

const course = plan.timeline;
const COMPUTE = 0;
const LETTERS = { forward: "F", backward: "B", weights: "W", end: "end" };
const PHASES = { forward: "forward", backward: "backward", weights: "gradients of weights", end: "end of the step" };
const isPipeline = course.stages.length > 1;
const known = new Map();

/** What `make` gives for a key, made once. */
function once(key, make) {
  if (!known.has(key)) known.set(key, make());
  return known.get(key);
}

/** A stage's items as rounds that come again and again, with where each begins and the memory that is there then. */
const roundsOf = (stage) => once(`rounds ${stage}`, () => {
  let now = 0;
  const passed = {}, left = course.categories.map((category) => course.stages[stage].state[category] || 0);
  return course.stages[stage].items.map(([times, numbers]) => {
    const round = { begin: now, times, items: [], left: [...left] }, counts = {};
    const held = course.categories.map(() => 0);
    let at = 0;
    for (let i = 0; i < numbers.length; i += 2) {
      const segment = course.segments[numbers[i]], way = `${segment.direction} ${segment.chunk}`;
      at += numbers[i + 1] * course.tick_s;
      round.items.push({ segment, at, way, number: counts[way] || 0, left: [...held] });
      at += segment.ready_s;
      counts[way] = (counts[way] || 0) + 1;
      course.nets[segment.net].forEach((n, category) => { held[category] += n; });
    }
    Object.assign(round, { seconds: at, counts, held, passed: { ...passed } });
    for (const way of Object.keys(counts)) passed[way] = (passed[way] || 0) + times * counts[way];
    held.forEach((n, category) => { left[category] += times * n; });
    now += times * at;
    return round;
  });
});

/** The segments of a stage that run between two times: when each begins, of which microbatch, what is in memory then. `skip`: rounds. */
function* placesOf(stage, from, to, skip = () => false) {
  for (const round of roundsOf(stage)) {
    if (round.begin > to) return;
    if (skip(round)) continue;
    const first = Math.max(0, Math.floor((from - round.begin) / (round.seconds || 1)) - 1);
    for (let time = first; time < round.times && round.begin + time * round.seconds <= to; time++) {
      for (const item of round.items) {
        const begin = round.begin + time * round.seconds + item.at;
        if (begin > to) return;
        if (begin + lasting(item.segment) < from) continue;
        yield { round, segment: item.segment, begin, microbatch: (round.passed[item.way] || 0) + time * (round.counts[item.way]) + item.number,
          left: () => round.left.map((n, category) => n + time * round.held[category] + item.left[category]) };
      }
    }
  }
}

/** What the places of a stage take, as `explain` has it of the stage: compute, waiting for communication, and the rest. */
const totalsOf = (stage) => once(`totals ${stage}`, () => {
  const found = { compute: 0, exposed: 0, bubble: 0, sums: [0, 0] };
  let ready = 0, end = 0;
  for (const round of roundsOf(stage)) {
    for (const { segment } of round.items) {
      found.compute += round.times * segment.compute_s;
      found.exposed += round.times * segment.waiting_s;
    }
  }
  for (const place of placesOf(stage, 0, Infinity)) {
    if (place.segment.direction === "end") end = place.begin;
    else ready = Math.max(ready, place.begin + place.segment.ready_s);
  }
  if (ready > 0) {  // the end waits for sums that are still going on
    found.sums = [ready, end];
    found.exposed += Math.max(0, end - ready);
  }
  found.bubble = Math.max(0, course.step_s - found.compute - found.exposed);
  return found;
});

/** The tasks of a segment, by stream: when each begins and ends, what it is called, and its block. */
const tasksOf = (segment) => once(`tasks ${segment.tasks}`, () => {
  const streams = course.streams.map(() => ({ begins: [], ends: [], labels: [], blocks: [], busy_s: 0 }));
  const numbers = course.tasks[segment.tasks];
  streams.runs = [];
  for (let i = 0; i < numbers.length; i += 3) {
    const run = course.runs[numbers[i]], block = numbers[i + 1], ended = course.streams.map(() => numbers[i + 2]);
    for (let k = 0; k < run.length; k += 5) {
      const [label, stream, further, gap, duration] = run.slice(k, k + 5), own = streams[stream];
      const begin = ended[stream] + gap;
      ended[stream] = begin + duration;
      own.busy_s += duration * course.tick_s;
      own.begins.push(begin * course.tick_s);
      own.ends.push(ended[stream] * course.tick_s);
      own.labels.push(course.labels[label]);
      own.blocks.push(further === null ? null : block === null ? further : block + further);
    }
    if (ended[COMPUTE] > numbers[i + 2]) streams.runs.push({ block, begin: numbers[i + 2] * course.tick_s, end: ended[COMPUTE] * course.tick_s });
  }
  return streams;
});

/** The name of a task's block, which is counted from the segment's. */
function blockOf(segment, further) {
  return further === null ? "" : course.blocks[segment.block + further] || "";
}

/** How long a segment lasts, with what goes on beside the next one. */
const lasting = (segment) => once(`lasting ${segment.tasks} ${segment.ready_s}`, () =>
  tasksOf(segment).reduce((most, own) => Math.max(most, own.ends.at(-1) || 0), segment.ready_s));

/** When compute waits in a segment, until the next one can begin. */
const waitsOf = (segment) => once(`waits ${segment.tasks} ${segment.ready_s}`, () => {
  const own = tasksOf(segment)[COMPUTE], found = [];
  let ended = 0;
  own.begins.forEach((begin, i) => {
    if (begin - ended > 10 * course.tick_s) found.push([ended, begin]);
    ended = Math.max(ended, own.ends[i]);
  });
  if (segment.ready_s - ended > 10 * course.tick_s) found.push([ended, segment.ready_s]);
  return found;
});

/** The number of the first of some sorted values that is at least so much. */
function firstAt(values, least) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < least) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** What is in memory at every moment of a segment: [time, bytes by category], relative to what was there before. */
const momentsOf = (segment) => once(`moments ${segment.course}`, () => {
  const [times, ...columns] = course.courses[segment.course];
  return times.map((time, i) => [time * course.tick_s, columns.map((column) => (column[i] || 0) * course.unit_bytes)]);
});

const allocated = course.categories.map((category) => !course.not_allocated.includes(category));
/** With what the allocator holds beyond that, which is a share of it. */
const withSlack = (held, stage) => [...held, course.stages[stage].slack * held.reduce((sum, n, category) => sum + (allocated[category] ? n : 0), 0)];
const summed = (held) => held.reduce((sum, n) => sum + n, 0);
/** The most that a segment has at once, relative to what was there before; nothing if it only gives back. */
const mostOf = (segment) => once(`most ${segment.course}`, () => momentsOf(segment).reduce((most, [, held]) =>
  (summed(held) > summed(most) ? held : most), course.categories.map(() => 0)));
