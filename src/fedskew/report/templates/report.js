"use strict";
// Draws the figures of the page from the JSON that stands in it, again whenever the reader changes something.
const page = JSON.parse(document.getElementById("figures").textContent);
const ranking = page.ranking;
const numbers = page.groups.map((_, at) => at);
const state = {
  shown: new Set(page.shown), // runs that are switched on
  matching: new Set(numbers), // runs that the filters leave
  printed: false,
  smoothing: 0,
  along: "round",
  measure: ranking?.measures[0]?.key,
  reference: ranking?.chosen,
  axis: Object.keys(ranking?.axes ?? {}).find((name) => new Set(ranking.axes[name]).size > 1),
  sort: { by: ranking?.measures[0]?.key, down: !ranking?.measures[0]?.low },
};
const all = (selector, from = document) => [...from.querySelectorAll(selector)];
const one = (selector, from = document) => from.querySelector(selector);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
const known = (values) => values.filter((value) => value !== null);
const escaped = (name) => name.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

// ---- looks

const DASHES = ["solid", "dash", "dot", "dashdot"];
const NARROW = 480; // pixels of a figure
const LONG = 12; // letters of a name, there
const PAPER = 600; // pixels of a figure in print: A4 and Letter have room for it
const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "triangle-down", "cross"];
const color = (look) => css(`--series-${look % 6}`);
const dash = (look) => DASHES[Math.floor(look / 6) % 4];
const symbol = (look) => SYMBOLS[look % 6];

function themed(layout, element, revision) {
  const [ink, muted, grid, card] = ["--ink", "--muted", "--grid", "--card"].map(css);
  const axis = { gridcolor: grid, zerolinecolor: grid, linecolor: grid, spikecolor: muted, fixedrange: false };
  const above = layout.xaxis?.side === "top";
  const font = { family: getComputedStyle(document.body).fontFamily, size: 12 };
  const finished = {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { ...font, color: muted },
    margin: { l: 46, r: 14, t: above ? 58 : 28, b: above ? 12 : 40 }, // the buttons stand in the one on top
    showlegend: false,
    height: element.clientHeight,
    ...(state.printed && { width: PAPER }),
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom", // a finger scrolls the page
    hoverlabel: { bgcolor: card, bordercolor: grid, font: { ...font, color: ink }, namelength: -1 },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: muted, activecolor: ink },
    uirevision: revision, // keeps the reader's zoom
    ...layout,
  };
  for (const name of Object.keys({ xaxis: 0, yaxis: 0, ...layout }).filter((key) => /^[xy]axis/.test(key)))
    finished[name] = { ...axis, ...layout[name], automargin: true };
  finished.shapes = (layout.shapes ?? []).map((shape) => ({ ...shape, line: { ...shape.line, color: muted } }));
  return finished;
}

// ---- curves

/** Exponential moving average, as TensorBoard and W&B smooth: without a pull towards the beginning. */
function smooth(values) {
  if (!state.smoothing) return values;
  let last = 0;
  let weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    last = last * state.smoothing + (1 - state.smoothing) * value;
    weight = weight * state.smoothing + 1 - state.smoothing;
    return last / weight;
  });
}

/** Rounds of a run on the axis that the reader chose: its seconds or megabytes at these rounds. */
function along(run, rounds) {
  if (state.along === "round") return rounds;
  const { round, [state.along]: values } = page.groups[run].clock;
  return rounds.map((at) => {
    const next = round.findIndex((number) => number >= at);
    if (next <= 0) return values[next === 0 ? 0 : values.length - 1];
    const part = (at - round[next - 1]) / (round[next] - round[next - 1]);
    return values[next - 1] + part * (values[next] - values[next - 1]);
  });
}

