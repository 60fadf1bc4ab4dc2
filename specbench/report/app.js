"use strict";

// The page, from the data that stands in it.

const ABOUT = { speed: "Speed", text: "Text", doubt: "Doubt", failed: "Failed" };
const THEMES = ["auto", "light", "dark"];

function themeButton() {
  const button = el("button", { type: "button", class: "quiet", onclick: () => set(THEMES[(THEMES.indexOf(current) + 1) % THEMES.length]) });
  let current = "auto";
  function set(theme) {
    current = theme;
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    button.textContent = `Theme: ${theme}`;
  }
  set("auto");
  return button;
}

function summaryList(sentences) {
  return el(
    "dl",
    { class: "summary" },
    Object.entries(ABOUT).flatMap(([about, words]) => {
      const said = sentences.filter((sentence) => sentence.about === about);
      return said.length ? [el("dt", { class: `about-${about}` }, words), el("dd", {}, said.map((sentence) => el("p", {}, sentence.text.replaceAll(" %", "\u00a0%"))))] : [];
    }),
  );
}

function facts(pairs) {
  return el("dl", { class: "facts" }, pairs.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

// A flag's name, then whom and what it is about.
function flagLine(line) {
  const end = line.search(/[ :]/);
  return el("li", {}, el("strong", {}, line.slice(0, end)), line.slice(end));
}

function settingSection(setting, number, definitions) {
  const narrow = setting.figures.filter((figure) => figure.kind !== "grid").length;
  const wide = (figure, i) => figure.kind === "grid" || (i === 0 && narrow % 2 === 1); // so that no place stays empty
  const cards = setting.figures.map((figure, i) => figureCard(figure, setting.runs, wide(figure, i)));
  const part = (title, ...children) => [el("h3", {}, title), ...children];
  const replies = repliesPanel(setting);
  return el(
    "section",
    { id: `setting-${number}`, "aria-labelledby": `heading-${number}` },
    el("h2", { id: `heading-${number}` }, setting.target),
    el("ul", { class: "setting" }, setting.facts.map((fact) => el("li", {}, fact))),
    summaryList(setting.summary),
    part("Runs", runTable(setting, definitions, (ids) => cards.forEach((card) => card.show(ids)))),
    cards.length ? part("Figures", el("div", { class: "figures" }, cards.map((each) => each.card))) : null,
    replies && part("Replies, token by token", replies),
    setting.flags.length ? part("What to doubt", el("ul", { class: "flags card" }, setting.flags.map(flagLine))) : null,
    el("details", { class: "card" }, el("summary", {}, "Where these runs are from"), facts(setting.origin)),
  );
}

// What only runs of several batch sizes show together.
function batchSection(sweep, number) {
  const cards = sweep.figures.map((figure) => figureCard(figure, sweep.runs, false));
  return el(
    "section",
    { id: `batches-${number}`, "aria-labelledby": `batches-heading-${number}` },
    el("h2", { id: `batches-heading-${number}` }, `${sweep.target}, across batch sizes`),
    el("ul", { class: "setting" }, sweep.facts.map((fact) => el("li", {}, fact))),
    el("div", { class: "figures" }, cards.map((each) => each.card)),
  );
}

function start() {
  const data = JSON.parse(document.getElementById("data").textContent);
  const sections = data.settings.map((setting, i) => settingSection(setting, i + 1, data.definitions));
  const sweeps = data.batch_sizes.map((sweep, i) => batchSection(sweep, i + 1));
  const link = (id, ...words) => el("li", {}, el("a", { href: `#${id}` }, words.join(" · ")));
  const links = [
    ...data.settings.map((setting, i) => link(`setting-${i + 1}`, setting.target, ...setting.facts)),
    ...data.batch_sizes.map((sweep, i) => link(`batches-${i + 1}`, `${sweep.target}, across batch sizes`, ...sweep.facts)),
  ];
  document.getElementById("page").replaceChildren(
    el("header", {}, el("div", {}, el("h1", {}, data.title), el("p", { class: "note" }, data.made)), themeButton()),
    ...(links.length > 1 ? [el("nav", { "aria-label": "Settings" }, el("ol", {}, links))] : []),
    ...data.notes.map((note) => el("p", { class: "note warning" }, note)),
    ...sections,
    ...sweeps,
    el("details", { class: "card" }, el("summary", {}, "How the metrics are defined"), facts(Object.entries(data.definitions))),
  );
  document.body.append(hint.box);
  document.addEventListener("pointerdown", () => hint.hide());
  document.addEventListener("scroll", () => hint.place(), { passive: true, capture: true });
}

start();
