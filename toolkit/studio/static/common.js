// What the pages share. Text of files and answers is only ever set as text; HTML comes from the server, escaped there.

export const $ = (id) => document.getElementById(id);

/** An element with attributes, properties of its own, and children (texts or elements). */
export function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key in made && typeof value !== "string") made[key] = value;
    else if (value !== null && value !== undefined) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

export class Problem extends Error {
  constructor(problems) {
    super(problems.map((one) => one.message ?? one).join("\n"));
    this.problems = problems;
  }
}

/** The answer to a request; throws Problem with what the server said. */
export async function ask(name, values = {}, options = {}) {
  let response;
  try {
    response = await fetch(`/api/${name}`, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(values),
      ...options,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    lose("The server does not answer. Is toolkit studio still running?");
    throw new Problem(["The server does not answer. Is toolkit studio still running?"]);
  }
  if (response.status === 403) lose(await response.clone().text());
  else found();
  if (response.ok) return response.headers.get("content-type") === "application/zip" ? response.blob() : response.json();
  const text = await response.text();
  try {
    throw new Problem(JSON.parse(text).problems);
  } catch (error) {
    throw error instanceof Problem ? error : new Problem([text]);
  }
}

// ---- a server that is gone: a banner on every page, what is shown is stale, and one that asks until it is back ----

let lost = null;
const back = [];

/** Calls after the server has answered again. */
export const whenBack = (action) => back.push(action);

function lose(why) {
  if (lost) return;
  lost = el("p", { class: "lost", role: "alert" }, why);
  document.body.prepend(lost);
  document.body.classList.add("stale");
  const again = setInterval(async () => {
    try {
      const answer = await fetch(location.pathname, { cache: "no-store" });
      if (!answer.ok || !lost) return;
    } catch { return; }
    found();
    back.forEach((action) => action());
  }, 2000);
  lost.stop = () => clearInterval(again);
}

function found() {
  if (!lost) return;
  lost.stop();
  lost.remove();
  lost = null;
  document.body.classList.remove("stale");
}

export function showProblems(problems, go = null) {
  $("problems").replaceChildren(...problems.map((one) => {
    const line = one.line ?? null;
    const text = el("p", {}, one.message ?? String(one));
    if (line && go) {
      const at = el("button", { class: "small", type: "button" }, `line ${line}`);
      at.addEventListener("click", () => go(line));
      text.prepend(at, " ");
    }
    return text;
  }));
}

/** Runs an action of a button; what goes wrong is shown. */
export function on(id, action, event = "click") {
  $(id)?.addEventListener(event, async (happened) => {
    const button = event === "click" ? $(id) : null;
    if (button) button.disabled = true;
    try {
      showProblems([]);
      await action(happened);
    } catch (error) {
      if (error instanceof Problem) showProblems(error.problems);
      else throw error;
    } finally {
      if (button) button.disabled = false;
    }
  });
}

export function say(text) {
  $("said").textContent = text;
  clearTimeout(say.later);
  say.later = setTimeout(() => { $("said").textContent = ""; }, 6000);
}

export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}

export function save(blob, name) {
  const address = URL.createObjectURL(blob);
  const link = el("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

/** Calls after the last of several quick changes. */
export function later(milliseconds, action) {
  let waiting;
  return (...given) => {
    clearTimeout(waiting);
    waiting = setTimeout(() => action(...given), milliseconds);
  };
}

// ---- the state in the address, behind the #: a browser does not send it to the server ----

const toText = (bytes) => btoa(String.fromCharCode(...bytes)).replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
const toBytes = (text) => Uint8Array.from(atob(text.replaceAll("-", "+").replaceAll("_", "/")), (c) => c.charCodeAt(0));

async function through(bytes, stream, limit = 1 << 20) {
  const parts = [];
  let size = 0;
  const reader = new Blob([bytes]).stream().pipeThrough(stream).getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    size += value.length;
    if (size > limit) throw new Error("too long");
    parts.push(value);
  }
  return new Uint8Array(await new Blob(parts).arrayBuffer());
}

export async function pack(state) {
  const packed = await through(new TextEncoder().encode(JSON.stringify(state)), new CompressionStream("deflate-raw"));
  let text = "";
  for (let at = 0; at < packed.length; at += 3 * 4096) text += toText(packed.subarray(at, at + 3 * 4096));
  return text;
}

export async function unpack(text) {
  try {
    const found = JSON.parse(new TextDecoder().decode(await through(toBytes(text), new DecompressionStream("deflate-raw"))));
    return found && typeof found === "object" ? found : null;
  } catch {
    return null; // a link that was cut off
  }
}

const RECIPE = "toolkit-studio-recipe";

export function remember(text) {
  try { sessionStorage.setItem(RECIPE, text); } catch { /* private windows: the pages then share nothing */ }
}

export function remembered() {
  try { return sessionStorage.getItem(RECIPE); } catch { return null; }
}

/** Tabs by the WAI-ARIA pattern: arrows move, the shown one is in the order of Tab. */
export function tabs(list) {
  const all = [...list.querySelectorAll("[role=tab]")];
  const select = (tab, focus = true) => {
    for (const one of all) {
      const shown = one === tab;
      one.setAttribute("aria-selected", String(shown));
      one.tabIndex = shown ? 0 : -1;
      $(one.getAttribute("aria-controls")).hidden = !shown;
    }
    if (focus) tab.focus();
  };
  list.addEventListener("click", (event) => event.target.closest("[role=tab]") && select(event.target.closest("[role=tab]")));
  list.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const now = all.findIndex((tab) => tab.getAttribute("aria-selected") === "true");
    select(all[(now + step + all.length) % all.length]);
    event.preventDefault();
  });
  return (id) => select($(id), false);
}

export function codeOf(text, marks = new Map()) {
  const block = el("pre", { class: "code", tabindex: "0" });
  text.replace(/\n$/, "").split("\n").forEach((line, at) => {
    const mark = marks.get(at + 1);
    const row = el("span", mark ? { class: "marked" } : {});
    if (mark) row.append(line.slice(0, mark.from), el("u", {}, line.slice(mark.from, mark.to)), line.slice(mark.to));
    else row.append(line);
    block.append(row);
  });
  return block;
}

export function diffOf(text) {
  const block = el("pre", { class: "diff", tabindex: "0" });
  for (const line of text.replace(/\n$/, "").split("\n")) {
    const kind = /^(\+\+\+|---|@@)/.test(line) ? "at" : { "+": "plus", "-": "minus" }[line[0]];
    block.append(el("span", kind ? { class: kind } : {}, line || " "));
  }
  return block;
}
