// Fills the screens of the console from its API. Keys: 1 to 8 choose a screen.
// States come by server-sent events; while these fail, they are requested every two seconds.
import { bytes, el, lasting, number, patchChildren, table, time, when, withCommands } from "./dom.js";
import { graph } from "./graph.js";

const main = document.getElementById("screen");
const state = document.getElementById("state");
const asOf = document.getElementById("as-of");
const icon = document.getElementById("icon");
const links = [...document.querySelectorAll("nav a")];
const ranges = [[5, "5 min"], [60, "1 h"], [360, "6 h"], [1440, "24 h"], [2880, "48 h"]];
let by = "user";
let chosenTarget;
let round = 0;
// The last state: { status, troubles }.
let last;

// A browser may refuse to keep anything.
const recall = (name) => { try { return localStorage.getItem(name); } catch { return null; } };
const keep = (name, value) => { try { localStorage.setItem(name, value); } catch { /* it is chosen again */ } };
let minutes = ranges.map(([m]) => m).find((m) => `${m}` === recall("weir-minutes")) ?? 5;

// Severities that ask for nobody are not red.
const mark = (severity) => el("span", { class: severity === "note" ? "" : severity === "warning" ? "warn" : "bad" }, severity);
const yes = (is, words) => el("span", { class: is ? "good" : "bad" }, words);

const get = async (path) => {
  const answer = await fetch(`/api/v1/${path}`);
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
};

// Answers that the screen does not wait for: the last one, and a new one when it is old.
const answers = new Map();
const lately = (path, freshS) => {
  const known = answers.get(path) ?? { at: -Infinity };
  answers.set(path, known);
  if (!known.asked && performance.now() - known.at > freshS * 1000) {
    known.asked = true;
    get(path).then((answer) => { known.answer = answer; }, () => {}).finally(() => {
      [known.asked, known.at] = [false, performance.now()];
      if (!document.hidden) show();
    });
  }
  if (answers.size > 200) answers.delete(answers.keys().next().value);
  return known.answer;
};

const series = (title, name, show, isBytes) => {
  const read = lately(`history?series=${encodeURIComponent(name)}&minutes=${minutes}`, minutes <= 5 ? 4 : minutes <= 60 ? 15 : 60);
  return graph({ title, key: `graph ${name}`, read, minutes, show, isBytes });
};
const perSecond = (value) => `${bytes(value)}/s`;
const rate = (value) => `${number(value)}/s`;
const nanos = (value) => time(value / 1000);

const range = () => el("p", { class: "tabs", role: "group", "aria-label": "Time range of the graphs", key: "range" },
  ...ranges.map(([m, name]) => el("button", { type: "button", "aria-pressed": `${m === minutes}`, key: name,
    onclick: () => { minutes = m; keep("weir-minutes", m); show(); } }, name)));

const used = (value, limit) => limit > 0 ? el("progress", { max: limit, value, title: `${Math.round((100 * value) / limit)} %` }) : undefined;

// A bar, if there is a limit, with words.
const bar = (value, limit, words) => el("span", { class: "bar" }, used(value, limit), el("span", {}, words));

// Waits of one kind are one row, with the longest of them.
const kindOf = (w) => JSON.stringify([w.process, w.reason, w.action, w.holder || w.peer, w.pid, w.object, w.object_id, w.ended_ms_ago !== null]);
const grouped = (waits) => {
  const rows = new Map();
  for (const w of waits) {
    const key = kindOf(w);
    const row = rows.get(key);
    if (!row) rows.set(key, { ...w, count: 1 });
    else { row.count += 1; row.lasted_us = Math.max(row.lasted_us, w.lasted_us); }
  }
  return [...rows.values()];
};
const rowsMax = 100;

