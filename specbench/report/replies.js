"use strict";

// Replies token by token: where each token came from, and a player that steps through the rounds.

const ORIGINS = {
  accepted: ["accepted draft", "a draft that the target accepted"],
  correction: ["correction", "the target's own token, in place of a draft that was not accepted"],
  bonus: ["bonus", "the target's own token, after drafts that were all accepted"],
  plain: ["undrafted", "the target's own token, where nothing was drafted"],
  prefill: ["prefill", "the reply's first token, from the pass over the prompt"],
};
const ENDS = { eos: "an end token", stop_string: "a stop string", length: "the length limit", context: "the end of the context" };

function repliesPanel(setting) {
  const { prompts, replies } = setting.replies;
  const ids = Object.keys(replies);
  if (!prompts.length || !ids.length) return null;
  const runs = el("select", { onchange: load }, ids.map((id) => el("option", { value: id }, setting.runs[id].name)));
  const asked = el("select", { onchange: load }, prompts.map((prompt, i) => el("option", { value: i }, `${prompt.category.replaceAll("_", " ")} · ${prompt.text.slice(0, 44)}`)));
  const prompt = el("p", { class: "prompt" });
  const uid = el("summary");
  const view = tokenView(setting, (round) => steps.goTo(round));
  const steps = player(setting);

  function load() {
    const chosen = prompts[asked.value];
    const reply = replies[runs.value][chosen.uid];
    hint.hide();
    prompt.textContent = chosen.text;
    uid.textContent = `The prompt, ${chosen.uid}`;
    view.load(reply);
    steps.load(reply);
  }

  load();
  return el(
    "div",
    { class: "card replies" },
    el("div", { class: "choices" }, el("label", {}, "Run ", runs), el("label", {}, "Prompt ", asked)),
    setting.pieces ? null : el("p", { class: "note warning" }, "The target's own tokenizer was not at hand when this page was made, so tokens are shown by their numbers."),
    el("details", { class: "asked" }, uid, prompt),
    el("h4", {}, "Where each token came from"),
    view.node,
    el("h4", {}, "Round by round"),
    steps.node,
  );
}

function piece(setting, token) {
  return setting.pieces?.[token] ?? `⟨${token}⟩`;
}

// Text with its line ends to be seen; blanks keep their width by the style sheet.
function visible(words) {
  return words.replaceAll("\r", "␍").replaceAll("\n", "↵\n").replaceAll("\t", "⇥\t");
}

function token(setting, id, origin) {
  return el("span", { class: `token ${origin}` }, visible(piece(setting, id)));
}

// The tokens that a round adds to the reply: each with its origin and its place in the draft.
function added(round) {
  const kept = round.drafted.slice(0, round.accepted).map((id, i) => ({ id, origin: "accepted", place: i + 1 }));
  return round.own === null ? kept : [...kept, { id: round.own, origin: round.kind, place: round.accepted + 1 }];
}

function tokenView(setting, onRound) {
  const said = el("p", { class: "hidden-but-read", role: "status" });
  const text = el("div", { class: "text", tabindex: "0", role: "group", "aria-label": "The reply. Arrow keys go from token to token, Enter shows a token's round below." });
  const legend = el("div", { class: "keys" });
  let tokens = [];
  let at = -1;

  function about(each, number) {
    const place = each.round === 0 ? "prefill" : `round ${each.round}, ${each.origin === "accepted" ? `draft ${each.place} of ${each.drafted}` : `place ${each.place} of the pass`}`;
    return [`“${visible(piece(setting, each.id)).trimEnd()}”`, ORIGINS[each.origin][1], place, `token ${number + 1} of ${tokens.length}, number ${each.id} of the vocabulary`];
  }

  function focusOn(number) {
    tokens[at]?.node.classList.remove("current");
    at = Math.min(Math.max(0, number), tokens.length - 1);
    const each = tokens[at];
    each.node.classList.add("current");
    each.node.scrollIntoView({ block: "nearest" });
    hint.show(each.node, about(each, at));
    said.textContent = about(each, at).join("; ");
  }

  text.addEventListener("keydown", (event) => {
    const moves = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tokens.length - 1 };
    if (event.key in moves) focusOn(moves[event.key]);
    else if (event.key === "Enter" && at >= 0) onRound(tokens[at].round);
    else if (event.key === "Escape") hint.hide();
    else return;
    event.preventDefault();
  });
  text.addEventListener("blur", () => hint.hide());

  function load(reply) {
    at = -1;
    said.textContent = "";
    tokens = reply.rounds.flatMap((round, i) => added(round).map((each) => ({ ...each, round: i, drafted: round.drafted.length })));
    tokens.forEach((each, number) => {
      each.node = token(setting, each.id, each.origin);
      each.node.addEventListener("click", () => onRound(each.round));
      hint.on(each.node, about(each, number));
    });
    text.replaceChildren(...tokens.map((each) => each.node));
    legend.replaceChildren(
      ...Object.entries(ORIGINS).map(([origin, [name, meaning]]) => {
        const count = tokens.filter((each) => each.origin === origin).length;
        return hint.on(el("span", { class: "key" }, el("span", { class: `token sample ${origin}` }, name), el("span", { class: "count" }, count)), [name, meaning]);
      }),
    );
  }

  return { node: el("div", {}, legend, text, said), load };
}

