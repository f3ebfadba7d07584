"use strict";
// Draws the report from the JSON in #data. Text from models and users reaches the page through text
// nodes only: nothing in here builds markup from strings.

const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const byId = (id) => document.getElementById(id);

// ------------------------------------------------------------------ building blocks

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, v] of Object.entries(value)) element.style.setProperty(key, v);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}
const h = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const s = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const show = (id, ...children) => byId(id).replaceChildren(...children.flat(Infinity));
const empty = (text) => h("p", { class: "empty" }, text);

function tabs(id, labels, choose, start = 0) {
  const buttons = labels.map((label, index) => h("button", {
    role: "tab", type: "button", "aria-selected": "false", "data-tab": label, onclick: () => select(index),
  }, label));
  function select(index) {
    buttons.forEach((button, i) => button.setAttribute("aria-selected", String(i === index)));
    choose(index);
  }
  show(id, buttons);
  if (buttons.length) select(start);
}

// ------------------------------------------------------------------ numbers for people

function short(value) {
  if (value === null || value === undefined) return "none";
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e5 || size < 1e-3) return value.toExponential(2).replace("e+", "e");
  return String(Number(value.toPrecision(4)));
}
function count(value) {
  if (value >= 1e9) return (value / 1e9).toPrecision(3) + " G";
  if (value >= 1e6) return (value / 1e6).toPrecision(3) + " M";
  if (value >= 1e4) return (value / 1e3).toPrecision(3) + " k";
  return String(value);
}
function duration(seconds) {
  if (seconds < 60) return seconds.toFixed(seconds < 10 ? 1 : 0) + " s";
  const whole = Math.round(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.round((whole % 3600) / 60)} min`;
}
const percent = (share, digits = 1) => (100 * share).toFixed(digits) + " %";
const signed = (value) => (value >= 0 ? "+" : "−") + Math.abs(value).toFixed(1);
const sum = (values) => values.reduce((total, value) => total + value, 0);
const curveColour = (index) => `var(--curve-${index % 8})`;
const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

// ------------------------------------------------------------------ tooltip

const tooltip = byId("tooltip");
function showTooltip(event, text) {
  tooltip.textContent = text;
  tooltip.hidden = false;
  const box = tooltip.getBoundingClientRect();
  const left = Math.min(event.clientX + 14, window.innerWidth - box.width - 8);
  const above = event.clientY + 18 + box.height > window.innerHeight;
  tooltip.style.left = Math.max(8, left) + "px";
  tooltip.style.top = (above ? event.clientY - box.height - 10 : event.clientY + 18) + "px";
}
const hideTooltip = () => { tooltip.hidden = true; };
const hint = (text) => ({ onmousemove: (event) => showTooltip(event, text), onmouseleave: hideTooltip });

// ------------------------------------------------------------------ header and arc

const KINDS = {
  pretrain: ["Reads text: learns to predict the next token.", 0],
  midtrain: ["Reads longer text: stretches the context.", 0],
  dsa: ["Learns to attend to a few selected keys.", 5],
  sft: ["Imitates expert trajectories.", 1],
  reasoning_rl: ["Learns from rewards to think before it answers.", 2],
  agentic_rl: ["Learns from rewards to act with tools, asynchronously.", 2],
  general_rl: ["Learns from rules to follow instructions.", 2],
  distill: ["Relearns from its own earlier stages what was lost.", 3],
  eval: ["Tries every checkpoint on tasks never trained on.", 7],
};
const kindOf = (stage) => KINDS[stage.kind] || ["", 7];

function drawHeader() {
  const run = data.run;
  const done = data.stages.filter((stage) => stage.status === "done").length;
  const total = (key) => sum(data.stages.map((stage) => stage[key]));
  byId("run-name").textContent = run.name;
  byId("summary").textContent =
    `${done} of ${data.stages.length} stages done` + (run.is_running ? ", still running" : "") +
    ` · ${count(total("num_trained_tokens"))} tokens trained on · ${count(total("num_sampled_tokens"))} sampled in ` +
    `${plural(total("num_trajectories"), "rollout")} · ${duration(total("elapsed_s"))}`;
  const [commit, changes] = run.commits.length ? run.commits[0].split("+") : ["not under git", null];
  const others = run.commits.length - 1;
  const code = [`longarc ${run.longarc || "?"}`, changes && "with uncommitted changes", others > 0 && `later starts: ${others} other`];
  const facts = [
    ["Model", run.num_parameters === null ? run.model_family : `${count(run.num_parameters)} parameters`,
      [run.num_parameters === null ? "" : run.model_family, ...run.model_facts].filter(Boolean).join(", ")],
    ["Seed", String(run.seed), run.num_starts > 1 ? `${run.num_starts} starts` : ""],
    ["Code", commit.slice(0, 12), code.filter(Boolean).join(", ")],
    ["Machine", run.machine, [run.platform, run.python && `Python ${run.python}`, run.torch && `torch ${run.torch}`].filter(Boolean).join(", ")],
    ["Time in stages", duration(total("elapsed_s")),
      run.started_at_s ? "started " + new Date(run.started_at_s * 1000).toISOString().slice(0, 16).replace("T", " ") + " UTC" : ""],
  ];
  show("facts", facts.map(([name, value, small]) =>
    h("div", {}, h("dt", {}, name), h("dd", {}, value, small && h("small", {}, small)))));
  byId("footer").textContent = "Made from the run directory alone; write it again at any time with: longarc report RUN";
}

function drawArc() {
  const total = sum(data.stages.map((stage) => stage.elapsed_s)) || 1;
  show("strip", data.stages.filter((stage) => stage.elapsed_s > 0).map((stage) => h("div", {
    style: { "flex-grow": String(stage.elapsed_s), background: curveColour(kindOf(stage)[1]) },
    ...hint(`${stage.name}: ${duration(stage.elapsed_s)}, ${percent(stage.elapsed_s / total, 0)} of the time`),
  })));
  show("stages", data.stages.map((stage) => {
    const [what, colour] = kindOf(stage);
    const steps = stage.num_planned_steps === null ? String(stage.num_steps) : `${stage.num_steps} / ${stage.num_planned_steps}`;
    const rows = [[stage.kind === "eval" ? "cells" : "steps", steps]];
    if (stage.num_trained_tokens) rows.push(["trained", count(stage.num_trained_tokens)]);
    if (stage.num_sampled_tokens) rows.push(["sampled", count(stage.num_sampled_tokens)]);
    if (stage.num_trajectories) rows.push(["rollouts", count(stage.num_trajectories)]);
    return h("li", { class: "stage", "data-stage": stage.name, style: { "--kind": curveColour(colour) } },
      h("h4", {}, stage.name),
      h("span", { class: `status ${stage.status}` }, stage.status),
      h("p", { class: "what" }, what),
      h("div", { class: "time number" }, stage.elapsed_s ? duration(stage.elapsed_s) : "–",
        stage.elapsed_s > 0 && h("small", {}, ` ${percent(stage.elapsed_s / total, 0)}`)),
      h("dl", {}, rows.map(([name, value]) => [h("dt", {}, name), h("dd", { class: "number" }, value)])),
      stage.headline && result(stage.headline));
  }));
}
function result(headline) {
  const text = (value) => (value !== null && headline.is_share ? percent(value, 0) : short(value));
  return h("p", { class: "result number", ...hint(headline.hint) },
    `${headline.label} ${text(headline.first)} → ${text(headline.last)}`);
}

// ------------------------------------------------------------------ line charts

const WIDTH = 340, HEIGHT = 178, LEFT = 46, RIGHT = 10, TOP = 8, BOTTOM = 32;

function linearTicks(low, high, wanted) {
  const raw = (high - low) / wanted, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= raw);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) ticks.push(i * step);
  return ticks;
}
function logTicks(low, high) {
  const from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high));
  const digits = to - from > 2 ? [1] : [1, 2, 5];
  const every = Math.ceil((to - from) / 5);
  const ticks = [];
  for (let power = from; power <= to; power += 1) {
    if (digits.length === 1 && (power - from) % every) continue;
    for (const digit of digits) ticks.push(digit * 10 ** power);
  }
  return ticks.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
}
function scale(low, high, start, end, isLog) {
  const f = isLog ? Math.log10 : (value) => value;
  return (value) => start + ((f(value) - f(low)) / (f(high) - f(low))) * (end - start);
}
function range(values, isLog) {
  let low = Math.min(...values), high = Math.max(...values);
  if (isLog) return [low / 1.3, high * 1.3];
  if (low === high) { const by = Math.abs(low) * 0.1 || 1; low -= by; high += by; }
  const margin = (high - low) * 0.06;
  return [low >= 0 && low - margin < 0 ? 0 : low - margin, high + margin];
}

function lineChart(chart) {
  const drawable = (value) => value !== null && (!chart.is_log || value > 0);
  const points = chart.series.map((series) => series.steps.map((step, i) => [step, series.values[i]]));
  const values = points.flat().map((point) => point[1]).filter(drawable);
  const figure = h("figure", { "data-chart": chart.title },
    h("figcaption", {}, chart.title, chart.unit && h("small", {}, " · " + chart.unit)),
    chart.hint && h("p", {}, chart.hint));
  if (!values.length) {
    const all = points.flat().map((point) => point[1]);
    figure.append(empty(all.every((value) => value === 0) ? "zero at every step" : "no finite value at any step"));
    return figure;
  }
  const steps = points.flat().map((point) => point[0]);
  const firstStep = Math.min(...steps), lastStep = Math.max(...steps);
  const [low, high] = range(values, chart.is_log);
  const x = scale(firstStep, lastStep === firstStep ? firstStep + 1 : lastStep, LEFT, WIDTH - RIGHT, false);
  const y = scale(low, high, HEIGHT - BOTTOM, TOP, chart.is_log);
  const picture = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": chart.title });
  for (const tick of chart.is_log ? logTicks(low, high) : linearTicks(low, high, 4)) {
    picture.append(s("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(tick), y2: y(tick) }),
      s("text", { x: LEFT - 5, y: y(tick) + 3.5, "text-anchor": "end" }, short(tick)));
  }
  const stepTicks = lastStep === firstStep ? [firstStep] : linearTicks(firstStep, lastStep, 5).filter(Number.isInteger);
  for (const tick of stepTicks) {
    picture.append(s("text", { x: x(tick), y: HEIGHT - BOTTOM + 13, "text-anchor": "middle" }, String(tick)));
  }
  picture.append(s("text", { x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 4, "text-anchor": "middle" }, "step"));
  points.forEach((line, index) => {
    for (const run of unbroken(line, drawable)) {
      picture.append(s("path", {
        class: "curve", style: { stroke: curveColour(index) },
        d: run.map(([step, value], i) => `${i ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join(""),
      }));
      if (line.length <= 15 || run.length === 1) {
        for (const [step, value] of run) picture.append(s("circle", { cx: x(step), cy: y(value), r: 2.4, style: { fill: curveColour(index) } }));
      }
    }
  });
  readValues(picture, chart, x);
  figure.append(picture);
  if (chart.series.length > 1) figure.append(legend(chart.series.map((series, i) => [series.name, curveColour(i)])));
  return figure;
}
function unbroken(line, drawable) {
  const runs = [[]];
  for (const point of line) {
    if (drawable(point[1])) runs[runs.length - 1].push(point);
    else if (runs[runs.length - 1].length) runs.push([]);
  }
  return runs.filter((run) => run.length);
}
const legend = (entries) => h("div", { class: "legend" },
  entries.map(([name, colour]) => h("span", {}, h("i", { style: { background: colour } }), name)));