function curve(trace) {
  const { look, runs, digits, std, share, thin } = trace.meta;
  const ink = color(look);
  const x = along(runs[0], trace.x);
  const line = { color: ink, width: thin ? 0.9 : 2, dash: trace.line?.dash ?? dash(look) };
  const drawn = [];
  if (std) {
    const places = x.map((_, at) => at).filter((at) => std[at] !== null && trace.y[at] !== null);
    const clip = (value) => (share ? Math.min(Math.max(value, 0), 100) : value);
    const high = smooth(places.map((at) => clip(trace.y[at] + std[at])));
    const low = smooth(places.map((at) => clip(trace.y[at] - std[at])));
    const there = places.map((at) => x[at]);
    const edge = { x: [...there, ...[...there].reverse()], y: [...high, ...low.reverse()] };
    drawn.push({ ...edge, mode: "lines", line: { width: 0 }, fill: "toself", fillcolor: `${ink}2e`, hoverinfo: "skip" });
  }
  if (state.smoothing) drawn.push({ x, y: trace.y, mode: "lines", line: { color: `${ink}55`, width: 1 }, hoverinfo: "skip" });
  drawn.push({
    x,
    y: smooth(trace.y),
    name: trace.name,
    mode: x.length <= 25 ? "lines+markers" : "lines",
    line,
    marker: { symbol: symbol(look), size: 6, color: ink },
    customdata: trace.x.map((_, at) => (std?.[at] == null ? "" : ` ± ${std[at].toPrecision(2)}`)),
    hovertemplate: share ? `%{y:.${digits}f} %%{customdata}` : `%{y:.${digits}~g}%{customdata}`,
  });
  return drawn;
}

// ---- other figures

function counts(trace) {
  const most = Math.max(10, ...trace.z.map((row) => Math.max(...row)));
  const powers = [...Array(Math.floor(Math.log10(most)) + 1).keys()];
  const bar = { ...trace.colorbar, tickvals: powers, ticktext: powers.map((power) => (10 ** power).toLocaleString("en")) };
  const z = trace.z.map((row) => row.map((value) => (value ? Math.log10(value) : null)));
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  return { ...trace, z, customdata: trace.z, zmin: Math.min(0, Math.log10(most)), zmax: Math.log10(most),
    colorscale: "YlGnBu", reversescale: !dark, colorbar: bar };
}

function painted(trace) {
  const { kind, look, ink, cloud, small, bar } = trace.meta ?? {};
  if (kind === "curve") return curve(trace);
  if (kind === "count") return counts(trace);
  if (ink === "line" && trace.type === "scatter") return { ...trace, line: { ...trace.line, color: css("--ink") } };
  if (ink === "line") return { ...trace, marker: { color: "rgba(0,0,0,0)", line: { color: css("--ink"), width: 1.3 } } };
  if (ink === "area") return { ...trace, marker: { color: css("--area") } };
  if (bar) return { ...trace, marker: { color: color(look) } };
  if (look === undefined) return trace;
  const marker = { color: color(look), symbol: symbol(look), size: small ? 5 : cloud ? 7 : 9, opacity: cloud ? 0.75 : 1 };
  const drawn = { ...trace, marker };
  for (const error of ["error_x", "error_y"])
    if (trace[error]) drawn[error] = { ...trace[error], color: color(look) };
  return drawn;
}

const isDrawn = (run) => state.shown.has(run) && state.matching.has(run);

function draw(element) {
  const chart = page.charts[element.dataset.chart];
  const figure = element.closest("figure");
  const picked = Number(one("[data-pick]", figure)?.value ?? 0);
  const traces = chart.data.filter(({ meta = {} }) =>
    (meta.pick ?? picked) === picked && (!meta.runs || page.groups.length < 2 || meta.runs.some(isDrawn)));
  const layout = { ...chart.layout };
  const order = one("[data-order]", figure)?.value;
  if (order) {
    const name = `${chart.axis}axis`;
    layout[name] = { ...layout[name], categoryorder: "array", categoryarray: chart.orders[order] };
  }
  const curves = chart.data[0].meta?.kind === "curve";
  if (curves && state.along !== "round") {
    const title = state.along === "seconds" ? "seconds of training" : "MB, up and down";
    layout.xaxis = { ...layout.xaxis, title: { text: title } };
  }
  if (curves) layout.xaxis = { ...layout.xaxis, unifiedhovertitle: { text: `${layout.xaxis.title.text} %{x}` } };
  const level = traces[0]?.meta?.level;
  if (level !== undefined) {
    const line = { dash: "dash", width: 1 };
    layout.shapes = [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: level, y1: level, line }];
  }
  show(element, traces.flatMap(painted), layout, `${state.along} ${order} ${picked}`);
}

function show(element, data, layout, revision) {
  const icons = ["select2d", "lasso2d", "zoomIn2d", "zoomOut2d", "autoScale2d", "toggleSpikelines"];
  const config = { responsive: true, displaylogo: false, modeBarButtonsToRemove: icons, doubleClick: "reset" };
  const narrow = !state.printed && element.clientWidth < NARROW;
  const drawn = narrow ? data.map(withBarOnTop) : data;
  const finished = themed(layout, element, revision);
  if (narrow) shortenNames(data, finished);
  Plotly.react(element, drawn, finished, config);
}

