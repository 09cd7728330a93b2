// Measures how late a round is on the chart: node live.mjs URL TOKEN MACHINE HOST FOLDER. Migrates the machine
// and prints, for each round that ended while the chart was shown, the time from its line in the stream of the
// operation, as a client beside the browser gets it, until the chart had it.
import { chromium } from "playwright-core";

const [url, token, machine, host, folder] = process.argv.slice(2);
process.env.TMPDIR = folder;
const headers = { authorization: `Bearer ${token}`, "content-type": "application/json" };

/** Runs in the page, before its own scripts: notes when the chart had how many rounds. */
function observe(token) {
  sessionStorage.setItem("whimbrel-token", token);
  globalThis.drawn = {};
  const note = () => {
    const rounds = document.querySelector(".chart")?.dataset.drawn;
    if (rounds) globalThis.drawn[rounds] ??= Date.now();
  };
  new MutationObserver(note).observe(document, { subtree: true, childList: true, attributes: true });
}

/** When a client had how many rounds. */
async function follow(operation) {
  const told = {};
  const answer = await fetch(`${url}v1/operations/${operation}/events`, { headers });
  let text = "";
  for await (const piece of answer.body.pipeThrough(new TextDecoderStream())) {
    const lines = (text + piece).split("\n");
    text = lines.pop();
    for (const line of lines.map((one) => JSON.parse(one)))
      told[line.progress.rounds?.length ?? 0] ??= Date.now();
  }
  return told;
}

const browser = await chromium.launch({ executablePath: "/usr/bin/chromium", args: ["--no-sandbox"] });
const page = await browser.newPage();
await page.addInitScript(observe, token);
// The chart's file is in the cache of the browser, as on every move but the first.
await page.goto(url);
await page.evaluate(() => import("/chart.js"));
const body = JSON.stringify({ host });
const begun = await fetch(`${url}v1/machines/${machine}/migrate`, { method: "POST", headers, body });
const { id } = await begun.json();
if (!begun.ok) throw new Error(`the migration was refused: ${begun.status}`);
const told = follow(id);
await page.goto(`${url}#/operations/${id}`);
const lines = await told;
await page.waitForTimeout(500);
const drawn = await page.evaluate(() => globalThis.drawn);
await browser.close();
const first = Math.min(...Object.keys(drawn).map(Number));
const live = Object.keys(lines)
  .map(Number)
  .filter((rounds) => rounds > first && drawn[rounds]);
console.log(JSON.stringify(live.map((rounds) => ({ ms: Math.max(0, drawn[rounds] - lines[rounds]) }))));
