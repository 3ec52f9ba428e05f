// Updates the page: at each tick on the event stream, fetch the part that changes. Without scripts it reloads itself.
"use strict";

const live = document.getElementById("live");
const lost = document.getElementById("lost");
const lostAge = document.getElementById("lost-age");
let drawnAt = performance.now();
let fetching = false;
let fetchAgain = false;

// The same rules as format_duration in watcher/common/formatting.py: the two largest units.
function formatDuration(seconds) {
  if (seconds < 9.95) return seconds.toFixed(1).replace(/\.0$/, "") + " s";
  const whole = Math.round(seconds);
  const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  for (let i = 0; i < units.length - 1; i++) {
    const [name, size] = units[i];
    const [smallerName, smallerSize] = units[i + 1];
    if (whole < size) continue;
    const rest = Math.floor((whole % size) / smallerSize);
    return Math.floor(whole / size) + " " + name + (rest ? " " + rest + " " + smallerName : "");
  }
  return whole + " s";
}

async function redraw() {
  if (fetching) {
    fetchAgain = true;
    return;
  }
  fetching = true;
  try {
    const response = await fetch("/live", { signal: AbortSignal.timeout(10000) });
    if (response.ok) {
      const open = [...live.querySelectorAll("details[open]")].map((d) => d.id);
      live.innerHTML = await response.text(); // escaped by the server, and scripts in it would not run
      for (const details of live.querySelectorAll("details")) details.open = open.includes(details.id);
      drawnAt = performance.now();
      lost.hidden = true;
    }
  } catch {
    // Ignored: the banner shows how long the connection has been lost.
  }
  fetching = false;
  if (fetchAgain) {
    fetchAgain = false;
    setTimeout(redraw, 250);
  }
}

function updateAges() {
  const since = (performance.now() - drawnAt) / 1000;
  // The page reloads its part at every tick; after 8 s without one the connection is lost.
  if (since > 8) {
    lostAge.textContent = formatDuration(since);
    lost.hidden = false;
    redraw();
  }
  if (since < 1.5) return; // the server has just written the ages
  for (const age of live.querySelectorAll("[data-age]")) {
    const ageWhenDrawn = parseFloat(age.dataset.age);
    if (!Number.isNaN(ageWhenDrawn)) age.textContent = formatDuration(ageWhenDrawn + since);
  }
}

function listen() {
  const events = new EventSource("/api/v1/events");
  events.addEventListener("tick", () => { if (!document.hidden) redraw(); });
  events.addEventListener("resync", redraw);
  events.addEventListener("error", () => {
    // A browser stops reconnecting after an error response (too many streams, a restart), so reconnect here.
    if (events.readyState === EventSource.CLOSED) setTimeout(listen, 5000);
  });
}

document.addEventListener("visibilitychange", () => { if (!document.hidden) redraw(); });
setInterval(updateAges, 1000);
listen();
