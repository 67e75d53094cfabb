// ---- parameters: one row each, to be sorted and searched ----

const MOST_ROWS = 60;
const naturally = new Intl.Collator("en", { numeric: true }).compare;
const product = (sizes) => sizes.reduce((all, n) => all * n, 1);
/** [title, what a row is sorted by, what is shown, whether it is a number] */
const COLUMNS = [
  ["name", (p) => p.full, (p) => element("span.name", {}, shownInTree(p.full))],
  ["shape", (p) => product(p.shape), (p) => element("span.mono", {}, p.shape.join(" × ") || "number"), true],
  ["on a device", (p) => product(p.local_shape), (p) => element("span.mono", {}, p.local_shape.join(" × ") || "number"), true],
  ["dtype", (p) => p.dtype, (p) => p.dtype],
  ...devices.map((axis) => [`axis ${axes[axis].name}`, (p) => p.layouts[axis], (p) => element("span.chip",
    { style: `background:${colour(p.stored[axis])}`, title: axes[axis].stored[p.stored[axis]] || p.stored[axis] }, p.layouts[axis])]),
  ["gathered", (p) => p.lifetime, (p) => p.lifetime],
  ["bytes", (p) => p.num_bytes, (p) => bytes(p.num_bytes), true],
  ["on a device", (p) => p.local_bytes, (p) => bytes(p.local_bytes), true],
  ["ranks", (p) => p.ranks, (p) => p.ranks],
  ["copies", (p) => p.copies, (p) => String(p.copies), true],
];

/** Every parameter, though what is stored alike is told once. */
const everyParameter = () => once("parameters", () => plan.parameters.flatMap((alike) => {
  const [list, numbers] = alike.blocks, one = (full) => ({ ...alike, full, text: `${full} ${alike.dtype} ${alike.layouts.join(" ")} ${alike.lifetime} ${alike.stored.join(" ")}`.toLowerCase() });
  return numbers.length ? numbers.map((number) => one(`${list ? `${list}.` : ""}${number}.${alike.name}`)) : [one(alike.name)];
}));

function drawParameters() {
  const asked = { query: "", column: 0, down: false, most: MOST_ROWS }, list = element("div.scroll", { tabindex: 0 }), count = element("span.soft");
  const draw = () => redrawn(list, () => { count.textContent = fillParameters(list, asked, draw); });
  at("parameters").append(element("h2", {}, "Parameters"),
    element("p", {}, "Copies: how many devices have the same part. Click on a title to sort."),
    element("div.tools", {}, element("input", { type: "search", placeholder: "search names, dtypes, layouts, lifetimes", "aria-label": "search parameters",
      oninput: (event) => { Object.assign(asked, { query: event.target.value.trim().toLowerCase(), most: MOST_ROWS }); draw(); } }), count), list);
  draw();
}

/** Draw what is asked for, and say how much that is. */
function fillParameters(list, asked, draw) {
  const found = sortedParameters(asked), rest = found.length - asked.most;
  const titles = COLUMNS.map(([title, , , right], column) => {
    const own = column === asked.column, sort = () => { Object.assign(asked, { column, down: own && !asked.down }); draw(); };
    return element(right ? "th.right" : "th", { "aria-sort": own ? (asked.down ? "descending" : "ascending") : "none" },
      element("button", { onclick: sort }, title + (own ? (asked.down ? " ↓" : " ↑") : "")));
  });
  const rows = found.slice(0, asked.most).map((p) => element("tr", {}, ...COLUMNS.map(([, , show, right]) => element(right ? "td.right" : "td", {}, show(p)))));
  list.replaceChildren(element("table", {}, element("tr", {}, ...titles), ...rows));
  if (rest > 0) list.append(element("button", { onclick: () => { asked.most *= 4; draw(); } }, `${rest} more`));
  return `${plural(found.length, "parameter")}, ${bytes(found.reduce((sum, p) => sum + p.num_bytes, 0))}, ${bytes(found.reduce((sum, p) => sum + p.local_bytes, 0))} of it on a device` +
    (isPipeline ? " that has all of them" : "");
}

function sortedParameters({ query: words, column, down }) {
  const key = COLUMNS[column][1], found = everyParameter().filter((p) => words.split(/\s+/).every((word) => p.text.includes(word)));
  const order = (a, b) => (typeof key(a) === "number" ? key(a) - key(b) : naturally(key(a), key(b))) || naturally(a.full, b.full);
  return [...found].sort((a, b) => (down ? -order(a, b) : order(a, b)));
}
