// ---- the timeline as a trace: the JSON that ui.perfetto.dev and chrome://tracing open, as `shardwright timeline --trace` writes it ----

/** Of a longer trace, each kind of segment of a stage is shown task by task once: viewers hold about a million events. */
const MOST_TASKS = 200000;
const microseconds = (seconds) => Math.round(1e12 * seconds) / 1e6;

function traceOf() {
  const events = [], many = course.stages.reduce((sum, _, stage) => sum + numTasks(stage), 0);
  course.stages.forEach((_, stage) => {
    events.push({ ph: "M", name: "process_name", pid: stage, args: { name: `stage ${stage}` } });
    ["microbatches", ...course.streams].forEach((name, track) => events.push({ ph: "M", name: "thread_name", pid: stage, tid: track, args: { name } }));
    const seen = new Set();
    for (const { segment, begin, microbatch } of placesOf(stage, 0, Infinity)) {
      const name = segment.direction === "end" ? "end" : `${segment.direction} ${microbatch}`;
      events.push({ ph: "X", name, cat: "segment", pid: stage, tid: 0, ts: microseconds(begin), dur: microseconds(segment.ready_s) });
      const key = `${segment.tasks} ${segment.block}`;
      if (many <= MOST_TASKS || !seen.has(key)) events.push(...taskEvents(segment, begin, stage));
      seen.add(key);
    }
  });
  return { traceEvents: events, displayTimeUnit: "ms" };
}

function numTasks(stage) {
  let sum = 0;
  for (const { segment } of placesOf(stage, 0, Infinity)) sum += tasksOf(segment).reduce((most, own) => most + own.begins.length, 0);
  return sum;
}

function* taskEvents(segment, begin, stage) {
  for (const [stream, own] of tasksOf(segment).entries()) {
    for (let i = 0; i < own.begins.length; i++) {
      const label = own.labels[i], block = blockOf(segment, own.blocks[i]), result = course.results[labelNumbers().get(label)];
      yield { ph: "X", name: block && !label.startsWith(":") ? `${block}.${label}` : block + label, cat: course.streams[stream], pid: stage, tid: stream + 1,
        ts: microseconds(begin + own.begins[i]), dur: microseconds(own.ends[i] - own.begins[i]), ...(result && { args: { shape: result[0], bytes: result[1] } }) };
    }
  }
}

const labelNumbers = () => once("label numbers", () => new Map(course.labels.map((label, number) => [label, number])));