// On a phone, names of classes and the bar of colours would leave a heat map no room.

const withBarOnTop = (trace) => !trace.colorbar ? trace : { ...trace, colorbar: { ...trace.colorbar,
  orientation: "h", x: 0.5, xanchor: "center", y: 1, yanchor: "bottom", len: 1, thickness: 8, xpad: 0, ypad: 6 } };

const shortened = (name) => `${name.slice(0, 5).trim()}\u2026${name.slice(-5).trim()}`;

function shortenNames(data, layout) {
  for (const [key, axis] of Object.entries(layout)) {
    if (axis?.type !== "category") continue;
    const [letter, number] = [key[0], key.slice(5)];
    const names = data.filter((trace) => (trace[`${letter}axis`] ?? letter) === letter + number)
      .flatMap((trace) => trace[letter] ?? []).filter((name) => typeof name === "string" && name.length > LONG);
    if (names.length) axis.labelalias = Object.fromEntries(names.map((name) => [name, shortened(name)]));
  }
}

// ---- the ranking of a comparison

const measureOf = (key) => ranking.measures.find((measure) => measure.key === key);
const isDown = (measure) => Boolean(measure?.share) && !measure.low;
const spread = (values) => {
  const middle = mean(values);
  return Math.sqrt(values.reduce((sum, value) => sum + (value - middle) ** 2, 0) / (values.length - 1));
};
/** The name of a run beside an axis: the middle gives way, since cells of a grid differ at their ends. */
const short = (run) => {
  const name = Object.values(ranking.axes).map((values) => values[run]).join(" · ") || page.groups[run].label;
  const most = innerWidth < 600 ? 19 : 36;
  const half = Math.floor((most - 1) / 2);
  return escaped(name.length > most ? `${name.slice(0, half)}…${name.slice(-half)}` : name);
};

/** Runs in the order of the table, without those that the filters leave out. */
function ranked() {
  return all("#ranked tbody tr").map((row) => Number(row.dataset.run)).filter((run) => state.matching.has(run));
}

/** An axis with a row for each run, the first on top, and the height that it needs. */
function rows(element, order) {
  element.style.height = `${98 + 24 * Math.max(order.length, 2)}px`;
  const names = order.map(short);
  return { tickvals: order.map((_, at) => at), ticktext: names, range: [order.length - 0.4, -0.6], zeroline: false };
}

function drawDots(element) {
  const order = ranked();
  const measure = measureOf(state.measure);
  const unit = measure.share ? " %" : "";
  const seeds = { x: [], y: [], text: [] };
  const means = { x: [], y: [], text: [] };
  order.forEach((run, at) => {
    const values = known(measure.values[run]);
    values.forEach((value) => { seeds.x.push(value); seeds.y.push(at); seeds.text.push(escaped(page.groups[run].label)); });
    if (!values.length) return;
    means.x.push(mean(values));
    means.y.push(at);
    means.text.push(`${escaped(page.groups[run].label)}: ${mean(values).toFixed(1)}${unit}`
      + (values.length > 1 ? ` ± ${spread(values).toFixed(1)}, ${values.length} seeds` : ""));
  });
  const looks = means.y.map((at) => order[at]);
  const dots = [
    { ...seeds, mode: "markers", marker: { color: css("--muted"), symbol: "circle-open", size: 7 },
      hovertemplate: `%{text}, one seed: %{x:.1f}${unit}<extra></extra>` },
    { ...means, mode: "markers", hovertemplate: "%{text}<extra></extra>",
      marker: { color: looks.map(color), symbol: looks.map(symbol), size: 10 } },
  ];
  const layout = { xaxis: { ticksuffix: unit, side: "top", nticks: 6 }, yaxis: rows(element, order), hovermode: "closest" };
  show(element, dots, layout, state.measure);
}

