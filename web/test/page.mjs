// What a person does with the page, with a real machine behind it: looks, types into its console, saves and
// rewinds it, stops and starts it, suspends and resumes it, clones it, protects the clone and switches it
// over, cancels a migration, and watches another.
import {
  allowProblems,
  answer,
  check,
  enter,
  expectProblems,
  go,
  inspect,
  log,
  picture,
  run,
  settings,
} from "./browser.mjs";

const PAGES = [
  "machines",
  "machines/web",
  "machines/web/log",
  "machines/web/writes",
  "machines/web/protection",
  "machines/web/capsules",
  "capsules",
  "operations",
  "migrations",
  "schedules",
  "schedules/nightly",
  "networks",
  "sessions",
  "pools",
  "host",
];

async function refusesStrangers(browser) {
  const context = await browser.newContext();
  const page = await context.newPage();
  const answered = await page.goto(settings.url);
  const headers = answered.headers();
  const policy = headers["content-security-policy"] ?? "";
  check(policy.includes("script-src 'self'") && !policy.includes("unsafe"), `the policy is ${policy}`);
  check(
    policy.includes("frame-ancestors 'none'") && headers["x-frame-options"] === "DENY",
    "it can be put into a frame",
  );
  check(headers["x-content-type-options"] === "nosniff", "types may be guessed");
  await inspect(page, "the login");
  await picture(page, "login");
  await page.getByLabel("Token").fill("whimbrel_wrong");
  await page.getByRole("button", { name: "Log in" }).click();
  await page.getByRole("alert").getByText("unknown, revoked or expired").waitFor();
  check((await page.evaluate(() => sessionStorage.length)) === 0, "a wrong token is kept");
  const foreign = await context.request.get(`${settings.url}v1/machines`, {
    headers: { "sec-fetch-site": "cross-site" },
  });
  check(foreign.status() === 403, `a request of another site got ${foreign.status()}`);
  await context.close();
}

const state = (page, name) =>
  page.getByRole("heading", { level: 1 }).locator("..").getByText(name, { exact: true });

async function typesIntoTheConsole(page) {
  await go(page, "machines/web/console");
  const terminal = page.getByRole("region", { name: "Serial console of web" });
  await terminal.locator(".xterm-screen").waitFor();
  // The guest drops what comes before it listens, so the question is repeated.
  const answered = terminal.locator(".xterm-rows").getByText("whimbrel! browser");
  for (let turn = 0; turn < 60 && (await answered.count()) === 0; turn++) {
    await page.keyboard.type("whimbrel? browser ping\n");
    await page.waitForTimeout(500);
  }
  check((await answered.count()) > 0, `the guest does not answer: ${await terminal.innerText()}`);
  await inspect(page, "the console");
  await picture(page, "console");
}

async function seesTheScreen(page) {
  await go(page, "machines/web/display");
  const screen = page.getByRole("region", { name: "Screen of web" });
  await page.locator(".screen[data-open] canvas").waitFor();
  const colours = () =>
    screen.locator("canvas").evaluate((canvas) => {
      const points = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
      return new Set(new Uint32Array(points.buffer)).size;
    });
  for (let turn = 0; turn < 100 && (await colours()) < 2; turn++) await page.waitForTimeout(100);
  check((await colours()) > 1, "the screen is blank");
  await inspect(page, "the screen");
  await picture(page, "screen");
  // The keyboard is the guest's until it is asked back.
  await screen.locator("canvas").click();
  await page.keyboard.press("Control+Shift+KeyL");
  check((await page.evaluate(() => document.activeElement?.tagName)) === "H1", "the keyboard stays there");
}

async function seesWhatItWrites(page) {
  await go(page, "machines/web/writes");
  await page.getByRole("button", { name: "Sample for 30 seconds" }).click();
  const drawn = () => page.locator(".chart").evaluate((chart) => Number(chart.dataset.drawn ?? 0));
  await page.locator(".chart canvas").waitFor();
  for (let turn = 0; turn < 300 && (await drawn()) < 15; turn++) await page.waitForTimeout(100);
  check((await drawn()) >= 15, "the trace is not drawn while it grows");
  await page.getByRole("button", { name: "Stop sampling" }).click();
  await page.getByRole("button", { name: "Sample for 30 seconds" }).waitFor();
  check((await page.getByRole("alert").count()) === 0, "a trace that its user ended is called a failure");
  // Its own work writes pages all the time.
  const set = await page.getByText(/within a second, at most/).innerText();
  check(/ at most [1-9]/.test(set), `the working set is empty: ${set}`);
  await inspect(page, "the writes");
  await picture(page, "writes");
}

