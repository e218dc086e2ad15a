import { $, ask, codeOf, copy, diffOf, el, later, on, remember, save, say, showProblems } from "./common.js";

let files = {};

const pasted = new Set(); // names of boxes for text that is still to come

function add(name, text) {
  let free = name || "file.yaml";
  for (let at = 2; free in files; at += 1) free = name.replace(/(\.[^.]*)?$/, `-${at}$1`);
  files[free] = text;
  return free;
}

/** What pasted text is to be called: JSON takes the name that another file gives its DeepSpeed file. */
function nameOf(text) {
  if (!text.trimStart().startsWith("{")) return "config.yaml";
  const wanted = Object.values(files).map((other) => /deepspeed_config_file:\s*["']?([^\s"'#]+)/.exec(other)?.[1]).find(Boolean);
  return wanted && !(wanted in files) ? wanted : "ds.json";
}

/** The files again, one under another name. */
function rename(from, to) {
  const kept = files;
  files = {};
  for (const [key, value] of Object.entries(kept)) add(key === from ? to : key, value);
}

async function take(list) {
  for (const file of list) {
    if (file.size > 1 << 20) showProblems([`${file.name}: configuration files are limited to 1 MB`]);
    else add(file.name, await file.text());
  }
  drawSources();
  await check();
}

function drawSources() {
  $("sources").replaceChildren(...Object.entries(files).map(([name, text]) => {
    const title = el("input", { value: name, "aria-label": "Name of the file", spellcheck: "false" });
    const away = el("button", { class: "small", type: "button" }, "Remove");
    const box = el("textarea", { spellcheck: "false", "aria-label": `Text of ${name}`, rows: String(Math.min(18, text.split("\n").length + 1)) });
    box.value = text;
    const changed = later(400, () => {
      files[name] = box.value;
      if (pasted.has(name) && nameOf(box.value) !== "config.yaml") {
        pasted.delete(name);
        rename(name, nameOf(box.value));
        drawSources();
      }
      check();
    });
    box.addEventListener("input", changed);
    title.addEventListener("change", () => {
      pasted.delete(name);
      rename(name, title.value);
      drawSources();
      check();
    });
    away.addEventListener("click", () => { delete files[name]; drawSources(); check(); });
    const inner = el("details", { class: "file", open: true }, el("summary", {}, name), el("p", {}, title, away), box);
    return inner;
  }));
  $("actions").hidden = !Object.keys(files).length;
}

let latest = 0;

async function check() {
  const mine = ++latest;
  $("made").replaceChildren();
  if (!Object.keys(files).length) {
    $("findings").replaceChildren();
    return;
  }
  try {
    const found = await ask("check", { files });
    if (mine !== latest) return;
    showProblems(found.unread);
    draw(found);
  } catch (error) {
    if (!error.problems) throw error;
    if (mine !== latest) return;
    showProblems(error.problems);
    $("findings").replaceChildren();
    $("apply").hidden = true;
  }
}

function draw(found) {
  const serious = found.findings.filter((one) => one.severity !== "note").length;
  const fixable = found.findings.filter((one) => one.fix).length;
  $("apply").hidden = !fixable;
  const head = el("h2", { class: serious ? "bad" : "good" },
    !found.findings.length ? "Nothing found" : `${serious} to look at${fixable ? `, ${fixable} with a fix` : ""}`);
  const all = found.findings.map((one) => finding(one, found.files));
  const parts = [head, ...all];
  if (found.diff) parts.push(el("h2", {}, "What the fixes change"), diffOf(found.diff));
  $("findings").replaceChildren(...parts);
}

function finding(one, texts) {
  const box = el("article", { class: `finding ${one.severity}` },
    el("p", {}, el("b", {}, `${one.severity} ${one.code}`), ` ${one.message}`),
    el("p", { class: "where" }, `${one.file}:${one.line ?? 1}${one.key ? ` · ${one.key}` : ""}${one.fix ? ` · fix: ${one.fix}` : ""}`));
  const lines = (texts[one.file] ?? "").split("\n");
  if (one.line && lines[one.line - 1] !== undefined) {
    const first = Math.max(0, one.line - 2);
    const from = (one.column ?? 1) - 1;
    const near = lines.slice(first, one.line + 1);
    const block = codeOf(near.join("\n"), new Map([[one.line - first, { from, to: from + one.width }]]));
    block.style.counterReset = `line ${first}`;
    box.append(block);
  }
  const more = el("div", { class: "more" });
  const button = el("button", { class: "small", type: "button", "aria-expanded": "false" }, `Explain ${one.code}`);
  button.addEventListener("click", async () => {
    if (more.childElementCount) {
      more.replaceChildren();
      button.setAttribute("aria-expanded", "false");
      return;
    }
    const told = await ask("explain", { code: one.code });
    more.replaceChildren(el("p", {}, told.reason || told.title), ...example("Fails", told.fails), ...example("Passes", told.passes),
      el("p", { class: "soft" }, `Source: ${told.source}`));
    button.setAttribute("aria-expanded", "true");
  });
  box.append(button, more);
  return box;
}

const example = (title, texts) => Object.entries(texts).flatMap(([name, text]) =>
  [el("p", { class: "soft" }, `${title}: ${name}`), el("pre", { tabindex: "0" }, text)]);

on("choose", async (event) => { await take(event.target.files); event.target.value = ""; }, "change");
on("paste", () => { pasted.add(add("config.yaml", "")); drawSources(); $("sources").querySelector(".file:last-child textarea").focus(); });
on("clear", () => { files = {}; drawSources(); return check(); });

on("apply", async () => {
  const fixed = await ask("fix", { files });
  const names = Object.keys(files);
  files = Object.fromEntries(Object.values(fixed.files).map((text, at) => [names[at], text]));
  drawSources();
  await check();
  say(`${fixed.titles.length} ${fixed.titles.length === 1 ? "fix" : "fixes"} applied; copy or download the files.`);
  made("The fixed files", files);
});

on("to", async () => {
  if (!$("to").value) return;
  $("made").replaceChildren();
  const found = await ask("migrate", { files, to: $("to").value });
  $("to").value = "";
  if (Object.keys(found.files).length) made(`For ${found.to}`, found.files, found.notes);
  else { $("made").replaceChildren(el("h2", {}, "It cannot be migrated"), ...found.notes.map((note) => el("p", {}, note))); }
  $("made").scrollIntoView({ block: "nearest" });
}, "change");

on("import", async () => {
  $("made").replaceChildren();
  const found = await ask("import", { files });
  const lost = found.keys.filter((key) => ["differs", "unsupported", "unknown"].includes(key.outcome));
  const parts = [el("h2", {}, found.recipe ? `A recipe, from ${found.tool}` : "There is no recipe of this")];
  parts.push(...found.blocks.map((why) => el("p", { class: "bad" }, why)));
  if (found.recipe) {
    parts.push(el("p", { class: lost.length ? "bad" : "good" },
      lost.length ? `Not the same training: ${lost.length} settings are not carried over exactly.` : "Every setting that decides about training is carried over."));
    const open = el("button", { class: "main", type: "button" }, "Open in Build");
    open.addEventListener("click", () => { remember(found.recipe); location.assign("/build"); });
    parts.push(el("p", { class: "actions" }, open));
  }
  if (lost.length) parts.push(el("ul", {}, ...lost.map((key) => el("li", {}, el("code", {}, key.key), ` ${key.reason}`))));
  if (found.recipe) parts.push(el("pre", { tabindex: "0" }, found.recipe));
  $("made").replaceChildren(...parts);
  $("made").scrollIntoView({ block: "nearest" });
});

function made(title, texts, notes = []) {
  $("made").replaceChildren(el("h2", {}, title), ...notes.map((note) => el("p", { class: "soft" }, note)),
    ...Object.entries(texts).map(([name, text]) => {
      const copied = el("button", { class: "small", type: "button" }, "Copy");
      copied.addEventListener("click", async () => { copied.textContent = (await copy(text)) ? "Copied" : "Not allowed here"; });
      const down = el("button", { class: "small", type: "button" }, "Download");
      down.addEventListener("click", () => save(new Blob([text], { type: "text/plain" }), name));
      return el("div", { class: "file" }, el("p", {}, name, copied, down), el("pre", { tabindex: "0" }, text));
    }));
}

const drop = $("drop");
for (const kind of ["dragover", "dragenter"]) {
  document.addEventListener(kind, (event) => { event.preventDefault(); drop.classList.add("over"); });
}
document.addEventListener("dragleave", (event) => event.relatedTarget ?? drop.classList.remove("over"));
document.addEventListener("drop", async (event) => {
  event.preventDefault();
  drop.classList.remove("over");
  if (event.dataTransfer.files.length) await take(event.dataTransfer.files);
  else if (event.dataTransfer.getData("text")) { const text = event.dataTransfer.getData("text"); add(nameOf(text), text); drawSources(); await check(); }
});