function readValues(picture, chart, x) {
  const steps = [...new Set(chart.series.flatMap((series) => series.steps))].sort((a, b) => a - b);
  const rule = s("line", { class: "rule", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  picture.append(rule);
  picture.addEventListener("mousemove", (event) => {
    const box = picture.getBoundingClientRect();
    const place = ((event.clientX - box.left) / box.width) * WIDTH;
    const step = steps.reduce((best, other) => (Math.abs(x(other) - place) < Math.abs(x(best) - place) ? other : best));
    rule.setAttribute("x1", x(step));
    rule.setAttribute("x2", x(step));
    rule.setAttribute("visibility", "visible");
    const lines = chart.series.flatMap((series) => {
      const index = series.steps.indexOf(step);
      if (index < 0) return [];
      return [`${series.name}: ${series.values[index] === null ? "not finite" : short(series.values[index])}`];
    });
    const stride = Math.max(...chart.series.map((series) => series.stride));
    showTooltip(event, [`step ${step}` + (stride > 1 ? ` (mean of ${stride} steps)` : ""), ...lines].join("\n"));
  });
  picture.addEventListener("mouseleave", () => { rule.setAttribute("visibility", "hidden"); hideTooltip(); });
}

function drawCurves() {
  const names = Object.keys(data.curves);
  if (!names.length) {
    show("charts", empty("No step has been recorded yet."));
    byId("other-charts-box").hidden = true;
    return;
  }
  tabs("curve-tabs", names, (index) => {
    const charts = data.curves[names[index]];
    const others = charts.filter((chart) => chart.is_other);
    show("charts", charts.filter((chart) => !chart.is_other).map(lineChart));
    show("other-charts", others.map(lineChart));
    byId("other-charts-box").hidden = !others.length;
  });
}

// ------------------------------------------------------------------ evaluation

const heat = (rate) => `rgba(var(--heat), ${(0.04 + 0.46 * rate).toFixed(3)})`;

function drawEvaluation() {
  if (!data.evaluations.length) {
    show("matrix", empty("Nothing has been evaluated yet."));
    show("difficulty", []);
    return;
  }
  const sizes = data.evaluations.map((evaluation) => evaluation.num_tasks);
  const labels = data.evaluations.map((evaluation, i) => `${evaluation.name}: ${count(sizes[i])} tasks a cell`);
  tabs("evaluation-tabs", labels, (index) => {
    const evaluation = data.evaluations[index];
    show("matrix", matrixTable(evaluation), matrixLegend(evaluation));
    show("difficulty", evaluation.difficulty.map(difficultyTable));
  }, sizes.indexOf(Math.max(...sizes)));
}
function matrixTable(evaluation) {
  const kept = evaluation.kept.map((share) => h("td", {},
    share === null ? "never solved" : `at the end ${percent(share, 0)} of its best`));
  return h("table", { class: "matrix" },
    h("thead", {}, h("tr", {}, h("th", { class: "corner" }, "weights of"), evaluation.families.map((f) => h("th", { scope: "col" }, f)))),
    h("tbody", {}, evaluation.stages.map((stage, i) => h("tr", {},
      h("th", { scope: "row" }, stage),
      evaluation.rows[i].map((cell, j) => matrixCell(cell, stage, evaluation.families[j]))))),
    h("tfoot", {}, h("tr", {}, h("td", {}), kept)));
}
function matrixCell(cell, stage, family) {
  const place = { "data-stage": stage, "data-family": family };
  if (cell === null) return h("td", place, h("small", {}, "not evaluated"));
  const excluded = cell.num_excluded > 0 && h("small", { class: "excluded" }, `${cell.num_excluded} excluded`);
  if (cell.rate === null) return h("td", place, h("div", { class: "rate" }, "–"), excluded);
  const notes = [
    `${family}, weights of ${stage} (version ${cell.policy_version})`,
    `mean reward ${short(cell.mean_reward)}, ${short(cell.mean_turns)} turns, ${short(cell.mean_sampled_tokens)} sampled tokens`,
    ...Object.entries(cell.outcomes).map(([outcome, number]) => `${outcome}: ${number}`),
  ].join("\n");
  return h("td", { ...place, class: "number", "data-mark": cell.mark, style: { background: heat(cell.rate) }, ...hint(notes) },
    marks(cell),
    h("div", { class: "rate" }, percent(cell.rate)),
    h("small", {}, `${percent(cell.low, 0).replace(" %", "")}–${percent(cell.high, 0)} · ${cell.num_solved} of ${cell.num_graded}`),
    excluded);
}
const MARKS = { gained: "▲", dropped: "▼ forgot", recovered: "↺ recovered" };
function marks(cell) {
  const change = MARKS[cell.mark] && h("span", { class: `${cell.mark} ${cell.is_clear ? "" : "unclear"}` },
    MARKS[cell.mark], ` ${signed(cell.change_points)}`);
  return h("div", { class: "mark" }, cell.is_best && h("span", { class: "best" }, "★ best"), change);
}
function matrixLegend(evaluation) {
  const excluded = evaluation.num_excluded
    ? `${evaluation.num_excluded} of ${evaluation.num_rollouts} rollouts were excluded because their environment failed; they count neither as solved nor as failed.`
    : `None of the ${evaluation.num_rollouts} rollouts was excluded.`;
  return h("p", { class: "hint" },
    "★ best of all stages · ▲ above the best so far, ▼ below 95 % of it (forgetting), ↺ back at it, in points; " +
    "bold where the 95 % interval of the difference on the same tasks excludes zero. ", excluded);
}
function difficultyTable(entry) {
  return h("figure", { "data-family": entry.family }, h("figcaption", {}, entry.family),
    h("table", { class: "heat" },
      h("thead", {}, h("tr", {}, h("th", {}, "difficulty"), entry.levels.map((level) => h("th", {}, level)))),
      h("tbody", {}, entry.stages.map((stage, i) => h("tr", {}, h("th", { scope: "row" }, stage),
        entry.rows[i].map((cell) => (cell === null ? h("td", {}) : h("td",
          { class: "number", style: { background: heat(cell[1] ? cell[0] / cell[1] : 0) } },
          cell[1] ? (100 * cell[0] / cell[1]).toFixed(0) : "–", h("small", {}, `${cell[0]}/${cell[1]}`)))))))));
}

// ------------------------------------------------------------------ histograms

function barChart(title, note, bars, { bound = null, boundText = "", axis }) {
  const most = Math.max(...bars.map((bar) => bar.count), 1);
  const left = 46, bottom = HEIGHT - BOTTOM, width = (WIDTH - left - RIGHT) / bars.length;
  const y = scale(0, most * 1.05, bottom, TOP + 8, false);
  const picture = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title });
  for (const tick of linearTicks(0, most, 4).filter(Number.isInteger)) {
    picture.append(s("line", { class: "grid", x1: left, x2: WIDTH - RIGHT, y1: y(tick), y2: y(tick) }),
      s("text", { x: left - 5, y: y(tick) + 3.5, "text-anchor": "end" }, count(tick)));
  }
  bars.forEach((bar, i) => {
    const x = left + i * width;
    // A bar that stands for something stays visible however small it is.
    const top = bar.count ? Math.min(y(bar.count), bottom - 1.5) : bottom;
    picture.append(
      s("rect", { class: bar.isBeyond ? "bar beyond" : "bar", x: x + 1, width: Math.max(width - 2, 1), y: top, height: bottom - top }),
      s("rect", { x, width, y: TOP, height: bottom - TOP, fill: "transparent", ...hint(bar.text) }));
    if (bar.label !== null) {
      picture.append(s("text", { x: x + (bar.isEdge ? 0 : width / 2), y: bottom + 13, "text-anchor": "middle" }, bar.label));
    }
  });
  if (bound !== null) {
    const x = left + bound * width;
    picture.append(s("line", { class: "bound", x1: x, x2: x, y1: TOP, y2: bottom }),
      s("text", { x: x - 4, y: TOP + 8, "text-anchor": "end" }, boundText));
  }
  picture.append(s("text", { x: (left + WIDTH - RIGHT) / 2, y: HEIGHT - 4, "text-anchor": "middle" }, axis));
  return h("figure", { "data-chart": title }, h("figcaption", {}, title), h("p", {}, note), picture);
}
function lagChart(stage, lag) {
  const most = Math.max(...lag.counts.map(([steps]) => steps), lag.max_lag_steps === null ? 0 : lag.max_lag_steps);
  const counts = new Map(lag.counts);
  const total = sum(lag.counts.map((entry) => entry[1]));
  const bars = Array.from({ length: most + 2 }, (_, steps) => ({
    count: counts.get(steps) || 0, label: most > 20 && steps % 5 ? null : String(steps),
    isBeyond: lag.max_lag_steps !== null && steps > lag.max_lag_steps,
    text: `lag ${steps}: ${plural(counts.get(steps) || 0, "use")}`,
  }));
  const mean = sum(lag.counts.map(([steps, number]) => steps * number)) / total;
  const isBounded = lag.max_lag_steps !== null;
  return barChart(`${stage}: lag`, `${count(total)} uses of trajectories, ${mean.toFixed(2)} steps old on average.`, bars, {
    axis: "lag of the oldest token, optimizer steps",
    bound: isBounded ? lag.max_lag_steps + 1 : null, boundText: isBounded ? `bound: ${lag.max_lag_steps}` : "",
  });
}
function magnitudeChart(stage, title, histogram, limit) {
  const edge = (i) => 10 ** (histogram.lowest + i / histogram.bins_per_decade);
  const superscript = (power) => "10" + String(power).replace(/[-0-9]/g, (c) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(c)]);
  const bars = histogram.counts.map((number, i) => ({
    count: number, isEdge: true, isBeyond: false,
    label: i === 0 || i % (2 * histogram.bins_per_decade) !== 2 ? null : superscript(histogram.lowest + i / histogram.bins_per_decade),
    text: `${short(edge(i))} to ${short(edge(i + 1))}: ${plural(number, "token")}`,
  }));
  bars.unshift({ count: histogram.num_zero, label: "0", isBeyond: false, text: `exactly equal: ${plural(histogram.num_zero, "token")}` });
  const bad = histogram.num_not_finite ? ` ${histogram.num_not_finite} were not finite!` : "";
  return barChart(`${stage}: ${title}`,
    `Sample of ${plural(histogram.num_values, "token")}; the largest difference is ${short(histogram.max_abs)} nats.${bad}`, bars,
    { axis: "|log π − log μ|, nats", bound: limit === null ? null : 1 + (limit - histogram.lowest) * histogram.bins_per_decade,
      boundText: limit === null ? "" : superscript(limit) });
}
function drawHistograms() {
  const names = [...new Set([...Object.keys(data.lag), ...Object.keys(data.histograms)])];
  if (!names.length) return show("histograms", empty("No stage has trained on its own rollouts yet."));
  return show("histograms", names.map((stage) => {
    const found = data.histograms[stage] || {};
    const kinds = [["mismatch/log_ratio", "engine against trainer", -5], ["ratio/log_ratio", "policy against behaviour", null]];
    return [
      data.lag[stage] && lagChart(stage, data.lag[stage]),
      ...kinds.map(([name, title, limit]) => found[name] && magnitudeChart(stage, title, found[name], limit)),
    ].filter(Boolean);
  }));
}