// When the targets are full.
const fills = () => {
  const space = lately("space", 60);
  const card = (words, kind, how) => el("div", { class: "card", key: "fills" }, "Full in", el("b", { class: kind }, words), el("p", {}, how));
  if (!space) return card("…", "", "");
  if (space.bytes_per_day === null) return card("not known yet", "", "It is known an hour after the targets' start.");
  const rate = `Targets fill by ${bytes(Math.max(0, space.bytes_per_day))} a day, as in the last two days.`;
  if (space.days_to_full === null || space.days_to_full > 3650) return card("more than ten years", "", rate);
  const days = space.days_to_full;
  return card(days < 2 ? `${Math.round(days * 24)} hours` : `${Math.round(days)} days`, days < 7 ? "bad" : days < 30 ? "warn" : "", rate);
};

const screens = {
  async overview(status, troubles) {
    const space = el("div", { class: "card", key: "space" }, "Space for files",
      el("b", {}, `${bytes(Math.max(0, status.capacity_bytes - status.used_bytes))} free`),
      used(status.used_bytes, status.capacity_bytes), el("p", {}, `${bytes(status.used_bytes)} of ${bytes(status.capacity_bytes)} are used.`));
    const waits = el("div", { class: "card", key: "waits" }, "Waits over 10 ms", el("b", {}, `${status.waits ?? 0}`), el("a", { href: "#waits" }, "which?"));
    return [
      el("h2", {}, "Troubles"),
      troubles === null ? el("p", { class: "bad" }, "They are not known: the coordinator does not answer.")
        : table([["", (t) => t.muted_until_s ? "muted" : mark(t.severity)], ["what", (t) => t.text, "w"], ["to do", (t) => withCommands(t.action), "w"]],
          troubles, "None.", (t) => `${t.code} ${t.about}`, "stack"),
      el("div", { class: "cards" }, space, fills(), waits),
      range(),
      el("div", { class: "cards graphs" },
        series("Bytes of programs", "weir_client_bytes_total", perSecond, true),
        series("Calls of programs", "weir_client_fuse_seconds", rate),
        series("A program's call takes", "weir_client_fuse_seconds:mean", nanos),
        series("Requests at servers", "weir_rpc_seconds", rate),
        series("Reads of targets", "weir_store_read_bytes_total", perSecond, true),
        series("Writes of targets", "weir_store_write_bytes_total", perSecond, true),
        series("A target's disk takes", "weir_store_disk_seconds:mean", nanos),
        series("A sync of a journal takes", "weir_journal_sync_seconds:mean", nanos)),
    ];
  },
  async who() {
    const { rows } = await get(`top?by=${by}`);
    const tab = (name) => el("button", { type: "button", "aria-pressed": `${by === name}`, key: name, onclick: () => { by = name; show(); } }, name);
    return [
      el("p", { class: "tabs", role: "group", "aria-label": "Rows" }, ...["user", "volume", "client", "job", "kind"].map(tab)),
      table([[by, (r) => r.name], ["requests/s", (r) => number(r.requests_per_s), "n"], ["bytes/s", (r) => bytes(r.bytes_per_s), "n"],
        ["waiting", (r) => r.waiting.toFixed(1), "n"], ["mostly", (r) => r.kind], ["client", (r) => r.client], ["volume", (r) => r.volume]],
      rows, "No requests in the last ten seconds.", (r) => r.name),
    ];
  },
  async machines(status) {
    const targets = status.targets ?? [];
    const names = targets.map((t) => t.target);
    if (!names.includes(chosenTarget)) chosenTarget = targets.find((t) => t.state !== "up")?.target ?? names[0];
    const choose = (name) => { chosenTarget = name; show(); };
    const since = (p) => p.since_s ? `, since ${when(p.since_s)} (${lasting(Math.max(0, Date.now() / 1000 - p.since_s))})` : "";
    const option = (name) => el("option", { value: name, selected: name === chosenTarget ? "" : undefined }, name);
    const of = (name) => `${name}{${chosenTarget}}`;
    return [
      el("h2", {}, "Processes"),
      table([["process", (p) => p.name], ["role", (p) => p.role], ["", (p) => yes(p.answers, p.answers ? "answers" : `${p.why}${since(p)}`), "w"]],
        status.processes ?? [], "No process answers.", (p) => `${p.role} ${p.name}`, "stack"),
      el("h2", {}, "Targets"),
      table([["target", (t) => el("button", { type: "button", class: "link", title: "Show its graphs", onclick: () => choose(t.target) }, t.target)],
        ["node", (t) => t.node], ["state", (t) => yes(t.state === "up", t.state)],
        ["used", (t) => bar(t.used_bytes, t.capacity_bytes, `${bytes(t.used_bytes)} of ${bytes(t.capacity_bytes)}`)],
        ["cells without redundancy", (t) => t.debt_cells, "n"]], targets, "There are no targets.", (t) => t.target),
      ...(chosenTarget === undefined ? [] : [
        el("h2", {}, "Graphs of target ", el("select", { "aria-label": "Target", key: "target", onchange: (event) => choose(event.currentTarget.value) }, ...names.map(option))),
        range(),
        el("div", { class: "cards graphs" },
          series(`Reads of ${chosenTarget}`, of("weir_store_read_bytes_total"), perSecond, true),
          series(`Writes of ${chosenTarget}`, of("weir_store_write_bytes_total"), perSecond, true),
          series(`The disk of ${chosenTarget} takes`, `${of("weir_store_disk_seconds")}:mean`, nanos),
          series(`Used of ${chosenTarget}`, of("weir_target_used_bytes"), bytes, true)),
      ]),
    ];
  },
  async volumes() {
    const { volumes } = await get("volumes");
    return [table([["volume", (v) => v.volume], ["used", (v) => bytes(v.used_bytes), "n"],
      ["limit", (v) => bar(v.used_bytes, v.limit_bytes ?? 0, v.limit_bytes === null ? "none" : bytes(v.limit_bytes))],
      ["files", (v) => v.files, "n"], ["directories", (v) => v.directories, "n"], ["only at home", (v) => bytes(v.evicted_bytes), "n"],
      ["requests/s", (v) => number(v.requests_per_s), "n"], ["bytes/s", (v) => bytes(v.bytes_per_s), "n"]],
    volumes, "There are no volumes.", (v) => `${v.namespace} ${v.volume}`)];
  },
  async homes() {
    const { homes } = await get("homes");
    const is = (h) => h.failure === "" && h.state !== "paused" && h.state !== "diverged";
    return [table([["volume", (h) => h.volume], ["home", (h) => h.home], ["state", (h) => yes(is(h), h.state)],
      ["lag", (h) => time(h.lag_ms * 1000), "n"], ["backlog", (h) => bytes(h.backlog_bytes), "n"], ["rate", (h) => perSecond(h.rate_bytes), "n"],
      ["movers", (h) => h.movers, "n"], ["limited by", (h) => withCommands(h.failure || h.why || h.limited_by), "w"]], homes, "No volume has a home.",
    (h) => `${h.volume} ${h.home}`)];
  },
  async waits() {
    const { waits, silent } = await get("waits");
    const rows = grouped(waits);
    return [
      ...silent.map((s) => el("p", { class: "bad", key: s.process }, `${s.process} does not answer: ${s.why}`)),
      table([["time", (w) => time(w.lasted_us), "n"], ["", (w) => w.ended_ms_ago === null ? "waits" : `${time(w.ended_ms_ago * 1000)} ago`],
        ["calls", (w) => w.count, "n"], ["process", (w) => w.process, "w"], ["reason", (w) => w.reason],
        ["object", (w) => w.object && `${w.object} ${w.object_id}`], ["doing", (w) => w.action], ["for", (w) => w.holder || w.peer, "w"],
        ["program", (w) => w.pid ? `${w.pid} of user ${w.uid}` : "", "w"]],
      rows.slice(0, rowsMax), "Nothing waits, and nothing has waited for long in the last hour.", kindOf),
      rows.length > rowsMax ? el("p", {}, `${rows.length - rowsMax} more: `, withCommands("`weir waits --since 1h` lists all.")) : el("p", {}),
    ];
  },
  async events() {
    const { events, mutes } = await get("events");
    const now = Math.round(Date.now() / 1000);
    const lasts = (e) => e.cleared_s !== null ? "cleared" : e.acknowledged_s !== null ? "lasts, known" : "lasts";
    return [
      table([["raised", (e) => when(e.raised_s)], ["lasted", (e) => lasting(Math.max(0, (e.cleared_s ?? now) - e.raised_s)), "n"], ["state", lasts],
        ["severity", (e) => e.cleared_s === null ? mark(e.severity) : e.severity], ["code", (e) => e.code], ["what", (e) => e.text, "w"]],
      events.toReversed(), "Nothing has happened in the last 30 days.", (e) => `${e.raised_s} ${e.code} ${e.about}`, "stack"),
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
      targets, "No target reports.", (t) => t.target),
      el("h2", {}, "Audit logs"),
      table([["of", (a) => a.of], ["records", (a) => a.records, "n"], ["waiting", (a) => a.waiting, "n"], ["lost", (a) => a.lost, "n"],
        ["", (a) => yes(a.failure === "", a.failure || "is written"), "w"]], audit, "They are not known.", (a) => a.of),
      el("h2", {}, "Certificates"),
      table([["node", (c) => c.name], ["roles", (c) => c.roles.join(", ")], ["joined from", (c) => c.from],
        ["ends in", (c) => el("span", { class: c.left_s < late ? "bad" : "" }, c.left_s > 0 ? lasting(c.left_s) : "has ended"), "n"]],
      certificates, "No node has one: all roles run on this machine, and use Unix sockets.", (c) => `${c.name} ${c.roles.join(" ")}`),
    ];
  },
};

