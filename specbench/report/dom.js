"use strict";

// Making elements. Whatever comes from a record is set as text, never as markup.

function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "paint") node.style.setProperty("--paint", value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

// A note beside what the pointer is on, was tapped, or has the focus.
const hint = {
  box: el("div", { class: "hint", role: "tooltip", hidden: true }),
  at: null,

  show(at, lines) {
    const [first, ...rest] = lines;
    this.at = at;
    this.box.replaceChildren(el("strong", {}, first), ...rest.map((line) => el("div", {}, line)));
    this.box.hidden = false;
    this.place();
  },

  place() {
    if (!this.at) return;
    const mark = this.at.getBoundingClientRect();
    const { offsetWidth: width, offsetHeight: height } = this.box;
    const left = Math.min(Math.max(8, mark.left + mark.width / 2 - width / 2), document.documentElement.clientWidth - width - 8);
    const above = mark.top - height - 8;
    this.box.style.left = `${left}px`;
    this.box.style.top = `${above > 8 ? above : mark.bottom + 8}px`;
  },

  hide() {
    this.at = null;
    this.box.hidden = true;
  },

  on(node, lines) {
    node.addEventListener("pointerenter", (event) => event.pointerType === "mouse" && this.show(node, lines));
    node.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && this.hide());
    node.addEventListener("click", () => this.show(node, lines));
    return node;
  },
};

function swatch(colour) {
  return el("span", { class: "swatch", paint: colour, "aria-hidden": "true" });
}

// A table of data with a button that saves it: what stands behind a figure.
function dataOf(name, columns, rows) {
  const save = el("button", { type: "button", class: "quiet save", onclick: () => download(`${name}.csv`, csv(columns, rows)) }, "CSV");
  const body = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "data" });
  const details = el("details", { class: "data" }, el("summary", {}, "Data"), body);
  details.addEventListener("toggle", () => {
    if (!details.open || body.firstChild) return;
    const head = el("tr", {}, columns.map((column) => el("th", { scope: "col" }, column)));
    const lines = rows.map((row) => el("tr", {}, row.map((value) => el("td", { class: typeof value === "number" ? "number" : null }, plain(value)))));
    body.append(el("table", { class: "numbers small" }, el("thead", {}, head), el("tbody", {}, lines)));
  });
  return el("div", { class: "behind" }, details, save);
}

function plain(value) {
  if (value === null || value === undefined) return "–";
  return typeof value === "number" && !Number.isInteger(value) ? String(Number(value.toPrecision(5))) : String(value);
}

function csv(columns, rows) {
  const cell = (value) => (value === null || value === undefined ? "" : /[",\r\n]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : String(value));
  return [columns, ...rows].map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";
}

function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "text/csv;charset=utf-8" }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}