// ------------------------------------------------------------------ endings

const ENDING_COLOURS = {
  completed: "--good", truncated_tokens: "--curve-1", truncated_turns: "--curve-6", timed_out: "--curve-3", invalid_format: "--curve-0",
  cancelled_stale: "--curve-7", cancelled_shutdown: "--curve-7",
  trained: "--curve-0", evaluated: "--curve-5", served: "--curve-2", collected: "--curve-6", waiting: "--curve-7",
  stale: "--curve-1", zero_variance: "--curve-3", group_dropped: "--curve-4", environment_fault: "--bad", filtered: "--curve-6",
  cancelled: "--curve-7",
};
const endingColour = (name) => `var(${ENDING_COLOURS[name] || "--bad"})`;

function drawCounts() {
  const names = Object.keys(data.counts);
  if (!names.length) return show("counts", empty("No rollout has ended yet."));
  const bar = (counts) => {
    const total = sum(counts.map((entry) => entry[1]));
    return [
      h("div", { class: "bar-row" }, counts.map(([name, number]) => h("div", {
        style: { "flex-grow": String(number), background: endingColour(name) }, ...hint(`${name}: ${number} (${percent(number / total)})`),
      }))),
      h("div", { class: "legend number" }, counts.map(([name, number]) =>
        h("span", {}, h("i", { style: { background: endingColour(name) } }), `${name} ${number}`))),
    ];
  };
  return show("counts", h("table", { class: "counts" },
    h("thead", {}, h("tr", {}, h("th", {}, "stage"), h("th", {}, "outcome: how rollouts ended"), h("th", {}, "disposition: what became of their data"))),
    h("tbody", {}, names.map((stage) => h("tr", { "data-stage": stage }, h("th", { scope: "row" }, stage),
      h("td", {}, bar(data.counts[stage].outcomes)), h("td", {}, bar(data.counts[stage].dispositions)))))));
}

