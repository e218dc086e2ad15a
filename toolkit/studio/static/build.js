import { $, Problem, ask, copy, el, later, on, pack, remember, remembered, save, say, showProblems, tabs, unpack, whenBack } from "./common.js";

const state = { text: "", gpu: "rtx4090", memory: null };
const fields = [...document.querySelectorAll("[data-key]")];
const show = tabs(document.querySelector("[role=tablist]"));
const answer = document.querySelector(".answer");
let planning = null;
let version = 0;

// ---- the recipe: one text; the form shows and changes it ----

async function update(edits = []) {
  const mine = ++version;
  const sent = state.text;
  const found = await ask("recipe", { text: sent, edits });
  if (state.text !== sent) return; // typed over meanwhile: that change is next
  if (found.text !== state.text || $("text").value !== found.text) {
    state.text = found.text;
    if (document.activeElement !== $("text")) $("text").value = found.text;
  }
  fill(found.set, found.empty);
  showProblems(found.problems, goToLine);
  if (!found.problems.length) {
    reasons(found.decisions);
    files(found.files);
  }
  $("note").textContent = found.note;
  $("note").hidden = !found.note;
  keep();
  if (!found.problems.length) plan(mine);
  else {
    planning?.abort();
    answer.classList.remove("waiting");
    $("verdict").replaceChildren(el("h2", { class: "bad" }, "The recipe cannot be used yet"));
  }
}

function fill(set, empty) {
  for (const [key, text] of Object.entries(empty)) {
    const [first, none] = fields.find((field) => field.dataset.key === key).options;
    first.textContent = text; // what the recipe has where the key is not set
    none.hidden = text.startsWith("none");
  }
  for (const field of fields) {
    const value = set[field.dataset.key];
    const shown = value ?? "";
    // What is being typed is no answer's: it is sent when the field is left.
    const typing = document.activeElement === field && field.tagName !== "SELECT" && field.value !== (field.dataset.filled ?? "");
    if (!typing || field.value === shown) {
      if (field.tagName === "SELECT" && value !== undefined && ![...field.options].some((o) => o.value === value)) {
        field.append(el("option", {}, value)); // what the schema does not know stays visible
      }
      field.value = shown;
      field.dataset.filled = field.value;
    }
    field.classList.toggle("set", value !== undefined);
  }
  const model = set["model.path"] ?? set["model.config"] ?? "";
  if (document.activeElement !== $("model")) $("model").value = model;
  for (const group of document.querySelectorAll(".group:not([data-group=basics])")) {
    const count = group.querySelectorAll(".set").length;
    group.querySelector(".count").textContent = count ? `${count} set` : "";
  }
}

function reasons(decisions) {
  const list = el("dl", { class: "reasons" });
  for (const [key, value, reason] of decisions) {
    list.append(el("dt", {}, el("code", {}, key)), el("dd", { class: "value" }, value), el("dd", { class: "soft why" }, reason));
  }
  $("why").replaceChildren(list);
}

function files(found) {
  $("file-list").replaceChildren(...Object.entries(found).map(([name, text]) => {
    const button = el("button", { class: "small", type: "button" }, "Copy");
    button.addEventListener("click", async () => {
      button.textContent = (await copy(text)) ? "Copied" : "Not allowed here";
    });
    return el("div", { class: "file" }, el("p", {}, name, button), el("pre", { tabindex: "0" }, text));
  }));
}

function goToLine(line) {
  show("tab-recipe");
  const box = $("text");
  const start = box.value.split("\n").slice(0, line - 1).join("\n").length + (line > 1 ? 1 : 0);
  const end = box.value.indexOf("\n", start);
  box.focus();
  box.setSelectionRange(start, end < 0 ? box.value.length : end);
}

const keep = later(300, async () => {
  remember(state.text);
  history.replaceState(null, "", `#${await pack(state)}`);
});

// ---- the plan ----

async function plan(mine) {
  planning?.abort();
  planning = new AbortController();
  answer.classList.add("waiting");
  try {
    const memory = state.gpu === "memory" ? Number($("memory").value) || 24 : null;
    const asked = { text: state.text, gpu: state.gpu === "memory" ? null : state.gpu, memory };
    const found = await ask("plan", asked, { signal: planning.signal });
    if (mine !== version) return;
    if (found.problems.length) {
      showProblems(found.problems, goToLine);
      verdictWithout();
    } else drawPlan(found);
  } catch (error) {
    if (error.name === "AbortError") return;
    if (!(error instanceof Problem)) throw error;
    showProblems(error.problems);
    verdictWithout();
  }
  answer.classList.remove("waiting");
}

function verdictWithout() {
  $("verdict").replaceChildren(el("h2", {}, "No plan"));
  for (const id of ["bars", "key", "step", "table", "assumptions"]) $(id).replaceChildren();
}