const chosen = () => Object.keys(screens).find((name) => `#${name}` === location.hash) ?? "overview";

const colors = { good: "#2a7d3a", warn: "#b36b00", bad: "#c0392b" };
// The state for the header, for the tab's title and its icon.
const say = (word, words, kind, count) => {
  patchChildren(state, [el("b", {}, word), el("span", {}, words)]);
  state.className = kind;
  document.title = `${word}${count > 0 ? ` (${count})` : ""} – Weir`;
  const drawn = `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><circle cx="8" cy="8" r="7" fill="${colors[kind]}"/></svg>`;
  const href = `data:image/svg+xml,${encodeURIComponent(drawn)}`;
  if (icon.getAttribute("href") !== href) icon.setAttribute("href", href);
};

const silent = (error) => say("no answer", `The console does not answer: ${error.message}`, "bad", 0);

const sayStatus = ({ word, state: text, healthy, troubles }) => {
  const words = text.startsWith(word) ? text.slice(word.length).replace(/^[:;]\s*/, "") : text;
  say(word, words, healthy ? "good" : word === "warning" ? "warn" : "bad", troubles ?? 0);
  asOf.textContent = `as of ${new Date().toLocaleTimeString()}`;
};

let shown;
// Fills the chosen screen for the last state.
const show = async () => {
  const mine = ++round;
  const name = chosen();
  links.forEach((link) => link.dataset.screen === name ? link.setAttribute("aria-current", "page") : link.removeAttribute("aria-current"));
  if (!last) return;
  try {
    const content = await screens[name](last.status, last.troubles);
    if (mine !== round) return;
    if (shown === name) patchChildren(main, content);
    else main.replaceChildren(...content);
    shown = name;
  } catch (error) {
    if (mine === round) silent(error);
  }
};

const take = async (found) => {
  last = found;
  sayStatus(found.status);
  // A tab in the background shows its title and icon.
  if (!document.hidden) await show();
};

const poll = async () => {
  try {
    const [status, troubles] = await Promise.all([get("status"), get("troubles").then((t) => t.troubles, () => null)]);
    await take({ status, troubles });
  } catch (error) {
    silent(error);
  }
};

let stream;
let polling;

// A browser connects again by itself, unless it got an answer that is not a stream.
const begin = () => {
  stream?.close();
  clearInterval(polling);
  polling = undefined;
  stream = new EventSource("/api/v1/events/stream");
  stream.addEventListener("state", (event) => {
    clearInterval(polling);
    polling = undefined;
    take(JSON.parse(event.data));
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
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.nodeName === "SELECT") return;
  const link = links[Number(event.key) - 1];
  if (link) { location.hash = `#${link.dataset.screen}`; event.preventDefault(); }
});
document.addEventListener("visibilitychange", () => { if (!document.hidden) show(); });
show();
begin();