// ------------------------------------------------------------------ trajectories: list

const trajectories = data.browser.trajectories;
const special = new Set(data.browser.special_ids);
const state = { chosen: null, view: "conversation", mode: "mask" };

const FILTERS = [
  ["stage", "Stage", (t) => t.origin],
  ["family", "Family", (t) => t.family],
  ["outcome", "Outcome", (t) => t.outcome],
  ["reward", "Reward", (t) => t.bucket],
];

function drawBrowser() {
  byId("browser-hint").textContent =
    `${trajectories.length} of ${data.browser.num_all} trajectories: good and bad ones of every stage and family. ` +
    "Choose one to read the conversation, or its tokens as the trainer saw them: every sampled token carries the " +
    "log-probability and the version of the weights that sampled it.";
  if (!trajectories.length) {
    show("list", empty("No trajectory has been recorded yet."));
    return;
  }
  const selects = FILTERS.map(([name, label, of]) => {
    const options = [...new Set(trajectories.map(of))];
    return h("label", {}, label, h("select", { id: `filter-${name}`, onchange: drawList },
      h("option", { value: "" }, "all"), options.map((value) => h("option", { value }, value))));
  });
  show("filters", selects, h("label", { class: "check" },
    h("input", { type: "checkbox", id: "filter-reported", onchange: drawList }), "with log-ratios and advantages"));
  drawList();
}
function drawList() {
  const wanted = FILTERS.map(([name, , of]) => [byId(`filter-${name}`).value, of]);
  const isReported = byId("filter-reported").checked;
  const found = trajectories.filter((t) =>
    wanted.every(([value, of]) => !value || of(t) === value) && (!isReported || t.has_report));
  if (!found.length) return show("list", empty("No trajectory is like that."));
  show("list", found.map((t) => h("button", { type: "button", class: "trajectory", "data-id": t.id, onclick: () => choose(t) },
    h("span", { class: `reward number ${t.bucket}` }, t.reward === null ? "–" : short(t.reward), h("small", {}, h("br"), t.bucket)),
    h("span", {}, `${t.family} · ${t.origin}`),
    h("small", {}, `${t.outcome} · ${plural(t.num_turns, "turn")} · ${t.num_sampled_tokens} sampled` + (t.has_report ? " · ◆" : "")))));
  return choose(found.includes(state.chosen) ? state.chosen : found[0]);
}
function choose(trajectory) {
  state.chosen = trajectory;
  for (const button of byId("list").querySelectorAll("button")) {
    button.setAttribute("aria-current", String(button.dataset.id === trajectory.id));
  }
  drawDetail();
}

