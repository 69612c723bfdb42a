// Fills the screens of the console from its API. Keys: 1 to 8 choose a screen. All text goes through textContent.
// States come by server-sent events; while these fail, they are requested every two seconds.
const main = document.getElementById("screen");
const state = document.getElementById("state");
const links = [...document.querySelectorAll("nav a")];
let by = "user";
let round = 0;
// The last state: { status, troubles }.
let last;

const el = (tag, props = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== undefined) node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== undefined));
  return node;
};

const units = (value, step, names) => {
  let unit = 0;
  while (value >= step && unit < names.length - 1) { value /= step; unit += 1; }
  return `${value >= 100 || unit === 0 ? Math.round(value) : value.toPrecision(3)} ${names[unit]}`;
};
const bytes = (value) => units(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]);
const time = (us) => us < 1000 ? `${us} µs` : us < 1e6 ? `${Math.round(us / 1000)} ms` : us < 12e7 ? `${(us / 1e6).toFixed(1)} s` : `${Math.round(us / 6e7)} min`;

const lasting = (s) => s < 120 ? `${s} s` : s < 7200 ? `${Math.round(s / 60)} min` : s < 172800 ? `${Math.round(s / 3600)} h` : `${Math.floor(s / 86400)} d`;
const when = (s) => new Date(s * 1000).toLocaleString([], { dateStyle: "short", timeStyle: "medium" });
// Severities that ask for nobody are not red.
const mark = (severity) => el("span", { class: severity === "note" ? "" : "bad" }, severity);

const get = async (path) => {
  const answer = await fetch(`/api/v1/${path}`);
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
};

// Columns: [title, cell of a row, class]
const table = (columns, rows, empty) => {
  if (rows.length === 0) return el("p", {}, empty);
  const head = el("tr", {}, ...columns.map(([title, , kind]) => el("th", { scope: "col", class: kind }, title)));
  const line = (row) => el("tr", {}, ...columns.map(([, cell, kind]) => el("td", { class: kind }, cell(row) ?? "")));
  return el("div", { class: "table" }, el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows.map(line))));
};

const line = (points) => {
  const known = points.filter((point) => point !== null);
  const top = Math.max(1e-9, ...known);
  let path = "";
  points.forEach((point, at) => {
    if (point === null) return;
    const move = at === 0 || points[at - 1] === null ? "M" : "L";
    path += `${move}${at} ${(40 - (38 * point) / top).toFixed(1)}`;
  });
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", `0 0 ${Math.max(1, points.length - 1)} 40`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", "the last minutes");
  const drawn = document.createElementNS("http://www.w3.org/2000/svg", "path");
  drawn.setAttribute("d", path);
  svg.append(drawn);
  return svg;
};

const card = async (title, series, show) => {
  const { points } = await get(`history?series=${series}&minutes=5`);
  const last = points.findLast((point) => point !== null) ?? 0;
  return el("div", { class: "card" }, title, el("b", {}, show(last)), line(points));
};

const used = (value, limit) => limit > 0 ? el("progress", { max: limit, value, title: `${Math.round((100 * value) / limit)} %` }) : undefined;

// A bar, if there is a limit, with words.
const bar = (value, limit, words) => el("span", { class: "bar" }, used(value, limit) ?? "", el("span", {}, words));

// Waits of one kind are one row, with the longest of them.
const grouped = (waits) => {
  const rows = new Map();
  for (const w of waits) {
    const key = JSON.stringify([w.process, w.reason, w.action, w.holder || w.peer, w.pid, w.object, w.object_id, w.ended_ms_ago !== null]);
    const row = rows.get(key);
    if (!row) rows.set(key, { ...w, count: 1 });
    else { row.count += 1; row.lasted_us = Math.max(row.lasted_us, w.lasted_us); }
  }
  return [...rows.values()];
};
const rowsMax = 100;

