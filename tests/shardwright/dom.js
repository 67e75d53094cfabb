// Enough of a browser to run the page's script: node dom.js page.html [#link] prints the text of the page;
// node dom.js page.html "" CODE the value of an expression as JSON.
"use strict";
const html = require("fs").readFileSync(process.argv[2], "utf8");
const listeners = [];

class Element {
  constructor(tag) { Object.assign(this, { tag, children: [], style: {}, dataset: {}, attributes: {}, className: "", value: "" }); }
  append(...children) { this.children.push(...children.filter((child) => child !== "")); }
  replaceChildren(...children) { this.children = []; this.append(...children); }
  setAttribute(key, value) { this.attributes[key] = value; }
  addEventListener(kind, action) { listeners.push({ kind, action, target: this }); }
  get classList() { return { add: (name) => { this.className += ` ${name}`; } }; }
  get textContent() { return this.text ?? this.children.map((child) => child.textContent ?? child).join(" "); }
  set textContent(text) { this.children = []; this.text = text; }
  get offsetWidth() { return 100; }
  get offsetHeight() { return 20; }
  focus() {}
  click() {}
  getBoundingClientRect() { return { left: 1, bottom: 1 }; }
  scrollIntoView() {}
  querySelectorAll() { return []; }
  getContext() { return new Proxy({}, { get: (_, key) => (key === "measureText" ? (text) => ({ width: 6 * text.length }) : () => ({})) }); }
}

const byId = {};
for (const [, id] of html.matchAll(/ id="(\w+)"/g)) byId[id] = new Element("div");
byId.plan.text = html.match(/<script type="application\/json" id="plan">(.*?)<\/script>/s)[1];
const find = (id, from = Object.values(byId)) => {
  for (const item of from) {
    if (item?.attributes?.id === id) return item;
    const inside = item?.children && find(id, item.children);
    if (inside) return inside;
  }
};
Object.assign(globalThis, { innerWidth: 1400, innerHeight: 900, addEventListener: () => {}, location: { hash: process.argv[3] || "" },
  matchMedia: () => ({ matches: false }), getComputedStyle: () => ({ getPropertyValue: () => "#888" }),
  navigator: {},
  document: { getElementById: (id) => byId[id] || find(id), createElement: (tag) => new Element(tag), documentElement: new Element("html"),
    addEventListener: () => {}, activeElement: null } });
const script = html.match(/<script>\s*(.*?)<\/script>/s)[1];
if (process.argv[4]) {
  console.log(JSON.stringify((0, eval)(`${script}\n;${process.argv[4]}`)));
  process.exit(0);
}
(0, eval)(script);
console.log(Object.values(byId).filter((item) => item !== byId.plan).map((item) => item.textContent).join("\n"));
for (const { kind, action, target } of [...listeners]) {  // everything that can be clicked, pointed at or typed into works
  for (const key of ["Enter", "+", "ArrowRight", "p"])
    action({ key, target, clientX: 1, clientY: 1, offsetX: 500, offsetY: 40, deltaX: 9, deltaY: 1, preventDefault() {} });
}