function drawDifferences(element) {
  const order = ranked();
  const tests = ranking.tests[state.reference]?.[state.measure];
  const places = tests ? order.map((_, at) => at).filter((at) => tests[order[at]][0] !== null) : [];
  const found = places.map((at) => tests[order[at]]);
  const dots = {
    x: found.map(([middle]) => middle),
    y: places,
    text: found.map((row, at) => `${escaped(page.groups[order[places[at]]].label)}: ${row[3]}`),
    error_x: { array: found.map(([middle, , high]) => (high === null ? 0 : high - middle)), thickness: 1.5, width: 4,
      color: css("--muted") },
    mode: "markers",
    marker: { color: places.map((at) => color(order[at])), symbol: places.map((at) => symbol(order[at])), size: 10 },
    hovertemplate: "%{text}<extra></extra>",
  };
  const zero = { type: "line", x0: 0, x1: 0, y0: 0, y1: 1, yref: "paper", line: { dash: "dash", width: 1 } };
  const layout = { xaxis: { side: "top", nticks: 6, tickformat: "+", autorangeoptions: { include: [-1, 1] }, zeroline: false },
    yaxis: rows(element, order), hovermode: "closest", shapes: [zero] };
  show(element, [dots], layout, `${state.measure} ${state.reference}`);
}

function drawAlong(element) {
  const measure = measureOf(state.measure);
  const places = ranking.axes[state.axis];
  const values = [...new Set(places)];
  const numeric = values.every((value) => value.trim() !== "" && Number.isFinite(Number(value)));
  const ends = numeric && values.map(Number).filter((value) => value > 0);
  const log = numeric && ends.length === values.length && Math.max(...ends) / Math.min(...ends) >= 20;
  const others = Object.keys(ranking.axes).filter((name) => name !== state.axis && new Set(ranking.axes[name]).size > 1);
  const lines = new Map(); // what stays the same along a line
  for (const run of numbers.filter((number) => state.matching.has(number))) {
    const name = others.map((axis) => `${axis} ${ranking.axes[axis][run]}`).join(", ");
    lines.set(name, [...(lines.get(name) ?? []), run]);
  }
  const unit = measure.share ? " %" : "";
  const data = [...lines].map(([name, members], look) => {
    const order = numeric ? members.sort((a, b) => places[a] - places[b]) : members;
    const there = order.filter((run) => known(measure.values[run]).length);
    const own = there.map((run) => known(measure.values[run]));
    return {
      name: escaped(name) || escaped(measure.name),
      x: there.map((run) => (numeric ? Number(places[run]) : escaped(places[run]))),
      y: own.map(mean),
      error_y: { array: own.map((row) => (row.length > 1 ? spread(row) : 0)), thickness: 1, width: 3, color: color(look) },
      mode: "lines+markers",
      line: { color: color(look), dash: dash(look), width: 1.6 },
      marker: { color: color(look), symbol: symbol(look), size: 8 },
      hovertemplate: `%{y:.1f}${unit}`,
    };
  });
  const axis = numeric ? { type: log ? "log" : "linear", ...(log && { tickvals: ends }) } :
    { type: "category", categoryorder: "array", categoryarray: values.map(escaped) };
  const layout = { xaxis: { ...axis, title: { text: escaped(state.axis) } }, yaxis: { ticksuffix: unit, nticks: 6 },
    hovermode: "closest", showlegend: data.length > 1,
    legend: innerWidth < 760 ? { orientation: "h", y: -0.25 } : {} };
  element.style.height = `${360 + (innerWidth < 760 ? 24 * data.length : 0)}px`;
  show(element, data, layout, `${state.axis} ${state.measure}`);
}

function sortTable() {
  const { by, down } = state.sort;
  const measure = measureOf(by);
  const key = (row) => {
    const run = Number(row.dataset.run);
    if (by === "difference") return ranking.tests[state.reference][state.measure]?.[run][0] ?? null;
    if (measure) { const values = known(measure.values[run]); return values.length ? mean(values) : null; }
    const text = by === "label" ? page.groups[run].label : ranking.axes[by][run];
    return text.trim() !== "" && Number.isFinite(Number(text)) ? Number(text) : text;
  };
  const keyed = all("#ranked tbody tr").map((row) => [key(row), row]);
  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
  keyed.sort(([a], [b]) => (a === null) - (b === null) || (a === null ? 0 : (down ? -1 : 1) * compare(a, b)));
  one("#ranked tbody").append(...keyed.map(([, row]) => row));
  all("#ranked th[data-sort]").forEach((head) =>
    head.setAttribute("aria-sort", head.dataset.sort !== by ? "none" : down ? "descending" : "ascending"));
}

function refreshTable() {
  sortTable();
  let rank = 0;
  for (const row of all("#ranked tbody tr")) {
    const run = Number(row.dataset.run);
    row.hidden = !state.matching.has(run);
    row.cells[0].textContent = row.hidden ? "" : ++rank;
    one("input", row).checked = state.shown.has(run);
    const test = ranking.tests[state.reference]?.[state.measure]?.[run];
    if (one(".difference", row)) one(".difference", row).textContent = test ? test[3] : "–";
  }
  if (one("#difference")) one("#difference").textContent = `${measureOf(state.measure).name} against ${state.reference}`;
  one("#left").textContent = rank < page.groups.length ? `${rank} of ${page.groups.length} runs` : "";
}

