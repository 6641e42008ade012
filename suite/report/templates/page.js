"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const dark = matchMedia("(prefers-color-scheme: dark)");

  // ---- figures: drawn when they come near the screen, in the colours of the page ----
  const theme = (layout) => {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const themed = { ...layout, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)" };
    themed.font = { ...layout.font, color: colour("--text") };
    for (const key of Object.keys(layout).filter((k) => /^[xy]axis/.test(k)))
      themed[key] = { ...layout[key], gridcolor: colour("--line"), linecolor: colour("--line"), tickcolor: colour("--line") };
    return themed;
  };
  const draw = (box) => {
    const { data, layout } = JSON.parse(document.getElementById("data-" + box.dataset.key).textContent);
    for (const trace of data) if (trace.text && /text/.test(trace.mode)) trace.mode = "markers"; // names are placed below
    const options = { responsive: true, displaylogo: false, displayModeBar: false, doubleClick: "reset", scrollZoom: false };
    const narrow = matchMedia("(max-width: 600px)").matches;
    return Plotly.react(box, data, { ...theme(layout), dragmode: narrow ? false : "zoom" }, options).then(() => name(box)).then(() => (box.dataset.drawn = "yes"));
  };
  // ---- names of points: each where it covers no point, interval or other name, with a line to a point that is far ----
  const pen = document.createElement("canvas").getContext("2d");
  const overlap = (a, b) => Math.max(0, Math.min(a.right, b.right) - Math.max(a.left, b.left)) * Math.max(0, Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top));
  const around = (x, y, width, height) => ({ left: x - width / 2, right: x + width / 2, top: y - height / 2, bottom: y + height / 2 });
  const name = (box) => {
    const { xaxis, yaxis, width: whole, _size: room } = box._fullLayout;
    const taken = [], names = [];
    for (const trace of box.data) {
      if (!trace.x) continue;
      if (trace.mode === "lines") {
        // a name may lie on a line where there is no other room, so the line counts in steps of a few pixels
        trace.x.slice(1).forEach((_, n) => {
          const [from, to] = [n, n + 1].map((at) => [xaxis.l2p(xaxis.d2l(trace.x[at])), yaxis.l2p(yaxis.d2l(trace.y[at]))]);
          const steps = Math.ceil(Math.hypot(to[0] - from[0], to[1] - from[1]) / 4);
          for (let step = 0; step <= steps; step++) taken.push(around(from[0] + ((to[0] - from[0]) * step) / steps, from[1] + ((to[1] - from[1]) * step) / steps, 3, 3));
        });
      }
      if (!/markers/.test(trace.mode || "")) continue;
      trace.x.forEach((value, n) => {
        const x = xaxis.l2p(xaxis.d2l(value)), y = yaxis.l2p(yaxis.d2l(trace.y[n]));
        taken.push(around(x, y, 13, 13));
        const bars = trace.error_y;
        if (bars && bars.array) {
          const high = yaxis.l2p(yaxis.d2l(trace.y[n] + bars.array[n])), low = yaxis.l2p(yaxis.d2l(trace.y[n] - bars.arrayminus[n]));
          taken.push(around(x, (high + low) / 2, 8, low - high));
        }
        if (trace.text && trace.text[n]) names.push({ x, y, text: trace.text[n], at: [xaxis.d2l(value), yaxis.d2l(trace.y[n])] });
      });
    }
    if (!names.length) return undefined;
    pen.font = `11px ${box._fullLayout.font.family}`;
    const turns = [0, 180, 90, 270, 45, 315, 135, 225, 20, 340, 160, 200].map((degrees) => (degrees * Math.PI) / 180);
    const inside = { left: 2, right: whole - room.l - 4, top: -room.t + 2, bottom: room.h };
    const annotations = names.sort((a, b) => a.y - b.y || a.x - b.x).map(({ x, y, text, at }) => {
      const width = pen.measureText(text).width + 6, height = 15;
      let best = null;
      for (const far of [9, 16, 26, 40, 58, 80, 110, 150]) for (const turn of turns) {
        const [ax, ay] = [Math.cos(turn) * (far + width / 2), Math.sin(turn) * (far + height / 2)];
        const place = around(x + ax, y + ay, width, height);
        if (place.left < inside.left || place.right > inside.right || place.top < inside.top || place.bottom > inside.bottom) continue;
        const cost = taken.reduce((sum, other) => sum + overlap(place, other), 0);
        if (best === null || cost < best.cost) best = { cost, place, ax, ay, far };
        if (cost === 0) break;
      }
      if (best === null) return null;
      taken.push(best.place);
      return { x: at[0], y: at[1], ax: best.ax, ay: best.ay, text, showarrow: true, arrowhead: 0, arrowwidth: 1, standoff: 6, font: { size: 11 }, borderpad: 0,
        arrowcolor: best.far > 20 ? "#8a8a8a" : "rgba(0,0,0,0)" };
    });
    return Plotly.relayout(box, { annotations: annotations.filter(Boolean) });
  };
  // a phone that is turned has other room for names
  const widths = new Map();
  const turned = new ResizeObserver((boxes) => {
    for (const { target, contentRect } of boxes) {
      const known = widths.get(target);
      widths.set(target, contentRect.width);
      if (known && known !== contentRect.width && contentRect.width && target.dataset.drawn) Plotly.Plots.resize(target).then(() => name(target));
    }
  });
  all(".plot").forEach((box) => turned.observe(box));
  const near = new IntersectionObserver((seen) => {
    for (const { target, isIntersecting } of seen) if (isIntersecting) { near.unobserve(target); draw(target); }
  }, { rootMargin: "400px" });
  all(".plot").forEach((box) => near.observe(box));
  dark.addEventListener("change", () => all(".plot[data-drawn]").forEach(draw));
  const drawAll = () => all(".plot:not([data-drawn])").forEach(draw);
  addEventListener("beforeprint", () => { all("details").forEach((d) => (d.open = true)); drawAll(); });

  // ---- tables: sorted by a press on a head, filtered by text or by `> 70`, `< 0.05 Wh`, `= 3` ----
  const value = (cell) => (cell.dataset.v === undefined ? cell.textContent.trim().toLowerCase() : cell.dataset.v === "" ? null : Number(cell.dataset.v));
  const sort = (table, at, direction) => {
    const rows = all("tbody tr", table);
    const keys = new Map(rows.map((row) => [row, value(row.cells[at])]));
    const order = direction === "descending" ? -1 : 1;
    rows.sort((a, b) => {
      const [x, y] = [keys.get(a), keys.get(b)];
      if (x === null || y === null) return (x === null) - (y === null);
      return order * (typeof x === "number" ? x - y : x.localeCompare(y));
    });
    table.tBodies[0].append(...rows);
    all("thead th", table).forEach((head, n) => (n === at ? head.setAttribute("aria-sort", direction) : head.removeAttribute("aria-sort")));
  };
  // a number without a unit is in that of the column's first cell: `< 300` of memory shown in MiB is 300 MiB
  const units = {{ units | tojson }};
  const shownUnit = new RegExp(`[\\d.]\\s(${Object.keys(units).join("|")})(?:\\s|$)`);
  const unitOf = (text) => (shownUnit.exec(text) || [])[1];
  const columnUnit = (cell) => {
    const first = [...cell.closest("tbody").rows].map((row) => unitOf(row.cells[cell.cellIndex].textContent)).find(Boolean);
    return units[first] || 1;
  };
  // `mib` is MiB, as people type it; a mWh is no MWh
  const sizeOf = (unit) => units[unit] || units[Object.keys(units).find((name) => name.toLowerCase() === unit.toLowerCase())];
  // `= 83.1` is also a score that is shown as 83.1 and has more digits
  const shows = (cell, number, size) => {
    const text = cell.textContent.trim().replaceAll(",", "");
    const shown = /^[+-]?[\d.]+(?:e[+-]?\d+)?/i.exec(text);
    return shown !== null && Number(shown[0]) === number && (units[unitOf(text)] || 1) === size;
  };
  const passes = (cell, wanted) => {
    // of texts, `= bert` is bert alone, and not roberta
    if (cell.dataset.v === undefined && /^\s*=/.test(wanted)) return cell.textContent.trim().toLowerCase() === wanted.trim().slice(1).trim().toLowerCase();
    const compared = /^\s*(<=|>=|<|>|=)\s*(-?[\d.,]+(?:e[+-]?\d+)?)\s*([A-Za-z]*)\s*$/.exec(wanted);
    if (!compared || cell.dataset.v === undefined) return cell.textContent.toLowerCase().includes(wanted.trim().toLowerCase());
    if (cell.dataset.v === "") return false;
    const [, comparison, typed, unit] = compared;
    const size = unit ? sizeOf(unit) : columnUnit(cell);
    if (!size) return false; // a unit that is not known says nothing of this column's
    const number = Number(typed.replaceAll(",", ""));
    const bound = number * size;
    // a rank such as 2-4 goes by its best place: its sort key has the worst one, too
    const whole = /^(\d+)(?:-\d+)?$/.exec(cell.textContent.trim());
    const found = Number(whole ? whole[1] : cell.dataset.v);
    if (comparison === "=" && shows(cell, number, size)) return true;
    return { "<": found < bound, ">": found > bound, "<=": found <= bound, ">=": found >= bound, "=": found === bound }[comparison];
  };
  const filter = (table) => {
    const of = (name) => document.querySelector(`[data-${name}="${table.id}"]`);
    const [task, find, count] = ["task", "find", "count"].map(of);
    const wanted = all(".filters input", table).map((input, n) => [n, input.value]).filter(([, text]) => text.trim());
    const rows = all("tbody tr", table);
    for (const row of rows) {
      const there = (!task || !task.value || row.dataset.task === task.value)
        && (!find || row.textContent.toLowerCase().includes(find.value.trim().toLowerCase()))
        && wanted.every(([n, text]) => passes(row.cells[n], text));
      row.hidden = !there;
    }
    if (task) {
      // a column that says nothing about these rows only takes room
      const shown = rows.filter((row) => !row.hidden);
      const heads = [...table.tHead.rows[0].cells];
      heads.forEach((head, at) => {
        const empty = shown.length > 0 && shown.every((row) => row.cells[at].textContent === "-");
        const gone = empty || (head.textContent === "task" && task.value !== "");
        for (const row of [...table.tHead.rows, ...rows]) row.cells[at].classList.toggle("gone", gone);
      });
    }
    if (count) count.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows`;
  };
  // a perplexity, whose best is its least, has an arrow behind it
  const lessIsBetter = (table) => all("tbody tr", table).filter((row) => !row.hidden).some((row) => row.textContent.includes("\u2193"));
  for (const table of all("table")) {
    all("thead th", table).forEach((head, at) => head.querySelector("button.sort").addEventListener("click", () => {
      const isScore = /score|validation|test/.test(head.textContent) && !lessIsBetter(table);
      const first = head.classList.contains("n") && (isScore || /samples/.test(head.textContent)) ? "descending" : "ascending";
      const other = first === "ascending" ? "descending" : "ascending";
      sort(table, at, head.getAttribute("aria-sort") === first ? other : first);
    }));
    all(".filters input", table).forEach((input) => input.addEventListener("input", () => filter(table)));
  }
  const board = document.getElementById("board");
  const tools = document.querySelector(".tools");
  const task = document.querySelector('[data-task="board"]');
  const find = document.querySelector('[data-find="board"]');
  const filters = document.querySelector('[data-filters="board"]');
  tools.hidden = false;
  task.addEventListener("change", () => { filter(board); choose(); });
  find.addEventListener("input", () => filter(board));
  filters.addEventListener("click", () => {
    const row = board.querySelector(".filters");
    row.hidden = !row.hidden;
    filters.setAttribute("aria-expanded", String(!row.hidden));
  });
  const everything = document.querySelector('[data-all="board"]');
  everything.addEventListener("click", () => everything.setAttribute("aria-pressed", String(board.classList.toggle("all"))));

  // ---- the best arm within a reader's limits ----
  const form = document.getElementById("limits"); // not on the index of a site
  const limits = form ? all("[data-limit]", form) : [];
  const choices = form ? JSON.parse(document.getElementById("choices").textContent) : [];
  const choose = () => {
    if (!choices.length) return;
    const wanted = choices.some((choice) => choice.task === task.value) ? task.value : choices[0].task;
    const rows = choices.filter((choice) => choice.task === wanted);
    const set = limits.filter((input) => input.value.trim() !== "");
    const fits = rows.filter((row) => set.every((input) => row[input.dataset.limit] !== null && row[input.dataset.limit] <= Number(input.value) * Number(input.dataset.size)));
    const least = limits.map((input) => {
      const known = rows.filter((row) => row[input.dataset.limit] !== null).sort((a, b) => a[input.dataset.limit] - b[input.dataset.limit]);
      return known.length ? known[0].arm + " takes " + known[0][input.dataset.limit + "_shown"] : "";
    }).filter(Boolean);
    const [first] = fits.sort((a, b) => (a.higher ? b.score - a.score : a.score - b.score));
    const said = first
      ? `${first.arm} scores best ${first.where}: ${first.said}. ${fits.length} of ${rows.length} arms are within these limits.`
      : `No arm is within these limits ${rows[0].where}. The least: ${least.join(", ")}.`;
    form.querySelector("output").textContent = set.length ? said : limits.length > 1 ? "Give one limit or both." : "Give a limit.";
  };
  if (form) {
    form.hidden = !choices.length;
    form.addEventListener("input", choose);
    form.addEventListener("submit", (event) => event.preventDefault());
  }
  filter(board);
  choose();

  // ---- an arm's part opens when something points at it ----
  const open = () => {
    const part = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (part && part.tagName === "DETAILS") { part.open = true; part.scrollIntoView(); part.querySelector("summary").focus({ preventScroll: true }); }
  };
  addEventListener("hashchange", open);
  document.addEventListener("click", (event) => {
    const link = event.target.closest && event.target.closest('a[href^="#arm-"]');
    if (link && link.hash === location.hash) open();
  });
  open();

  // ---- what a reader has set, for a page that reloads itself ----
  window.report = {
    state: () => ({
      scroll: scrollY, task: task.value, find: find.value, limits: limits.map((input) => input.value), all: board.classList.contains("all"), filters: all(".filters input", board).map((i) => i.value),
      filtering: filters.getAttribute("aria-expanded") === "true", open: all("details[open]").map((d) => d.id || d.querySelector("summary").textContent),
      sorted: all("table").map((t) => [t.id, all("thead th", t).findIndex((h) => h.ariaSort)]).filter(([, n]) => n >= 0)
        .map(([id, n]) => [id, n, document.getElementById(id).tHead.rows[0].cells[n].ariaSort]),
    }),
    restore: (kept) => {
      if ([...task.options].some((option) => option.value === kept.task)) task.value = kept.task;
      find.value = kept.find;
      all(".filters input", board).forEach((input, n) => (input.value = kept.filters[n] || ""));
      if (kept.filtering) filters.click();
      if (kept.all) everything.click();
      limits.forEach((input, n) => (input.value = kept.limits[n] || ""));
      for (const [id, at, direction] of kept.sorted) { const t = document.getElementById(id); if (t && t.tHead.rows[0].cells[at]) sort(t, at, direction); }
      all("details").forEach((d) => { if (kept.open.includes(d.id || d.querySelector("summary").textContent)) d.open = true; });
      filter(board);
      choose();
      scrollTo({ top: kept.scroll, behavior: "instant" });
    },
  };
})();
