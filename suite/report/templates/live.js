"use strict";
(() => {
  const shown = document.getElementById("live");
  const kept = sessionStorage.getItem("report-state");
  sessionStorage.removeItem("report-state");
  if (kept) window.report.restore(JSON.parse(kept));
  let first = null;
  const look = async () => {
    try {
      const answer = await fetch(location.pathname + "?version", { cache: "no-store" });
      const version = await answer.text();
      shown.textContent = "live";
      if (first === null) first = version;
      else if (version !== first) {
        sessionStorage.setItem("report-state", JSON.stringify(window.report.state()));
        location.reload();
        return;
      }
    } catch {
      shown.textContent = "the server has ended; this is the last state";
    }
    setTimeout(look, 3000);
  };
  look();
})();