const screens = {
  async overview(status, troubles) {
    const cards = await Promise.all([
      card("Programs' bytes", "weir_client_bytes_total", (value) => `${bytes(value)}/s`),
      card("Requests at servers", "weir_rpc_seconds", (value) => `${Math.round(value)} /s`),
      card("Writes of targets", "weir_store_write_bytes_total", (value) => `${bytes(value)}/s`),
      card("Journal syncs", "weir_journal_sync_seconds", (value) => `${Math.round(value)} /s`),
    ]);
    const space = el("div", { class: "card" }, "Space for files",
      el("b", {}, `${bytes(Math.max(0, status.capacity_bytes - status.used_bytes))} free`),
      used(status.used_bytes, status.capacity_bytes) ?? "", ` ${bytes(status.used_bytes)} of ${bytes(status.capacity_bytes)}`);
    const waits = el("div", { class: "card" }, "Waits over 10 ms", el("b", {}, `${status.waits}`), el("a", { href: "#waits" }, "which?"));
    return [
      el("div", { class: "cards" }, space, waits, ...cards),
      el("h2", {}, "Troubles"),
      troubles === null ? el("p", { class: "bad" }, "They are not known: the coordinator does not answer.")
        : table([["", (t) => t.muted_until_s ? "muted" : mark(t.severity)], ["what", (t) => t.text, "w"], ["to do", (t) => t.action, "w"]],
          troubles, "None."),
    ];
  },
  async who() {
    const { rows } = await get(`top?by=${by}`);
    const tab = (name) => el("button", { "aria-pressed": by === name, onclick: () => { by = name; show(); } }, name);
    return [
      el("p", { class: "tabs", role: "group", "aria-label": "Rows" }, ...["user", "volume", "client", "job", "kind"].map(tab)),
      table([[by, (r) => r.name], ["requests/s", (r) => Math.round(r.requests_per_s), "n"], ["bytes/s", (r) => bytes(r.bytes_per_s), "n"],
        ["waiting", (r) => r.waiting.toFixed(1), "n"], ["mostly", (r) => r.kind], ["client", (r) => r.client], ["volume", (r) => r.volume]],
      rows, "No requests in the last ten seconds."),
    ];
  },
  async machines(status) {
    return [
      el("h2", {}, "Targets"),
      table([["target", (t) => t.target], ["node", (t) => t.node], ["state", (t) => el("span", { class: t.state === "up" ? "good" : "bad" }, t.state)],
        ["used", (t) => bar(t.used_bytes, t.capacity_bytes, `${bytes(t.used_bytes)} of ${bytes(t.capacity_bytes)}`)],
        ["cells without redundancy", (t) => t.debt_cells, "n"]], status.targets ?? [], "There are no targets."),
      el("h2", {}, "Processes"),
      table([["process", (p) => p.name], ["role", (p) => p.role],
        ["", (p) => el("span", { class: p.answers ? "good" : "bad" }, p.answers ? "answers" : `does not answer: ${p.why}`), "w"]],
      status.processes ?? [], "No process answers."),
    ];
  },
  async volumes() {
    const { volumes } = await get("volumes");
    return [table([["volume", (v) => v.volume], ["used", (v) => bytes(v.used_bytes), "n"],
      ["limit", (v) => bar(v.used_bytes, v.limit_bytes ?? 0, v.limit_bytes === null ? "none" : bytes(v.limit_bytes))],
      ["files", (v) => v.files, "n"], ["directories", (v) => v.directories, "n"], ["only at home", (v) => bytes(v.evicted_bytes), "n"],
      ["requests/s", (v) => Math.round(v.requests_per_s), "n"], ["bytes/s", (v) => bytes(v.bytes_per_s), "n"]],
    volumes, "There are no volumes.")];
  },
  async homes() {
    const { homes } = await get("homes");
    const is = (h) => h.failure === "" && h.state !== "paused" && h.state !== "diverged";
    return [table([["volume", (h) => h.volume], ["home", (h) => h.home], ["state", (h) => el("span", { class: is(h) ? "good" : "bad" }, h.state)],
      ["lag", (h) => time(h.lag_ms * 1000), "n"], ["backlog", (h) => bytes(h.backlog_bytes), "n"], ["rate", (h) => `${bytes(h.rate_bytes)}/s`, "n"],
      ["movers", (h) => h.movers, "n"], ["limited by", (h) => h.failure || h.why || h.limited_by, "w"]], homes, "No volume has a home.")];
  },
  async waits() {
    const { waits, silent } = await get("waits");
    const rows = grouped(waits);
    return [
      ...silent.map((s) => el("p", { class: "bad" }, `${s.process} does not answer: ${s.why}`)),
      table([["time", (w) => time(w.lasted_us), "n"], ["", (w) => w.ended_ms_ago === null ? "waits" : `${time(w.ended_ms_ago * 1000)} ago`],
        ["calls", (w) => w.count, "n"], ["process", (w) => w.process, "w"], ["reason", (w) => w.reason],
        ["object", (w) => w.object && `${w.object} ${w.object_id}`], ["doing", (w) => w.action], ["for", (w) => w.holder || w.peer, "w"],
        ["program", (w) => w.pid ? `${w.pid} of user ${w.uid}` : "", "w"]],
      rows.slice(0, rowsMax), "Nothing waits, and nothing has waited for long in the last hour."),
      rows.length > rowsMax ? el("p", {}, `${rows.length - rowsMax} more: weir waits --since 1h lists all.`) : "",
    ];
  },
  async events() {
    const { events, mutes } = await get("events");
    const now = Math.round(Date.now() / 1000);
    const state = (e) => e.cleared_s !== null ? "cleared" : e.acknowledged_s !== null ? "lasts, known" : "lasts";
    return [
      table([["raised", (e) => when(e.raised_s)], ["lasted", (e) => lasting(Math.max(0, (e.cleared_s ?? now) - e.raised_s)), "n"], ["state", state],
        ["severity", (e) => e.cleared_s === null ? mark(e.severity) : e.severity], ["code", (e) => e.code], ["what", (e) => e.text, "w"]],
      events.toReversed(), "Nothing has happened."),
      ...mutes.map((m) => el("p", {}, `${m.code}${m.about && ` of ${m.about}`} is muted until ${when(m.until_s)}.`)),
    ];
  },
  async proof() {
    const { targets, audit, certificates } = await get("proof");
    const late = 7 * 86400;
    return [
      el("h2", {}, "Checksums"),
      table([["target", (t) => t.target], ["damaged blocks", (t) => t.damaged_blocks, "n"],
        ["repaired", (t) => el("span", { class: t.repaired_blocks < t.damaged_blocks ? "bad" : "" }, `${t.repaired_blocks}`), "n"]],
      targets, "No target reports."),
      el("h2", {}, "Audit logs"),
      table([["of", (a) => a.of], ["records", (a) => a.records, "n"], ["waiting", (a) => a.waiting, "n"], ["lost", (a) => a.lost, "n"],
        ["", (a) => el("span", { class: a.failure === "" ? "good" : "bad" }, a.failure || "is written"), "w"]], audit, "They are not known."),
      el("h2", {}, "Certificates"),
      table([["node", (c) => c.name], ["roles", (c) => c.roles.join(", ")], ["joined from", (c) => c.from],
        ["ends in", (c) => el("span", { class: c.left_s < late ? "bad" : "" }, c.left_s > 0 ? lasting(c.left_s) : "has ended"), "n"]],
      certificates, "No node has one: all roles run on this machine, and use Unix sockets."),
    ];
  },
};