// ------------------------------------------------------------------ trajectories: detail

function drawDetail() {
  const t = state.chosen;
  const uses = t.uses.map((use) => `step ${use.step} of ${use.stage}` + (use.multiplicity > 1 ? ` × ${use.multiplicity}` : ""));
  const chips = [
    `task ${t.task_id}`, `difficulty ${short(t.difficulty)}`, t.outcome, `reward ${short(t.reward)}`,
    ...Object.entries(t.reward_parts).map(([name, value]) => `${name} ${short(value)}`),
    t.disposition + (t.disposition_reason ? `: ${t.disposition_reason}` : ""), ...uses,
    `${t.num_tokens} tokens, ${t.num_sampled_tokens} sampled, ${t.num_trained_tokens} in the train mask`, `${short(t.duration_s)} s`,
    t.tools.length ? `tools: ${t.tools.join(", ")}` : null,
  ].filter(Boolean);
  const views = [["conversation", "Conversation"], ["tokens", "Tokens"]];
  show("detail",
    h("h3", {}, t.id),
    h("div", { class: "chips" }, chips.map((chip) => h("span", { class: "chip" }, chip))),
    t.error ? h("p", { class: "error" }, t.error) : [],
    h("div", { class: "tabs" }, views.map(([view, label]) => h("button", {
      type: "button", "data-view": view, "aria-selected": String(state.view === view),
      onclick: () => { state.view = view; drawDetail(); },
    }, label))),
    state.view === "tokens" ? tokenView(t) : conversation(t));
}
const ROLE_COLOURS = { system: "--curve-7", user: "--curve-0", assistant: "--curve-2", tool: "--curve-1" };

