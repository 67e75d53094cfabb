// What a person does with the charts over time and the table of parameters; run in the page, it gives `answer`.
const [timelineCanvas, memoryCanvas] = document.querySelectorAll("canvas");
const inked = (from) => new Set(new Uint32Array(
  from.getContext("2d").getImageData(0, 0, from.width, from.height).data.buffer)).size > 5;
const press = (...keys) => keys.forEach((key) => timelineCanvas.dispatchEvent(new KeyboardEvent("keydown", { key })));
const point = (kind, x, y) => {
  const { left, top } = timelineCanvas.getBoundingClientRect();
  timelineCanvas.dispatchEvent(new MouseEvent(kind, { clientX: left + x, clientY: top + y }));
};
const row = timelineRows.find((own) => own.stream === COMPUTE), middle = row.top + 5;
const answer = { drawn: [timelineCanvas, memoryCanvas].map(inked), whole: at("shown").textContent };
press("+", "+", "ArrowRight");
answer.zoomed = shown.to - shown.from < 0.3 * course.step_s;
press("Escape", shown.stage ? "ArrowUp" : "ArrowDown");
answer.other = at("shown").textContent;
chooseStage(0);
point("mousemove", timelineCanvas.clientWidth / 2, middle);
answer.tip = at("tip").textContent;
point("mousedown", 200, middle);
point("mousemove", 260, middle);
point("mouseup", 260, middle);
answer.dragged = shown.to - shown.from < 0.1 * course.step_s;
const titles = [...document.querySelectorAll("#parameters th button")];
titles.find((title) => title.textContent === "bytes").click();
answer.rows = document.querySelectorAll("#parameters tr").length;
answer.sorted = document.querySelector("#parameters [aria-sort=ascending]").textContent;
switchTheme();
