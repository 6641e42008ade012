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
    const options = { responsive: true, displaylogo: false, displayModeBar: false, doubleClick: "reset", scrollZoom: false };
    const narrow = matchMedia("(max-width: 600px)").matches;
    return Plotly.react(box, data, { ...theme(layout), dragmode: narrow ? false : "zoom" }, options).then(() => (box.dataset.drawn = "yes"));
  };
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
  const passes = (cell, wanted) => {
    // of texts, `= bert` is bert alone, and not roberta
    if (cell.dataset.v === undefined && /^\s*=/.test(wanted)) return cell.textContent.trim().toLowerCase() === wanted.trim().slice(1).trim().toLowerCase();
    const compared = /^\s*(<=|>=|<|>|=)\s*(-?[\d.,]+(?:e[+-]?\d+)?)\s*([A-Za-z]*)\s*$/.exec(wanted);
    if (!compared || cell.dataset.v === undefined) return cell.textContent.toLowerCase().includes(wanted.trim().toLowerCase());
    if (cell.dataset.v === "") return false;
    const bound = Number(compared[2].replaceAll(",", "")) * (units[compared[3]] || columnUnit(cell));
    const found = Number(cell.dataset.v);
    return { "<": found < bound, ">": found > bound, "<=": found <= bound, ">=": found >= bound, "=": found === bound }[compared[1]];
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
  task.addEventListener("change", () => filter(board));
  find.addEventListener("input", () => filter(board));
  filters.addEventListener("click", () => {
    const row = board.querySelector(".filters");
    row.hidden = !row.hidden;
    filters.setAttribute("aria-expanded", String(!row.hidden));
  });
  filter(board);

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
      scroll: scrollY, task: task.value, find: find.value, filters: all(".filters input", board).map((i) => i.value),
      filtering: filters.getAttribute("aria-expanded") === "true", open: all("details[open]").map((d) => d.id || d.querySelector("summary").textContent),
      sorted: all("table").map((t) => [t.id, all("thead th", t).findIndex((h) => h.ariaSort)]).filter(([, n]) => n >= 0)
        .map(([id, n]) => [id, n, document.getElementById(id).tHead.rows[0].cells[n].ariaSort]),
    }),
    restore: (kept) => {
      if ([...task.options].some((option) => option.value === kept.task)) task.value = kept.task;
      find.value = kept.find;
      all(".filters input", board).forEach((input, n) => (input.value = kept.filters[n] || ""));
      if (kept.filtering) filters.click();
      for (const [id, at, direction] of kept.sorted) { const t = document.getElementById(id); if (t && t.tHead.rows[0].cells[at]) sort(t, at, direction); }
      all("details").forEach((d) => { if (kept.open.includes(d.id || d.querySelector("summary").textContent)) d.open = true; });
      filter(board);
      scrollTo({ top: kept.scroll, behavior: "instant" });
    },
  };
})();