function player(setting) {
  const counters = Object.fromEntries(COUNTERS.map(([name]) => [name, el("dd", {}, "0")]));
  const caption = el("p", { class: "caption", "aria-live": "polite" });
  const text = el("div", { class: "text sofar", tabindex: "0", role: "region", "aria-label": "The reply so far" });
  const pass = el("div", { class: "pass" });
  const slider = el("input", { type: "range", min: "0", "aria-label": "Step", oninput: () => show(Number(slider.value)) });
  const play = el("button", { type: "button", class: "play", onclick: toggle }, "Play");
  const speed = el("select", { "aria-label": "Speed", onchange: () => timer && start() }, [["0.5×", 1600], ["1×", 800], ["2×", 400], ["4×", 200]].map(([words, pause]) => el("option", { value: pause, selected: pause === 800 }, words)));
  let reply = null;
  let frames = [];
  let at = 0;
  let timer = null;

  // A round that drafted is shown in three frames (draft, verify, commit), another in two, prefill in one.
  function load(loaded) {
    stop();
    reply = loaded;
    frames = reply.rounds.flatMap((round, i) => phases(round, i).map((phase) => ({ round: i, phase })));
    slider.max = frames.length - 1;
    show(0);
  }

  function show(number) {
    at = Math.min(Math.max(0, number), frames.length - 1);
    const { round, phase } = frames[at];
    slider.value = at;
    slider.setAttribute("aria-valuetext", `round ${round} of ${reply.rounds.length - 1}, ${phase}`);
    count(round, phase);
    caption.textContent = describe(round, phase);
    const before = reply.rounds.slice(0, phase === "commit" ? round + 1 : round).flatMap((each, i) => added(each).map((one) => ({ ...one, fresh: i === round })));
    text.replaceChildren(
      ...before.map((each) => token(setting, each.id, each.fresh ? each.origin : `${each.origin} old`)),
      el("span", { class: "cursor", "aria-hidden": "true" }),
    );
    text.scrollTop = text.scrollHeight;
    pass.replaceChildren(...(round === 0 ? [] : slots(reply.rounds[round], phase)));
    if (at === frames.length - 1) stop();
  }

  function count(round, phase) {
    const done = phase === "commit" ? round : round - 1; // rounds whose tokens are in the reply
    const tokens = done < 0 ? 0 : reply.rounds[done].tokens;
    const passes = phase === "draft" ? round - 1 : round;
    const values = {
      passes,
      drafts: reply.rounds[round].drafts,
      tokens,
      rate: done > 0 ? ((tokens - 1) / done).toFixed(2) : "–",
      plain: Math.max(0, tokens - 1),
    };
    for (const [name, value] of Object.entries(values)) counters[name].textContent = value;
  }

  function describe(number, phase) {
    const round = reply.rounds[number];
    const [drafted, kept] = [round.drafted.length, round.accepted];
    if (number === 0) return "Prefill: the target reads the prompt and gives the reply's first token. This is no verify pass.";
    const where = `Round ${number} of ${reply.rounds.length - 1}, ${phase}. `;
    if (phase === "draft") return `${where}The drafter proposes ${counted(drafted, "token")}.`;
    if (phase === "verify") return where + (drafted ? `One pass of the target judges ${drafted === 1 ? "it" : "all of them"}.` : "Nothing was drafted: the pass is one step of plain decoding.");
    const end = number === reply.rounds.length - 1 ? ` The reply ends by ${ENDS[reply.finish] ?? reply.finish}.` : "";
    if (round.own === null) return `${where}The text ends within the draft: ${kept} of ${drafted} kept.${end}`;
    if (!drafted) return `${where}The target gives one token.${end}`;
    if (kept === drafted) return `${where}${drafted === 1 ? "The draft is" : `All ${drafted} drafts are`} accepted, and the target adds a token of its own.${end}`;
    const dropped = drafted - kept - 1;
    const rest = dropped ? ` ${dropped} after it ${dropped === 1 ? "is" : "are"} dropped.` : "";
    return `${where}${kept} of ${drafted} accepted. Draft ${kept + 1} is not: the target's own token takes its place.${rest}${end}`;
  }

  const cell = (id, origin) => el("span", { class: `token ${origin}` }, visible(piece(setting, id)).replaceAll("\n", "")); // on one line

  // The pass, a column for each place: above what was drafted, below what the target made of it.
  function slots(round, phase) {
    const drafts = round.drafted.map((id, i) => {
      if (phase !== "commit") return slot(cell(id, "draft"), phase === "verify" ? mark("?") : mark(""));
      if (i < round.accepted) return slot(cell(id, "accepted"), mark("kept"));
      if (i === round.accepted && round.own !== null) return slot(cell(id, "wrong"), cell(round.own, round.kind));
      return slot(cell(id, "dropped"), mark("dropped"));
    });
    const last = round.kind === "bonus" || round.kind === "plain";
    const after = phase === "commit" ? last && slot(mark(""), cell(round.own, round.kind)) : phase === "verify" && slot(mark(""), mark("?"));
    return [slot(el("span", { class: "lane" }, "draft"), el("span", { class: "lane" }, "target")), ...drafts, ...(after ? [after] : [])];
  }

  function toRound(number) {
    const round = Math.min(Math.max(0, number), reply.rounds.length - 1);
    show(frames.findLastIndex((frame) => frame.round === round));
  }

  function start() {
    stop();
    if (at === frames.length - 1) show(0);
    timer = setInterval(() => show(at + 1), Number(speed.value));
    play.textContent = "Pause";
  }

  function stop() {
    clearInterval(timer);
    timer = null;
    play.textContent = "Play";
  }

  function toggle() {
    if (timer) stop();
    else start();
  }

  function move(action) {
    stop();
    action();
  }

  const button = (words, label, action) => el("button", { type: "button", "aria-label": label, title: label, onclick: () => move(action) }, words);
  const controls = el(
    "div",
    { class: "controls" },
    button("«", "Previous round (Shift+Left)", () => toRound(frames[at].round - 1)),
    button("‹", "Previous step (Left)", () => show(at - 1)),
    play,
    button("›", "Next step (Right)", () => show(at + 1)),
    button("»", "Next round (Shift+Right)", () => toRound(frames[at].round + 1)),
    speed,
    slider,
  );
  const node = el(
    "div",
    { class: "player", tabindex: "0", role: "group", "aria-label": "Player of the rounds. Left and right go step by step, with Shift round by round; Space plays." },
    el("dl", { class: "counters" }, COUNTERS.map(([name, words]) => el("div", { class: `counter ${name}` }, el("dt", {}, words), counters[name]))),
    controls,
    caption,
    text,
    pass,
    el("p", { class: "note" }, "Passes of plain decoding: what it would have needed for the same tokens. Prefill and its token count on neither side."),
  );
  node.addEventListener("keydown", (event) => {
    if (event.target === slider || event.target === speed) return;
    const round = frames[at].round;
    const moves = {
      ArrowRight: () => (event.shiftKey ? toRound(round + 1) : show(at + 1)),
      ArrowLeft: () => (event.shiftKey ? toRound(round - 1) : show(at - 1)),
      Home: () => show(0),
      End: () => show(frames.length - 1),
    };
    if (event.key in moves) move(moves[event.key]);
    else if (event.key === " " && event.target.tagName !== "BUTTON") toggle();
    else return;
    event.preventDefault();
  });
  return { node, load, goTo: (number) => move(() => toRound(number)) };
}

const COUNTERS = [
  ["passes", "target passes"],
  ["plain", "passes of plain decoding"],
  ["tokens", "tokens"],
  ["rate", "tokens per pass"],
  ["drafts", "rounds that drafted"],
];

function phases(round, number) {
  if (number === 0) return ["commit"];
  return round.drafted.length ? ["draft", "verify", "commit"] : ["verify", "commit"];
}

function counted(number, what) {
  return `${number} ${what}${number === 1 ? "" : "s"}`;
}

function slot(above, below) {
  return el("div", { class: "slot" }, above, below);
}

function mark(words) {
  return el("span", { class: "mark" }, words);
}
