// Measures the first load of the page: node first.mjs URL TOKEN MACHINES TIMES FOLDER. Prints what each load
// brought, and when the list could be used: the time of the frame after the one that shows it.
import { chromium } from "playwright-core";

const [url, token, machines, times, folder] = process.argv.slice(2);
process.env.TMPDIR = folder;

/** Runs in the page, before its own scripts. */
function observe(token) {
  sessionStorage.setItem("whimbrel-token", token);
  const look = () => {
    const table = document.querySelector("table[aria-label=Machines]");
    if (!table) return requestAnimationFrame(look);
    requestAnimationFrame(() => {
      globalThis.usable = {
        ms: performance.now(),
        machines: Number(table.getAttribute("aria-rowcount")) - 1,
      };
    });
  };
  look();
}

const browser = await chromium.launch({ executablePath: "/usr/bin/chromium", args: ["--no-sandbox"] });
const loads = [];
for (let turn = 0; turn < Number(times); turn++) {
  // Each context has a cache of its own.
  const context = await browser.newContext({ viewport: { width: 1280, height: 800 } });
  const page = await context.newPage();
  await page.addInitScript(observe, token);
  await page.goto(url);
  await page.waitForFunction(() => globalThis.usable);
  const load = await page.evaluate(() => {
    const entries = [
      ...performance.getEntriesByType("navigation"),
      ...performance.getEntriesByType("resource"),
    ];
    return { ...globalThis.usable, bytes: entries.reduce((sum, entry) => sum + entry.transferSize, 0) };
  });
  if (load.machines !== Number(machines)) throw new Error(`the page shows ${load.machines} machines`);
  loads.push(load);
  await context.close();
}
await browser.close();
console.log(JSON.stringify(loads));
