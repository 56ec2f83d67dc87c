"use strict";
// Draws the charts of a report: in the colours of the theme, linked along the time of the iteration, and on paper.
(() => {
  let figures = [];
  let themes = {};
  const paper = window.matchMedia("print");
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const coarse = window.matchMedia("(pointer: coarse)").matches;
  const PRINT_PX = 690; // an A4 page between its margins
  const NARROW_PX = 560;
  const MERGED_PX = 1.2; // what is narrower than that is drawn together with its neighbours
  const HOVER_PX = 12; // between places of a bar that show what it is
  let printing = false;
  const state = {};

  const chosen = () => document.documentElement.dataset.theme;
  const dark = () => !printing && (chosen() === "dark" || (chosen() !== "light" && system.matches));

  // "@name" and "@name/opacity" become colours of the theme.
  function coloured(value, colours) {
    if (typeof value === "string" && value.startsWith("@")) {
      const [name, opacity] = value.slice(1).split("/");
      const hex = colours[name];
      if (opacity === undefined) return hex;
      const part = (i) => parseInt(hex.slice(i, i + 2), 16);
      return `rgba(${part(1)},${part(3)},${part(5)},${opacity})`;
    }
    if (Array.isArray(value)) { // many numbers are as they are; a scale has pairs of a number and a colour
      return value.length > 2 && typeof value[0] === "number" ? value : value.map((item) => coloured(item, colours));
    }
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, coloured(item, colours)]));
    }
    return value;
  }

  // The tasks of one row between two moments, as bars of at least a pixel. Of tasks that share one the longest work
  // gives its colour.
  function bars(row, from, to, perPixel) {
    const found = [];
    let low = 0;
    let high = row.end.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (row.end[middle] < from) low = middle + 1;
      else high = middle;
    }
    let group = null;
    const close = () => {
      if (group === null) return;
      let best = 0;
      for (const [work, length] of group.lengths) {
        if (length > (group.lengths.get(best) ?? -1)) best = work;
      }
      found.push({ start: group.start, end: group.end, work: best, count: group.count, task: group.task });
      group = null;
    };
    for (let i = low; i < row.start.length && row.start[i] <= to; i++) {
      const length = row.end[i] - row.start[i];
      if (length >= MERGED_PX * perPixel) {
        close();
        found.push({ start: row.start[i], end: row.end[i], work: row.work[i], count: 1, task: row.task[i] });
        continue;
      }
      if (group !== null && row.end[i] - group.start > 2 * MERGED_PX * perPixel) close();
      if (group === null) {
        group = { start: row.start[i], end: row.end[i], lengths: new Map(), count: 0, task: row.task[i] };
      }
      group.end = Math.max(group.end, row.end[i]);
      group.count += 1;
      group.lengths.set(row.work[i], (group.lengths.get(row.work[i]) ?? 0) + length);
    }
    close();
    return found;
  }

  const seconds = (value) => {
    const steps = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]];
    const [unit, name] = steps.find(([size]) => Math.abs(value) >= size) ?? steps[value === 0 ? 0 : 3];
    return `${(value / unit).toPrecision(3)} ${name}`;
  };

  function ganttTraces(figure, range, width) {
    const [from, to] = range.map((moment) => moment / figure.tick);
    const perPixel = (to - from) / Math.max(width, 1);
    const traces = figure.work.map((work) => ({
      type: "scatter", mode: "lines", name: work.name, x: [], y: [], fill: "toself", fillcolor: work.color,
      line: { width: 0.4, color: work.color }, hoverinfo: "skip",
    }));
    const hover = {
      type: "scatter", mode: "markers", x: [], y: [], text: [], showlegend: false, name: "",
      marker: { size: 12, opacity: 0 }, hovertemplate: "%{text}<extra></extra>",
    };
    figure.rows.forEach((row, number) => {
      for (const bar of bars(row, from, to, perPixel)) {
        const [start, end] = [bar.start * figure.tick, bar.end * figure.tick];
        const trace = traces[bar.work];
        trace.x.push(start, end, end, start, start, null);
        trace.y.push(number - 0.38, number - 0.38, number + 0.38, number + 0.38, number - 0.38, null);
        const when = `from ${seconds(start)}, ${seconds(end - start)} long`;
        const what = bar.count > 1 ? `${bar.count} tasks, mostly ${figure.work[bar.work].name}` : figure.names[bar.task];
        const first = Math.max(bar.start, from);
        const last = Math.min(bar.end, to);
        const places = Math.max(1, Math.round((last - first) / perPixel / HOVER_PX));
        for (let i = 0; i < places; i++) {
          hover.x.push((first + ((last - first) * (i + 0.5)) / places) * figure.tick);
          hover.y.push(number);
          hover.text.push(`${what}<br>${row.name}: ${when}`);
        }
      }
    });
    return [...traces, hover];
  }

  function layoutOf(figure, width) {
    const narrow = width < NARROW_PX;
    const layout = structuredClone(figure.layout);
    const wide = figure.kind === "bars" ? 24 : 8;
    const base = {
      width,
      paper_bgcolor: "@paper", plot_bgcolor: "@paper",
      font: { family: "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", size: 12, color: "@ink" },
      margin: { l: narrow ? 48 : 64, r: narrow ? wide : 24, t: coarse && !printing ? 54 : 26, b: 44 },
      legend: { orientation: "h", x: 0, xref: "container", y: 0, yref: "container", yanchor: "bottom", font: { size: 12 } },
      dragmode: coarse ? false : "zoom",
      hoverlabel: { bgcolor: "@paper", bordercolor: "@soft", font: { color: "@ink", size: 12 } },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: "@soft", activecolor: "@ink" },
    };
    const result = { ...base, ...layout };
    result.height += result.margin.t - 26;
    result.margin.b += result.showlegend ? legendPx(figure, width) : 0;
    result.height += result.showlegend ? legendPx(figure, width) : 0;
    for (const axis of ["xaxis", "yaxis"]) {
      result[axis] = {
        gridcolor: "@grid", zerolinecolor: "@soft", linecolor: "@soft", tickcolor: "@soft", nticks: narrow ? 5 : 9,
        ...layout[axis],
      };
    }
    if (narrow) for (const axis of ["xaxis", "yaxis"]) fewerTicks(result[axis]);
    if (figure.kind === "bars") result.xaxis.range = roomForWords(figure, width);
    if (state[figure.id]?.range && figure.linked) result.xaxis.range = state[figure.id].range;
    // A word has room for itself only where its stretch is wide enough.
    result.annotations = (layout.annotations ?? [])
      .filter((note) => note.share === undefined || note.share * (width - namesPx(figure) - 24) > 6.4 * note.text.length)
      .map(({ share, ...note }) => note);
    return result;
  }

  function fewerTicks(axis) {
    axis.title = { ...axis.title, font: { size: 10 } };
    if (!Array.isArray(axis.ticktext) || axis.type !== "log" || axis.tickvals.length < 4) return;
    axis.ticktext = axis.ticktext.map((text, i) => (i % 2 ? "" : text));
  }

  // Words stand behind bars, where they can be read in any colour: an axis is longer than its longest bar.
  function roomForWords(figure, width) {
    const values = figure.data.flatMap((trace) => trace.x);
    const ends = figure.layout.barmode === "stack"
      ? figure.data[0].y.map((_, i) => figure.data.reduce((sum, trace) => sum + trace.x[i], 0)) : values;
    const limits = (figure.layout.shapes ?? []).map((shape) => (shape.yref === "paper" ? shape.x1 : 0));
    const [low, high] = [Math.min(0, ...ends), Math.max(1e-12, ...ends, ...limits)];
    const words = figure.layout.barmode === "stack" ? 0 : Math.max(0, ...figure.data.flatMap(
      (trace) => (Array.isArray(trace.text) ? trace.text.map((text) => text.length) : [6])));
    const room = Math.max(width - namesPx(figure) - 30, 60);
    const share = Math.min((6.3 * words + 12) / room, 0.7);
    const extra = (share / (1 - share)) * (high - low);
    return [low < 0 ? low - extra : low, high + extra];
  }

  // Pixels left of the plot: names of bars and lanes, or figures.
  function namesPx(figure) {
    const names = figure.layout.yaxis.categoryarray ?? (figure.kind === "gantt" ? figure.layout.yaxis.ticktext : null);
    if (names === null) return 66;
    return 14 + 6.6 * Math.max(0, ...names.flatMap((name) => name.split("<br>").map((line) => line.length)));
  }

  // Lines of a legend, which is as wide as the plot, and its entries as wide as their longest.
  function legendPx(figure, width) {
    const names = (figure.kind === "gantt" ? figure.work : figure.data.filter((trace) => trace.showlegend !== false))
      .map((trace) => trace.name.length * 6.8 + 58);
    const longest = Math.max(0, ...names);
    const perLine = Math.max(1, Math.floor((width - namesPx(figure) - 24) / Math.max(longest, 1)));
    return Math.ceil(names.length / perLine) * 20 + 6;
  }

  function configOf(figure) {
    const whole = {
      name: "Show the whole iteration", icon: Plotly.Icons.home, click: () => zoom(figure.part, null),
    };
    return {
      displaylogo: false,
      doubleClick: figure.linked ? false : "reset",
      modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", ...(figure.linked ? ["resetScale2d"] : [])],
      modeBarButtonsToAdd: figure.linked ? [whole] : [],
      toImageButtonOptions: { format: "svg", filename: figure.key },
    };
  }

  function dataOf(figure, layout, width) {
    if (figure.kind !== "gantt") return figure.data;
    return ganttTraces(figure, layout.xaxis.range, width - layout.margin.l - layout.margin.r);
  }

  function draw(figure) {
    const place = document.getElementById(figure.id);
    const width = printing ? PRINT_PX : Math.floor(place.clientWidth);
    const colours = themes[dark() ? "dark" : "light"];
    const layout = layoutOf(figure, width);
    const data = dataOf(figure, layout, width);
    const first = state[figure.id] === undefined;
    state[figure.id] ??= {};
    state[figure.id].width = width;
    Plotly.react(place, coloured(data, colours), coloured(layout, colours), configOf(figure));
    if (!first || !figure.linked) return;
    state[figure.id].whole = [...figure.layout.xaxis.range];
    place.on("plotly_relayout", (change) => {
      const [from, to] = change["xaxis.range"] ?? [change["xaxis.range[0]"], change["xaxis.range[1]"]];
      if (from !== undefined) zoom(figure.part, [Number(from), Number(to)]);
    });
    place.on("plotly_doubleclick", () => zoom(figure.part, null));
  }

  // All charts over the time of one iteration show the same part of it; null: all of it.
  function zoom(part, range) {
    for (const figure of figures.filter((each) => each.linked && each.part === part && state[each.id])) {
      state[figure.id].range = range;
      draw(figure);
    }
  }

  function drawAll() {
    for (const figure of figures) draw(figure);
  }

  // One after another, so that the page answers meanwhile.
  function drawInTurn(rest) {
    if (rest.length > 0 && !figures.includes(rest[0])) return; // others took their place
    if (rest.length === 0) {
      document.documentElement.dataset.drawn = "yes";
      return;
    }
    draw(rest[0]);
    setTimeout(() => drawInTurn(rest.slice(1)), 0);
  }

  function show(theme) {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    for (const button of document.querySelectorAll("[data-choose]")) {
      button.setAttribute("aria-pressed", String(button.dataset.choose === theme));
    }
    try {
      localStorage.setItem("ullage-theme", theme);
    } catch { /* a browser that keeps nothing for files */ }
  }

  for (const button of document.querySelectorAll("[data-choose]")) {
    button.addEventListener("click", () => {
      show(button.dataset.choose);
      drawAll();
    });
  }
  let kept = null;
  try {
    kept = localStorage.getItem("ullage-theme");
  } catch { /* as above */ }
  show(["light", "dark"].includes(kept) ? kept : "auto");
  system.addEventListener("change", drawAll);

  let waiting = 0;
  window.addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => {
      if (printing) return;
      for (const figure of figures) {
        const width = Math.floor(document.getElementById(figure.id).clientWidth);
        if (state[figure.id]?.width !== width) draw(figure);
      }
    }, 120);
  });
  const print = (on) => {
    if (printing === on) return;
    printing = on;
    drawAll();
  };
  window.addEventListener("beforeprint", () => print(true));
  window.addEventListener("afterprint", () => print(false));
  paper.addEventListener("change", (event) => print(event.matches));

  // Draws figures in place of those before; their places are in the page.
  window.ullageCharts = (newFigures, newThemes) => {
    for (const id of Object.keys(state)) delete state[id];
    [figures, themes] = [newFigures, newThemes];
    drawInTurn(figures);
  };
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  if (document.getElementById("figures")) window.ullageCharts(read("figures"), read("themes"));
})();
