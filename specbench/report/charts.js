"use strict";

// Drawing figures as SVG, each from the rows of its table. A chart is a function of a figure, the rows to be drawn, the
// runs by id and the width there is in pixels, and gives a node.

const ROW = 26; // height of a line of a chart with a line for each run
const CHARACTER = 6.7; // width of one, at the size of a chart's text

function figureCard(figure, runs, wide) {
  const host = el("div", { class: "chart" });
  const card = el(
    "figure",
    { class: wide ? "card wide" : "card" },
    el("figcaption", {}, el("h4", {}, figure.title), el("p", { class: "note" }, figure.note)),
    host,
    dataOf(figure.name, figure.columns, figure.rows),
  );
  let shown = null;
  let width = 0;
  const draw = () => {
    if (!width) return;
    const rows = figure.rows.filter((row) => !shown || shown.has(row[0]));
    const records = rows.map((row) => Object.fromEntries(figure.columns.map((column, i) => [column, row[i]])));
    hint.hide();
    host.replaceChildren(rows.length ? CHARTS[figure.kind](figure, records, runs, width) : el("p", { class: "note" }, "No run to show."));
  };
  new ResizeObserver(() => {
    if (host.clientWidth === width) return;
    width = host.clientWidth;
    draw();
  }).observe(host);
  return {
    card,
    show(ids) {
      shown = ids;
      draw();
    },
  };
}

