// Uses the switches as a person would, and leaves what it has seen in the document.
const seen = {};
const click = (selector) => document.querySelector(selector).click();
const look = (name) => {
  seen[name] = [...document.querySelectorAll("path.curve:not(.raw)")].map((path) => ({
    chart: path.closest("figure").id.slice(6), run: path.dataset.run, metric: path.dataset.metric,
    points: (path.getAttribute("d").match(/[ML]/g) || []).length, breaks: path.getAttribute("d").split("M").length - 2,
    first: path.getAttribute("d").match(/^M([-\d.]+) ([-\d.]+)/)?.slice(1).map(Number),
  }));
  seen[name + " broken"] = [...document.querySelectorAll("figure > svg")].filter((svg) =>
    /NaN|undefined|Infinity/.test(svg.innerHTML.replace(/<title>.*?<\/title>/g, ""))).length;
  seen[name + " text"] = document.querySelector("#chart-loss").textContent;
};
look("start");
seen.key = document.querySelector("#key").textContent;
seen.best = [...document.querySelectorAll("#chart-loss .best-mark")].map((one) => one.textContent);
seen.marks = document.querySelectorAll("#chart-loss .mark").length;
click("#marks"); seen["no marks"] = document.querySelectorAll("#chart-loss .mark").length; click("#marks");
for (const axis of ["samples", "tokens", "hours", "step"]) { click(`[data-key=${axis}]`); look(axis); }
click("[data-key=log]"); look("log"); click("[data-key=linear]");
document.querySelector("#smooth").value = 0.9;
document.querySelector("#smooth").dispatchEvent(new Event("input")); look("smooth");
document.querySelector("#smooth").value = 0;
document.querySelector("#smooth").dispatchEvent(new Event("input"));
const svg = document.querySelector("#chart-lr > svg"), box = svg.getBoundingClientRect();
const point = (kind, share) => svg.dispatchEvent(new PointerEvent(kind, {
  clientX: box.left + share * box.width, clientY: box.top + 50, pointerType: "mouse", bubbles: true }));
point("pointermove", 1);
seen.tip = document.querySelector("#chart-lr .tip").textContent;
point("pointerdown", 0.5); point("pointermove", 0.7); point("pointerup", 0.7);
seen.zoomed = !document.querySelector("#reset").hidden; look("zoom");
click("#reset"); seen.whole = document.querySelector("#reset").hidden; look("reset");
click(".legend [data-run=b]"); look("without b");
click(".legend [data-run=a]"); look("without both"); click(".legend [data-run=a]");
const field = document.querySelector(".search");
field.value = "CLIP"; field.dispatchEvent(new Event("input"));
seen.found = [...field.closest("details").querySelectorAll("tbody tr")].filter((row) => !row.hidden)
  .map((row) => row.textContent);
document.body.append(Object.assign(document.createElement("pre"), { id: "seen", textContent: JSON.stringify(seen) }));
