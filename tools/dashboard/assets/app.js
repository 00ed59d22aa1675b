"use strict";
// One script for all pages. Text from a run is only ever set as text, never as HTML.

const params = new URLSearchParams(location.search);
const run = params.get("run") || "0";
const page = location.pathname.slice(1);
const main = document.getElementById("main");
const state = document.getElementById("state");
const COLORS = {
  forward: "#2f63c6", backward: "#5b8def", recompute: "#8fb1f5", optimizer: "#3a9d8f", grad_clip: "#7ec4a5",
  data: "#8c7a4f", host_device: "#b9a63a", comm: "#e08a3c", bubble: "#dcb37a", checkpoint: "#9a6fc4",
  evaluate: "#b56a8c", digest: "#6b7fa3", sample_gen: "#9bb08f", op: "#7d8fb3", idle: "#c3cad2", operation: "#e08a3c",
};

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") made.className = value; else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

async function ask(question, more = "") {
  const response = await fetch(`/api/${question}?run=${encodeURIComponent(run)}${more}`);
  if (!response.ok) throw new Error((await response.text()).trim() || `${response.status}`);
  return response.json();
}

function section(id, title, about, wide = false) {
  const known = document.getElementById(id);
  if (known) return known.querySelector(".body");
  const body = element("div", { class: "body" });
  main.append(element("section", { id, class: wide ? "wide" : "" },
    element("h2", {}, title), element("p", { class: "about" }, about), body));
  return body;
}

function empty(body, words) {
  if (body.plotted) { Plotly.purge(body.firstChild); body.plotted = false; }
  body.replaceChildren(element("div", { class: "empty" }, words));
}

function plot(body, traces, layout = {}, high = false) {
  if (!body.plotted) {
    body.replaceChildren(element("div", { class: high ? "plot high" : "plot" }));
    body.plotted = true;
  }
  const style = getComputedStyle(document.documentElement);
  const ink = style.getPropertyValue("--ink"), line = style.getPropertyValue("--line");
  const axis = { gridcolor: line, zerolinecolor: line, automargin: true };
  return Plotly.react(body.firstChild, traces, {
    margin: { l: 55, r: 15, t: 30, b: 40 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: ink, size: 12 }, legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" }, hovermode: "x unified",
    uirevision: "kept", ...layout, xaxis: { title: { text: "step" }, ...axis, ...(layout.xaxis || {}) },
    yaxis: { ...axis, ...(layout.yaxis || {}) },
  }, { displayModeBar: false, responsive: true });
}

function table(body, columns, rows) {
  const head = element("tr", {}, ...columns.map(([title, , number]) =>
    element("th", number ? { class: "number" } : {}, title)));
  const lines = rows.map((row) => element("tr", {}, ...columns.map(([, value, number]) =>
    element("td", number ? { class: "number" } : {}, String(value(row) ?? "–")))));
  body.plotted = false;
  body.replaceChildren(element("div", { class: "scroll" },
    element("table", {}, element("thead", {}, head), element("tbody", {}, ...lines))));
}

const number = (value, digits = 3) => value === null || value === undefined ? "–"
  : Number(value).toLocaleString("en", { maximumSignificantDigits: digits });