// ---- drawing what is seen

const special = { dots: drawDots, differences: drawDifferences, along: drawAlong };
const seen = new Set();
const fresh = new Set();

function drawSeen() {
  for (const element of seen)
    if (!fresh.has(element)) {
      fresh.add(element);
      (special[element.dataset.special] ?? draw)(element);
    }
}

function refresh() {
  fresh.clear();
  if (ranking) refreshTable();
  all(".chip").forEach((chip) => {
    const run = Number(chip.dataset.run);
    chip.setAttribute("aria-pressed", state.shown.has(run));
    chip.hidden = !state.matching.has(run);
  });
  drawSeen();
}

// ---- what the reader can change

function listen() {
  const bar = one("#smoothing");
  bar?.addEventListener("input", () => {
    state.smoothing = Number(bar.value);
    one("#smoothed").textContent = state.smoothing ? state.smoothing.toFixed(2) : "off";
    refresh();
  });
  const choose = (id, key) => one(id)?.addEventListener("change", (event) => { state[key] = event.target.value; refresh(); });
  choose("#along", "along");
  choose("#reference", "reference");
  choose("#axis", "axis");
  one("#measure")?.addEventListener("change", (event) => {
    state.measure = event.target.value;
    state.sort = { by: state.measure, down: isDown(measureOf(state.measure)) };
    refresh();
  });
  all("[data-pick], [data-order]").forEach((menu) => menu.addEventListener("change", () => {
    fresh.delete(one(".chart", menu.closest("figure")));
    drawSeen();
  }));
  const toggle = (run) => { if (!state.shown.delete(run)) state.shown.add(run); refresh(); };
  all(".chip").forEach((chip) => {
    chip.addEventListener("click", () => toggle(Number(chip.dataset.run)));
    chip.addEventListener("dblclick", () => { state.shown = new Set([Number(chip.dataset.run)]); refresh(); });
  });
  all("#ranked tbody input").forEach((box) =>
    box.addEventListener("change", () => toggle(Number(box.closest("tr").dataset.run))));
  one("#all")?.addEventListener("click", () => { state.shown = new Set(numbers); refresh(); });
  one("#none")?.addEventListener("click", () => { state.shown = new Set(); refresh(); });
  all("#ranked th[data-sort] button").forEach((button) => button.addEventListener("click", () => {
    const by = button.closest("th").dataset.sort;
    state.sort = { by, down: state.sort.by === by ? !state.sort.down : isDown(measureOf(by)) || by === "difference" };
    refresh();
  }));
  const filter = () => {
    const words = one("#filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    state.matching = new Set(numbers.filter((run) =>
      words.every((word) => page.groups[run].label.toLowerCase().includes(word))
      && all("[data-axis]").every((menu) => !menu.value || ranking.axes[menu.dataset.axis][run] === menu.value)));
    refresh();
  };
  one("#filter")?.addEventListener("input", filter);
  all("[data-axis]").forEach((menu) => menu.addEventListener("change", filter));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", refresh);
  const print = (printed) => {
    state.printed = printed;
    if (printed) all(".chart").forEach((element) => seen.add(element));
    refresh();
  };
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
}

async function unpack(packed) {
  const text = atob(packed);
  const letters = new Uint8Array(text.length);
  for (let at = 0; at < text.length; at += 1) letters[at] = text.charCodeAt(at);
  const stream = new Blob([letters]).stream().pipeThrough(new DecompressionStream("deflate"));
  const script = document.createElement("script"); // from a URL, which browsers read beside the page, not before it
  script.src = URL.createObjectURL(await new Response(stream).blob());
  const loaded = new Promise((resolve) => script.addEventListener("load", resolve));
  document.head.append(script);
  await loaded;
}

async function begin() {
  if (one("#library")) await unpack(one("#library").textContent);
  else if (!window.Plotly) {
    one("#missing").hidden = false;
    return;
  }
  listen();
  refresh();
  const watch = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting) seen.add(target);
      else seen.delete(target);
    }
    drawSeen();
  }, { rootMargin: "400px" });
  all(".chart").forEach((element) => watch.observe(element));
}

begin();
