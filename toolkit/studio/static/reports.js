import { $, Problem, ask, el, showProblems } from "./common.js";

async function draw() {
  const { reports } = await ask("reports");
  if (!reports.length) {
    $("list").replaceChildren(el("p", { class: "soft" }, "None yet: toolkit verify RECIPE --html FILE writes one."));
    return;
  }
  const rows = reports.map((one) => {
    const button = el("button", { type: "button", "aria-current": "false" }, one.title, el("span", { class: "soft" }, one.shown));
    button.addEventListener("click", () => {
      for (const other of $("list").querySelectorAll("button")) other.setAttribute("aria-current", String(other === button));
      $("page").src = `/report?file=${encodeURIComponent(one.name)}`;
      $("page").hidden = false;
    });
    return el("li", {}, button);
  });
  $("list").replaceChildren(el("ul", {}, ...rows));
  rows[0].firstChild.click();
}

draw().catch((error) => { if (error instanceof Problem) showProblems(error.problems); else throw error; });