function conversation(t) {
  const messages = t.messages.map((message) => h("div",
    { class: "message", style: { "--role": `var(${ROLE_COLOURS[message.role] || "--curve-7"})` } },
    h("div", { class: "role" }, message.role),
    message.reasoning !== null && h("pre", { class: "reasoning" }, message.reasoning),
    message.content && h("pre", {}, message.content),
    message.calls.map((call) => h("pre", { class: "call" }, `${call.name} ${call.arguments}`,
      call.error && h("span", { class: "error" }, `\n${call.error}`)))));
  if (!messages.length) messages.push(empty("Nothing was said."));
  const info = t.info && h("details", {}, h("summary", {}, "What the environment noted"), h("pre", { class: "info" }, t.info));
  return info ? [...messages, info] : messages;
}

// A mode gives each token a colour (or none) and the whole a legend; null values have none.
const MODES = {
  mask: ["Mask", maskColours],
  logprob: ["Log-probability", (tokens) => strengths(tokens, "logprob", "how surprising the token was to the policy that sampled it")],
  logratio: ["Log-ratio", (tokens) => diverging(tokens, "logRatio", "log π − log μ: below and above what the behaviour policy gave")],
  advantage: ["Advantage", (tokens) => diverging(tokens, "advantage", "pushed down and pushed up")],
  value: ["Value", (tokens) => diverging(tokens, "value", "what the critic expected before the token was sampled")],
  version: ["Policy version", versionColours],
};
const MASK_NAMES = { T: "in the train mask", s: "sampled, not in the train mask", ".": "given, not sampled" };
const MASK_COLOURS = { T: "rgba(38, 166, 91, .38)", s: "rgba(240, 160, 20, .45)", ".": "" };