async function savesIt(page) {
  await go(page, "machines/web");
  await page.getByRole("button", { name: "Checkpoint" }).click();
  await answer(page, "Checkpoint", { Tag: "first" });
  await page.getByText("Checkpoint web: done").waitFor();
  await go(page, "capsules");
  await page.getByRole("link", { name: "first", exact: true }).waitFor();
  await page.getByRole("button", { name: "Tag first", exact: true }).click();
  await answer(page, "Tag", { Tag: "golden" });
  await page.getByText("golden").first().waitFor();
  await picture(page, "capsules");
  // The label is text, whatever it looks like.
  await page.getByRole("link", { name: "before", exact: true }).click();
  await page.getByText("note=<img src=x onerror=alert(1)>").waitFor();
  await page.getByRole("button", { name: "Compare" }).click();
  await page.getByRole("table", { name: "Changes" }).waitFor();
  await inspect(page, "a capsule");
  await picture(page, "capsule");
}

async function schedulesWork(page) {
  await go(page, "schedules");
  await page.getByRole("button", { name: "Create a schedule" }).click();
  await answer(page, "Create", { Name: "nightly", Machine: "web", "Capsules to retain": "1" });
  await page.getByRole("link", { name: "nightly", exact: true }).click();
  await page.getByText("It has not run yet.").waitFor();
  for (const runs of [1, 2]) {
    await page.getByRole("button", { name: "Run now" }).click();
    const rows = page.getByRole("table", { name: "Runs" }).locator("tbody tr");
    await rows.nth(runs - 1).waitFor();
  }
  // The rule retains one, so the second run has removed the capsule of the first.
  const capsules = page.getByRole("table", { name: "Capsules" }).locator("tbody tr");
  check((await capsules.count()) === 1, `${await capsules.count()} capsules stay`);
  await page.getByRole("button", { name: "What would be removed?" }).click();
  await page.getByText("nightly would remove 0 capsules").waitFor();
  await inspect(page, "a schedule");
  await picture(page, "schedule");
}

/** In a page whose timers never come, only the stream of events tells what somebody else has done. */
async function hearsWhatHappens(browser) {
  const page = await enter(browser, settings.operator, { timers: false });
  await go(page, "machines/web");
  await state(page, "running").waitFor();
  const headers = { authorization: `Bearer ${settings.operator}` };
  for (const [call, name] of [
    ["pause", "paused"],
    ["unpause", "running"],
  ]) {
    const done = await page.context().request.post(`${settings.url}v1/machines/web/${call}`, { headers });
    check(done.ok(), `${call}: ${done.status()}`);
    await state(page, name).waitFor();
  }
  await page.getByRole("table", { name: "What happened" }).getByText("paused").first().waitFor();
  await page.context().close();
}

/** The row of a table whose link has this name. */
const rowOf = (page, name) =>
  page.getByRole("row").filter({ has: page.getByRole("link", { name, exact: true }) });

async function seesWhatItUses(page) {
  await go(page, "machines/web");
  const used = page.getByRole("region", { name: "Use" });
  await used.getByText(/ % of 100 %/).waitFor();
  await used.locator(".chart canvas").waitFor();
  await inspect(page, "what a machine uses");
  await picture(page, "use");
  await go(page, "machines");
  await rowOf(page, "web")
    .getByText(/^\d+ %$/)
    .waitFor();
}

async function findsThings(page) {
  const search = page.getByRole("combobox", { name: "Search" });
  await search.fill("nigh");
  await page.locator("#found option").first().waitFor({ state: "attached" });
  await search.press("Enter");
  await page.getByRole("heading", { level: 1, name: "nightly" }).waitFor();
  // By a label, and by choosing from the list.
  await search.fill("note=<img");
  await page.locator("#found option").first().waitFor({ state: "attached" });
  await search.fill("before, capsule");
  await page.getByRole("heading", { level: 1, name: "before" }).waitFor();
}

async function rewindsIt(page) {
  await go(page, "capsules");
  await page.getByRole("button", { name: "Rewind first", exact: true }).click();
  await answer(page, "Rewind");
  await page.getByText("Rewind web: done").waitFor();
  // What it was before is a capsule with a tag.
  await go(page, "machines/web/capsules");
  await page
    .getByText(/^rewound\./)
    .first()
    .waitFor();
  await state(page, "running").waitFor();
}