const chosen = () => Object.keys(screens).find((name) => `#${name}` === location.hash) ?? "overview";

const silent = (error) => {
  state.textContent = `The console does not answer: ${error.message}`;
  state.className = "bad";
};

// Fills the chosen screen for the last state.
const show = async () => {
  const mine = ++round;
  const name = chosen();
  links.forEach((link) => link.dataset.screen === name ? link.setAttribute("aria-current", "page") : link.removeAttribute("aria-current"));
  if (!last) return;
  try {
    const content = await screens[name](last.status, last.troubles);
    if (mine !== round) return;
    state.textContent = last.status.state;
    state.className = last.status.healthy ? "good" : "bad";
    main.replaceChildren(...content);
  } catch (error) {
    if (mine === round) silent(error);
  }
};

const poll = async () => {
  try {
    const [status, troubles] = await Promise.all([get("status"), get("troubles").then((t) => t.troubles, () => null)]);
    last = { status, troubles };
    await show();
  } catch (error) {
    silent(error);
  }
};

let stream;
let polling;

const end = () => {
  stream?.close();
  clearInterval(polling);
  stream = polling = undefined;
};

// A browser connects again by itself, unless it got an answer that is not a stream.
const begin = () => {
  end();
  if (document.hidden) return;
  stream = new EventSource("/api/v1/events/stream");
  stream.addEventListener("state", (event) => {
    clearInterval(polling);
    polling = undefined;
    last = JSON.parse(event.data);
    show();
  });
  stream.addEventListener("error", () => {
    polling ??= setInterval(async () => {
      await poll();
      if (stream?.readyState === EventSource.CLOSED) begin();
    }, 2000);
  });
};

// The header stays in sight.
addEventListener("hashchange", () => { show(); main.focus({ preventScroll: true }); scrollTo(0, 0); });
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const link = links[Number(event.key) - 1];
  if (link) { location.hash = `#${link.dataset.screen}`; event.preventDefault(); }
});
document.addEventListener("visibilitychange", begin);
show();
begin();