const percent = (value) => value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)} %`;
const time = (ns) => ns ? new Date(ns / 1e6).toISOString().replace("T", " ").slice(0, 23) : "–";
const curve = (name, x, y, more = {}) => ({ type: "scatter", mode: "lines", name, x, y, ...more });

// ---- sections, each of which asks for what it draws

async function summary() {
  const found = await ask("summary");
  const body = section("summary", found.directory || "a run without a profile yet", "", true);
  const tiles = [
    ["steps", number(found.steps, 9)], ["ranks", number(found.ranks, 6)], ["ms a step", number(found.step_ms, 4)],
    ["loss", number(found.loss, 4)], ["held-out loss", number(found.held_out_loss, 4)],
    ["tokens a second", number(found.tokens_per_s, 4)], ["MFU", percent(found.mfu)], ["HFU", percent(found.hfu)],
    ["communication", percent(found.comm), found.comm > found.comm_limit],
    ["bubble", percent(found.bubble), found.bubble > found.bubble_limit],
    ["ranks lost", number(found.deaths, 6)], ["ms a recovery", number(found.recovery_ms, 4)],
  ];
  body.plotted = false;
  body.replaceChildren(element("div", { class: "tiles" }, ...tiles.map(([name, value, bad]) =>
    element("div", { class: bad ? "tile bad" : "tile" }, element("b", {}, value), element("span", {}, name)))));
  if (found.problem) body.append(element("div", { class: "empty" }, found.problem));
}

async function waterfall() {
  const body = section("waterfall", "Time of a step", "ms by phase, in the mean of the ranks", true);
  const found = await ask("waterfall");
  if (!found.step.length) return empty(body, "no step has ended yet");
  const traces = Object.entries(found.phases).map(([name, y]) =>
    ({ type: "bar", name, x: found.step, y, marker: { color: COLORS[name] }, hovertemplate: "%{y:.3f} ms" }));
  return plot(body, traces, { barmode: "stack", bargap: 0, yaxis: { title: { text: "ms" } } }, true);
}

async function utilisation() {
  const found = await ask("utilisation");
  const body = section("utilisation", "Utilisation", "of the peak of matrix products, measured on each machine");
  const known = found.mfu.some((value) => value !== null);
  if (!found.step.length) empty(body, "no step has ended yet");
  else if (known) {
    await plot(body, [curve("MFU", found.step, found.mfu), curve("HFU", found.step, found.hfu, { line: { dash: "dot" } })],
      { yaxis: { tickformat: ".1%", rangemode: "tozero" } });
  } else {
    await plot(body, [curve("GFLOP/s of a rank (its peak was not measured: zbmd profile measures it)", found.step, found.gflops)],
      { yaxis: { rangemode: "tozero" }, showlegend: true });
  }
  const limits = section("overheads", "Communication and bubble", "share of a step, beside the limits");
  if (!found.step.length) return empty(limits, "no step has ended yet");
  const line = (name, at) => curve(name, [found.step[0], found.step[found.step.length - 1]], [at, at],
    { line: { dash: "dash", width: 1 }, hoverinfo: "skip" });
  return plot(limits, [curve("communication", found.step, found.comm, { line: { color: COLORS.comm } }),
    curve("bubble", found.step, found.bubble, { line: { color: COLORS.checkpoint } }),
    line("limit of communication", found.comm_limit), line("limit of the bubble", found.bubble_limit)],
  { yaxis: { tickformat: ".0%", rangemode: "tozero" } });
}

async function ranks() {
  const body = section("ranks", "Ranks", "ms a step in which a rank waits for nobody: a slow one stands out");
  const found = await ask("by_rank");
  if (!found.step.length) return empty(body, "no step has ended yet");
  return plot(body, [{ type: "heatmap", x: found.step, y: found.rank.map((rank) => `rank ${rank}`), z: found.own_ms,
    colorscale: "Viridis", colorbar: { title: { text: "ms" } }, hovertemplate: "%{y}, step %{x}: %{z:.3f} ms<extra></extra>" }],
  { hovermode: "closest", yaxis: { type: "category" } });
}

async function slowest() {
  const body = section("slowest", "Slowest operations", "time of their own, over the steps whose spans were kept or whose ops were sampled", true);
  const found = await ask("slowest_ops");
  if (!found.rows.length) return empty(body, "no spans are kept yet");
  const rate = (value) => value > 0 && value < 0.001 ? "< 0.001" : number(value);
  const ofOps = found.sampled ? [
    ["pass", (row) => row.pass], ["shape", (row) => `${row.shape} ${row.dtype}`],
    ["enqueue ms", (row) => number(row.enqueue_ms), true],
    ["wait ms", (row) => number(row.wait_ms), true], ["GFLOP/s", (row) => rate(row.gflops), true],
    ["of peak", (row) => row.of_peak === null ? "–" : percent(row.of_peak), true],
  ] : [];
  return table(body, [
    ["operation", (row) => row.op], ...ofOps.slice(0, 2), ["share", (row) => percent(row.share), true],
    ["ms in all", (row) => number(row.total_ms, 4), true], ["ms a step", (row) => number(row.step_ms), true],
    ["launches", (row) => number(row.calls, 9), true], ["a step", (row) => number(row.calls_per_step), true],
    ...ofOps.slice(2, 5), ["GB/s", (row) => rate(row.gigabytes_per_s), true], ...ofOps.slice(5),
  ], found.rows);
}

async function memory() {
  const body = section("memory", "Activations", "bytes that a rank holds for its backward passes");
  const found = await ask("memory");
  if (!found.step.length) return empty(body, "this run has not recorded any");
  return plot(body, [curve("most of any rank", found.step, found.most), curve("mean", found.step, found.mean)],
    { yaxis: { rangemode: "tozero", tickformat: ".3s", ticksuffix: "B" } });
}

let shownSteps = "";
async function timelineOf() {
  const body = section("timeline", "Time line", "ranks as rows; drag to zoom, double-click to go back", true);
  if (!body.form) {
    body.form = element("form", { class: "range" }, "steps ", element("input", { name: "first", inputmode: "numeric", "aria-label": "first step" }),
      " to ", element("input", { name: "last", inputmode: "numeric", "aria-label": "last step" }), element("button", {}, "show"),
      element("a", { href: `/api/trace?run=${encodeURIComponent(run)}`, download: "trace.json" }, "trace for Perfetto"),
      element("span", { class: "kept" }));
    body.form.addEventListener("submit", (event) => {
      event.preventDefault();
      shownSteps = `&steps=${encodeURIComponent(`${body.form.first.value}:${body.form.last.value}`)}`;
      guarded(timelineOf);
    });
    body.drawn = element("div");
    body.replaceChildren(body.form, body.drawn);
  }
  const found = await ask("timeline", shownSteps);
  if (!found.rank.length) return empty(body.drawn, "no spans of these steps are kept");
  if (document.activeElement?.form !== body.form) {
    body.form.first.value = found.first;
    body.form.last.value = found.last;
  }
  body.form.querySelector(".kept").textContent =
    `kept: ${found.kept[0]} to ${found.kept[1]}${found.more ? "; the longest spans of these are shown" : ""}`;
  const groups = new Map();
  for (let n = 0; n < found.rank.length; n += 1) {
    const kind = found.category[n];
    if (!groups.has(kind)) groups.set(kind, { y: [], base: [], x: [], text: [] });
    const one = groups.get(kind);
    const where = { step: "steps", ops: "ops" }[found.track[n]] || "groups";
    one.y.push(`rank ${found.rank[n]} ${where}`);
    one.base.push(found.begin_ms[n]);
    one.x.push(found.ms[n]);
    const bytes = found.bytes[n] ? `, ${number(found.bytes[n])} B` : "";
    one.text.push(`${found.name[n]}, step ${found.step[n]}: ${number(found.ms[n], 4)} ms${bytes}`);
  }
  const traces = [...groups].map(([kind, one]) => ({ type: "bar", orientation: "h", name: kind, ...one,
    marker: { color: COLORS[kind] || "#888" }, hovertemplate: "%{text}<extra></extra>", textposition: "none" }));
  const tracks = found.track.includes("ops") ? ["groups", "ops", "steps"] : ["groups", "steps"];
  const rows = [...new Set(found.rank)].sort((a, b) => b - a).flatMap((rank) => tracks.map((track) => `rank ${rank} ${track}`));
  return plot(body.drawn, traces, { barmode: "overlay", hovermode: "closest", xaxis: { title: { text: "ms" } },
    yaxis: { type: "category", categoryorder: "array", categoryarray: rows } }, true);
}

async function losses() {
  const [found, told] = await Promise.all([ask("curves"), ask("events")]);
  const body = section("losses", "Loss", "a vertical line is a rank that was lost", true);
  const named = ["loss", "held_out_loss"].filter((name) => found[name]);
  if (!named.length) empty(body, "no loss has been recorded yet");
  else {
    const shapes = told.rows.filter((row) => row.kind === "death" && row.step !== null).map((row) => ({
      type: "line", x0: row.step, x1: row.step, yref: "paper", y0: 0, y1: 1, line: { color: "#c0392b", width: 1, dash: "dot" } }));
    await plot(body, named.map((name) => curve(name.replaceAll("_", "-"), found[name].step, found[name].value,
      { mode: found[name].step.length > 60 ? "lines" : "lines+markers" })), { shapes });
  }
  const others = Object.keys(found).filter((name) => !["loss", "held_out_loss", "version", "problem"].includes(name));
  for (const name of others) {
    const one = section(`metric-${name}`, name.replaceAll("_", " "), "");
    await plot(one, [curve(name, found[name].step, found[name].value)], { showlegend: false });
  }
}

async function userMetrics() {
  const found = await ask("user_metrics");
  if (!found.rows.length) return;
  table(section("own", "Metrics of the program", "zbmd.metrics, over all ranks: sums of counters, means of gauges and histograms", true), [
    ["name", (row) => row.name], ["labels", (row) => row.labels || "–"], ["kind", (row) => row.kind],
    ["value", (row) => number(row.value, 6), true], ["values", (row) => row.count === null ? "–" : number(row.count, 12), true],
  ], found.rows);
}

async function goodput() {
  const body = section("goodput", "Goodput", "each second of each rank has one cause", true);
  const found = await ask("goodput");
  if (found.missing) return empty(body, found.missing);
  const all = found.rank_seconds;
  const traces = Object.entries(found.seconds).filter(([, seconds]) => seconds > 0).map(([cause, seconds]) => ({
    type: "bar", orientation: "h", name: `${cause} ${percent(seconds / all)}`, y: ["all ranks"], x: [seconds / all],
    hovertemplate: `${cause}: ${number(seconds, 4)} s<extra></extra>` }));
  return plot(body, traces, { barmode: "stack", hovermode: "closest", xaxis: { tickformat: ".0%", title: { text: "" }, range: [0, 1] } });
}

const eventColumns = [["time", (row) => time(row.at_ns)], ["what", (row) => row.kind], ["rank", (row) => row.rank, true],
  ["step", (row) => row.step, true], ["ms", (row) => row.ms === null ? "" : number(row.ms, 4), true], ["", (row) => row.text]];

async function recoveries() {
  const body = section("recoveries", "Losses and recoveries", "", true);
  const rows = (await ask("events")).rows.filter((row) => row.kind !== "start");
  if (!rows.length) return empty(body, "no rank was lost");
  return table(body, eventColumns, rows);
}

async function clusterOf() {
  const body = section("processes", "Ranks", "the latest process of each", true);
  const found = await ask("cluster");
  if (!found.rows.length) return empty(body, "no rank has begun yet");
  return table(body, [
    ["rank", (row) => row.rank, true], ["state", (row) => row.state], ["host", (row) => row.host], ["process", (row) => row.pid, true],
    ["step", (row) => row.step, true], ["restarts", (row) => row.restarts, true], ["began", (row) => time(row.began_ns)],
    ["processor", (row) => row.processor], ["threads", (row) => row.threads, true],
    ["peak GFLOP/s", (row) => row.gflops_peak === null ? "–" : number(row.gflops_peak), true], ["last death", (row) => row.last_death ?? ""],
  ], found.rows);
}

const bytes = (value) => value >= 1 << 20 ? `${number(value / (1 << 20), 4)} MiB` : `${number(value / 1024, 4)} KiB`;

async function liveOf() {
  const found = await ask("live");
  const body = section("live", "Live", "every node, rank and actor of this user here, or of the cluster", true);
  if (!found.hosts.length) return empty(body, found.problem || "no job and no node of this user runs here");
  body.plotted = false;
  const kept = [...body.querySelectorAll(".scroll")].map((one) => one.scrollTop);
  const parts = found.hosts.flatMap((host) => {
    const job = host.job;
    const words = job === null ? `${host.processes.length} processes`
      : `epoch ${job.epoch}, ${job.restarts} restarts, on loss ${job.on_loss}, up ${number(job.uptime_s, 4)} s, process ${job.pid}`;
    const ranks = new Map(host.ranks.map((rank) => [`rank${rank.rank}`, rank]));
    const answered = new Map(host.processes.map((one) => [one.process, one]));
    const names = [...new Set([...answered.keys(), ...host.silent, ...ranks.keys()])];
    const rows = names.map((name) => ({ name, rank: ranks.get(name), one: answered.get(name), silent: host.silent.includes(name) }));
    const processes = element("div"), actors = element("div");
    table(processes, [
      ["process", (row) => row.name], ["state", (row) => row.silent ? "silent" : row.rank?.state ?? "up"],
      ["pid", (row) => row.rank?.pid, true], ["incarnation", (row) => row.one?.incarnation ?? row.rank?.incarnation, true],
      ["restarts", (row) => row.rank?.restarts, true], ["memory", (row) => row.rank && bytes(row.rank.memory_bytes), true],
      ["actors", (row) => row.one?.actors, true], ["waiting", (row) => row.one?.waiting, true],
      ["in mailboxes", (row) => row.one && bytes(row.one.bytes), true], ["loop held", (row) => row.one?.held, true],
      ["links", (row) => row.one?.links.map((link) => `${link.process} ${link.carrier}${link.waiting ? ` (${link.waiting} wait)` : ""}`).join(", ")],
    ], rows);
    table(actors, [
      ["process", (row) => row.process], ["actor", (row) => row.name], ["class", (row) => row.class], ["state", (row) => row.state],
      ["at", (row) => row.at || "–"], ["waiting", (row) => row.waiting, true], ["bytes", (row) => number(row.bytes, 9), true],
      ["messages a second", (row) => number(row.per_s), true], ["handled", (row) => number(row.handled, 12), true],
      ["restarts", (row) => row.restarts, true], ["dropped", (row) => row.dropped, true],
    ], host.actors);
    const hangs = (job?.hangs ?? []).map((text) => element("p", { class: "bad" }, `no progress: ${text}`));
    return [element("h3", {}, host.target), element("p", { class: "about" }, words), ...hangs, processes, actors];
  });
  body.replaceChildren(...parts);
  body.querySelectorAll(".scroll").forEach((one, n) => { one.scrollTop = kept[n] ?? 0; });
}

async function logs() {
  const body = section("events", "Events", "the latest 500", true);
  if (!body.filter) {
    body.filter = element("input", { placeholder: "filter", "aria-label": "filter" });
    body.rows = element("div");
    body.replaceChildren(body.filter, body.rows);
    body.filter.addEventListener("input", () => guarded(logs));
  }
  const words = body.filter.value.toLowerCase();
  const rows = (await ask("events")).rows.filter((row) => `${row.kind} ${row.text}`.toLowerCase().includes(words));
  if (!rows.length) return empty(body.rows, "nothing has happened");
  return table(body.rows, eventColumns, rows);
}

// ---- the page

const PAGES = {
  run: [summary, losses, userMetrics, goodput, recoveries],
  profiling: [summary, waterfall, utilisation, ranks, memory, slowest, timelineOf],
  cluster: [liveOf, clusterOf],
  logs: [logs],
};

async function guarded(draw) {
  try {
    await draw();
  } catch (error) {
    state.textContent = `error: ${error.message}`;
    state.className = "lost";
    throw error;
  }
}

// What needs no run.
const WITHOUT_RUN = [liveOf];
const LIVE_MS = 2000;
let runs = [];
let drawing = false, again = false;
async function drawAll() {
  if (drawing) { again = true; return; }
  drawing = true;
  do {
    again = false;
    for (const draw of PAGES[page] || []) if (runs.length || WITHOUT_RUN.includes(draw)) await guarded(draw);
    if (!runs.length && page !== "cluster") empty(section("none", "No run yet", "", true), "the ranks have not begun a run yet");
  } while (again);
  drawing = false;
  document.body.dataset.drawn = String(Number(document.body.dataset.drawn || "0") + 1);
}

function follow() {
  const scheme = location.protocol === "https:" ? "wss" : "ws";
  const line = new WebSocket(`${scheme}://${location.host}/live?run=${encodeURIComponent(run)}`);
  line.addEventListener("message", async (event) => {
    state.textContent = "live";
    state.className = "";
    if (JSON.parse(event.data).runs !== runs.length) {
      const before = runs.length;
      await guarded(listRuns);
      if (!before && runs.length) { document.getElementById("none")?.remove(); line.close(); }
    }
    drawAll();
  });
  line.addEventListener("close", () => {
    state.textContent = "not connected";
    state.className = "lost";
    setTimeout(follow, 2000);
  });
}

async function listRuns() {
  runs = (await ask("runs")).runs;
  const choice = document.getElementById("runs");
  choice.replaceChildren(...runs.map((name, n) => element("option", { value: n }, name)));
  choice.value = run;
  choice.hidden = runs.length < 2;
  document.title = `zbmd: ${runs[Number(run)] ?? ""} ${page}`;
}

async function begin() {
  for (const link of document.querySelectorAll("nav a")) {
    if (link.pathname === location.pathname) link.className = "here";
    if (params.has("run")) link.search = `?run=${encodeURIComponent(run)}`;
  }
  const choice = document.getElementById("runs");
  choice.addEventListener("change", () => { location.search = `?run=${choice.value}`; });
  await listRuns();
  follow();
  if (PAGES[page]?.includes(liveOf)) setInterval(() => { if (!document.hidden) guarded(liveOf); }, LIVE_MS);
}

guarded(begin);
