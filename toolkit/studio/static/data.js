import { $, ask, on, remember, remembered, say } from "./common.js";

$("text").value = remembered() ?? "";
$("text").addEventListener("input", () => remember($("text").value));
if (!$("text").value) say("Make a recipe on the page Build first, or paste one here.");

on("read", async () => {
  let told = "";
  say("Reading…");
  try {
    const asked = { text: $("text").value, only: $("only").value, evaluation: $("evaluation").checked };
    const found = await ask("data", asked);
    $("page").src = `/report?kept=${encodeURIComponent(found.page)}`;
    $("page").hidden = false;
    if (found.refused) told = `A run would refuse ${found.refused} rows.`;
  } finally {
    say(told);
  }
});