function drawPlan(found) {
  const html = (text) => { const box = el("span"); box.innerHTML = text; return box; };
  const title = el("h2", {}, el("span", { class: found.fits ? "good" : "bad" }, found.fits ? "Fits" : "Does not fit"));
  const [size, most] = found.reason.split(", most of it ");
  title.append(el("span", { class: "soft" }, " ", html(found.fits ? found.size_and_rate : size)));
  const parts = [title, el("p", { class: "soft" }, html(found.facts))];
  if (most) parts.push(el("p", {}, html(`Most of it: ${most} GiB`)));
  if (found.change_text) parts.push(offer("To make it fit:", html(`<code>${found.change_text}</code>`), "Apply", found.change, "apply"));
  else if (!found.fits) parts.push(el("p", {}, "Nothing else fits: other strategies, sizes, lengths and adapters were tried."));
  if (found.chosen) {
    const label = html(`<b>${found.chosen_label}</b> ${found.chosen_rate ? `<span class="soft">${found.chosen_rate}</span>` : ""}`);
    const why = html(found.chosen_why).textContent;
    parts.push(offer(`${why[0].toUpperCase()}${why.slice(1)}:`, label, "Use it", found.chosen, "use"));
  }
  $("verdict").replaceChildren(...parts);
  for (const id of ["bars", "key", "step", "table", "assumptions"]) $(id).innerHTML = found[id];
  for (const row of document.querySelectorAll("#bars [data-way]")) {
    const name = row.textContent;
    const button = el("button", { class: "small", type: "button", "aria-label": `Use ${name}` }, "Use");
    button.addEventListener("click", () => run(found.ways[Number(row.dataset.way)]));
    row.append(button);
  }
}

function offer(told, what, label, edits, id) {
  const button = el("button", { class: id === "apply" ? "small main" : "small", type: "button", id: `offer-${id}` }, label);
  button.addEventListener("click", () => run(edits));
  return el("p", { class: "fit" }, el("span", {}, told), what, button);
}

let turn = Promise.resolve();
let typed = false;

/** One change after the other: each is made to the text that the one before has left. */
function run(edits = []) {
  if (typed) state.text = $("text").value;
  typed = false;
  turn = turn.then(() => update(edits)).catch((error) => {
    if (!(error instanceof Problem)) throw error;
    showProblems(error.problems);
  });
  return turn;
}

/** Wait until the state holds all that was typed and chosen: who types and clicks at once means what was typed. */
const current = () => (typed ? run() : turn);

// ---- what the user does ----

for (const field of fields) field.addEventListener("change", () => run([[field.dataset.key, field.value || null]]));
$("form").addEventListener("submit", (event) => event.preventDefault());

$("model").addEventListener("change", () => {
  const value = $("model").value.trim();
  if (!value) return;
  if (value.startsWith("{") && value.includes('"')) {
    try {
      JSON.parse(value);
    } catch (error) {
      showProblems([`The model's config is not valid JSON: ${error.message}`]);
      return;
    }
  }
  run(value.startsWith("{") ? [["model.path", null], ["model.config", value.replace(/\s+/g, " ")]]
    : [["model.config", null], ["model.path", value]]);
});

$("text").addEventListener("input", () => { typed = true; });
$("text").addEventListener("input", later(350, current));

$("gpu").addEventListener("change", () => { state.gpu = $("gpu").value; device(); run(); });
$("memory").addEventListener("input", later(300, () => { state.memory = Number($("memory").value); run(); }));

function device() {
  $("gpu").value = state.gpu;
  $("memory-label").hidden = state.gpu !== "memory";
  if (state.memory) $("memory").value = state.memory;
}

$("start").addEventListener("change", () => {
  const chosen = $("start").selectedOptions[0];
  if (!chosen.value) return;
  typed = false;
  state.text = chosen.value;
  state.gpu = chosen.dataset.gpu;
  device();
  run();
});

on("download", async () => {
  await current();
  save(await ask("archive", { text: state.text }), "recipe.zip");
});

on("link", async () => {
  await current();
  const address = `${location.origin}/build#${await pack(state)}`;
  history.replaceState(null, "", address);
  say((await copy(address)) ? "Copied. The link holds the whole recipe." : "The address of this page now holds the whole recipe.");
});

on("train", async () => {
  await current();
  const found = await ask("start", { text: state.text });
  location.assign(`/runs#${encodeURIComponent(found.name)}`);
});

async function begin() {
  const given = location.hash.length > 1 ? await unpack(location.hash.slice(1)) : null;
  const first = $("start").options[1];
  typed = false;
  state.text = typeof given?.text === "string" ? given.text : remembered() ?? first.value;
  const known = [...$("gpu").options].some((option) => option.value === given?.gpu);
  state.gpu = known ? given.gpu : first.dataset.gpu;
  state.memory = typeof given?.memory === "number" ? given.memory : null;
  $("text").value = state.text;
  device();
  await run();
}

window.addEventListener("hashchange", begin);
whenBack(() => run());
begin();