function canvas(figure, width, height, ...children) {
  return svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${figure.title}: ${figure.note}. The numbers are under Data.` }, ...children);
}

function scale([low, high], [from, to]) {
  const factor = (to - from) / (high - low || 1);
  return (value) => from + (value - low) * factor;
}

// Round numbers between two others, and so many decimals as tell them apart.
function ticks(low, high, about) {
  const rough = (high - low) / Math.max(1, about);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const decimals = Math.max(0, -Math.floor(Math.log10(step)) + (step / power === 2.5 ? 1 : 0));
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + 1e-9; n++) found.push(n * step);
  return found.map((value) => [value, value.toFixed(decimals)]);
}

function extent(values, margin = 0.04) {
  const known = values.filter((value) => value !== null && value !== undefined);
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const room = (high - low || Math.abs(high) || 1) * margin;
  return [low - room, high + room];
}

function span(record, digits = 2) {
  return record.low === null ? "no interval" : `95 % interval ${record.low.toFixed(digits)}–${record.high.toFixed(digits)}`;
}

function named(record, runs) {
  return runs[record.run].name;
}

function text(x, y, content, attributes = {}) {
  return svg("text", { x, y, ...attributes }, content);
}

// The names of runs down the left side, shortened to the room there is.
function gutter(records, runs, width) {
  const longest = Math.max(...records.map((record) => named(record, runs).length));
  const room = Math.min(longest * CHARACTER + 10, width * 0.36);
  const letters = Math.floor((room - 10) / CHARACTER);
  const label = (record, y) => {
    const name = named(record, runs);
    const short = name.length > letters ? `${name.slice(0, Math.max(3, letters - 1))}…` : name;
    return text(room - 10, y + 4, short, { "text-anchor": "end", class: "name" });
  };
  return [room, label];
}

function intervals(figure, records, runs, width) {
  const metric = figure.columns[3];
  const [left, label] = gutter(records, runs, width);
  const height = records.length * ROW + 34;
  const value = (number) => `${number.toFixed(2)}${figure.unit}`;
  const right = width - 8 - 5.5 * CHARACTER;
  const [to, from] = figure.ratio ? [Math.log, Math.exp] : [Number, Number]; // ratios stand on a logarithmic axis
  const reach = extent([figure.at, ...(figure.band ?? []), ...records.flatMap((r) => [r[metric], r.low, r.high])].map((value) => value && to(value)));
  const place = scale(reach, [left, right]);
  const x = (number) => place(to(number));
  const bottom = records.length * ROW + 4;
  const marked = figure.ratio ? ratios(...reach.map(from), x) : ticks(...reach, (right - left) / 60);
  const axis = marked.map(([at, words]) => [
    svg("line", { x1: x(at), x2: x(at), y1: 2, y2: bottom, class: "grid" }),
    text(x(at), bottom + 16, words, { "text-anchor": "middle", class: "tick" }),
  ]);
  const band = figure.band && svg("rect", { x: x(figure.band[0]), width: x(figure.band[1]) - x(figure.band[0]), y: 2, height: bottom - 2, class: "band" });
  const marks = records.map((record, i) => {
    const y = i * ROW + ROW / 2 + 2;
    const colour = runs[record.run].colour;
    const whisker = record.low !== null && [
      svg("line", { x1: x(record.low), x2: x(record.high), y1: y, y2: y, class: "casing thick" }),
      svg("line", { x1: x(record.low), x2: x(record.high), y1: y, y2: y, class: "whisker", stroke: colour }),
    ];
    const group = svg(
      "g",
      { class: "mark" },
      svg("rect", { x: 0, y: y - ROW / 2, width, height: ROW, class: "catch" }),
      label(record, y),
      whisker,
      svg("circle", { cx: x(record[metric]), cy: y, r: 5, fill: colour, class: "dot" }),
      text(width - 4, y + 4, value(record[metric]), { "text-anchor": "end", class: "value" }),
    );
    return hint.on(group, [named(record, runs), `${figure.title.toLowerCase()}: ${value(record[metric])}`, span(record)]);
  });
  const reference = svg("line", { x1: x(figure.at), x2: x(figure.at), y1: 2, y2: bottom, class: "reference" });
  return canvas(figure, width, height, band, ...axis, reference, ...marks);
}

// Marks of a logarithmic axis: ratios that people know, 1 among them, as many as have room.
const RATIOS = [0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.5, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30];
const APART = 34; // pixels

function ratios(low, high, place) {
  const found = [];
  const room = (value) => found.every((other) => Math.abs(place(other) - place(value)) >= APART);
  for (const value of [1, 2, 0.5, 4, 3, 1.5, ...RATIOS]) if (value >= low && value <= high && room(value)) found.push(value);
  return found.sort((a, b) => a - b).map((value) => [value, String(value)]);
}

// Of a logarithmic axis from small numbers to large ones: 1, 2 and 5 of each power of ten.
function decades(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    for (const factor of [1, 2, 5]) {
      const value = factor * 10 ** power;
      if (value >= low && value <= high) found.push([value, String(Number(value.toPrecision(1)))]);
    }
  }
  return found.length > 1 ? found : ticks(low, high, 4);
}

// Axes of a chart with two of them: where things are, and the nodes.
function axes(figure, xs, ys, width, height, marks = ticks(...ys, 5)) {
  const [left, right, top, bottom] = [58, width - 12, 10, height - 40];
  const [x, y] = [scale(xs, [left, right]), scale(ys, [bottom, top])];
  const nodes = [
    ...marks.map(([at, words]) => [
      svg("line", { x1: left, x2: right, y1: y(at), y2: y(at), class: "grid" }),
      text(left - 8, y(at) + 4, words, { "text-anchor": "end", class: "tick" }),
    ]),
    text((left + right) / 2, height - 4, figure.x, { "text-anchor": "middle", class: "axis" }),
    text(12, (top + bottom) / 2, figure.y, { "text-anchor": "middle", class: "axis", transform: `rotate(-90 12 ${(top + bottom) / 2})` }),
  ];
  return { x, y, left, right, top, bottom, nodes };
}

function upright(x, y1, y2, colour) {
  const ends = { x1: x, x2: x, y1, y2 };
  return [svg("line", { ...ends, class: "casing" }), svg("line", { ...ends, class: "whisker thin", stroke: colour })];
}

const DASHES = [null, "6 3", "2 3", "9 3 2 3"];

function lines(figure, records, runs, width) {
  const { across, up, by } = figure;
  const series = Map.groupBy(records, (record) => by.map((column) => record[column]).join(" "));
  const [[toX, fromX], [toY, fromY]] = figure.log.map((log) => (log ? [Math.log, Math.exp] : [Number, Number]));
  const numbers = records.map((record) => record[across]);
  const whole = numbers.every(Number.isInteger) && [...new Set(numbers)].sort((a, b) => a - b);
  const xs = figure.log[0] || !whole ? extent(numbers.map(toX), 0.08) : [Math.min(...numbers) - 0.25, Math.max(...numbers) + 0.25];
  const heights = [...(figure.zero ? [0] : []), ...(figure.at === null ? [] : [figure.at]), ...records.flatMap((r) => [r[up], r.low, r.high])];
  const ys = extent(heights.map((value) => value && toY(value)));
  if (figure.zero) ys[0] = 0;
  const height = 260;
  const ups = figure.log[1] ? decades(...ys.map(fromY)).map(([at, words]) => [toY(at), words]) : ticks(...ys, 5);
  const frame = axes(figure, xs, ys, width, height, ups);
  const { bottom } = frame;
  const [x, y] = [(value) => frame.x(toX(value)), (value) => frame.y(toY(value))];
  const marked = whole ? whole.map((at) => [at, at]) : decades(...xs.map(fromX));
  const across_ticks = marked.map(([at, words]) => text(x(at), bottom + 16, words, { "text-anchor": "middle", class: "tick" }));
  const reference = figure.at !== null && svg("line", { x1: frame.left, x2: frame.right, y1: y(figure.at), y2: y(figure.at), class: "reference" });
  const used = new Map();
  const keys = [];
  const drawn = [...series.values()].map((points, i) => {
    const [first] = points;
    const name = by.includes("run") ? named(first, runs) : by.includes("k") && first.k ? `${first.drafter} k=${first.k}` : first.drafter;
    const colour = runs[first.run].colour;
    const twin = used.get(colour) ?? 0;
    used.set(colour, twin + 1);
    const dashes = DASHES[twin % DASHES.length];
    const shift = whole && figure.columns.includes("low") ? (i - (series.size - 1) / 2) * 3 : 0; // whiskers side by side
    const path = points.map((point, n) => `${n ? "L" : "M"}${x(point[across]) + shift} ${y(point[up])}`).join("");
    keys.push(key(name, colour, dashes));
    return svg(
      "g",
      {},
      svg("path", { d: path, class: "casing" }),
      svg("path", { d: path, class: "line", stroke: colour, "stroke-dasharray": dashes }),
      points.map((point) => {
        const at = x(point[across]) + shift;
        const whisker = point.low !== null && point.low !== undefined && upright(at, y(point.low), y(point.high), colour);
        const dot = svg("circle", { cx: at, cy: y(point[up]), r: 4, fill: colour, class: "dot" });
        const digits = figure.log[1] ? 1 : figure.zero ? 3 : 2;
        const said = [named(point, runs), `${figure.x}: ${whole ? point[across] : point[across].toFixed(1)}`, `${figure.y}: ${point[up].toFixed(digits)}`];
        if (point.low !== undefined) said.push(span(point, digits));
        if (point.conditional !== undefined && point.conditional !== null) said.push(`of those accepted so far: ${point.conditional.toFixed(3)}`);
        return svg("g", {}, whisker, hint.on(dot, said));
      }),
    );
  });
  return el("div", {}, canvas(figure, width, height, ...frame.nodes, ...across_ticks, reference, ...drawn), el("div", { class: "keys" }, keys));
}

function key(name, colour, dashes = null) {
  const line = svg("svg", { width: 26, height: 12, "aria-hidden": "true" }, svg("path", { d: "M1 6H25", class: "casing" }), svg("path", { d: "M1 6H25", class: "line", stroke: colour, "stroke-dasharray": dashes }), svg("circle", { cx: 13, cy: 6, r: 3.5, fill: colour, class: "dot" }));
  return el("span", { class: "key" }, line, name);
}

function scatter(figure, records, runs, width) {
  const reach = extent([1, ...records.flatMap((r) => [r.predicted, r.measured, r.low, r.high])].map((value) => value && Math.log(value)), 0.06);
  const height = Math.min(380, Math.max(260, width * 0.75));
  const onScreen = scale(reach, [0, Math.min(width, height) - 50]);
  const marked = ratios(...reach.map(Math.exp), (value) => onScreen(Math.log(value)));
  const frame = axes(figure, reach, reach, width, height, marked.map(([value, words]) => [Math.log(value), words]));
  const { left, right, top, bottom } = frame;
  const [x, y] = [frame.x, frame.y].map((place) => (value) => place(Math.log(value)));
  const across = marked.map(([value, words]) => text(x(value), bottom + 16, words, { "text-anchor": "middle", class: "tick" }));
  const [from, to] = reach.map(Math.exp);
  const factors = [[from, 1 - figure.within], [to, 1 - figure.within], [to, 1 + figure.within], [from, 1 + figure.within]];
  const corners = factors.map(([value, factor]) => `${x(value) - left},${y(value * factor) - top}`);
  const marks = records.map((record) => {
    const colour = runs[record.run].colour;
    const where = x(record.predicted);
    const whisker = record.low !== null && upright(where, y(record.low), y(record.high), colour);
    const dot = svg("circle", { cx: where, cy: y(record.measured), r: 5, fill: colour, class: "dot" });
    return svg("g", {}, whisker, hint.on(dot, [named(record, runs), `predicted ${record.predicted.toFixed(2)}×, measured ${record.measured.toFixed(2)}×`, span(record)]));
  });
  const inside = svg("svg", { x: left, y: top, width: right - left, height: bottom - top }, svg("polygon", { points: corners.join(" "), class: "band" }));
  const equal = svg("line", { x1: x(from), y1: y(from), x2: x(to), y2: y(to), class: "reference" });
  const colours = new Map(records.map((record) => [record.drafter, runs[record.run].colour]));
  const keys = [...colours].map(([drafter, colour]) => el("span", { class: "key" }, swatch(colour), drafter));
  return el("div", {}, canvas(figure, width, height, inside, ...frame.nodes, ...across, equal, ...marks), el("div", { class: "keys" }, keys));
}

function shares(figure, records, runs, width) {
  const [left, label] = gutter(records, runs, width);
  const right = width - 8;
  const x = scale([0, 1], [left, right]);
  const height = records.length * ROW + 26;
  const bars = records.map((record, i) => {
    const top = i * ROW + 4;
    let from = 0;
    const pieces = figure.parts.map((part, n) => {
      const share = record[part];
      const [start, end] = [x(from), x(from + share)];
      from += share;
      const words = `${(100 * share).toFixed(0)} %`;
      return [
        svg("rect", { x: start, y: top, width: Math.max(0, end - start), height: ROW - 8, class: `part part-${n}` }),
        end - start > 36 && text((start + end) / 2, top + ROW / 2, words, { "text-anchor": "middle", class: `value on-part-${n}` }),
      ];
    });
    const said = figure.parts.map((part) => `${part}: ${(100 * record[part]).toFixed(1)} %`);
    return hint.on(svg("g", {}, label(record, top + ROW / 2 - 4), pieces), [named(record, runs), ...said]);
  });
  const axis = [0, 0.25, 0.5, 0.75, 1].map((at) => text(x(at), height - 4, `${100 * at} %`, { "text-anchor": at === 1 ? "end" : "middle", class: "tick" }));
  const keys = figure.parts.map((part, n) => el("span", { class: "key" }, el("span", { class: `swatch part-${n}` }), part));
  return el("div", {}, canvas(figure, width, height, ...bars, ...axis), el("div", { class: "keys" }, keys));
}

const GRID_FULL = 1; // doublings of the speed at which a cell has its full colour

function grid(figure, records, runs) {
  const categories = [...new Set(records.map((record) => record.category))];
  const head = el("tr", {}, el("th", { scope: "col" }, "drafter"), categories.map((name) => el("th", { scope: "col" }, name.replaceAll("_", " "))));
  const rows = [...Map.groupBy(records, (record) => record.run)].map(([id, found]) => {
    const cells = categories.map((category) => {
      const record = found.find((each) => each.category === category);
      if (!record) return el("td", {}, "–");
      const depth = Math.min(1, Math.abs(Math.log2(record.speedup)) / GRID_FULL);
      const side = record.speedup >= 1 ? "faster" : "slower";
      const cell = el("td", { class: `number ${side}` }, record.speedup.toFixed(2));
      cell.style.setProperty("--depth", depth.toFixed(3));
      const said = [`${runs[id].name}, ${category.replaceAll("_", " ")}`, `${record.speedup.toFixed(2)} times plain decoding`, span(record), `${record.tokens_per_pass.toFixed(2)} tokens per pass; ${record.units} conversations`];
      return hint.on(cell, said);
    });
    return el("tr", {}, el("th", { scope: "row" }, swatch(runs[id].colour), runs[id].name), cells);
  });
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": figure.title }, el("table", { class: "numbers heat" }, el("thead", {}, head), el("tbody", {}, rows)));
}

const CHARTS = { intervals, lines, shares, scatter, grid };
