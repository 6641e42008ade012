"use strict";
(() => {
  const board = document.getElementById("board");
  const heads = [...board.tHead.rows[0].cells].map((head) => head.textContent);
  const inputs = board.querySelectorAll(".filters input");

  // ---- the choices above the table: each writes the filter of a column, so that one rule filters ----
  const set = (head, text) => {
    const input = inputs[heads.indexOf(head)];
    input.value = text;
    input.dispatchEvent(new Event("input"));
  };
  for (const choice of document.querySelectorAll("select[data-column]"))
    choice.addEventListener("change", () => set(choice.dataset.column, choice.value));
  const bound = document.getElementById("bound");
  const cost = document.getElementById("cost");
  let bounded = cost.value;
  const setBound = () => {
    set(bounded, "");
    bounded = cost.value;
    if (bound.value.trim()) set(bounded, `<= ${bound.value}`);
    tell();
  };
  bound.addEventListener("input", setBound);
  cost.addEventListener("change", setBound);

  // ---- the best row of each sweep and task, of a perplexity of each backbone, among those that are shown ----
  const MOST = 12;
  const best = document.getElementById("best");
  const cell = (row, head) => row.cells[heads.indexOf(head)];
  const text = (row, head) => (heads.includes(head) ? cell(row, head).textContent.trim() : "-");
  const ranks = (row) => { const found = /^(\d+)(?:-(\d+))?$/.exec(text(row, "rank")); return found && [+found[1], +(found[2] || found[1])]; };
  // ranks compare the arms of one home and backbone, and ranges that meet are no proof of a difference
  const alike = (a, b) => {
    const [one, other] = [ranks(a), ranks(b)];
    const compared = ["home", "backbone"].every((head) => text(a, head) === text(b, head));
    return one && other && compared && one[0] <= other[1] && other[0] <= one[1];
  };
  const lessIsBetter = (row) => text(row, "score").includes("\u2193");
  // a perplexity is set beside others of its backbone alone: another may have another tokenizer
  const scale = (row) => (lessIsBetter(row) ? text(row, "backbone") : "");
  const item = (rows) => {
    const score = (row) => Number(cell(row, "score").dataset.v) * (lessIsBetter(row) ? -1 : 1);
    const [first, ...others] = rows.sort((a, b) => score(b) - score(a));
    const said = document.createElement("li");
    const arm = document.createElement("strong");
    arm.textContent = text(first, "arm");
    const near = others.filter((row) => alike(first, row)).map((row) => text(row, "arm"));
    const of = scale(first) && ` of ${scale(first)}`;
    said.append(`${text(first, "sweep")}, ${text(first, "task")}${of}: `, arm, ` ${text(first, "score")}; ${cost.value} ${text(first, cost.value)}.`);
    if (near.length) said.append(` Ranks that meet its rank, and may still differ: ${near.join(", ")}.`);
    return said;
  };
  const tell = () => {
    const groups = new Map();
    for (const row of board.tBodies[0].rows) {
      if (row.hidden || row.matches(".rejected, .failed") || cell(row, "score").dataset.v === "") continue;
      const key = JSON.stringify([text(row, "sweep"), text(row, "task"), scale(row)]);
      groups.set(key, [...(groups.get(key) || []), row]);
    }
    const said = [...groups.values()].slice(0, MOST).map(item);
    if (groups.size > MOST) {
      said.push(document.createElement("li"));
      said.at(-1).append(`${groups.size - MOST} more: choose a task, a family or a sweep.`);
    }
    best.replaceChildren(...said);
    document.getElementById("h-best").hidden = !said.length;
  };
  new MutationObserver(tell).observe(board.tBodies[0], { subtree: true, attributeFilter: ["hidden"] });
  tell();
})();
