"use strict";
(() => {
  const shown = document.getElementById("live");
  const kept = sessionStorage.getItem("report-state");
  sessionStorage.removeItem("report-state");
  if (kept) window.report.restore(JSON.parse(kept));
  // the version that this page shows, not the first that is heard of: the sweep may have moved on while the page was built
  const own = shown.dataset.version;
  const LOOK_MS = 3000, RELOAD_MS = 10000; // a busy sweep must leave its readers time to read
  const look = async () => {
    try {
      const answer = await fetch(location.pathname + "?version", { cache: "no-store" });
      const version = answer.ok ? await answer.text() : own;
      shown.textContent = answer.ok ? "live" : "the sweep cannot be read at the moment; this is the last state";
      if (version !== own && performance.now() >= RELOAD_MS) {
        sessionStorage.setItem("report-state", JSON.stringify(window.report.state()));
        location.reload();
        return;
      }
    } catch {
      shown.textContent = "the server has ended; this is the last state";
    }
    setTimeout(look, LOOK_MS);
  };
  look();
})();