function maskColours(tokens) {
  return {
    colours: tokens.map((token) => MASK_COLOURS[token.mask]),
    legend: legend(Object.entries(MASK_NAMES).map(([letter, name]) => [name, MASK_COLOURS[letter] || "transparent"])),
  };
}
function strengths(tokens, field, meaning) {
  const most = Math.max(...tokens.map((token) => (token[field] === null ? 0 : Math.abs(token[field]))), 1e-12);
  return {
    colours: tokens.map((token) => (token[field] === null ? "" : `rgba(var(--heat), ${(0.05 + 0.6 * Math.abs(token[field]) / most).toFixed(3)})`)),
    legend: legend([[`${meaning}; darkest: ${short(-most)} nats`, "rgba(var(--heat), .65)"]]),
  };
}
function diverging(tokens, field, meaning) {
  const most = Math.max(...tokens.map((token) => (token[field] === null ? 0 : Math.abs(token[field]))));
  const paint = (value) => {
    if (value === null) return "";
    const alpha = most ? (0.06 + 0.6 * Math.abs(value) / most).toFixed(3) : "0.06";
    return value < 0 ? `rgba(214, 60, 50, ${alpha})` : `rgba(38, 150, 200, ${alpha})`;
  };
  if (tokens.every((token) => token[field] === null)) {
    return {
      colours: tokens.map(() => ""),
      legend: h("p", { class: "empty" }, "None was recorded for this segment: each step records them for a few of its segments. Filter for “with log-ratios and advantages” (◆) to see some."),
    };
  }
  return {
    colours: tokens.map((token) => paint(token[field])),
    legend: legend([[`${short(-most)}`, paint(-most)], [`${short(most)}`, paint(most)], [meaning, "transparent"]]),
  };
}
function versionColours(tokens) {
  const versions = [...new Set(tokens.map((token) => token.version).filter((v) => v !== null))].sort((a, b) => a - b);
  const paint = (version) => `hsla(${(versions.indexOf(version) * 137 + 210) % 360}, 65%, 55%, .42)`;
  return {
    colours: tokens.map((token) => (token.version === null ? "" : paint(token.version))),
    legend: legend(versions.map((version) => [`version ${version}`, paint(version)])),
  };
}

