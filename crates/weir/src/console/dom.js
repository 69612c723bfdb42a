// Makes and updates elements of the page. All text goes through text nodes: none is markup.
// An update changes elements in place. One that has the focus, or in which text is selected, is neither moved nor
// replaced, and selected text stays as it is.

const svgNames = new Set(["svg", "path", "line", "g"]);

export const el = (tag, props = {}, ...children) => {
  const node = svgNames.has(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "key") node.dataset.key = value;
    else if (value !== undefined && value !== false) node.setAttribute(key, value);
  }
  node.append(...children.flat().filter((child) => child !== undefined && child !== null && child !== ""));
  return node;
};

const isSelected = (node) => {
  const selection = getSelection();
  return selection && !selection.isCollapsed && selection.rangeCount > 0 && selection.getRangeAt(0).intersectsNode(node);
};
const isInUse = (node) => (node !== document.body && node.contains(document.activeElement)) || isSelected(node);

const keyOf = (node) => node.dataset?.key;
const isAlike = (old, fresh) => old.nodeName === fresh.nodeName && keyOf(old) === keyOf(fresh);

const patchAttributes = (old, fresh) => {
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
};

const patch = (old, fresh) => {
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data && !isSelected(old)) old.data = fresh.data;
    return;
  }
  // Its user is choosing.
  if (old.nodeName === "SELECT" && old === document.activeElement) return;
  patchAttributes(old, fresh);
  patchChildren(old, [...fresh.childNodes]);
};

// Gives an element these children.
export const patchChildren = (parent, fresh) => {
  const keyed = new Map([...parent.childNodes].filter((child) => keyOf(child) !== undefined).map((child) => [keyOf(child), child]));
  const done = new Set();
  let at = parent.firstChild;
  for (const next of fresh) {
    while (at && done.has(at)) at = at.nextSibling;
    const key = keyOf(next);
    const found = key !== undefined ? keyed.get(key) : at;
    const match = found && !done.has(found) && isAlike(found, next) ? found : undefined;
    if (!match) {
      parent.insertBefore(next, at);
      done.add(next);
      continue;
    }
    done.add(match);
    patch(match, next);
    if (match === at) at = at.nextSibling;
    // The others are placed around one in use.
    else if (isInUse(match)) at = match.nextSibling;
    else parent.insertBefore(match, at);
  }
  for (const child of [...parent.childNodes]) {
    if (done.has(child)) continue;
    // It goes with a later update.
    if (child.nodeType === Node.ELEMENT_NODE && isInUse(child)) child.classList.add("gone");
    else if (!(child.nodeType === Node.TEXT_NODE && isSelected(child))) child.remove();
  }
};

const units = (value, step, names) => {
  let unit = 0;
  while (value >= step && unit < names.length - 1) { value /= step; unit += 1; }
  const digits = value >= 100 ? Math.round(value) : Number(value.toPrecision(3));
  return `${digits} ${names[unit]}`;
};
export const bytes = (value) => units(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]);
export const number = (value) => value < 10 ? `${Number(value.toPrecision(2))}` : value < 10000 ? `${Math.round(value)}` : units(value, 1000, ["", "k", "M", "G"]);
export const time = (us) => us < 1 ? "0" : us < 1000 ? `${Number(us.toPrecision(3))} µs` : us < 1e6 ? `${Number((us / 1000).toPrecision(3))} ms`
  : us < 12e7 ? `${Number((us / 1e6).toPrecision(3))} s` : `${Math.round(us / 6e7)} min`;
export const lasting = (s) => s < 120 ? `${Math.round(s)} s` : s < 7200 ? `${Math.round(s / 60)} min` : s < 172800 ? `${Math.round(s / 3600)} h`
  : `${Math.floor(s / 86400)} d`;
export const when = (s) => new Date(s * 1000).toLocaleString([], { dateStyle: "short", timeStyle: "medium" });

// Columns: [title, cell of a row, class]. `key` names a row from one update to the next.
// `kind`: a class; of `stack`, narrow screens show cells below each other.
export const table = (columns, rows, empty, key, kind) => {
  if (rows.length === 0) return el("p", {}, empty);
  const head = el("tr", {}, ...columns.map(([title, , kind]) => el("th", { scope: "col", class: kind }, title)));
  const seen = new Map();
  const named = (row) => {
    const name = key(row);
    const count = (seen.get(name) ?? 0) + 1;
    seen.set(name, count);
    return count === 1 ? name : `${name} ${count}`;
  };
  const line = (row) => el("tr", { key: named(row) }, ...columns.map(([, cell, kind]) => el("td", { class: kind }, cell(row) ?? "")));
  return el("div", { class: "table" }, el("table", { class: kind }, el("thead", {}, head), el("tbody", {}, ...rows.map(line))));
};

// Browsers give the clipboard to pages of this machine, and to others by TLS only.
const copy = async (button, text) => {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const range = document.createRange();
    range.selectNodeContents(button.previousSibling);
    getSelection().removeAllRanges();
    getSelection().addRange(range);
    document.execCommand("copy");
  }
  button.classList.add("copied");
  setTimeout(() => button.classList.remove("copied"), 1500);
};

// Text in which commands are in backticks: each with a button that copies it.
export const withCommands = (text) => el("span", {}, ...text.split(/`([^`]+)`/).map((part, at) => at % 2 === 0 ? part
  : el("span", { class: "command" }, el("code", {}, part),
    el("button", { type: "button", class: "copy", title: "Copy this command", "aria-label": `Copy ${part}`,
      onclick: (event) => copy(event.currentTarget, event.currentTarget.previousSibling.textContent) }))));
