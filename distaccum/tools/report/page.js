// Draws the charts of the embedded data as SVG, and answers the switches. No library, no network.
(() => {
  "use strict";
  const { axes, runs, charts, counted } = JSON.parse(document.getElementById("data").textContent);
  const AXES = { step: "step", samples: "samples", tokens: "tokens", hours: "hours" };
  if (counted !== "tokens") delete AXES.tokens;
  for (const run of runs) for (const named of [run.y, run.bad, run.best, run.levels]) Object.setPrototypeOf(named, null); // a "constructor"
  const DASHES = ["", "6 3", "2 3", "9 3 2 3", "1 4"];
  const HEIGHT = 260, LEFT = 58, RIGHT = 12, TOP = 24, BOTTOM = 34;
  const state = { axis: "step", log: false, smooth: 0, marks: true, off: new Set(), range: null };

  const SVG = "http://www.w3.org/2000/svg";
  const draw = (name, attributes = {}, ...children) => fill(document.createElementNS(SVG, name), attributes, children);
  const make = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
  function fill(node, attributes, children) {
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  }
  const titled = (text, node) => { node.append(draw("title", {}, text)); return node; };
  // One run has a color for each line of a chart, several have one each, and dashes for the lines.
  const alone = runs.length === 1;
  const colorOf = (one) => color(alone ? one.order : one.number);
  const dashOf = (i) => alone ? "" : DASHES[i % DASHES.length];
  const color = (number) => number < 10 ? `var(--c${number})` : `hsl(${(number * 137.5) % 360} 60% 52%)`;

  // ------------------------------------------------------------------------------------------------ numbers in words
  function significant(value, digits = 4) {
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e6 || size < 1e-4) return value.toExponential(digits - 2).replace(/\.?0+e/, "e").replace("e+", "e");
    return String(Number(value.toPrecision(digits)));
  }
  function scaled(value, steps, units) {
    let unit = 0;
    while (Math.abs(value) >= steps && unit < units.length - 1) { value /= steps; unit += 1; }
    return significant(value) + units[unit];
  }
  function seconds(value) {
    if (Math.abs(value) < 1) return significant(value * 1e3, 3) + " ms";
    if (value < 120) return significant(value, 3) + " s";
    return value < 7200 ? significant(value / 60, 3) + " min" : significant(value / 3600, 4) + " h";
  }
  function words(value, form) {
    if (form === "bytes") return scaled(value, 1024, [" B", " KiB", " MiB", " GiB", " TiB"]);
    if (form === "share") return significant(value * 100, 3) + " %";
    if (form === "seconds") return seconds(value);
    if (form === "count") return scaled(value, 1000, ["", " k", " M", " G", " T", " P"]);
    return significant(value, 5);
  }
  const place = (value) => state.axis === "hours" ? (value === 0 ? "0" : seconds(value * 3600))
    : scaled(value, 1000, ["", " k", " M", " G", " T", " P"]);

  // ----------------------------------------------------------------------------------------------------------- ticks
  function evenly(from, to, count, base = 10) {
    const span = to - from || Math.abs(to) || 1;
    const raw = span / Math.max(1, count), power = base ** Math.floor(Math.log(raw) / Math.log(base));
    const steps = base === 10 ? [1, 2, 5, 10] : [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];
    const step = power * steps.find((one) => one * power >= raw * 0.999);
    const found = [];
    for (let i = Math.ceil(from / step - 1e-9); i * step <= to + step * 1e-9 && found.length < 100; i += 1) found.push(i * step);
    return found;
  }
  function powers(from, to, count, base) {
    const low = Math.floor(Math.log10(from)), high = Math.ceil(Math.log10(to));
    if (Math.log10(to / from) < 1) return evenly(from, to, count, base).filter((value) => value > 0);
    const every = Math.max(1, Math.ceil((high - low) / 8)), found = [];
    for (let power = low; power <= high; power += every) {
      for (const part of high - low <= 2 ? [1, 2, 5] : [1]) found.push(part * 10 ** power);
    }
    return found.filter((value) => value >= from * 0.999 && value <= to * 1.001);
  }

  // ---------------------------------------------------------------------------------------------------------- series
  // A moving average whose weights begin at the first point, each last value weighing 1 - smooth.
  function smoothed(values, line) {
    if (!state.smooth || !line.noisy) return values;
    let sum = 0, weight = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = sum * state.smooth + value * (1 - state.smooth);
      weight = weight * state.smooth + 1 - state.smooth;
      return sum / weight;
    });
  }
  const seriesOf = (chart) => runs.flatMap((run, number) => state.off.has(number) ? [] : chart.lines
    .map((line, order) => ({ run, number, line, order, dash: dashOf(order) }))
    .filter(({ line }) => Object.hasOwn(run.y, line.metric))
    .map((one) => ({ ...one, xs: run.x[state.axis], ys: run.y[one.line.metric], odd: run.bad[one.line.metric] || [] })));

  function extent(values) {
    let low = Infinity, high = -Infinity;
    for (const value of values) if (value !== null) { low = Math.min(low, value); high = Math.max(high, value); }
    return [low, high];
  }
  function spanX() {
    if (state.range) return state.range;
    const ends = runs.filter((_, number) => !state.off.has(number)).map((run) => extent(run.x[state.axis]));
    const low = Math.min(...ends.map((end) => end[0])), high = Math.max(...ends.map((end) => end[1]));
    if (!Number.isFinite(low)) return [0, 1];
    return low < high ? [low, high] : [low - (Math.abs(low) * 0.05 || 0.5), high + (Math.abs(high) * 0.05 || 0.5)];
  }
  function spanY(series, levels, [from, to]) {
    const inside = series.map(({ xs, ys }) => extent(ys.filter((value, i) => value !== null && xs[i] >= from && xs[i] <= to
      && (!state.log || value > 0))));
    let [low, high] = extent([...inside.flat().filter(Number.isFinite), ...levels.filter((one) => !state.log || one > 0)]);
    if (!Number.isFinite(low)) return null;
    if (state.log) return low === high ? [low / 2, high * 2] : [low * (low / high) ** 0.05, high * (high / low) ** 0.05];
    const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
    return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
  }

  // ---------------------------------------------------------------------------------------------------------- charts
  function path(xs, ys, odd, X, Y) {
    const broken = new Set(odd.map(([i]) => i));
    let text = "", pen = false, before = -Infinity, hidden = 0;
    for (let i = 0; i < ys.length; i += 1) {
      if (broken.has(i)) pen = false;
      if (ys[i] === null) continue;
      if (state.log && ys[i] <= 0) { pen = false; hidden += 1; continue; }
      if (xs[i] < before) pen = false; // a rollback
      text += `${pen ? "L" : "M"}${X(xs[i]).toFixed(1)} ${Y(ys[i]).toFixed(1)}`;
      pen = true;
      before = xs[i];
    }
    return [text, hidden];
  }

  function drawMarks(parent, X, width, [from, to]) {
    const bottom = HEIGHT - BOTTOM, at = axes.indexOf(state.axis);
    runs.forEach((run, number) => {
      if (state.off.has(number)) return;
      const last = {}, epochs = run.marks.filter((mark) => mark.kind === "epoch").length;
      for (const mark of run.marks) {
        const value = mark.at[at], x = X(value);
        if (value < from || value > to || x - (last[mark.kind] ?? -Infinity) < 4) continue;
        if (mark.kind === "epoch" && epochs > width / 12) continue;
        last[mark.kind] = x;
        let node;
        if (mark.kind === "checkpoint") {
          node = draw("path", { d: `M${x - 4} ${bottom}h8l-4 -7z`, fill: color(number), class: "mark" });
        } else if (mark.kind === "skip") {
          node = draw("path", { d: `M${x} ${TOP}v7`, class: "mark skip" });
        } else {
          node = draw("path", { d: `M${x} ${TOP}V${bottom}`, class: `mark ${mark.kind}`, fill: "none" });
          if (mark.kind === "start") node.setAttribute("stroke", color(number));
        }
        parent.append(titled(runs.length > 1 ? `${run.name}: ${mark.text}` : mark.text, node));
      }
    });
  }

  function render(chart, figure) {
    const width = Math.max(240, figure.clientWidth - 20), right = width - RIGHT, bottom = HEIGHT - BOTTOM;
    const series = seriesOf(chart), spanOfX = spanX();
    const levels = [...new Set(series.map(({ run }) => run.levels[chart.key]).filter((one) => one !== undefined))];
    const spanOfY = spanY(series, levels, spanOfX);
    const caption = make("figcaption", {}, chart.title);
    if (chart.lines.length > 1) for (const [i, line] of chart.lines.entries()) {
      const sample = draw("path", { d: "M0 4H26", stroke: alone ? color(i) : "currentColor", "stroke-width": 2, "stroke-dasharray": dashOf(i) });
      caption.append(make("span", {}, draw("svg", { viewBox: "0 0 26 8" }, sample), line.label));
    }
    figure.replaceChildren(caption);
    if (!spanOfY) {
      caption.append(make("span", {}, state.log ? "nothing above 0" : "nothing to draw"));
      if (!series.some(({ odd }) => odd.length)) return;
    }
    const [x0, x1] = spanOfX, [y0, y1] = spanOfY || [0, 1];
    const X = (value) => LEFT + (value - x0) / (x1 - x0) * (right - LEFT);
    const Y = state.log && spanOfY
      ? (value) => bottom - Math.log(value / y0) / Math.log(y1 / y0) * (bottom - TOP)
      : (value) => bottom - (value - y0) / (y1 - y0) * (bottom - TOP);
    const svg = draw("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": chart.title });
    const clip = `clip-${chart.key}`;
    svg.append(draw("clipPath", { id: clip }, draw("rect", { x: LEFT - 7, y: 0, width: right - LEFT + 14, height: bottom + 3 })));
    const ticksY = spanOfY ? (state.log ? powers : evenly)(y0, y1, 5, chart.form === "bytes" ? 1024 : 10) : [];
    for (const value of ticksY) {
      svg.append(draw("path", { d: `M${LEFT} ${Y(value)}H${right}`, class: "grid" }),
        draw("text", { x: LEFT - 6, y: Y(value) + 4, "text-anchor": "end" }, words(value, chart.form)));
    }
    const ticksX = state.axis === "hours" ? clock(x0, x1, width / 70) : evenly(x0, x1, width / 70);
    for (const value of ticksX) {
      const x = X(value);
      svg.append(draw("path", { d: `M${x} ${bottom}v4`, class: "axis" }),
        draw("text", { x: Math.min(x, right - 8), y: bottom + 16, "text-anchor": "middle" }, place(value)));
    }
    svg.append(draw("path", { d: `M${LEFT} ${bottom}H${right}`, class: "axis" }),
      draw("text", { x: right, y: bottom + 28, "text-anchor": "end" }, state.axis === "hours" ? "time of training" : AXES[state.axis]),
      draw("text", { x: 4, y: TOP - 11 }, chart.unit));
    const inner = draw("g", { "clip-path": `url(#${clip})` });
    svg.append(inner);
    if (state.marks) drawMarks(inner, X, width, spanOfX);
    for (const value of spanOfY ? levels.filter((one) => !state.log || one > 0) : []) {
      inner.append(titled(`${chart.limit} ${words(value, chart.form)}`, draw("path", { d: `M${LEFT} ${Y(value)}H${right}`, class: "level", fill: "none" })));
    }
    let hidden = 0;
    for (const one of series) {
      const stroke = { stroke: colorOf(one), "stroke-dasharray": one.dash, "data-run": one.run.name, "data-metric": one.line.metric };
      const [raw, below] = spanOfY ? path(one.xs, one.ys, one.odd, X, Y) : ["", 0];
      hidden += below;
      if (state.smooth && one.line.noisy) {
        inner.append(draw("path", { d: raw, class: "curve raw", stroke: stroke.stroke }));
        inner.append(draw("path", { d: path(one.xs, smoothed(one.ys, one.line), one.odd, X, Y)[0], class: "curve", ...stroke }));
      } else {
        inner.append(draw("path", { d: raw, class: "curve", ...stroke }));
      }
      const there = one.ys.map((_, i) => i).filter((i) => one.ys[i] !== null && !(state.log && one.ys[i] <= 0));
      if (there.length <= 40 && spanOfY) {
        for (const i of there) inner.append(draw("circle", { cx: X(one.xs[i]), cy: Y(one.ys[i]), r: 2.5, fill: stroke.stroke }));
      }
      const best = one.run.best[one.line.metric], shown = best && spanOfY && !(state.log && best.value <= 0);
      if (shown) {
        const text = `best ${words(best.value, chart.form)} at step ${best.step}`;
        if (alone && chart.lines.length < 5) (caption.children[one.order] || caption).append(make("b", {}, ` ${text}`));
        inner.append(titled(`${one.line.label}: ${text}`, draw("circle", { cx: X(best.at[axes.indexOf(state.axis)]), cy: Y(best.value), r: 5, class: "best-mark", stroke: stroke.stroke })));
      }
      for (const [i, kind] of one.odd) {
        inner.append(titled(`${one.run.name}: ${one.line.metric} is ${kind}`, draw("text", { x: X(one.xs[i]) - 4, y: TOP + 10, class: "bad" }, "×")));
      }
    }
    const odd = series.reduce((sum, one) => sum + one.odd.length, 0);
    if (odd) caption.append(make("span", {}, `× NaN or infinite: ${odd}`));
    if (hidden) caption.append(make("span", {}, `${hidden} values of 0 or less are not on a logarithmic axis`));
    figure.append(svg);
    listen(chart, figure, svg, { X, width, right, bottom, series, x0, x1 });
  }
  // Ticks of a time in hours, at round seconds, minutes or hours.
  function clock(from, to, count) {
    const raw = (to - from) * 3600 / Math.max(1, count);
    const nice = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];
    const step = nice.find((one) => one >= raw);
    if (raw < 1 || !step) return evenly(from * 3600, to * 3600, count).map((value) => value / 3600);
    const found = [];
    for (let at = Math.ceil(from * 3600 / step); at * step <= to * 3600; at += 1) found.push(at * step / 3600);
    return found;
  }

  // ---------------------------------------------------------------------------------------- the pointer over a chart
  function listen(chart, figure, svg, { X, width, right, bottom, series, x0, x1 }) {
    const cursor = draw("path", { class: "cursor", visibility: "hidden" });
    const zoom = draw("rect", { class: "zoom", y: TOP, height: bottom - TOP, visibility: "hidden" });
    const tip = make("div", { class: "tip", hidden: "" });
    svg.append(zoom, cursor);
    figure.append(tip);
    let pressed = null;
    const inside = (event) => {
      const box = svg.getBoundingClientRect();
      return Math.min(right, Math.max(LEFT, (event.clientX - box.left) * width / box.width));
    };
    const value = (x) => x0 + (x - LEFT) / (right - LEFT) * (x1 - x0);
    const nearest = (one, at) => {
      let best = -1;
      one.ys.forEach((y, i) => { if (y !== null && (best < 0 || Math.abs(one.xs[i] - at) < Math.abs(one.xs[best] - at))) best = i; });
      return best;
    };
    svg.addEventListener("pointermove", (event) => {
      const x = inside(event), at = value(x);
      cursor.setAttribute("d", `M${x} ${TOP}V${bottom}`);
      cursor.setAttribute("visibility", "visible");
      if (pressed !== null) {
        fill(zoom, { x: Math.min(x, pressed), width: Math.abs(x - pressed), visibility: "visible" }, []);
      }
      const rows = series.map((one) => [one, nearest(one, at)]).filter(([, i]) => i >= 0).slice(0, 12);
      const lines = rows.map(([one, i]) => {
        const label = make("span", {}, make("i", { class: "swatch" }), [runs.length > 1 ? one.run.name : "", chart.lines.length > 1 || runs.length < 2 ? one.line.label : ""].filter(Boolean).join(" "));
        label.firstChild.style.background = colorOf(one);
        return make("div", {}, label, make("b", {}, words(smoothed(one.ys, one.line)[i], chart.form)));
      });
      const head = rows.length ? place(rows[0][0].xs[rows[0][1]]) : place(at);
      const index = axes.indexOf(state.axis);
      const near = state.marks ? runs.flatMap((run, number) => state.off.has(number) ? [] : run.marks.filter((mark) => Math.abs(X(mark.at[index]) - x) < 4)) : [];
      tip.replaceChildren(make("div", {}, `${AXES[state.axis]} ${head}`), ...lines, ...near.slice(0, 4).map((mark) => make("div", {}, mark.text)));
      tip.hidden = false;
      const share = svg.clientWidth / width, left = x * share + 18;
      tip.style.left = `${left + tip.offsetWidth > figure.clientWidth ? Math.max(0, x * share - tip.offsetWidth - 6) : left}px`;
      tip.style.top = "2.4rem";
    });
    const leave = () => { tip.hidden = true; cursor.setAttribute("visibility", "hidden"); zoom.setAttribute("visibility", "hidden"); pressed = null; };
    svg.addEventListener("pointerleave", leave);
    svg.addEventListener("pointerdown", (event) => { if (event.pointerType === "mouse") pressed = inside(event); });
    svg.addEventListener("pointerup", (event) => {
      const from = pressed, to = inside(event);
      pressed = null;
      if (from === null || Math.abs(to - from) < 8) return zoom.setAttribute("visibility", "hidden");
      state.range = [value(Math.min(from, to)), value(Math.max(from, to))];
      return all();
    });
    svg.addEventListener("dblclick", () => { state.range = null; all(); });
  }

  // -------------------------------------------------------------------------------------------------------- switches
  const figures = charts.map((chart) => make("figure", { id: `chart-${chart.key}` }));
  const reset = make("button", { type: "button", id: "reset" }, "whole run");
  function all() {
    reset.hidden = !state.range;
    charts.forEach((chart, i) => render(chart, figures[i]));
  }
  function button(text, pressed, act, attributes = {}) {
    const node = make("button", { type: "button", "aria-pressed": pressed, ...attributes }, text);
    node.addEventListener("click", () => { act(node); all(); });
    return node;
  }
  function choice(label, options, chosen, act) {
    const buttons = Object.entries(options).map(([key, text]) => button(text, key === chosen, () => {
      act(key);
      buttons.forEach((one) => one.setAttribute("aria-pressed", one.dataset.key === key));
    }, { "data-key": key }));
    return make("span", { class: "set", role: "group", "aria-label": label }, `${label} `, ...buttons);
  }
  // What the marks on the charts mean: those that these runs have.
  function key() {
    const kinds = new Set(runs.flatMap((run) => run.marks.map((mark) => mark.kind)));
    const paths = {
      epoch: [{ d: "M9 0V14", class: "mark epoch" }, "an epoch begins"],
      start: [{ d: "M9 0V14", class: "mark start", stroke: "currentColor" }, "resumed"],
      rollback: [{ d: "M9 0V14", class: "mark rollback" }, "rolled back"],
      checkpoint: [{ d: "M4 12h10l-5 -9z", class: "mark", fill: "currentColor" }, "checkpoint"],
      skip: [{ d: "M9 3V11", class: "mark skip" }, "step skipped"],
      level: [{ d: "M0 7H18", class: "level" }, charts.filter((chart) => runs.some((run) => chart.key in run.levels)).map((chart) => chart.limit).join(", ")],
      best: [{ d: "M9 3a4 4 0 1 0 .1 0", class: "best-mark", stroke: "currentColor" }, "best value"],
      bad: [{ d: "M5 3l8 8m0 -8l-8 8", stroke: "var(--bad)", "stroke-width": 2 }, "NaN or infinite"],
    };
    if (runs.some((run) => Object.keys(run.levels).length)) kinds.add("level");
    if (runs.some((run) => Object.keys(run.best).length)) kinds.add("best");
    if (runs.some((run) => Object.keys(run.bad).length)) kinds.add("bad");
    const items = Object.entries(paths).filter(([kind]) => kinds.has(kind))
      .map(([, [shape, text]]) => make("span", {}, draw("svg", { viewBox: "0 0 18 14" }, draw("path", shape)), text));
    return items.length ? [make("p", { id: "key", class: "quiet" }, ...items)] : [];
  }

  const tools = document.getElementById("tools");
  if (charts.length) {
    reset.addEventListener("click", () => { state.range = null; all(); });
    const smooth = make("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: 0, id: "smooth" });
    smooth.addEventListener("input", () => { state.smooth = Number(smooth.value); all(); });
    tools.append(
      choice("by", AXES, "step", (key) => { state.axis = key; state.range = null; }),
      choice("scale", { linear: "linear", log: "log" }, "linear", (key) => { state.log = key === "log"; }),
      make("label", { class: "set" }, "smooth ", smooth),
      make("span", { class: "set" }, button("marks", true, (node) => { state.marks = !state.marks; node.setAttribute("aria-pressed", state.marks); }, { id: "marks" }), reset),
    );
  }
  if (runs.length > 1) {
    const legend = make("span", { class: "set legend", role: "group", "aria-label": "runs" });
    runs.forEach((run, number) => {
      const one = button("", true, (node) => {
        if (!state.off.delete(number)) state.off.add(number);
        node.setAttribute("aria-pressed", !state.off.has(number));
      }, { "data-run": run.name });
      one.append(make("i", { class: "swatch" }), run.name);
      one.firstElementChild.style.background = color(number);
      legend.append(one);
    });
    tools.append(legend);
  }
  document.querySelectorAll(".search").forEach((field) => field.addEventListener("input", () => {
    const wanted = field.value.trim().toLowerCase();
    field.closest("details").querySelectorAll("tbody tr").forEach((row) => {
      row.hidden = !row.textContent.toLowerCase().includes(wanted);
    });
  }));
  document.getElementById("charts").replaceChildren(...figures);
  document.getElementById("charts").before(...key());
  all();
  let width = document.getElementById("charts").clientWidth;
  new ResizeObserver(() => {
    const now = document.getElementById("charts").clientWidth;
    if (now !== width) { width = now; requestAnimationFrame(all); }
  }).observe(document.getElementById("charts"));
})();
