// A headless Chromium for the tests of the page: one token a context, and nothing that it complains about
// goes unseen.
import { createRequire } from "node:module";
import { appendFileSync, mkdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { chromium } from "playwright-core";

const require = createRequire(import.meta.url);
const axe = readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");

export const settings = JSON.parse(readFileSync(process.argv[2], "utf8"));
export const log = (text) => appendFileSync(join(settings.folder, "log"), `${text}\n`);

/** Longest wait for what has to happen: guests are translated and share two cores with other tests. */
export const PATIENCE = 120_000;
const problems = [];
/** Where pictures go: with WHIMBREL_PICTURES, to a folder that stays. */
const pictures = process.env.WHIMBREL_PICTURES ?? join(settings.folder, "pictures");

export function check(holds, text) {
  if (!holds) throw new Error(text);
}

/** Runs `work` with a browser, and ends the program with what came of it. */
export async function run(work) {
  process.env.TMPDIR = settings.folder;
  mkdirSync(pictures, { recursive: true });
  let browser;
  try {
    // The tests run as root, where Chromium's own sandbox does not.
    browser = await chromium.launch({
      executablePath: settings.chromium ?? "/usr/bin/chromium",
      args: ["--no-sandbox"],
    });
    await work(browser);
    check(problems.length === 0, `the browser complained:\n${problems.join("\n")}`);
  } catch (error) {
    log(`failed: ${error.stack}\n${problems.join("\n")}`);
    process.exitCode = 1;
  }
  await browser?.close();
}

/** Runs in the page, before its own scripts: timers of a second or more never come. */
function withoutTimers() {
  const { setTimeout } = globalThis;
  globalThis.setTimeout = (work, ms, ...rest) => (ms >= 1000 ? 0 : setTimeout(work, ms, ...rest));
}

/** A page that is logged in. */
export async function enter(browser, token, { timers = true, label = "Token", ...options } = {}) {
  const context = await browser.newContext({
    viewport: { width: 1280, height: 800 },
    locale: "en-GB",
    ...options,
  });
  const page = await context.newPage();
  page.setDefaultTimeout(PATIENCE);
  if (!timers) await page.addInitScript(withoutTimers);
  // Also what the page's policy forbids is told here.
  page.on(
    "console",
    (message) => message.type() === "error" && problems.push(`${page.url()}: ${message.text()}`),
  );
  page.on("pageerror", (error) => problems.push(`${page.url()}: ${error.stack}`));
  await page.goto(settings.url);
  await page.getByLabel(label).fill(token);
  await page.getByRole("button", { name: "Log in" }).click();
  await page.getByRole("heading", { level: 1, name: "Machines" }).waitFor();
  return page;
}

/** Complaints that were meant to come. */
export function expectProblems(text) {
  check(
    problems.some((one) => one.includes(text)),
    `the browser did not complain of ${text}`,
  );
  allowProblems(text);
}

/** Complaints that may have come. */
export function allowProblems(text) {
  problems.splice(0, problems.length, ...problems.filter((one) => !one.includes(text)));
}

export async function go(page, hash) {
  await page.goto(`${settings.url}#/${hash}`);
  await page.locator("h1").first().waitFor();
}

/** Asks axe; what is serious for somebody fails the test. */
export async function inspect(page, name) {
  // A button that changes its colour has poor contrast meanwhile.
  await page.evaluate(() => {
    const changes = document.getAnimations().filter((one) => one instanceof CSSTransition);
    return Promise.all(changes.map((one) => one.finished.catch(() => undefined)));
  });
  await page.evaluate(axe);
  const { violations } = await page.evaluate(() => globalThis.axe.run());
  const serious = violations.filter(({ impact }) => impact === "serious" || impact === "critical");
  const texts = serious.map(
    ({ id, nodes }) => `${id}: ${nodes.map(({ html }) => html.slice(0, 200)).join("; ")}`,
  );
  check(serious.length === 0, `axe finds on ${name}:\n${texts.join("\n")}`);
  const overflow = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
  check(overflow <= 0, `${name} is ${overflow} pixels too wide`);
}

export async function picture(page, name) {
  await page.screenshot({ path: join(pictures, `${name}.png`) });
}

/** Answers the question that is open. */
export async function answer(page, button, fields = {}) {
  const dialog = page.getByRole("dialog");
  await dialog.waitFor();
  for (const [label, value] of Object.entries(fields)) {
    const field = dialog.getByLabel(label, { exact: true });
    if (value === true) await field.check();
    else if ((await field.evaluate((element) => element.tagName)) === "SELECT")
      await field.selectOption(value);
    else await field.fill(value);
  }
  await dialog.getByRole("button", { name: button, exact: true }).click();
  await dialog.waitFor({ state: "detached" });
}
