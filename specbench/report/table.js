"use strict";

// The table of the runs of a setting: sorted by a click on a column's name, filtered by words. Failed runs stay last.

function runTable(setting, definitions, onFilter) {
  const { columns, rows } = setting.table;
  const body = el("tbody");
  const count = el("span", { class: "note", role: "status" });
  let order = { column: columns.findIndex((column) => column.name === "speedup"), down: true };

  const heads = columns.map((column, i) => {
    const button = el("button", { type: "button", onclick: () => sortBy(i) }, column.name);
    const definition = definitions[column.metric];
    if (definition) hint.on(button, [column.name, definition]);
    return el("th", { scope: "col", class: WORDS.includes(column.name) ? null : "number" }, button);
  });
  const lines = rows.map((row) => ({ row, node: rowNode(row, setting.runs[row.run], columns), words: wordsOf(row, setting.runs[row.run]) }));

  function sortBy(column) {
    // numbers begin with the largest, words with the first
    order = { column, down: order.column === column ? !order.down : !WORDS.includes(columns[column].name) };
    draw();
  }

  function draw() {
    const sign = order.down ? -1 : 1;
    const sorted = [...lines].sort((a, b) => compareRows(a.row, b.row, order.column, sign));
    body.replaceChildren(...sorted.map((line) => line.node));
    heads.forEach((head, i) => head.setAttribute("aria-sort", i !== order.column ? "none" : order.down ? "descending" : "ascending"));
  }

  function filter(asked) {
    const terms = asked.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = new Set();
    for (const line of lines) {
      const match = terms.every((term) => (term.startsWith("-") ? !has(line, term.slice(1)) : has(line, term)));
      line.node.hidden = !match;
      if (match) shown.add(line.row.run);
    }
    count.textContent = shown.size === lines.length ? `${lines.length} runs` : `${shown.size} of ${lines.length} runs`;
    onFilter(shown);
  }

  const input = el("input", { type: "search", placeholder: "eagle, k=4, -oracle…", "aria-label": "Filter the runs of this setting", oninput: () => filter(input.value) });
  draw();
  filter("");
  const table = el("table", { class: "numbers runs" }, el("thead", {}, el("tr", {}, heads)), body);
  return el(
    "div",
    { class: "card" },
    el("div", { class: "filter" }, el("label", {}, "Filter ", input), count),
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Runs" }, table),
    el("p", { class: "note" }, "plain: tokens/s of plain decoding of the same prompts, interleaved in the same run. In small type: 95 % bootstrap intervals over prompts. The filter takes words, left out with a minus before them, and also chooses what the figures show."),
    dataOf("runs", setting.table.data.columns, setting.table.data.rows),
  );
}

// Whether a line of the table has a word that contains the term; k=4 is only itself.
function has(line, term) {
  return line.words.some((word) => (term.includes("=") ? word === term : term && word.includes(term)));
}

const WORDS = ["drafter", "lossless", "flags"];

function rowNode(row, run, columns) {
  const [name, ...rest] = row.cells;
  const cells = rest.map((cell, i) => {
    const small = cell.interval && el("small", {}, cell.interval.map((limit) => limit.toFixed(2)).join("–"));
    const lossy = cell.text.startsWith("MISMATCH");
    return el("td", { class: [WORDS.includes(columns[i + 1].name) ? "" : "number", lossy ? "bad" : ""].join(" ").trim() || null }, cell.text, small);
  });
  if (row.error) cells.push(el("td", { colspan: columns.length - row.cells.length - 1, class: "bad" }, `failed: ${row.error}`));
  const flags = [...new Set(row.flags.map((flag) => flag.flag))].map((flag) => {
    const messages = row.flags.filter((each) => each.flag === flag).map((each) => each.message);
    return hint.on(el("span", { class: "flag" }, flag), [flag, ...messages]);
  });
  return el("tr", { class: row.error ? "failed" : null }, el("th", { scope: "row" }, swatch(run.colour), name.text), cells, el("td", {}, flags));
}

function compareRows(a, b, column, sign) {
  if (Boolean(a.error) !== Boolean(b.error)) return a.error ? 1 : -1;
  const [x, y] = [a, b].map((row) => sortKey(row, column));
  if (x === y) return 0;
  if (x === null) return 1; // what is not known comes last either way
  if (y === null) return -1;
  return sign * (typeof x === "number" ? x - y : x.localeCompare(y));
}

function sortKey(row, column) {
  const cell = row.cells[column];
  if (!cell) return row.flags.map((flag) => flag.flag).sort().join(" ") || null;
  return "value" in cell ? cell.value : cell.text;
}

function wordsOf(row, run) {
  const flags = row.flags.map((flag) => flag.flag);
  return [run.name, ...row.cells.slice(3).map((cell) => cell.text), ...flags, row.error ? `failed ${row.error}` : ""].join(" ").toLowerCase().split(/\s+/);
}
