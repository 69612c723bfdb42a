// Fills the screens of the console from its API. Keys: 1 to 6 choose a screen. All text goes through textContent.
const main = document.getElementById("screen");
const state = document.getElementById("state");
const links = [...document.querySelectorAll("nav a")];
let by = "user";
let round = 0;

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

const screens = {
  async overview(status) {
    const [found, ...cards] = await Promise.all([
      get("troubles").then(({ troubles }) => troubles, (error) => [{ severity: "unknown", about: "", text: error.message, action: "" }]),
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
      table([["", (t) => el("span", { class: "bad" }, t.severity)], ["what", (t) => t.text, "w"], ["to do", (t) => t.action, "w"]],
        found, "None."),
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
        ["used", (t) => used(t.used_bytes, t.capacity_bytes)], ["", (t) => `${bytes(t.used_bytes)} of ${bytes(t.capacity_bytes)}`, "n"],
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
      ["limit", (v) => v.limit_bytes === null ? "none" : bytes(v.limit_bytes), "n"], ["", (v) => used(v.used_bytes, v.limit_bytes ?? 0)],
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
    return [
      ...silent.map((s) => el("p", { class: "bad" }, `${s.process} does not answer: ${s.why}`)),
      table([["time", (w) => time(w.lasted_us), "n"], ["", (w) => w.ended_ms_ago === null ? "waits" : `${time(w.ended_ms_ago * 1000)} ago`],
        ["process", (w) => w.process], ["reason", (w) => w.reason], ["object", (w) => w.object && `${w.object} ${w.object_id}`],
        ["doing", (w) => w.action], ["for", (w) => w.holder || w.peer, "w"], ["program", (w) => w.pid ? `${w.pid} of user ${w.uid}` : ""]],
      waits, "Nothing waits, and nothing has waited for long in the last hour."),
    ];
  },
};

const chosen = () => Object.keys(screens).find((name) => `#${name}` === location.hash) ?? "overview";

const show = async () => {
  const mine = ++round;
  const name = chosen();
  links.forEach((link) => link.dataset.screen === name ? link.setAttribute("aria-current", "page") : link.removeAttribute("aria-current"));
  try {
    const status = await get("status");
    const content = await screens[name](status);
    if (mine !== round) return;
    state.textContent = status.state;
    state.className = status.healthy ? "good" : "bad";
    main.replaceChildren(...content);
  } catch (error) {
    if (mine === round) { state.textContent = `The console does not answer: ${error.message}`; state.className = "bad"; }
  }
};

addEventListener("hashchange", () => { show(); main.focus(); });
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const link = links[Number(event.key) - 1];
  if (link) { location.hash = `#${link.dataset.screen}`; event.preventDefault(); }
});
document.addEventListener("visibilitychange", show);
setInterval(() => { if (!document.hidden) show(); }, 2000);
show();