async function clonesAndProtectsIt(page) {
  await go(page, "capsules");
  await page.getByRole("button", { name: "Clone first", exact: true }).click();
  await answer(page, "Clone", { "Prefix of their names": "copy", "How many": "1" });
  await page.getByText("Clone first: done").waitFor();
  await go(page, "machines/copy-1/protection");
  await page.getByRole("button", { name: "Protect", exact: true }).click();
  await answer(page, "Protect", { Standby: "beta" });
  await page.getByText("Protect copy-1: done").waitFor();
  await page.getByText("Last epoch").waitFor();
  await inspect(page, "a protection");
  await picture(page, "protection");
  // On a busy host the standby may be lost for a moment, and a switch is refused until it is back.
  const done = page.getByText("Failover copy-1: done");
  const refused = page.locator(".card.bad").filter({ hasText: "Failover copy-1" });
  for (let turn = 0; turn < 20; turn++) {
    await page.getByRole("button", { name: "Switch over" }).click();
    await answer(page, "Switch over");
    await done.or(refused).first().waitFor();
    if ((await done.count()) > 0) return;
    await refused.getByRole("button", { name: "Close this message" }).first().click();
    await page.waitForTimeout(3000);
  }
  check(false, "the machine is not switched over");
}

async function cancelsAMigration(page) {
  await go(page, "machines/web");
  await page.getByRole("button", { name: "Migrate" }).click();
  // Minutes, at this rate.
  await answer(page, "Migrate", { Target: "beta", "Highest rate in Mbit/s": "1" });
  await go(page, "operations");
  await page.getByRole("button", { name: "Cancel migrate web" }).first().click();
  await rowOf(page, "migrate").first().getByText("cancelled").waitFor();
  await go(page, "machines/web");
  await state(page, "running").waitFor();
}

async function suspendsAndResumesIt(page) {
  await go(page, "machines/web");
  await page.getByRole("button", { name: "Suspend" }).click();
  await answer(page, "Suspend");
  await state(page, "suspended").waitFor();
  // By the list this time, and by the keyboard.
  await go(page, "machines");
  await page.getByLabel("Select web").focus();
  await page.keyboard.press("Space");
  await page.getByRole("button", { name: "Resume" }).press("Enter");
  await page.getByText("Resume web: done").waitFor();
  await page
    .getByRole("row", { name: "web" })
    .getByText(/running|loading/)
    .waitFor();
}

async function stopsAndStartsIt(page) {
  await go(page, "machines/web");
  await page.getByRole("button", { name: "Stop", exact: true }).click();
  await page.getByRole("dialog").waitFor();
  await page.keyboard.press("Escape");
  await page.getByRole("dialog").waitFor({ state: "detached" });
  await page.getByRole("button", { name: "Stop", exact: true }).click();
  await answer(page, "Stop", { "Switch it off at once, without asking the guest": true });
  await state(page, "stopped").waitFor();
  await page.getByRole("button", { name: "Hardware", exact: true }).click();
  await answer(page, "Change", { "Memory in MiB": "224" });
  await page.getByText("224 MiB").waitFor();
  await page.getByRole("button", { name: "Start", exact: true }).click();
  await state(page, "running").waitFor();
  // It gets a disk while it runs, which goes with it from here on.
  await page.getByRole("button", { name: "Hardware", exact: true }).click();
  await answer(page, "Change", { "Empty disk to add, in GiB": "1" });
  await page.getByRole("table", { name: "Disks" }).getByText("1 GiB").waitFor();
}

async function watchesAMigration(page) {
  await go(page, "machines/web");
  await page.getByRole("button", { name: "Migrate" }).click();
  await answer(page, "Migrate", { Target: "beta" });
  await page
    .getByRole("complementary", { name: "Activity" })
    .getByRole("link", { name: "Migrate web" })
    .click();
  await page.getByText("succeeded").waitFor();
  const rounds = await page.getByRole("table", { name: "Rounds" }).locator("tbody tr").count();
  check(rounds > 0, "no round is shown");
  await page.locator(".chart canvas").waitFor();
  await page.getByText(/^to beta: downtime/).waitFor();
  await picture(page, "operation");
  await go(page, "migrations");
  await page.getByRole("link", { name: "web", exact: true }).first().click();
  await page.getByRole("heading", { name: "web to beta" }).waitFor();
  await page.locator(".chart canvas").waitFor();
  await inspect(page, "a migration");
  await picture(page, "migration");
  await go(page, "machines");
  const others = page.getByRole("table", { name: "Machines of other hosts" });
  await others.getByRole("row").filter({ hasText: "beta" }).getByText("web", { exact: true }).waitFor();
  await inspect(page, "machines of other hosts");
}

