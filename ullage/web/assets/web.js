"use strict";
// The page: a question in a form and in the address, its answer as it comes, and what else can be asked of it.
// Texts become text nodes: nothing that a server or a file says is ever read as HTML.
(() => {
  const $ = (id) => document.getElementById(id);
  const DEFAULTS = {
    model: "llama-3-8b", machine: "rtx-4090", gpus: 1, how: "full", rank: 16, seq_len: null, step_tokens: null,
    optimizer: "adamw", precision: null, storage: "never", tokens: 1, days: null, price: null,
  };
  const WHOLE = ["gpus", "rank", "seq_len", "step_tokens"];
  const NUMBERS = [...WHOLE, "tokens", "days", "price"];
  const FILES = { config: "model", profile: "machine" }; // a file, and the field that it takes the place of
  const MOST_BESIDE = 3; // and the present answer
  const given = { config: null, profile: null };
  let choices = null;
  let shown = null; // the present answer, with its question
  let beside = []; // answers that were kept
  let running = null;

  function el(tag, attributes, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes ?? {})) {
      if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
      else if (value === true) made.setAttribute(name, "");
      else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
    }
    made.append(...children.filter((child) => child !== null && child !== undefined));
    return made;
  }

  // Questions, in the form and in the address.

  function read() {
    const form = $("ask");
    const found = {};
    for (const name of Object.keys(DEFAULTS)) {
      const text = form.elements[name].value.trim();
      if (NUMBERS.includes(name)) found[name] = text === "" ? DEFAULTS[name] : Number(text);
      else found[name] = text === "" ? DEFAULTS[name] : text;
    }
    for (const name of Object.keys(FILES)) if (given[name]) found[name] = given[name];
    return found;
  }

  function write(question) {
    const form = $("ask");
    for (const [name, value] of Object.entries({ ...DEFAULTS, ...question })) {
      if (name in FILES) continue;
      form.elements[name].value = value ?? "";
    }
    for (const name of Object.keys(FILES)) take(name, question[name] ?? null, question[FILES[name]]);
    form.elements.rank.parentElement.hidden = form.elements.how.value === "full";
  }

  async function packed(data) {
    const stream = new Blob([JSON.stringify(data)]).stream().pipeThrough(new CompressionStream("deflate-raw"));
    const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
    return btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join("")).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
  }

  async function unpacked(text) {
    const bytes = Uint8Array.from(atob(text.replaceAll("-", "+").replaceAll("_", "/")), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
    const reader = stream.getReader();
    const parts = [];
    let size = 0;
    for (let step = await reader.read(); !step.done; step = await reader.read()) {
      parts.push(step.value);
      size += step.value.length;
      if (size > choices.most_bytes) throw new Error("too long"); // a small address may unpack to any size
    }
    return JSON.parse(await new Blob(parts).text());
  }

  async function toText(question) {
    const found = new URLSearchParams();
    for (const [name, value] of Object.entries(question)) {
      if (name in FILES) found.set(name, await packed(value));
      else if (value !== null && (["model", "machine", "gpus"].includes(name) || value !== DEFAULTS[name])) found.set(name, value);
    }
    return found.toString();
  }

  async function fromText(text) {
    const found = { ...DEFAULTS };
    for (const [name, value] of new URLSearchParams(text)) {
      if (name in FILES) found[name] = await unpacked(value);
      else if (NUMBERS.includes(name)) found[name] = Number(value);
      else if (name in DEFAULTS) found[name] = value;
    }
    return found;
  }

  async function keepAddress(push) {
    const text = new URLSearchParams(await toText(read()));
    for (const each of beside) text.append("with", await toText(each.question));
    const address = `#?${text}`;
    if (address === location.hash) return;
    history[push ? "pushState" : "replaceState"](null, "", address);
  }

  async function fromAddress() {
    const text = location.hash.startsWith("#?") ? location.hash.slice(2) : "";
    let damaged = "";
    try {
      write(await fromText(text));
      const others = new URLSearchParams(text).getAll("with").slice(0, MOST_BESIDE);
      beside = await Promise.all(others.map(async (other) => ({ question: await fromText(other), answer: null })));
    } catch {
      write(DEFAULTS);
      damaged = "the address of this page is damaged; the question is the default one";
    }
    await keepAddress(false);
    const answer = ask(); // which begins by removing what was wrong before
    if (damaged) showError(damaged);
    await answer;
    for (const each of [...beside]) await fill(each);
  }

  // What is asked of the server: without what only the page needs.
  function asked(question, more) {
    const { tokens, days, price, ...rest } = question;
    return Object.fromEntries(Object.entries({ ...rest, ...more }).filter(([, value]) => value !== null));
  }

  async function lines(kind, question, signal, each) {
    const response = await fetch(`api/${kind}`, {
      method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(question), signal,
    });
    if (!response.ok) throw new Error((await response.json()).error);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (let step = await reader.read(); !step.done; step = await reader.read()) {
      const found = (rest + step.value).split("\n");
      rest = found.pop();
      for (const text of found) {
        const line = JSON.parse(text);
        if (line.error) throw new Error(line.error);
        if (line.result !== undefined) return line.result;
        each(line);
      }
    }
    throw new Error("the page was stopped before the answer was there; ask again");
  }

  // Runs what takes time: one thing at a time, which can be cancelled, and whose errors are one line.
  async function work(words, kind, question, first) {
    running?.abort();
    const own = new AbortController();
    running = own;
    showError("");
    status(words);
    $("cancel").hidden = false;
    const began = performance.now();
    const clock = setInterval(() => { $("elapsed").textContent = `${Math.round((performance.now() - began) / 1000)} s`; }, 1000);
    try {
      return await lines(kind, question, own.signal, (line) => {
        if (line.progress) status(line.total ? `${line.progress}: ${line.done} of ${line.total}` : line.progress);
        if (line.first) first?.(line.first);
      });
    } catch (error) {
      if (error.name !== "AbortError") showError(error.message);
      return null;
    } finally {
      clearInterval(clock);
      $("elapsed").textContent = "";
      if (running === own) {
        running = null;
        $("cancel").hidden = true;
        status("");
      }
    }
  }

  const status = (words) => { $("status").textContent = words; };
  function showError(words) {
    $("error").textContent = words;
    $("error").hidden = !words;
  }

  async function ask() {
    const question = read();
    if (!$("ask").checkValidity()) return $("ask").reportValidity();
    $("answer").classList.add("busy");
    const began = performance.now();
    const show = (answer) => {
      shown = { question, answer };
      render();
      $("answer").classList.remove("busy");
    };
    const answer = await work("asking", "answer", asked(question), show);
    if (answer === null) return $("answer").classList.remove("busy");
    show(answer);
    document.documentElement.dataset.answered = String(Number(document.documentElement.dataset.answered ?? 0) + 1);
    status(`answered in ${((performance.now() - began) / 1000).toFixed(1)} s`);
    await draw();
  }

  async function fill(kept) {
    try {
      kept.answer = await lines("answer", asked(kept.question), null, () => {});
    } catch (error) {
      kept.answer = { fits: false, error: error.message };
    }
    renderBeside();
  }

  // Answers.

  // What a row or a column of a table means, in the words of its reason.
  const MEANS = {
    parameters: "weights at the peak: those that stay, and slots for those on their way", gradients: "until their update",
    optimizer: "master copies and optimizer state", activations: "what forward saves for backward",
    workspace: "what kernels and transfers need while they run", all: "the sum, at the peak", capacity: "what the machine has for training",
    used: "all / capacity", time: "one iteration of this engine at its best setting, by the same simulator", ratio: "its time / that of ullage",
  };

  // A cell; a number in a table with reasons opens its own.
  function cellOf(data, row, i, why) {
    const words = data.words[i];
    if (!why || words || !/\d/.test(row[i])) return el("td", { class: words ? "words" : null }, row[i]);
    const facts = { [data.columns[i]]: row[i] };
    for (const name of [row[0], data.columns[i]]) if (MEANS[name]) facts[name] = `${facts[name] ?? ""} ${MEANS[name]}`.trim();
    data.columns.forEach((name, other) => { if (other && data.words[other]) facts[name] = row[other]; });
    return el("td", null, whyButton(why, `${row[0]}, ${data.columns[i]}: ${row[i]}`, facts, row[i]).firstChild);
  }

  const table = (data, why) => el("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": data.title || "table" }, el("table", null,
    el("thead", null, el("tr", null, ...data.columns.map((name, i) => el("th", { scope: "col", class: data.words[i] ? "words" : null }, name)))),
    el("tbody", null, ...data.rows.map((row, n) => el("tr", { class: data.bold.includes(n) ? "bold" : null },
      ...row.map((cell, i) => cellOf(data, row, i, why)))))));

  const described = (facts) => el("dl", { class: "about" }, ...Object.entries(facts).flatMap(([name, value]) => [el("dt", null, name), el("dd", null, value)]));

  function section(data, why) {
    const parts = data.parts.map((part) => (part.id
      ? el("figure", { class: part.wide ? "wide" : null }, el("figcaption", null, el("h3", null, part.title), el("p", null, part.note)),
        el("div", { class: "plot", id: part.id, role: "img", "aria-label": `${part.title}. ${part.note}` }),
        el("details", null, el("summary", null, "As a table"), table(part.table, why)))
      : el("div", { class: "table wide" }, el("h3", null, part.title), table(part, why), part.note ? el("p", null, part.note) : null)));
    return el("section", { "aria-label": data.title }, el("h2", null, data.title), ...data.words.map((words) => el("p", null, words)),
      why ? whyButton(why, data.title) : null, el("div", { class: "parts" }, ...parts));
  }

  // Reasons are the server's, of a name, and what is known here. Only what is known here: the name is empty.
  function whyButton(name, about, facts, text) {
    const button = el("button", { type: "button", class: text ? "why cell" : "why", "aria-expanded": "false", "aria-label": `Why: ${about}`, onclick: () => why(button, name, about, facts) }, text ?? "why?");
    return el("div", { class: "reason" }, button);
  }

  async function why(button, name, about, facts) {
    const open = button.getAttribute("aria-expanded") === "true";
    for (const other of document.querySelectorAll(".why[aria-expanded=true]")) other.setAttribute("aria-expanded", "false");
    for (const old of document.querySelectorAll(".reasons")) old.remove();
    if (open) return;
    button.setAttribute("aria-expanded", "true");
    let found = { about: {}, sections: [] };
    if (name) {
      const all = await work("finding reasons", "why", asked(shown.question));
      if (all === null || button.getAttribute("aria-expanded") !== "true") return button.setAttribute("aria-expanded", "false");
      found = all[name];
    }
    const panel = el("section", { class: "reasons", tabindex: "-1", "aria-label": `Why: ${about}` }, el("h3", null, `Why: ${about}`), described({ ...facts, ...found.about }),
      el("button", { type: "button", class: "close", onclick: () => { button.click(); button.focus(); } }, "close"),
      ...found.sections.flatMap((each) => each.parts.filter((part) => !part.id).map((part) => el("div", { class: "table" }, el("h4", null, part.title), table(part), part.note ? el("p", null, part.note) : null))));
    (button.closest("dl.facts, .scroll, .reason")).after(panel);
    panel.focus(); // which scrolls to it: on a phone it may be far below
  }

  const fact = (name, value, words, verdict, reasons) => el("div", null, el("dt", null, name), el("dd", { class: `value ${verdict ?? ""}` }, value),
    el("dd", { class: "words" }, words ?? ""), el("dd", null, whyButton(reasons ? "" : name, `${name} ${value}`, reasons).firstChild));

  const digits = (value) => value.toLocaleString("en", { maximumSignificantDigits: 3 });
  function time(seconds) {
    const [unit, name] = [[31557600, "years"], [86400, "days"], [3600, "hours"], [60, "minutes"]].find(([size]) => seconds >= 2 * size) ?? [1, "seconds"];
    return `${digits(seconds / unit)} ${name}`;
  }

  // Time and cost of the whole run.
  function run(question, numbers) {
    const tokens = question.tokens * 1e9;
    const seconds = tokens / numbers.tokens_per_s;
    const gpuHour = question.price ?? numbers.per_device_hour;
    const perHour = gpuHour === null ? null : gpuHour * numbers.num_devices + (question.price === null ? numbers.per_node_hour * numbers.num_nodes : 0);
    const cost = perHour === null ? null : (perHour * seconds) / 3600;
    const late = question.days !== null && seconds > question.days * 86400;
    const origin = question.price === null ? `${numbers.price_source}` : "your price";
    return {
      time: time(seconds), late,
      timeWords: `for ${digits(tokens)} tokens${question.days === null ? "" : late ? `, later than ${question.days} days` : `, within ${question.days} days`}`,
      timeWhy: { time: `${digits(tokens)} tokens / ${digits(numbers.tokens_per_s)} tokens/s = ${digits(seconds)} s` },
      cost: cost === null ? "unknown" : `${digits(cost)} ${numbers.currency}`,
      costWords: cost === null ? "no price is known for this machine; give that of a GPU hour" : `${digits(perHour)} ${numbers.currency} an hour; ${origin}`,
      costWhy: { cost: cost === null ? "no price is known" : `${digits(perHour)} ${numbers.currency}/h x ${digits(seconds / 3600)} h`, price: `${numbers.num_devices} GPU(s) x ${gpuHour ?? "?"} an hour: ${origin}` },
    };
  }

  function render() {
    const { question, answer } = shown;
    const place = $("answer");
    $("brief").textContent = "does not fit";
    if (!answer.fits) {
      place.replaceChildren(
        el("h2", null, "It does not fit"), el("p", { class: "sentence" }, answer.error), answer.note ? el("p", null, answer.note) : "",
        el("h3", null, answer.remedies?.length ? "It fits with" : "No change is found yet with which it fits"),
        el("ul", null, ...(answer.remedies ?? []).map((each) => el("li", null, el("code", null, each.change), ` (${digits(each.iteration_s)} s an iteration)${each.effect ? `: ${each.effect}` : ""} `, tryButton(each.change)))),
        actions(question, answer), ...same(answer));
    } else {
      const { part, numbers } = answer;
      const whole = run(question, numbers);
      $("brief").textContent = `fits, ${digits(numbers.tokens_per_s)} tokens/s, cost ${whole.cost}`;
      place.replaceChildren(
        el("h2", null, part.title), el("p", { class: "sentence" }, part.sentence),
        el("dl", { class: "facts" }, ...part.facts.map((each) => fact(each.name, each.value, [each.origin, each.words].filter(Boolean).join(": "), each.verdict)),
          fact("time", whole.time, whole.timeWords, whole.late ? "bad" : "", whole.timeWhy),
          fact("cost", whole.cost, whole.costWords, "", whole.costWhy)),
        part.warnings.length || answer.note ? el("ul", { class: "warnings" }, ...[...part.warnings, ...(answer.note ? [answer.note] : [])].map((each) => el("li", null, each))) : "",
        actions(question, answer), el("div", { id: "cheapest" }), ...same(answer),
        ...part.sections.map((each) => section(each, each.key)),
        el("details", null, el("summary", null, "Where this comes from"), described(part.about)));
    }
    $("details").replaceChildren();
    $("load-details").hidden = false;
    $("sweep-result").replaceChildren();
    for (const id of ["iteration", "sweep"]) $(id).hidden = id === "iteration" && !answer.fits;
    renderBeside();
  }

  // A button that makes a change, if it is one of fields here.
  function tryButton(change) {
    const found = {};
    for (const [, flag, value] of change.matchAll(/--(\S+) (\S+)/g)) {
      if (flag === "storage" || flag === "gpus") found[flag] = value;
      else if (flag === "lora" && value === "rank=16") Object.assign(found, { rank: 16, how: found.how ?? "lora" });
      else if (flag === "quantize" && value === "nf4") found.how = "qlora";
      else return null;
    }
    return Object.keys(found).length === 0 || change.includes(" and ") ? null : el("button", { type: "button", class: "why", onclick: () => {
      write({ ...read(), ...found });
      asking();
    } }, "try it");
  }

  function actions(question, answer) {
    const name = `${question.model}-${question.machine}`.replace(/[^\w.-]+/g, "-");
    const button = (words, does) => el("button", { type: "button", onclick: does }, words);
    const save = async (kind, type, file) => {
      const text = await work(`making ${file}`, kind, asked(question));
      if (text === null) return;
      const link = el("a", { href: URL.createObjectURL(new Blob([text], { type })), download: file });
      link.click();
      URL.revokeObjectURL(link.href);
      status(`${file} is saved`);
    };
    return el("div", { class: "actions", role: "group", "aria-label": "Take it with you" },
      ...(answer.fits ? [button("Report", () => save("report", "text/html", `${name}.html`)), button("plan.json", () => save("plan", "application/json", `${name}.plan.json`))] : []),
      button("Copy command line", () => copy(answer.command, "the command line")), button("Copy Python", () => copy(answer.python, "the Python")),
      button("Copy address", () => copy(location.href, "the address")),
      button("Keep beside", keepBeside), button("Cheapest machine", cheapest));
  }

  const same = (answer) => [el("details", { class: "same" }, el("summary", null, "The same on the command line and in Python"), el("pre", null, answer.command), el("pre", null, answer.python))];

  async function copy(text, what) {
    try {
      await navigator.clipboard.writeText(text);
      status(`${what} is copied`);
    } catch { // a page without a secure origin
      showError(`the browser lets this page copy nothing; here is ${what}: ${text}`);
    }
  }

  // Charts.

  let plotly = null;
  function loaded() {
    plotly ??= new Promise((resolve, reject) => {
      const script = el("script", { src: "assets/plotly.js" });
      script.onload = resolve;
      script.onerror = () => reject(new Error("the script of charts was not loaded; the tables have all figures"));
      document.head.append(script);
    });
    return plotly;
  }

  async function draw() {
    try {
      await loaded();
      const figures = [...(shown.answer.part?.figures ?? []), ...(shown.details?.figures ?? [])];
      window.ullageCharts(figures.filter((each) => $(each.id)), choices.themes);
    } catch (error) {
      showError(error.message);
    }
  }

  async function details() {
    const of = shown;
    const part = await work("simulating", "details", asked(of.question));
    if (part === null || of !== shown) return;
    shown.details = part;
    $("details").replaceChildren(...part.sections.map((each) => section(each)));
    $("load-details").hidden = true;
    await draw();
  }

  // What else can be asked.

  async function cheapest() {
    const question = read();
    const of = shown;
    const show = (found) => { if (shown === of) showCheapest(question, found); };
    const found = await work("comparing machines", "cheapest", asked(question, { tokens: question.tokens * 1e9, days: question.days }), show);
    if (found === null) return;
    show(found);
    status("the machines are below");
  }

  // The machines that are known: all of them are kept if the rest is cancelled, or takes too long.
  function showCheapest(question, { rows, others, currency }) {
    const money = (cost) => `${digits(cost)} ${currency}`;
    const named = ({ gpus, machine }) => `${gpus} x ${machine}`;
    const [best] = rows;
    const words = !rows.length ? "no machine with a price was found on which it fits"
      : best.late ? `None of these ends within ${question.days} days. The cheapest is ${named(best)}: ${money(best.cost)} in ${time(best.run_s)}`
        : `${named(best)}: ${money(best.cost)} in ${time(best.run_s)}`;
    const state = !others ? "So far; others are being planned. " : !others.count ? "These are all machines. "
      : others.proven ? `The ${others.count} others ${question.days === null ? "" : "end too late, or "}cost at least ${money(others.cost)}: that is how long they compute. `
        : `The ${others.count} others compute too slowly for their price. `;
    const body = rows.map((row, n) => el("tr", { class: n ? null : "bold" },
      el("th", { scope: "row" }, el("a", { href: "#", onclick: (event) => {
        event.preventDefault();
        write({ ...question, machine: row.machine, profile: null, gpus: row.gpus });
        asking();
      } }, named(row))), ...[money(row.cost), time(row.run_s), ...(question.days === null ? [] : [row.late ? "late" : "yes"]), digits(row.tokens_per_s)].map((cell) => el("td", null, cell))));
    const place = $("cheapest") ?? $("answer").appendChild(el("div", { id: "cheapest" }));
    place.replaceChildren(el("div", { class: "table", role: "region", "aria-label": "Cheapest machine" }, el("h3", null, "Cheapest machine"), el("p", null, words), rows.length
      ? el("div", { class: "scroll" }, el("table", null, el("thead", null, el("tr", null, ...["machine", "cost", "time", ...(question.days === null ? [] : ["in time"]), "tokens/s"].map((head) => el("th", { scope: "col" }, head)))), el("tbody", null, ...body))) : "",
    el("p", null, `${state}Choose a machine to see its answer, with reasons. Speeds are of the first plan found, a few percent below the best; prices are examples.`)));
  }

  async function sweep() {
    const name = $("axis").selectedOptions[0].text;
    const found = await work("planning", "sweep", asked(read(), { axis: $("axis").value }), (points) => showSweep(points, name));
    if (found !== null) showSweep(found, name);
  }

  function showSweep({ axis, points }, name) {
    const at = Number($("slider")?.value ?? 0);
    const most = Math.max(...points.map((point) => point.tokens_per_s ?? 0), 1e-9);
    const rows = points.map((point) => el("tr", null, el("td", null, point.value),
      el("td", null, point.tokens_per_s ? el("progress", { max: most, value: point.tokens_per_s, "aria-hidden": "true" }) : ""),
      el("td", null, point.tokens_per_s ? digits(point.tokens_per_s) : "-"), el("td", null, point.iteration_s ? `${digits(point.iteration_s)} s` : "-"), el("td", { class: "words" }, point.reason ?? "yes")));
    const words = el("output", { for: "slider" });
    const slider = el("input", { type: "range", class: "slider", id: "slider", min: 0, max: rows.length - 1, value: at, step: 1, "aria-label": `Value of ${name}` });
    const apply = el("button", { type: "button", onclick: () => {
      $("ask").elements[axis].value = points[slider.value].value;
      asking();
    } }, "Ask this");
    const choose = () => {
      const point = points[slider.value];
      rows.forEach((row, n) => row.classList.toggle("chosen", n === Number(slider.value)));
      words.textContent = `${point.value}: ${point.tokens_per_s ? `${digits(point.tokens_per_s)} tokens/s` : point.reason}`;
      slider.setAttribute("aria-valuetext", words.textContent);
    };
    slider.addEventListener("input", choose);
    const focused = document.activeElement?.id === "slider";
    $("sweep-result").replaceChildren(el("div", { class: "table" }, slider, el("div", { class: "line" }, words, axis in DEFAULTS ? apply : null),
      el("div", { class: "scroll" }, el("table", null, el("thead", null, el("tr", null, ...[name, "", "tokens/s", "iteration", "fits"].map((head) => el("th", { scope: "col", class: head === "fits" ? "words" : null }, head)))), el("tbody", null, ...rows))),
      el("p", null, "Figures are of the first plan found at each value, which is a few percent slower than the best. Ask a value to see its reasons.")));
    choose();
    if (focused) slider.focus();
  }

  function keepBeside() {
    if (beside.length >= MOST_BESIDE) return showError(`${MOST_BESIDE} answers are kept already; remove one`);
    beside.push({ question: shown.question, answer: shown.answer });
    renderBeside();
    keepAddress(false);
    status("kept; change the question, and compare below");
  }

  function renderBeside() {
    const kept = [...beside, ...(shown && beside.length ? [shown] : [])];
    $("beside").hidden = beside.length === 0;
    const cells = kept.map(({ question, answer }) => {
      if (!answer) return { fits: "..." };
      if (!answer.fits) return { fits: "no" };
      const whole = run(question, answer.numbers);
      return { ...Object.fromEntries(answer.part.facts.map((each) => [each.name, each.value])), time: whole.time, cost: whole.cost };
    });
    const names = [...new Set(cells.flatMap(Object.keys))];
    const heads = kept.map((each, n) => el("th", { scope: "col" }, `${each.question.model}, ${each.question.gpus} x ${each.question.machine}, ${each.question.how === "full" ? "all weights" : each.question.how}`,
      n < beside.length ? el("div", null, el("button", { type: "button", onclick: () => {
        beside.splice(n, 1);
        renderBeside();
        keepAddress(false);
      }, "aria-label": `Remove ${each.question.model} on ${each.question.machine}` }, "remove")) : el("div", null, "(this one)")));
    $("beside-result").replaceChildren(el("div", { class: "scroll" }, el("table", null, el("thead", null, el("tr", null, el("td"), ...heads)),
      el("tbody", null, ...names.map((name) => el("tr", null, el("th", { scope: "row" }, name), ...cells.map((each) => el("td", null, each[name] ?? "-"))))))));
  }

  // Files.

  function take(name, data, words) {
    given[name] = data;
    const field = $(FILES[name]);
    field.disabled = data !== null;
    if (data !== null && field.tagName === "SELECT" && ![...field.options].some((each) => each.value === words)) field.add(new Option(words, words));
    if (data !== null) field.value = words;
    $(`${name}-given`).hidden = data === null;
    $(`${name}-given`).replaceChildren(data === null ? "" : el("span", null, `${words}, from your file `), data === null ? "" : el("button", { type: "button", onclick: () => {
      take(name, null);
      field.value = DEFAULTS[FILES[name]];
      asking();
    } }, "remove"));
  }

  async function takeFile(name, file) {
    showError("");
    if (file.size > choices.most_bytes / 2) return showError(`${file.name} has ${digits(file.size)} B; at most ${digits(choices.most_bytes / 2)} are read`);
    let data = null;
    try {
      data = JSON.parse(await file.text());
    } catch { /* below */ }
    if (data === null || typeof data !== "object" || Array.isArray(data)) return showError(`${file.name} is not a JSON object; drop ${name === "config" ? "a config.json" : "a profile that ullage calibrate wrote"}`);
    const own = name === "config" ? String(data._name_or_path ?? "").split("/").pop() || file.name.replace(/\.json$/, "") : String(data.name ?? file.name.replace(/\.json$/, ""));
    take(name, data, own.slice(0, 60));
    asking();
  }

  async function asking() {
    await keepAddress(true);
    await ask();
  }

  async function begin() {
    choices = await (await fetch("api/choices")).json();
    $("models").append(...Object.entries(choices.models).map(([name, count]) => el("option", { value: name }, `${digits(count / 1e9)} billion parameters`)));
    for (const [name, each] of Object.entries(choices.machines)) $("machine").add(new Option(`${name}: ${each.words}`.slice(0, 90), name));
    for (const name of choices.optimizers) $("optimizer").add(new Option(name, name));
    $("more").open = !matchMedia("(max-width: 40rem)").matches;
    $("ask").addEventListener("invalid", () => { $("more").open = true; }, true); // a field that is hidden cannot say what is wrong
    $("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      asking();
    });
    $("ask").addEventListener("change", (event) => {
      $("rank").parentElement.hidden = $("ask").elements.how.value === "full";
      if (event.target.type !== "file") asking();
    });
    for (const name of Object.keys(FILES)) {
      $(name).addEventListener("change", () => {
        if ($(name).files.length) takeFile(name, $(name).files[0]);
        $(name).value = "";
      });
      const zone = document.querySelector(`[data-drop=${name}]`);
      for (const kind of ["dragover", "dragleave", "drop"]) {
        zone.addEventListener(kind, (event) => {
          event.preventDefault();
          zone.classList.toggle("dropping", kind === "dragover");
          if (kind === "drop" && event.dataTransfer.files.length) takeFile(name, event.dataTransfer.files[0]);
        });
      }
    }
    $("cancel").addEventListener("click", () => running?.abort());
    $("load-details").addEventListener("click", details);
    $("run-sweep").addEventListener("click", sweep);
    $("axis").addEventListener("change", () => $("sweep-result").replaceChildren());
    window.addEventListener("popstate", () => {
      if (location.hash === "" || location.hash.startsWith("#?")) fromAddress();
    });
    $("footer").textContent = "Figures are predictions of a simulator; the page sends your question to its server and keeps nothing. Prices are examples, to be replaced by your own.";
    await fromAddress();
  }

  begin().catch((error) => showError(`the page did not start: ${error.message}`));
})();