function unpack(segment) {
  const versions = segment.versions.flatMap(([version, length]) => Array(length).fill(version));
  let sampled = 0, trained = 0;
  return segment.token_ids.map((id, i) => {
    const mask = segment.mask[i], isSampled = mask !== ".", isTrained = mask === "T";
    const report = isTrained && segment.report;
    const token = {
      id, mask, position: i, text: data.browser.token_texts[id],
      logprob: isSampled ? segment.logprobs[sampled] : null,
      version: isSampled ? versions[sampled] : null,
      logRatio: report ? segment.report.log_ratios[trained] : null,
      advantage: report ? segment.report.advantages[trained] : null,
      value: report && segment.report.values ? segment.report.values[trained] : null,
    };
    sampled += isSampled ? 1 : 0;
    trained += isTrained ? 1 : 0;
    return token;
  });
}
function visible(text) {
  const marked = text.replace(/[\u0000-\u0008\u000b-\u001f\u007f\u200b-\u200f\u202a-\u202e\u2028\u2029\u2066-\u2069\ufeff]/g,
    (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0")).replace(/\t/g, "⇥").replace(/\n/g, "↵\n");
  return /^ +$/.test(marked) ? "·".repeat(marked.length) : marked;
}
function facts(token) {
  const lines = [JSON.stringify(token.text), `id ${token.id}, position ${token.position}`, MASK_NAMES[token.mask]];
  if (token.logprob !== null) lines.push(`log-probability ${short(token.logprob)} (p = ${short(Math.exp(token.logprob))})`);
  if (token.version !== null) lines.push(`policy version ${token.version}`);
  if (token.logRatio !== null) lines.push(`log-ratio ${short(token.logRatio)}`);
  if (token.advantage !== null) lines.push(`advantage ${short(token.advantage)}`);
  if (token.value !== null) lines.push(`value ${short(token.value)}`);
  return lines.join("\n");
}
function tokenView(t) {
  const hasValues = t.segments.some((segment) => segment.report && segment.report.values);
  const offered = Object.entries(MODES).filter(([mode]) => mode !== "value" || hasValues || state.mode === mode);
  const modes = h("div", { class: "tabs" }, offered.map(([mode, [label]]) => h("button", {
    type: "button", "data-mode": mode, "aria-selected": String(state.mode === mode),
    onclick: () => { state.mode = mode; drawDetail(); },
  }, label)));
  if (!t.segments.length) return [modes, empty("This rollout has no tokens.")];
  return [modes, ...t.segments.map((segment) => {
    const tokens = unpack(segment);
    const { colours, legend: key } = MODES[state.mode][1](tokens);
    const from = segment.parent === null ? "" : `, grown out of segment ${segment.parent}`;
    const step = segment.report ? `, log-ratios and advantages of step ${segment.report.step}` : "";
    return h("div", { "data-segment": segment.order },
      h("p", { class: "segment-title" }, `Segment ${segment.order} (${segment.kind}, ${segment.agent_id}${from}): ${tokens.length} tokens${step}`),
      key,
      h("div", {
        class: "tokens", onmouseleave: hideTooltip,
        onmousemove: (event) => {
          const place = event.target.dataset.position;
          if (place === undefined) hideTooltip();
          else showTooltip(event, facts(tokens[Number(place)]));
        },
      }, tokens.map((token, i) => h("span", {
        class: special.has(token.id) ? "token special" : "token", "data-position": i, style: { "background-color": colours[i] },
      }, visible(token.text)))));
  })];
}

drawHeader();
drawArc();
drawCurves();
drawEvaluation();
drawHistograms();
drawCounts();
drawBrowser();