async function offersAViewerNothing(browser) {
  const page = await enter(browser, settings.viewer);
  await go(page, "machines/web");
  await state(page, "running").waitFor();
  for (const name of ["Stop", "Checkpoint", "Delete"]) {
    check((await page.getByRole("button", { name }).count()) === 0, `a viewer is offered ${name}`);
  }
  check((await page.getByRole("link", { name: "Console" }).count()) === 0, "a viewer is offered the console");
  // Nor does it help to call what is not offered.
  const stopped = await page.evaluate(async () => {
    const headers = { authorization: `Bearer ${sessionStorage.getItem("whimbrel-token")}` };
    return (await fetch("/v1/machines/web/stop", { method: "POST", headers })).status;
  });
  check(stopped === 403, `a viewer stops a machine: ${stopped}`);
  const opened = await page.evaluate(
    () =>
      new Promise((told) => {
        const protocols = ["whimbrel-console", `bearer.${sessionStorage.getItem("whimbrel-token")}`];
        const socket = new WebSocket("/v1/machines/web/console", protocols);
        socket.onopen = () => told(true);
        socket.onerror = () => told(false);
      }),
  );
  check(!opened, "a viewer opens a console");
  expectProblems("403");
  await page.context().close();
}

async function knowsOtherHosts(browser) {
  const page = await enter(browser, settings.admin);
  await go(page, "host");
  const beta = page.getByRole("table", { name: "Trusted hosts" }).getByRole("row", { name: /^beta/ });
  await beta.getByText(/GiB|MiB/).waitFor();
  await beta.getByText("yes").waitFor();
  await page.context().close();
}

/** Every page in the light, in the dark and on a phone. */
async function looksAtEverything(browser) {
  const phone = { viewport: { width: 390, height: 780 } };
  for (const [look, options] of Object.entries({ light: {}, dark: { colorScheme: "dark" }, phone })) {
    const page = await enter(browser, settings.admin, options);
    for (const name of PAGES) {
      await go(page, name);
      await page.getByText("Loading …").first().waitFor({ state: "detached" });
      await inspect(page, `${name}, ${look}`);
      await picture(page, `${look}-${name.replaceAll("/", "-")}`);
    }
    await page.context().close();
  }
}

async function endsWithItsToken(browser) {
  const admin = await enter(browser, settings.admin);
  const viewer = await enter(browser, settings.viewer);
  await go(admin, "host");
  await admin.getByRole("button", { name: "Revoke vera" }).click();
  await answer(admin, "Revoke");
  await viewer.getByText("This token is no longer accepted.").waitFor();
  expectProblems("401");
}

await run(async (browser) => {
  const step = async (name, work) => {
    const begun = Date.now();
    await work();
    log(`${name}: ${Date.now() - begun} ms`);
  };
  await step("a stranger", () => refusesStrangers(browser));
  const page = await enter(browser, settings.operator);
  await page.getByRole("link", { name: "web", exact: true }).waitFor();
  await step("console", () => typesIntoTheConsole(page));
  await step("screen", () => seesTheScreen(page));
  await step("viewer", () => offersAViewerNothing(browser));
  await step("writes", () => seesWhatItWrites(page));
  await step("checkpoint", () => savesIt(page));
  await step("schedule", () => schedulesWork(page));
  await step("search", () => findsThings(page));
  await step("live", () => hearsWhatHappens(browser));
  await step("other hosts", () => knowsOtherHosts(browser));
  await step("use", () => seesWhatItUses(page));
  await step("looks", () => looksAtEverything(browser));
  await step("rewind", () => rewindsIt(page));
  await step("suspend", () => suspendsAndResumesIt(page));
  await step("stop", () => stopsAndStartsIt(page));
  // It has to have come up again, or it has nothing to migrate but its firmware.
  await step("console after a start", () => typesIntoTheConsole(page));
  await step("cancel", () => cancelsAMigration(page));
  await step("protection", () => clonesAndProtectsIt(page));
  await step("migration", () => watchesAMigration(page));
  // The page may have asked once more for the machine, which is elsewhere now.
  allowProblems("404 (Not Found)");
  await step("a token's end", () => endsWithItsToken(browser));
});
