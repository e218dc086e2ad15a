import { $, Problem, ask, el, on, showProblems } from "./common.js";
import { chart, COLOURS } from "./chart.js";

const EVERY = 2000;
let chosen = location.hash.length > 1 ? location.hash.slice(1).split(",").map(decodeURIComponent) : [];
let listed = "";
let log = "";

async function drawList() {
  const { runs } = await ask("runs");
  const names = JSON.stringify(runs);
  if (names === listed) return;
  listed = names;
  if (!runs.length) {
    $("list").replaceChildren(el("p", { class: "soft" }, "None yet. Start one on the page Build, or with toolkit train."));
    return;
  }
  $("list").replaceChildren(el("ul", {}, ...runs.map((one) => {
    const box = el("input", { type: "checkbox", checked: chosen.includes(one.name) });
    box.addEventListener("change", () => {
      chosen = box.checked ? [...chosen, one.name].slice(-8) : chosen.filter((name) => name !== one.name);
      history.replaceState(null, "", `#${chosen.map(encodeURIComponent).join(",")}`);
      refresh();
    });
    return el("li", {}, el("label", {}, box, one.shown, one.failed ? el("span", { class: "bad" }, " failed") : ""));
  })));
}

async function refresh() {
  $("shown").hidden = !chosen.length;
  $("empty").hidden = Boolean(chosen.length);
  if (!chosen.length) return;
  const { runs } = await ask("run", { names: chosen });
  table(runs);
  $("notes").replaceChildren(...runs.flatMap((run) => run.notes.map((note) => el("li", { class: note.startsWith("stopped by ") ? "soft" : "" }, `${run.shown}: ${note}`))));
  for (const key of ["loss", "lr", "grad_norm", "tokens_per_second"]) {
    chart($(`chart-${key}`), runs.map((run, at) => ({
      name: run.shown, colour: COLOURS[at % COLOURS.length], dashed: at >= COLOURS.length,
      x: run.steps.step, y: run.steps[key], marks: key === "loss" ? run.evaluations : [],
    })), key);
  }
  answers(runs.filter((run) => run.samples.length));
  await logs(runs);
}

function answers(runs) {
  $("answers").hidden = !runs.length;
  $("samples").replaceChildren(el("tr", {}, ...["run", "step", "prompt", "answer"].map((text) => el("th", {}, text))),
    ...runs.flatMap((run) => run.samples.map(([prompt, answer]) => el("tr", {}, ...[run.shown, `${run.sampled}`, prompt, answer].map((text) => el("td", { class: "text" }, text))))));
}

const number = (value, digits) => (value === null || value === undefined ? "–" : value.toLocaleString("en-GB", { maximumFractionDigits: digits, minimumFractionDigits: digits }));
const gib = (bytes) => `${(bytes / 2 ** 30).toFixed(2)}`;

function lasting(seconds) {
  if (seconds === null) return "–";
  const whole = Math.ceil(seconds);
  const [h, m, s] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const two = (n) => String(n).padStart(2, "0");
  return h ? `${h}:${two(m)}:${two(s)}` : `${m}:${two(s)}`;
}

function table(runs) {
  const heads = ["run", "state", "step", "loss", "norm", "tokens/s", "left", "memory by rank, GiB", "checkpoints", ""];
  const head = el("tr", {}, ...heads.map((text, at) => el("th", at >= 2 && at <= 6 ? { class: "n" } : {}, text)));
  const rows = runs.map((run, at) => {
    const last = run.last ?? {};
    const cells = [
      [el("span", { class: "dot", style: `background:${COLOURS[at % COLOURS.length]}` }), run.shown],
      [el("span", { class: ["ended early", "failed"].includes(run.state) ? "bad" : "" }, run.state)],
      [`${last.step ?? 0}${run.total ? `/${run.total}` : ""}`], [number(last.loss, 4)], [number(last.grad_norm, 3)],
      [number(last.tokens_per_second, 0)], [lasting(run.left)],
      [run.memory.length ? run.memory.slice(0, 8).map(gib).join(" ") + (run.memory.length > 8 ? " …" : "") : "at the end"],
      [run.checkpoints.slice(-3).join(", ") || "none"], [button(run)],
    ];
    return el("tr", {}, ...cells.map((parts, i) => el("td", i >= 2 && i <= 6 ? { class: "n" } : {}, ...parts)));
  });
  const focused = document.activeElement?.dataset?.run;
  $("table").replaceChildren(head, ...rows);
  if (focused) $("table").querySelector(`[data-run="${CSS.escape(focused)}"]`)?.focus();
}

const asked = new Map(); // what was asked of a run, until its state is another one

function button(run) {
  if (["finished", "empty", "failed"].includes(run.state)) return "";
  const active = run.state === "running" || run.state === "starting";
  const name = active ? "stop" : "resume";
  const label = active ? "Stop" : run.checkpoints.length ? "Resume" : "Start again";
  const made = el("button", { class: "small", type: "button", "data-run": run.name, "aria-label": `${label} ${run.shown}` }, label);
  const pending = () => {
    made.disabled = true;
    made.textContent = { stop: "Saving…", resume: "Starting…" }[name];
  };
  if (asked.get(run.name) === run.state) pending();
  else asked.delete(run.name);
  made.addEventListener("click", async () => {
    if (label === "Start again" && !confirm(`${run.shown} has no checkpoint: it starts again at step 0. Its metrics until now are kept beside the new ones.`)) return;
    pending();
    asked.set(run.name, run.state);
    try {
      await ask(name, { name: run.name });
    } catch (error) {
      asked.delete(run.name);
      if (!(error instanceof Problem)) throw error;
      showProblems(error.problems);
    }
    await refresh();
  });
  return made;
}

async function logs(runs) {
  const options = runs.flatMap((run) => ["screen", ...run.logs].map((name) => ({ value: JSON.stringify([run.name, name]), text: `${run.shown}: ${name === "screen" ? "toolkit train" : name}` })));
  const now = options.map((one) => one.value).join();
  if (now !== logs.known) {
    logs.known = now;
    $("log").replaceChildren(...options.map((one) => el("option", { value: one.value }, one.text)));
    if (options.some((one) => one.value === log)) $("log").value = log;
    log = $("log").value;
  }
  if (!log) return;
  const [name, file] = JSON.parse(log);
  const { text } = await ask("log", { name, log: file });
  const box = $("text");
  const shown = text || "Nothing yet.";
  if (box.textContent === shown) return;
  const atEnd = box.scrollTop + box.clientHeight >= box.scrollHeight - 8;
  box.textContent = shown;
  if (atEnd) box.scrollTop = box.scrollHeight;
}

on("log", () => { log = $("log").value; return refresh(); }, "change");

async function poll() {
  if (!document.hidden) {
    try {
      await drawList();
      await refresh();
      if (poll.lost) showProblems([]);
      poll.lost = false;
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      showProblems(error.problems);
      poll.lost = true;
    }
  }
  setTimeout(poll, EVERY);
}

window.addEventListener("hashchange", () => location.reload());
poll();
